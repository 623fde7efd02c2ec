from random import Random

import pytest
from attrs import define, evolve, field

from onepiece.core import ActorLife, DemandChanged, PlacementMachine, WorkflowWithdrawn
from onepiece.core.capacity import CapacityModel, WorkflowShape
from onepiece.core.give_back import GiveBack, GiveBackPolicy
from onepiece.core.inventory import DeviceKind
from onepiece.core.move_board import DeviceInfo, PlacedActor
from onepiece.core.moves import Move, MovePolicy
from onepiece.core.rebalance import (
    OrderMoves,
    RebalanceMachine,
    RebalancePolicy,
    RequestsCounted,
    SetChanged,
    TimesMeasured,
)
from tests.core.capacity_parts import GIB, make_stage
from tests.core.cluster import Cluster, make_need, make_node, make_workflow

_INTERVAL = 5.0
_LOAD_SECONDS = 20.0
_IMPATIENT = RebalancePolicy(
    windows_seconds=(30.0,),
    sustain_seconds=0.0,
    rest_seconds=0.0,
    moves=MovePolicy(gain_min=0.0, confidence=0.0),
)


@define(eq=False)
class _Set:
    """Eight devices, two workflows of one stage each, and Poisson arrivals; moves take as long as loading."""

    policy: RebalancePolicy = field(factory=RebalancePolicy)
    seed: int = 0
    actors: dict[int, PlacedActor] = field(factory=dict)
    ready_at: dict[int, float] = field(factory=dict)
    moves: list[tuple[float, Move]] = field(factory=list)
    given_back: list[tuple[float, GiveBack]] = field(factory=list)
    now: float = 0.0
    seconds: float = 0.2
    """What a request takes."""
    machine: RebalanceMachine = field(init=False)
    random: Random = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.random = Random(self.seed)
        self.machine = RebalanceMachine(policy=self.policy)
        stages = [make_stage(name, self.seconds, gib=30, load_seconds=_LOAD_SECONDS) for name in "xy"]
        shapes = [WorkflowShape.line(name, [name]) for name in "xy"]
        self.machine.handle(TimesMeasured(CapacityModel.of(stages, shapes)), self.now)
        for number, stage in enumerate("xxxxyyyy"):
            self.actors[number] = PlacedActor(number, stage, f"node-{number}", ("cuda:0",))
        self._tell_set()

    def count(self, stage: str) -> int:
        """Its actors."""
        return sum(actor.stage == stage for actor in self.actors.values())

    def run(self, seconds: float, x: float, y: float) -> None:
        """Let time pass; ``x`` and ``y`` are how many devices each workflow keeps busy."""
        end = self.now + seconds
        while self.now < end:
            self.now += _INTERVAL
            for number in [n for n, at in self.ready_at.items() if at <= self.now]:
                del self.ready_at[number]
                self.actors[number] = evolve(self.actors[number], is_settled=True)
                self._tell_set()
            requests = {
                (name, ""): self._arrivals(rate / self.seconds) for name, rate in (("x", x), ("y", y))
            }
            for effect in self.machine.handle(RequestsCounted(requests, _INTERVAL), self.now):
                assert isinstance(effect, OrderMoves)
                for move in effect.decision.moves:
                    self._carry_out(move)
                for give in effect.decision.gives_back:
                    self.given_back.append((self.now, give))
                    del self.actors[give.actor_id]
                self._tell_set()

    def _arrivals(self, rate: float) -> int:
        count, at = -1, 0.0
        while at < _INTERVAL:
            at += self.random.expovariate(rate)
            count += 1
        return count

    def _carry_out(self, move: Move) -> None:
        self.moves.append((self.now, move))
        for actor_id in move.replaces:
            del self.actors[actor_id]
        number = len(self.moves) + 100
        self.actors[number] = PlacedActor(number, move.stage, move.node_id, move.devices, is_settled=False)
        self.ready_at[number] = self.now + _LOAD_SECONDS

    def _tell_set(self) -> None:
        devices = tuple(DeviceInfo(f"node-{n}", "cuda:0", DeviceKind.GPU, 80 * GIB) for n in range(8))
        self.machine.handle(SetChanged(devices, tuple(self.actors.values())), self.now)


