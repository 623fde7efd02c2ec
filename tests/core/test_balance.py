"""What the manager makes of the counters that nodes report: times, rates, and what is asked of stages."""

import pytest

from onepiece.core import ActorLife
from onepiece.core.actors import Actor
from onepiece.core.balance import (
    BalanceConfig,
    BalanceMachine,
    LookedAround,
    NodeTold,
    RebalanceMode,
    patience,
)
from onepiece.core.inventory import ActorReport, ActorState, StageWork
from onepiece.core.move_board import StageLimits
from onepiece.core.run_times import CLASSES_MAX
from onepiece.limits import REPORTED_CLASSES_MAX
from tests.core.cluster import make_need, make_workflow
from tests.core.loaded_set import RED, LoadedSet


def test_counters_that_come_late_or_twice_count_once() -> None:
    """Of a proxy and of an actor alike; a proxy that was not known is counted from then on."""
    machine = BalanceMachine(config=BalanceConfig(mode=RebalanceMode.ON))

    def told(offered: int, runs: int) -> None:
        work = StageWork(runs, 2.0 * runs, 4.0 * runs, load_seconds=3.0)
        report = ActorReport(1, RED, ("cpu:0",), ActorState.READY, work=work)
        machine.handle(NodeTold("p", 1, (report,), {"red": {"": offered}}), 0.0)

    seen = LookedAround(
        (make_workflow("red", make_need("red")),),
        {RED: make_need("red")},
        (),
        (),
        frozenset(),
        {},
        on_cpu=False,
    )
    machine.handle(seen, 0.0)
    for offered, runs in ((100, 1), (110, 3), (110, 3), (105, 2), (120, 4)):
        told(offered, runs)
    timing = machine.timing(RED)
    assert timing is not None
    assert (timing.samples, timing.mean_seconds, timing.spread_seconds) == (4, 2.0, 0.0)
    assert machine.load_seconds(RED) == 3.0
    machine.handle(seen, 10.0)
    assert machine.rates == {"red": 2.0}


def _reports(*runs: tuple[str, int, float], actor_id: int = 1) -> ActorReport:
    """An actor of red that has finished so many runs of these classes, of so many seconds each."""
    work = StageWork(load_seconds=3.0)
    for size_class, count, seconds in runs:
        for _ in range(count):
            work = work.with_run(seconds, size_class=size_class)
    return ActorReport(actor_id, RED, ("cpu:0",), ActorState.READY, work=work)


@pytest.mark.parametrize(("size_class", "busy"), [("small", 0.2), ("large", 8.0), ("huge", 2.15), ("", 2.15)])
def test_what_is_asked_of_a_stage_follows_the_mix_of_size_classes(size_class: str, busy: float) -> None:
    """As soon as requests of another class come; one that was not measured takes the time of all together."""
    limits = {RED: StageLimits(instances_min=1)}
    machine = BalanceMachine(config=BalanceConfig(mode=RebalanceMode.ON, policy=patience(60.0)))
    report = _reports(("small", 150, 0.1), ("large", 50, 4.0))
    actor = Actor(1, RED, "red", "d", "n", 1, ("cpu:0",), 1, ActorLife.READY, 0.0)
    workflows = (make_workflow("red", make_need("red")),)
    for look in range(13):
        now = 10.0 * look
        machine.handle(NodeTold("p", 1, (report,), {"red": {"": 0, size_class: 20 * look}}), now)
        machine.handle(
            LookedAround(workflows, {RED: make_need("red")}, (), (actor,), frozenset(), limits, on_cpu=False),
            now,
        )
    assert machine.latest is not None
    assert machine.latest.utilisation[RED] == pytest.approx(busy)
    assert machine.rates == pytest.approx({"red": 0.0} | {f"red/{size_class}".rstrip("/"): 2.0})


def test_classes_are_bounded_wherever_they_are_counted() -> None:
    """What has no room is counted in the whole, and takes the time of all together."""
    machine = BalanceMachine()
    classes = [f"c{number}" for number in range(REPORTED_CLASSES_MAX + 5)]
    report = _reports(*((name, 1, 1.0) for name in classes))
    assert list(report.work.classes) == classes[:REPORTED_CLASSES_MAX]
    assert report.work.runs == len(classes)
    for actor_id in range(10):
        others = [(f"{actor_id}-{name}", 1, 1.0) for name in classes]
        machine.handle(NodeTold("n", 1, (_reports(*others, actor_id=actor_id),), {}), 0.0)
    assert len(machine._times.classes()) <= CLASSES_MAX + 1


@pytest.mark.parametrize("to", ["small", "large"])
def test_a_shift_between_size_classes_moves_instances(to: str) -> None:
    """As many requests as before, of another class: what takes five times as long needs more instances."""
    the = LoadedSet()
    the.rates = {"red": 2.6, "blue": 1.6}
    the.class_seconds = {"small": 0.5, "large": 2.5}
    the.size_class = "small"
    the.run(60)
    the.size_class = "large"
    the.rates["blue"] = 0.2
    the.run(60)
    the.size_class, the.rates["blue"] = to, 1.6
    the.run(400)
    assert (the.ready()[1] > 3) == (to == "large")


def test_older_runs_fade() -> None:
    """A stage that has become slower is soon known as such."""
    machine = BalanceMachine()
    for runs, seconds in ((1000, 1000.0), (1256, 1000.0 + 256 * 3.0)):
        work = StageWork(runs, seconds, seconds)
        report = ActorReport(1, RED, ("cpu:0",), ActorState.READY, work=work)
        machine.handle(NodeTold("n", 1, (report,), {}), 0.0)
    timing = machine.timing(RED)
    assert timing is not None
    assert timing.mean_seconds == pytest.approx(3.0)
