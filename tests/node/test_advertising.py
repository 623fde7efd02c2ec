"""Under which address others are told to reach a node."""

import pytest

from onepiece.node.advertising import advertised, advertised_host
from transports import Address

EVERYWHERE = Address("tcp", "0.0.0.0", 7070)


def test_bound_address_is_told_as_it_is() -> None:
    """A node that listens on one address is known by it."""
    bound = Address("tcp", "10.1.2.3", 7070)
    assert advertised(bound, None, Address("tcp", "10.9.9.9", 7070)) == bound


def test_named_host_wins() -> None:
    """What ``--advertise`` says is told, with the port that was bound."""
    assert advertised(EVERYWHERE, "node-1.example", None) == Address("tcp", "node-1.example", 7070)


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "0", "::", "::0", "0:0:0:0:0:0:0:0"])
@pytest.mark.parametrize("join", [None, Address("tcp", "127.0.0.1", 7070), Address("tcp", "192.0.2.9", 7070)])
def test_wildcard_is_never_told(wildcard: str, join: Address | None) -> None:
    """A node that listens everywhere tells an address of this machine."""
    told = advertised(Address("tcp", wildcard, 7070), None, join)
    assert told.host
    assert not told.is_wildcard
    assert told.port == 7070


def test_http_follows() -> None:
    """A proxy that listens everywhere is told under its node's address, another one under its own."""
    own = Address("tcp", "10.1.2.3", 7070)
    assert advertised_host("0.0.0.0", own) == "10.1.2.3"
    assert advertised_host("[::]", own) == "10.1.2.3"
    assert advertised_host("127.0.0.1", own) == "127.0.0.1"
    assert advertised_host("[::1]", own) == "::1"
