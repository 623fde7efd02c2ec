"""Addresses: ``scheme://host:port/name?option=value``.

The part before the name says where a process listens; the name says which of its regions is meant
(``control``, ``actor/7``). Hosts of IPv6 stand in brackets. ``local`` addresses have no port. The name
may also stand behind the options, so that it can be appended to the text of any address.
"""

import ipaddress
from collections.abc import Mapping
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from attrs import evolve, field, frozen

from transports.errors import AddressError

_FORM = "expected scheme://host:port[/name], for example tcp://127.0.0.1:7070"


@frozen
class Address:
    """Where a transport listens or connects to."""

    scheme: str
    host: str
    port: int = 0
    name: str = ""
    options: Mapping[str, str] = field(factory=dict, hash=False)

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read an address; raises ``AddressError`` saying what is wrong with it."""
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise AddressError(f"{text!r} is no address ({error}); {_FORM}") from error
        if not parts.scheme or not parts.netloc or not parts.hostname:
            raise AddressError(f"{text!r} is no address; {_FORM}")
        if parts.username is not None or parts.fragment:
            raise AddressError(f"{text!r} has a user or a fragment, which no transport knows; {_FORM}")
        query, _, appended = parts.query.partition("/")  # a slash within an option is written %2F
        return cls(
            scheme=parts.scheme,
            host=parts.hostname,
            port=port or 0,
            name=unquote("/".join(filter(None, (parts.path.lstrip("/"), appended)))),
            options=parse_options(query, text),
        )

    def region(self, name: str) -> "Address":
        """The same place, another region."""
        return evolve(self, name=name)

    @property
    def is_loopback(self) -> bool:
        """Only this machine can reach it."""
        if self.scheme == "local" or self.host == "localhost":
            return True
        place = ip_of(self.host)  # a name may begin with 127. and be anybody's
        return place is not None and place.is_loopback

    @property
    def is_wildcard(self) -> bool:
        """All addresses of a machine, however they are written; nobody can connect to it from elsewhere."""
        place = ip_of(self.host)
        return self.host == "0" or (place is not None and place.is_unspecified)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = f":{self.port}" if self.port or self.scheme != "local" else ""
        name = f"/{quote(self.name)}" if self.name else ""
        query = f"?{urlencode(self.options)}" if self.options else ""
        return f"{self.scheme}://{host}{port}{name}{query}"


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a host is written as, IPv4's in IPv6 as IPv4; None: it is a name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return address if address.version == 4 else address.ipv4_mapped or address


def parse_options(query: str, where: str) -> dict[str, str]:
    """Read ``option=value&option=value``.

    Raises:
        AddressError: An option has no value, as where a variable was empty, or has two: it is not guessed
            what was meant. ``where`` is named.
    """
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if not value:
            raise AddressError(f"{where!r}: the option {name!r} has no value; give it one or leave it out")
        if name in options:
            raise AddressError(f"{where!r}: the option {name!r} is given twice; give it once")
        options[name] = value
    return options
