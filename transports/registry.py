"""From the scheme of an address to the transport that implements it.

Built in are ``local``, ``tcp`` and, where there are a libucp or pyverbs, ``ucx`` and ``verbs``. Anyone's
package adds others with an entry point::

    [project.entry-points."onepiece.transports"]
    carrier = "pigeon:CarrierTransport"       # a Transport class or a function returning one
"""

from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from transports.address import Address
from transports.errors import UnknownScheme
from transports.local import LocalTransport
from transports.memory import Transport
from transports.tcp import TcpTransport
from transports.ucx import UcxTransport
from transports.verbs import VerbsTransport

ENTRY_POINT_GROUP: Final = "onepiece.transports"

_BUILT_IN: Final[dict[str, Callable[[], Transport]]] = {
    LocalTransport.scheme: LocalTransport,
    TcpTransport.scheme: TcpTransport,
    UcxTransport.scheme: UcxTransport,
    VerbsTransport.scheme: VerbsTransport,
}


def known_schemes() -> tuple[str, ...]:
    """All schemes that ``transport_for`` accepts, sorted."""
    return tuple(sorted({*_BUILT_IN, *_installed()}))


def transport_for(address: Address | str) -> Transport:
    """The transport for an address or a bare scheme.

    Raises:
        UnknownScheme: No transport of this name is built in or installed, or it cannot be loaded.
    """
    scheme = address.scheme if isinstance(address, Address) else address
    return _load(scheme)


@cache
def _load(scheme: str) -> Transport:
    factory = _BUILT_IN.get(scheme)
    if factory is not None:
        return factory()
    entry_point = _installed().get(scheme)
    if entry_point is None:
        known = ", ".join(known_schemes())
        raise UnknownScheme(
            f"no transport is registered for the scheme {scheme!r}; known are: {known}. Others are added by"
            f" a package with an entry point in the group {ENTRY_POINT_GROUP!r}"
        )
    try:
        transport = entry_point.load()()
    except (ImportError, AttributeError) as error:
        raise UnknownScheme(
            f"the transport for {scheme!r} ({entry_point.value}) cannot be imported: {error}; install what"
            " it needs or use another scheme"
        ) from error
    if not isinstance(transport, Transport):
        raise UnknownScheme(f"the entry point {entry_point.value!r} for {scheme!r} makes no Transport")
    return transport


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
