"""Which coordinator a manager is to use, as written in ``--coordination``.

``embedded``, or ``etcd://HOST:PORT[,HOST:PORT...][/NAME]``: the addresses at which etcd's members serve
clients, and the name of the set where several sets share one etcd. ``etcds://`` speaks TLS.
"""

import re
from typing import Final

from attrs import frozen

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_MEMBER: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s/,:@\[\]]+):([0-9]{1,5})")
_SCHEMES: Final = {"etcd": "http", "etcds": "https"}
_SHAPE: Final = "write embedded, or etcd://host:port[,host:port...][/name], for example etcd://127.0.0.1:2379"


@frozen
class Coordination:
    """A coordinator by its settings; without members it is the embedded one."""

    members: tuple[str, ...] = ()
    """``http://host:port`` or ``https://host:port`` of each member of etcd."""
    name: str = "default"

    @property
    def prefix(self) -> str:
        """What the keys of this set begin with."""
        return f"/onepiece/{self.name}/"

    @property
    def is_tls(self) -> bool:
        """Whether etcd is spoken to over TLS."""
        return any(member.startswith("https:") for member in self.members)


EMBEDDED: Final = Coordination()


def parse_coordination(text: str) -> Coordination:
    """Read what stands in ``--coordination``; raises ``ValueError`` that says what to write."""
    if text == "embedded":
        return EMBEDDED
    scheme, separator, rest = text.partition("://")
    places, slash, name = rest.partition("/")
    if not separator or scheme not in _SCHEMES or (slash and not _NAME.fullmatch(name)):
        raise ValueError(_SHAPE)
    members = []
    for place in places.split(","):
        found = _MEMBER.fullmatch(place.strip())
        if found is None or not 0 < int(found[2]) < 65536:
            raise ValueError(f"{place.strip()!r} is no host:port; {_SHAPE}")
        members.append(f"{_SCHEMES[scheme]}://{place.strip()}")
    return Coordination(tuple(members), name or "default")
