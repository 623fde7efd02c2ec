"""Giving back: which instances a load does not need, as a function of what was seen."""

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from onepiece.core.capacity import CapacityModel, Demand, WorkflowShape
from onepiece.core.give_back import GiveBackPolicy, SpareInstances, chosen
from onepiece.core.inventory import DeviceKind
from onepiece.core.move_board import DeviceInfo, Load, PlacedActor, StageLimits
from tests.core.capacity_parts import GIB, make_stage

_LONG = 100_000.0
"""So many requests that chance is nothing."""


def _model() -> CapacityModel:
    stages = [make_stage(name, 1.0) for name in "xy"]
    return CapacityModel.of(stages, [WorkflowShape.line(name, [name]) for name in "xy"])


def _spare(
    rate: float,
    count: int,
    *,
    seconds: float = _LONG,
    in_hand: float = 0.0,
    limits: StageLimits | None = None,
    then: float | None = None,
) -> int:
    """What x has to spare under so many requests of a second each; ``then``: by a longer window."""
    loads = [Load((Demand("x", rate),), seconds)]
    if then is not None:
        loads.append(Load((Demand("x", then),), 5 * seconds))
    look = SpareInstances(
        _model(), loads, {"x": in_hand}, {"x": count}, {"x": limits or StageLimits()}, GiveBackPolicy()
    )
    return look.found().get("x", 0)


def test_what_is_left_is_well_below_what_would_be_too_busy() -> None:
    """At most 60 % busy, by every window; the last one stays, and so does the pinned minimum."""
    assert _spare(2.4, 5) == 1
    assert _spare(2.41, 5) == 0
    assert _spare(0.0, 5) == 4
    assert _spare(0.0, 1) == 0
    assert _spare(0.0, 5, limits=StageLimits(instances_min=3)) == 2
    assert _spare(1.2, 5, then=1.2) == 3
    assert _spare(1.2, 5, then=2.4) == 1


def test_few_requests_prove_little() -> None:
    """What would be enough on average is not, where some more requests than usual would be too many."""
    assert _spare(0.5, 2) == 1
    assert _spare(0.5, 2, seconds=60.0) == 0
    assert _spare(0.4, 2, seconds=60.0) == 1
    assert _spare(0.4, 2, seconds=30.0) == 0
    assert _spare(0.05, 2, seconds=60.0) == 1


def test_work_that_is_not_done_needs_its_instances() -> None:
    """However long ago it came."""
    assert _spare(0.0, 8, in_hand=6.5) == 1
    assert _spare(0.0, 8, in_hand=8.0) == 0


@given(
    rate=st.floats(0.0, 12.0), count=st.integers(1, 40), seconds=st.floats(10.0, 600.0), busy=st.floats(0, 40)
)
def test_one_spare_less_is_never_more_than_enough(
    rate: float, count: int, seconds: float, busy: float
) -> None:
    """What is left bears the load, and has none to spare itself."""
    spare = _spare(rate, count, seconds=seconds, in_hand=busy)
    left = count - spare
    assert left >= 1
    if spare:
        assert rate / left <= 0.6 + 1e-9
        assert busy <= left
    assert _spare(rate, left, seconds=seconds, in_hand=busy) == 0


def _actors(*nodes: str) -> list[PlacedActor]:
    return [
        PlacedActor(number, "x", node, (f"cuda:{nodes[: number - 1].count(node)}",))
        for number, node in enumerate(nodes, 1)
    ]


def _devices(actors: list[PlacedActor]) -> list[DeviceInfo]:
    return [
        DeviceInfo(node, device, DeviceKind.GPU, 80 * GIB)
        for node, device in sorted({(actor.node_id, actor.devices[0]) for actor in actors})
    ]


def test_what_is_left_is_spread() -> None:
    """Those go first whose node has the most, then the newest; never more than are asked for."""
    actors = _actors("a", "a", "b", "a", "b")
    given_back = chosen(_model(), {"x": 3}, _devices(actors), actors, 64)
    assert [give.actor_id for give in given_back] == [4, 5, 2]
    assert given_back[0].reason == "the load needs 3 less of 5"
    assert len(chosen(_model(), {"x": 3}, _devices(actors), actors, 2)) == 2
    assert chosen(_model(), {}, _devices(actors), actors, 2) == ()


@pytest.mark.parametrize("why", ["shared", "loading", "draining node"])
def test_only_what_leaves_an_idle_device_goes(why: str) -> None:
    """One that shares its device, is not ready, or is on a node that takes nothing, stays."""
    actors = _actors("a", "b")
    devices = _devices(actors)
    if why == "shared":
        actors.append(PlacedActor(3, "y", "b", actors[1].devices))
    elif why == "loading":
        actors[1] = evolve(actors[1], is_settled=False)
    else:
        devices = devices[:1]
    assert [give.actor_id for give in chosen(_model(), {"x": 2}, devices, actors, 64)] == [1]
