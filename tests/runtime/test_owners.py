"""Which requests have lost their owner."""

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from onepiece.core.routing import NodeRoute
from onepiece.messages import StageInput
from onepiece.runtime.owners import LostOwners

ADDRESS = "tcp://10.0.0.1:7070"
NODE = NodeRoute("seed", 1_000_000, ADDRESS, None, ("proxy",), "alive", (), 1)
HEADER = StageInput(
    uid="uid",
    workflow="w",
    node="n",
    source="s",
    owner=f"{ADDRESS}/control",
    received_at=1500.0,
    deadline_at=None,
    sent_at=1500.0,
)


def test_nothing_is_lost_without_a_death() -> None:
    """Requests of nodes that live, or of which nothing is known, have their owners."""
    owners = LostOwners()
    assert not owners.is_lost(HEADER)
    owners.update([], [NODE], now=2000.0)
    assert not owners.is_lost(HEADER)


def test_requests_of_a_dead_proxy_are_lost() -> None:
    """What it received before its death was noticed is lost; other owners' requests are not."""
    owners = LostOwners()
    owners.update([NODE], [], now=2000.0)
    assert owners.is_lost(HEADER)
    assert not owners.is_lost(evolve(HEADER, owner="tcp://10.0.0.2:7070/control"))


@given(st.floats(1000.0, 3000.0), st.integers(1_000_001, 3_000_000))
def test_successor_owns_what_it_received(received_at: float, incarnation: int) -> None:
    """Of a proxy that came back at the same address only the requests of before are lost."""
    owners = LostOwners()
    owners.update([NODE], [evolve(NODE, incarnation=incarnation)], now=3000.0)
    header = evolve(HEADER, received_at=received_at)
    assert owners.is_lost(header) == (received_at < incarnation / 1000)


def test_bounded() -> None:
    """However many nodes die, the table of them stays small; the newest are kept."""
    owners = LostOwners()
    for port in range(5000):
        owners.update([evolve(NODE, address=f"tcp://10.0.0.1:{port}")], [], now=2000.0)
    assert len(owners._lost_before) <= 1024
    assert owners.is_lost(evolve(HEADER, owner="tcp://10.0.0.1:4999/control"))
