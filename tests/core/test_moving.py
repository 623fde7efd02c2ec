"""Moves on the manager's machine: from what nodes report to orders, on virtual time and simulated nodes."""

from random import Random

import pytest
from attrs import define, evolve, field

from onepiece.core import (
    ActorLife,
    HeartbeatReceived,
    ManagerConfig,
    MembershipConfig,
    NodeState,
    PlacementConfig,
)
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
from onepiece.core.pending_move import MovePhase
from onepiece.core.placement_view import PlacementView
from onepiece.core.run_times import CLASSES_MAX
from onepiece.limits import PREFETCH_SECONDS_MAX, REPORTED_CLASSES_MAX
from tests.core.cluster import Cluster, make_need, make_node, make_workflow

STEP = 5.0
"""Between two heartbeats: an hour should not take long."""
SECONDS = 0.5
"""Of a run of either stage."""
RED, BLUE = "module:red", "module:blue"


@define(eq=False)
class _Loaded:
    """A set of single-GPU nodes under a load; what its actors report follows from that."""

    red: int = 3
    blue: int = 3
    memory_gib: int = 30
    mode: RebalanceMode = RebalanceMode.ON
    limits: dict[str, StageLimits] = field(factory=dict)
    cluster: Cluster = field(init=False)
    offered: dict[tuple[str, str], int] = field(factory=dict)
    rates: dict[str, float] = field(factory=dict)
    random: Random = field(factory=lambda: Random(7))
    moved: list[str] = field(factory=list)
    loads_by_itself: bool = True
    size_class: str = ""
    """Of the blue requests that come now."""
    class_seconds: dict[str, float] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        gpus = self.red + self.blue
        placement = PlacementConfig(
            workers_expected=gpus, limits=self.limits, adoption_seconds=STEP, resend_seconds=STEP
        )
        balance = BalanceConfig(mode=self.mode, look_seconds=10.0, policy=patience(60.0))
        membership = MembershipConfig(
            heartbeat_seconds=STEP / 2, suspect_seconds=2 * STEP, lease_seconds=4 * STEP
        )
        self.cluster = Cluster(ManagerConfig(membership, placement, balance))
        for name, instances in (("red", self.red), ("blue", self.blue)):
            need = make_need(name, self.memory_gib, instances=instances)
            self.cluster.offer(make_workflow(name, need))
        self.cluster.join(make_node("p", roles=("proxy",)))
        for number in range(gpus):
            self.cluster.join(make_node(f"n{number}", cpus=(), gpus=(80,)))
        self.cluster.load()

    def run(self, seconds: float) -> None:
        """Let time pass under the load."""
        for _ in range(round(seconds / STEP)):
            self.step()

    def step(self) -> None:
        """Requests arrive by chance, ready actors serve them, everybody is heard."""
        cluster = self.cluster
        for name, rate in self.rates.items():
            size_class = self.size_class if name == "blue" else ""
            kind, came = (name, size_class), _poisson(self.random, rate * STEP)
            self.offered[kind] = self.offered.get(kind, 0) + came
            seconds = self.class_seconds.get(size_class, SECONDS)
            ready = [
                (node, report)
                for node in cluster.nodes.values()
                for report in node.actors.values()
                if report.stage == f"module:{name}" and report.state is ActorState.READY
            ]
            for node, report in ready:
                work = evolve(report.work, load_seconds=20.0)
                for _ in range(max(1, round(min(rate / len(ready), 1 / seconds) * STEP))):
                    work = work.with_run(seconds, size_class=size_class)
                node.actors[report.actor_id] = evolve(report, work=work)
        before = self.view().done
        cluster.advance(STEP)
        self.beat()
        self.moved += ["move"] * (self.view().done - before)
        if self.loads_by_itself:
            for node in cluster.nodes.values():
                node.finish_loading()

    def beat(self) -> None:
        """All are heard."""
        for name, node in self.cluster.nodes.items():
            heard: HeartbeatReceived = node.heartbeat()
            self.cluster.tell(evolve(heard, offered=self._by_class()) if name == "p" else heard)

    def _by_class(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for (name, size_class), count in self.offered.items():
            found.setdefault(name, {})[size_class] = count
        return found

    def view(self) -> PlacementView:
        """What is shown."""
        return self.cluster.manager.view(self.cluster.now)

    def ready(self) -> tuple[int, int]:
        """Ready instances of both stages."""
        stages = {stage.stage: stage.ready for stage in self.view().stages}
        return stages[RED], stages[BLUE]


def _poisson(random: Random, rate: float) -> int:
    count, left = 0, 1.0
    while (left := left - random.expovariate(rate) if rate else -1.0) > 0:
        count += 1
    return count


@pytest.mark.parametrize("memory_gib", [30, 60])
def test_a_shift_of_the_load_is_followed_within_three_moves(memory_gib: int) -> None:
    """Beside the old ones where memory allows (30 of 80 GiB), else behind them (60) (fault 91)."""
    the = _Loaded(memory_gib=memory_gib)
    the.rates = {"red": 4.2, "blue": 4.2}
    the.run(180)
    assert the.ready() == (3, 3)
    the.rates = {"red": 0.8, "blue": 7.6}
    the.run(600)
    assert the.ready() == (1, 5)
    assert len(the.moved) == 2
    view = the.view()
    assert {(move.outcome, move.stage, move.donor) for move in view.moves} == {("done", BLUE, RED)}
    assert view.abandoned == 0
    assert all(stage.problem is None for stage in view.stages)


def test_a_set_that_keeps_up_moves_nothing() -> None:
    """However uneven it is, as long as none could do without an instance."""
    the = _Loaded()
    the.rates = {"red": 2.8, "blue": 4.5}
    the.run(1200)
    assert the.ready() == (3, 3)
    assert the.view().moves == ()
    assert the.view().reason == "no stage is busier than 85%"


def test_a_steady_overload_does_not_flap_for_an_hour() -> None:
    """Where two choices are about as good, at most one move is made, and not taken back."""
    the = _Loaded(red=4, blue=4)
    the.rates = {"red": 6.0, "blue": 8.0}
    the.run(3600)
    assert len(the.moved) <= 1
    assert the.ready() in {(4, 4), (3, 5)}


def test_advice_is_shown_and_nothing_is_moved() -> None:
    """The default."""
    the = _Loaded(mode=RebalanceMode.ADVISE)
    the.rates = {"red": 0.8, "blue": 7.6}
    the.run(300)
    assert the.ready() == (3, 3)
    moves = the.view().moves
    assert {(move.outcome, move.stage, move.donor) for move in moves} == {("advised", BLUE, RED)}
    assert ManagerConfig().balance.mode is RebalanceMode.ADVISE


def test_pinned_minimum_and_maximum_hold() -> None:
    """Both, whatever the load says; and definitions are raised or lowered to them."""
    the = _Loaded(limits={RED: StageLimits(instances_min=2)})
    the.rates = {"red": 0.2, "blue": 11.0}
    the.run(900)
    assert the.ready() == (2, 4)
    the = _Loaded(limits={RED: StageLimits(instances_min=3), BLUE: StageLimits(instances_max=2)})
    the.rates = {"red": 0.2, "blue": 11.0}
    the.run(900)
    assert the.ready() == (3, 2)
    assert the.view().given_back == 0


def _until_moving(the: _Loaded) -> None:
    the.rates = {"red": 0.2, "blue": 11.0}
    the.loads_by_itself = False
    for _ in range(75):
        the.step()
        if any(move.outcome in set(MovePhase) for move in the.view().moves):
            return
    raise AssertionError("no move began")


@pytest.mark.parametrize("memory_gib", [30, 60])
def test_a_node_that_dies_in_the_middle_ends_its_move_alone(memory_gib: int) -> None:
    """What was wanted before is wanted again, and the other moves go on."""
    the = _Loaded(memory_gib=memory_gib)
    _until_moving(the)
    victim = the.view().moves[0].node
    the.cluster.nodes.pop(victim)
    for _ in range(10):
        the.step()
    assert the.cluster.manager.members[victim].state is NodeState.DEAD
    ended = [move for move in the.view().moves if move.outcome == "abandoned"]
    assert [move.node for move in ended] == [victim]
    assert ended[0].reason == f"{victim} is gone"
    the.loads_by_itself = True
    the.run(300)
    red, blue = the.ready()
    assert red >= 1
    assert red + blue == (5 if memory_gib > 40 else 6), "two of the small ones fit on one device"


def test_a_new_actor_that_fails_leaves_the_old_one() -> None:
    """Beside the old one: that has served all the time, and goes on."""
    the = _Loaded(red=2, blue=1)
    _until_moving(the)
    (move,) = the.view().moves
    assert move.outcome == "warming"
    assert move.actor is not None
    assert the.ready()[0] == 2
    the.cluster.nodes[move.node].fail(move.actor, "out of memory")
    the.beat()
    after = the.view()
    assert [each.outcome for each in after.moves if each.actor == move.actor] == ["abandoned"]
    assert "out of memory" in after.moves[-1].reason
    assert the.ready() == (2, 1)


@pytest.mark.parametrize("memory_gib", [30, 60])
def test_a_manager_that_restarts_goes_on_with_the_move(memory_gib: int) -> None:
    """The moves under way and what is wanted by them are stored; what was measured is measured anew."""
    the = _Loaded(memory_gib=memory_gib)
    _until_moving(the)
    the.cluster.restart_manager()
    the.loads_by_itself = True
    the.run(70)
    red, blue = the.ready()
    assert red + blue == 6
    assert blue > 3
    assert the.view().done >= 1
    assert not [move for move in the.view().moves if move.outcome == "abandoned"]
    the.cluster.restart_manager()
    the.rates = {}
    the.run(70)
    assert the.ready() == (red, blue)


def test_no_moment_has_fewer_ready_actors_than_a_move_beside_needs() -> None:
    """Warmed up beside the old one: the sum of ready instances never falls."""
    the = _Loaded()
    the.rates = {"red": 0.8, "blue": 7.6}
    for _ in range(75):
        the.step()
        assert sum(the.ready()) >= 6
    assert the.view().done >= 1


def _until_prefetching(the: _Loaded) -> str:
    """The node whose old instance serves while it reads what the new one is to load."""
    the.rates = {"red": 0.2, "blue": 11.0}
    the.loads_by_itself = False
    for node in the.cluster.nodes.values():
        node.fetches_slowly = True
    for _ in range(75):
        the.step()
        if (moves := the.view().moves) and moves[0].outcome == "prefetching":
            return moves[0].node
    raise AssertionError("nothing was read in advance")


def _all_fetched(the: _Loaded) -> None:
    for node in the.cluster.nodes.values():
        node.fetches_slowly = False
        reports = node.prefetches.items()
        node.prefetches = {stage: evolve(report, is_over=True) for stage, report in reports}


def test_the_old_instance_serves_while_the_new_one_s_weights_are_read() -> None:
    """Then it drains, the other is loaded, and what was read is asked for no more."""
    the = _Loaded(memory_gib=60)
    name = _until_prefetching(the)
    the.run(60)
    assert the.ready() == (3, 3)
    assert set(the.cluster.nodes[name].prefetches) == {BLUE}
    _all_fetched(the)
    the.run(2 * STEP)
    assert the.ready()[0] < 3
    assert not the.cluster.nodes[name].prefetches
    the.loads_by_itself = True
    the.run(300)
    red, blue = the.ready()
    assert (red + blue, the.view().abandoned) == (6, 0)
    assert blue > 3


def test_a_prefetch_that_is_never_over_holds_nothing_up_for_ever() -> None:
    """A node of another version, for instance, says nothing of it."""
    the = _Loaded(memory_gib=60)
    name = _until_prefetching(the)
    the.cluster.nodes[name].prefetches.clear()
    the.loads_by_itself = True
    the.run(PREFETCH_SECONDS_MAX / 2)
    assert the.ready() == (3, 3)
    the.run(PREFETCH_SECONDS_MAX)
    assert the.ready()[1] > 3


def test_a_lost_order_to_prefetch_is_sent_again() -> None:
    """As any other."""
    the = _Loaded(memory_gib=60)
    name = _until_prefetching(the)
    the.cluster.nodes[name].prefetches.clear()
    the.run(2 * STEP)
    assert set(the.cluster.nodes[name].prefetches) == {BLUE}


def test_a_prefetch_is_taken_back_with_its_move() -> None:
    """The workflows change: the old instance never stopped, and both stages have what they had."""
    the = _Loaded(memory_gib=60)
    name = _until_prefetching(the)
    the.cluster.offer(make_workflow("green", make_need("green", 60)))
    assert not the.cluster.nodes[name].prefetches
    assert {move.outcome for move in the.view().moves if move.outcome != "advised"} == {"abandoned"}
    assert the.ready() == (3, 3)
    wanted = {stage.stage: stage.wanted for stage in the.view().stages}
    assert (wanted[RED], wanted[BLUE]) == (3, 3)


def test_a_manager_that_restarts_goes_on_with_a_prefetch() -> None:
    """It gives the order anew."""
    the = _Loaded(memory_gib=60)
    name = _until_prefetching(the)
    before = the.cluster.nodes[name].prefetches[BLUE].number
    the.cluster.restart_manager()
    the.run(4 * STEP)
    assert the.cluster.nodes[name].prefetches[BLUE].number != before
    assert the.ready() == (3, 3)
    _all_fetched(the)
    the.loads_by_itself = True
    the.run(120)
    assert the.ready()[1] > 3


def _devices_of(the: _Loaded, stage: str) -> set[str]:
    return {actor.node_id for actor in the.cluster.manager.actors.values() if actor.stage == stage}


def _until_giving_back(the: _Loaded) -> None:
    the.rates = {"red": 4.2, "blue": 0.1}
    the.cluster.drains_slowly = True
    for _ in range(360):
        the.step()
        if any(move.outcome == "giving back" for move in the.view().moves):
            return
    raise AssertionError("nothing was given back")


def _finish_draining(the: _Loaded) -> None:
    the.cluster.drains_slowly = False
    for node in the.cluster.nodes.values():
        node.finish_draining()
    the.run(2 * STEP)


def test_what_a_lower_load_does_not_need_is_given_back_and_taken_again() -> None:
    """The last one stays; what is given back is drained, and taken from the idle ones, not from a donor."""
    the = _Loaded()
    the.rates = {"red": 4.2, "blue": 4.2}
    the.run(400)
    _until_giving_back(the)
    (move,) = [each for each in the.view().moves if each.outcome == "giving back"]
    assert (move.stage, move.donor, move.reason) == (BLUE, BLUE, "the load needs 1 less of 3")
    ending = [actor for actor in the.cluster.manager.actors.values() if actor.life is ActorLife.STOPPING]
    assert {actor.stop_reason for actor in ending} == {"the load does not need it"}
    assert {actor.actor_id for actor in ending} == set(move.replaces)
    _finish_draining(the)
    assert the.ready() == (3, 2)
    the.run(900)
    view = the.view()
    assert (the.ready(), view.given_back, view.done, view.abandoned) == ((3, 1), 2, 0, 0)
    assert {each.outcome for each in view.moves} == {"given back"}
    assert {stage.wanted for stage in view.stages} == {1, 3}
    assert {stage.leaving for stage in view.stages} == {0}
    red = _devices_of(the, RED)
    the.rates = {"red": 4.2, "blue": 4.2}
    the.run(300)
    view = the.view()
    assert the.ready() == (3, 3)
    assert {each.donor for each in view.moves if each.outcome == "done"} == {None}
    assert _devices_of(the, RED) == red


def test_a_pinned_minimum_is_not_given_back() -> None:
    """Nor is anything of a stage whose load is not known, as a workflow with it was never measured."""
    the = _Loaded(limits={BLUE: StageLimits(instances_min=2)})
    the.rates = {"red": 0.1, "blue": 0.1}
    the.run(1200)
    assert the.ready() == (1, 2)
    the = _Loaded()
    unmeasured = make_workflow("other", make_need("blue", 30, instances=3), make_need("slow", 30))
    the.cluster.offer(unmeasured)
    the.rates = {"red": 0.1, "blue": 0.1, "other": 0.01}
    the.run(1200)
    assert the.ready() == (1, 3)


def test_a_manager_that_restarts_goes_on_giving_back() -> None:
    """The instance ends, nothing takes its place, and that it was given back is known."""
    the = _Loaded()
    _until_giving_back(the)
    the.cluster.restart_manager()
    the.run(60)
    _finish_draining(the)
    assert the.ready() == (3, 1)
    assert the.view().given_back == 2


def test_workflows_that_change_end_the_moves() -> None:
    """A stage that is other than it was begins anew with what its definition says."""
    the = _Loaded()
    _until_moving(the)
    the.cluster.offer(
        make_workflow("blue", make_need("blue", 20, instances=2), digest="other"), replaces=True
    )
    the.loads_by_itself = True
    the.run(20)
    assert all(move.outcome == "abandoned" for move in the.view().moves if move.outcome != "advised")
    wanted = {stage.stage: stage.wanted for stage in the.view().stages}
    assert wanted[BLUE] == 2


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
    the = _Loaded()
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
