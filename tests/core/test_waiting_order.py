"""The order of waiting work: fair between flows, short ones first, nobody for ever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepiece.core.waiting_order import PASSED_SECONDS, PRIORITY_SECONDS, WaitingOrder, rank
from onepiece.limits import FLOWS_MAX

_TASKS = st.lists(
    st.tuples(
        st.floats(0.0, 500.0),
        st.floats(0.0, 100.0),
        st.integers(-2, 2),
        st.sampled_from(["film", "stills"]),
        st.sampled_from(["", "gold"]),
    ),
    max_size=30,
)


def _pulled(order: WaitingOrder[str]) -> list[str]:
    found = []
    while (item := order.pull()) is not None:
        found.append(item)
    return found


def test_equals_go_in_order_of_arrival() -> None:
    """Nothing measured, nothing said: first come, first served; workflows take turns."""
    order: WaitingOrder[str] = WaitingOrder()
    for number in range(3):
        order.add(f"busy{number}", "busy", "", rank(number, 0.0, 0), 1.0)
    order.add("rare", "rare", "", rank(9.0, 0.0, 0), 1.0)
    assert _pulled(order) == ["busy0", "rare", "busy1", "busy2"]


def test_short_ones_pass_long_ones_and_priority_passes_others() -> None:
    """Ten seconds of work pass a minute's that came before; a long one that waited long enough is first."""
    order: WaitingOrder[str] = WaitingOrder()
    order.add("long", "w", "", rank(0.0, 60.0, 0), 60.0)
    order.add("short", "w", "", rank(5.0, 1.0, 0), 1.0)
    order.add("late and short", "w", "", rank(70.0, 1.0, 0), 1.0)
    order.add("late and urgent", "w", "", rank(40.0, 60.0, 2), 60.0)
    order.add("early and idle", "w", "", rank(0.0, 1.0, -1), 1.0)
    assert _pulled(order) == ["short", "early and idle", "late and urgent", "long", "late and short"]
    assert rank(PRIORITY_SECONDS, 0.0, 1) == rank(0.0, 0.0, 0)


@given(_TASKS)
def test_nothing_is_passed_for_ever(tasks: list[tuple[float, float, int, str, str]]) -> None:
    """Whatever sizes and priorities come: of one flow none goes before one that came so much earlier."""
    order: WaitingOrder[int] = WaitingOrder()
    for number, (at, seconds, priority, workflow, tenant) in enumerate(tasks):
        order.add(number, workflow, tenant, rank(at, seconds, priority), seconds)
    assert len(order) == len(list(order)) == len(tasks)
    pulled = []
    while (item := order.pull()) is not None:
        pulled.append(item)
    assert sorted(pulled) == list(range(len(tasks)))
    for place, first in enumerate(pulled):
        for second in pulled[place + 1 :]:
            if tasks[first][3:] == tasks[second][3:]:
                assert tasks[first][0] <= tasks[second][0] + PASSED_SECONDS


@given(
    st.fixed_dictionaries({name: st.sampled_from([0.5, 1.0, 2.0, 4.0]) for name in "abc"}),
    st.fixed_dictionaries({name: st.floats(0.1, 5.0) for name in "abc"}),
)
def test_flows_that_wait_get_by_weight(weights: dict[str, float], costs: dict[str, float]) -> None:
    """What flows got of the stage's time is as their weights, within two stage tasks, however long."""
    for level in ("workflow", "tenant"):
        order: WaitingOrder[str] = (
            WaitingOrder(weights) if level == "workflow" else WaitingOrder(tenant_weights=weights)
        )
        for name in "abc":
            for number in range(300):
                workflow, tenant = (name, "") if level == "workflow" else ("w", name)
                order.add(name, workflow, tenant, float(number), costs[name])
        got = dict.fromkeys("abc", 0.0)
        for _ in range(100):
            pulled = order.pull()
            assert pulled is not None
            got[pulled] += costs[pulled] / weights[pulled]
            most = max(costs[each] / weights[each] for each in "abc")
            assert max(got.values()) - min(got.values()) <= 2 * most + 1e-6


def test_what_is_taken_out_does_not_run() -> None:
    """A request that is cancelled leaves its flow, and its flow leaves with the last."""
    order: WaitingOrder[str] = WaitingOrder()
    order.add("a", "w", "t", 0.0, 1.0)
    order.add("b", "w", "t", 1.0, 1.0)
    assert order.remove("w", "t", "a")
    assert not order.remove("w", "t", "a")
    assert not order.remove("v", "t", "b")
    assert _pulled(order) == ["b"]
    assert len(order) == 0


def test_made_up_names_take_no_memory() -> None:
    """Any number of tenants that come once are forgotten, and equals still take turns."""
    order: WaitingOrder[str] = WaitingOrder()
    for number in range(4 * FLOWS_MAX):
        order.add("x", "w", f"t{number}", 0.0, 1.0)
        order.pull()
    assert len(order._turns._done) <= 1
    order.add("first", "w", "one", 0.0, 1.0)
    for number in range(2 * FLOWS_MAX):
        order.add(f"{number}", "w", f"t{number}", 0.0, 1.0)
    assert len(_pulled(order)) == 2 * FLOWS_MAX + 1


@pytest.mark.parametrize("priority", [-3, 3])
def test_priorities_are_bounded(priority: int) -> None:
    """A priority beyond the bounds never came through the door."""
    with pytest.raises(AssertionError):
        rank(0.0, 0.0, priority)