def test_it_follows_a_shift_of_the_load() -> None:
    """When one workflow's load goes to the other, so do the devices, and then it is quiet."""
    cluster = _Set()
    cluster.run(300, 3.0, 3.0)
    assert not cluster.moves
    cluster.run(600, 1.0, 5.0)
    assert cluster.count("y") >= 6
    last = cluster.moves[-1][0]
    assert last < 600
    assert cluster.machine.latest is not None
    assert not cluster.machine.latest.moves


@pytest.mark.parametrize(("seed", "seconds"), [(0, 0.1), (1, 1.0), (2, 1.0), (3, 10.0)])
def test_a_steady_load_between_two_ratios_moves_nothing_to_and_fro(seed: int, seconds: float) -> None:
    """One hour near the border where 4 and 4 are as good as 3 and 5: at most one move, never one back."""
    cluster = _Set(seed=seed, seconds=seconds)
    cluster.run(3600, 3.0, 4.0)
    assert len(cluster.moves) <= 1


@pytest.mark.parametrize(("seed", "seconds"), [(0, 0.1), (1, 1.0), (2, 10.0)])
def test_a_load_that_falls_and_rises_is_followed_without_flapping(seed: int, seconds: float) -> None:
    """Two hours by halves: in the quiet ones x gives back and takes nothing, else it is the reverse."""
    cluster = _Set(seed=seed, seconds=seconds)
    for turn in range(2):
        given_back, moved = len(cluster.given_back), len(cluster.moves)
        cluster.run(1800, 3.0, 2.0)
        assert cluster.count("x") >= 4
        assert len(cluster.given_back) == given_back
        assert {move.stage for _, move in cluster.moves[moved:]} == ({"x"} if turn else set())
        moved = len(cluster.moves)
        cluster.run(1800, 0.2, 2.0)
        assert {give.stage for _, give in cluster.given_back[given_back:]} == {"x"}
        assert cluster.count("x") < 4
        assert len(cluster.moves) == moved
    assert all(not move.replaces for _, move in cluster.moves)


@pytest.mark.parametrize(("seed", "seconds"), [(0, 0.1), (1, 1.0), (2, 1.0), (3, 10.0), (4, 30.0)])
@pytest.mark.parametrize("x", [0.55, 0.7, 1.2])
def test_a_steady_low_load_gives_back_once(seed: int, seconds: float, x: float) -> None:
    """One hour near where one instance less would just do: what is given back is not taken again."""
    cluster = _Set(seed=seed, seconds=seconds)
    cluster.run(3600, x, 2.0)
    gone = {give.stage for _, give in cluster.given_back}
    assert gone.isdisjoint(move.stage for _, move in cluster.moves)
    assert gone == {"x"} or seconds > 1.0, "few requests say too little"


def test_without_patience_it_would_give_back_and_take() -> None:
    """The same hour with none, and with no regard to chance: the test above can fail."""
    hasty = RebalancePolicy(
        windows_seconds=(30.0,),
        sustain_seconds=0.0,
        release_seconds=0.0,
        give_back=GiveBackPolicy(utilisation_release=0.8, confidence=0.0),
    )
    cluster = _Set(hasty, seed=1, seconds=1.0)
    cluster.run(3600, 0.7, 2.0)
    assert len(cluster.moves) > 3


def test_without_patience_it_would_flap() -> None:
    """The same hour with no rest, no least gain and a short window: the test above can fail."""
    impatient = [_Set(_IMPATIENT, seed, seconds=1.0) for seed in range(3)]
    for cluster in impatient:
        cluster.run(3600, 3.0, 4.0)
    assert max(len(cluster.moves) for cluster in impatient) > 3


def test_one_busy_look_is_not_enough() -> None:
    """What is over before ``sustain_seconds`` moves nothing."""
    cluster = _Set(RebalancePolicy(windows_seconds=(10.0,), sustain_seconds=30.0))
    for _ in range(20):
        cluster.run(15, 1.0, 30.0)
        cluster.run(30, 1.0, 1.0)
    assert not cluster.moves


def test_nothing_is_decided_while_moves_take_place() -> None:
    """While an actor loads no more is ordered, but one that never gets ready does not stop it for ever."""
    cluster = _Set(RebalancePolicy(settle_seconds_max=200.0, rest_seconds=0.0), seconds=0.05)
    cluster.run(45, 1.0, 5.5)
    first = len(cluster.moves)
    assert first
    assert cluster.ready_at
    cluster.ready_at = dict.fromkeys(cluster.ready_at, float("inf"))
    begun = cluster.moves[-1][0]
    cluster.run(100, 5.5, 1.0)
    assert len(cluster.moves) == first
    cluster.run(300, 5.5, 1.0)
    assert len(cluster.moves) > first
    assert cluster.moves[first][0] >= begun + 200


