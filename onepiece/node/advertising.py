"""Under which host name a node can be reached, where it listens on all of its machine's addresses.

``0.0.0.0`` is no place to send anything to. What others are told instead is ``--advertise``, or else the
address that this machine itself would use towards the manager; a machine of several networks may need to
be told.
"""

import socket
from typing import Final

from attrs import evolve

from onepiece.log import get_logger
from transports import Address

_FAR_AWAY: Final = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses of those reserved for documentation; the route to them is the default one."""


def advertised(bound: Address, advertise: str | None, join: Address | None = None) -> Address:
    """The address that other nodes are told, for one that was bound."""
    if advertise is not None:
        return evolve(bound, host=advertise)
    if not bound.is_wildcard:
        return bound
    return evolve(bound, host=_own_address(bound.host, join))


def advertised_host(bound_host: str, own: Address) -> str:
    """The same for a host alone, of a node that is known as ``own``."""
    bound = Address("http", bound_host.strip("[]"))
    return own.host if bound.is_wildcard else bound.host


def _own_address(wildcard: str, join: Address | None) -> str:
    """The address towards the manager, or on the default route; no packet is sent to learn it."""
    family = socket.AF_INET6 if ":" in wildcard else socket.AF_INET
    target = join.host if join is not None and not join.is_loopback else _FAR_AWAY[family]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            host: str = probe.getsockname()[0]
    except OSError as error:
        host = "::1" if family is socket.AF_INET6 else "127.0.0.1"
        get_logger().warning(
            "address_unknown", assumed=host, error=str(error), hint="other machines need --advertise"
        )
    return host