def test_it_says_nothing_before_it_knows_enough() -> None:
    """Without service times, a set or half a window of load, nothing is decided."""
    machine = RebalanceMachine()
    assert machine.handle(RequestsCounted({("x", ""): 100}, 60.0), 0.0) == []
    assert machine.latest is None
    cluster = _Set()
    cluster.run(25, 1.0, 8.0)
    assert cluster.machine.latest is None
    cluster.run(10, 1.0, 8.0)
    assert cluster.machine.latest is not None


def test_what_was_not_measured_is_passed_over() -> None:
    """A workflow or a size class without service times does not stop the rest."""
    cluster = _Set()
    counts = {("x", ""): 100, ("x", "4k"): 7, ("new", ""): 9}
    cluster.machine.handle(RequestsCounted(counts, 60.0), 60.0)
    assert cluster.machine.latest is not None
    assert set(cluster.machine.latest.utilisation) == {"x"}


def test_its_story_can_be_replayed() -> None:
    """The same events give the same orders."""
    cluster = _Set()
    cluster.run(200, 1.0, 5.0)
    assert cluster.moves
    cluster.machine.story.replay()


def test_the_manager_carries_a_decision_out() -> None:
    """The instances of a decision, told to the real manager as demand, become actors on the nodes.

    Eight nodes with room for one actor each, so that every new one needs a donor that has gone.
    """
    cluster = Cluster()
    for stage in "xy":
        cluster.offer(make_workflow(stage, make_need(stage, 20, instances=4)))
    for number in range(8):
        cluster.join(make_node(f"node-{number}", cpus=(), gpus=(24,)))
    machine = RebalanceMachine()
    stages = [make_stage(f"module:{name}", 0.2, gib=20, load_seconds=20.0) for name in "xy"]
    shapes = [WorkflowShape.line(name, [f"module:{name}"]) for name in "xy"]
    machine.handle(TimesMeasured(CapacityModel.of(stages, shapes)), cluster.now)
    random, orders = Random(1), 0
    for look in range(120):
        cluster.advance(_INTERVAL, beating=cluster.nodes)
        if look % 4 == 0:
            cluster.load()
        machine.handle(
            SetChanged.of(_placement(cluster).workers.values(), cluster.manager.actors.values()), cluster.now
        )
        rates = {"x": 15.0, "y": 15.0} if look < 30 else {"x": 5.0, "y": 25.0}
        counted = {
            (name, ""): round(random.gauss(rate * 5, (rate * 5) ** 0.5)) for name, rate in rates.items()
        }
        for order in machine.handle(RequestsCounted(counted, _INTERVAL), cluster.now):
            orders += 1
            cluster.tell(DemandChanged(order.decision.instances))
    serving = [actor.stage for actor in cluster.manager.actors.values() if actor.life is ActorLife.READY]
    assert sorted(serving) == ["module:x"] * 2 + ["module:y"] * 6
    assert 1 <= orders <= 3


def test_the_set_is_seen_as_placement_has_it() -> None:
    """An actor that ends takes room, one that loads is not settled, a draining node takes nothing."""
    cluster = Cluster()
    cluster.offer(make_workflow("x", make_need("x", 20, instances=2)))
    for number in range(3):
        cluster.join(make_node(f"node-{number}", cpus=(), gpus=(24,)))
    loading = SetChanged.of(_placement(cluster).workers.values(), cluster.manager.actors.values())
    assert [actor.is_settled for actor in loading.actors] == [False, False]
    assert len(loading.devices) == 3
    cluster.load()
    cluster.nodes["node-0"].draining = True
    cluster.beat()
    seen = SetChanged.of(_placement(cluster).workers.values(), cluster.manager.actors.values())
    assert {device.node_id for device in seen.devices} == {"node-1", "node-2"}
    cluster.load()
    cluster.tell(WorkflowWithdrawn("x"))
    ending = SetChanged.of(_placement(cluster).workers.values(), cluster.manager.actors.values())
    assert {actor.stage for actor in ending.actors} == {""}


def _placement(cluster: Cluster) -> PlacementMachine:
    return cluster.manager._placement
