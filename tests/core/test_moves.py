import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from onepiece.core.capacity import CapacityModel, Demand, WorkflowShape
from onepiece.core.inventory import DeviceKind
from onepiece.core.move_board import DeviceInfo, KeptBoard, Load, PlacedActor, StageLimits
from onepiece.core.moves import Decision, MovePolicy, decide
from onepiece.core.service_times import StageProfile, Timing
from tests.core.capacity_parts import GIB, make_stage


def _model(*stages: StageProfile) -> CapacityModel:
    """Each stage is a workflow of its own, so that its load can be set alone."""
    return CapacityModel.of(stages, [WorkflowShape.line(stage.stage, [stage.stage]) for stage in stages])


def _devices(nodes: int, each: int = 1, gib: int = 80) -> list[DeviceInfo]:
    return [
        DeviceInfo(f"node-{n:02}", f"cuda:{d}", DeviceKind.GPU, gib * GIB)
        for n in range(nodes)
        for d in range(each)
    ]


def _actors(devices: list[DeviceInfo], *stages: str) -> list[PlacedActor]:
    """One on each of the first devices."""
    return [
        PlacedActor(number, stage, device.node_id, (device.device,))
        for number, (device, stage) in enumerate(zip(devices, stages, strict=False), 1)
    ]


def _decide(
    model: CapacityModel,
    load: dict[str, float],
    devices: list[DeviceInfo],
    actors: list[PlacedActor],
    limits: dict[str, StageLimits] | None = None,
    policy: MovePolicy | None = None,
    seconds: float = 100_000.0,
) -> Decision:
    demands = tuple(Demand(name, rate) for name, rate in load.items())
    return decide(model, [Load(demands, seconds)], devices, actors, limits, policy)


_TWO = _model(make_stage("x", 1.0), make_stage("y", 1.0))


def test_a_set_that_keeps_up_is_left_alone() -> None:
    """Uneven is not bad: below the bound nothing moves, idle devices or not."""
    devices = _devices(5)
    found = _decide(_TWO, {"x": 0.8, "y": 0.1}, devices, _actors(devices, "x", "y", "y", "y"))
    assert found.moves == ()
    assert found.reason == "no stage is busier than 85%"
    assert found.utilisation == {"x": 0.8, "y": pytest.approx(0.1 / 3)}


def test_idle_devices_come_first() -> None:
    """While a device has no actor, nobody gives."""
    devices = _devices(5)
    found = _decide(_TWO, {"x": 1.4, "y": 0.1}, devices, _actors(devices, "x", "y", "y", "y"))
    (move,) = found.moves
    assert (move.stage, move.node_id, move.replaces, move.is_beside) == ("x", "node-04", (), False)
    assert found.instances == {"x": 2, "y": 3}
    assert move.reason == "x is 140% busy, the devices are idle"
    assert move.gain_requests == pytest.approx(1.4 * (1 - 0.85 / 1.4) * 300)


def test_the_donor_is_the_one_that_loses_least() -> None:
    """Of two stages that could give, the less busy one does, down to its pinned minimum."""
    model = _model(make_stage("x", 1.0), make_stage("y", 1.0), make_stage("z", 1.0))
    devices = _devices(7)
    actors = _actors(devices, "x", "y", "y", "y", "z", "z", "z")
    load = {"x": 2.4, "y": 1.0, "z": 0.1}
    found = _decide(model, load, devices, actors, {"z": StageLimits(instances_min=2)})
    assert [move.replaces for move in found.moves] == [(7,), (4,)]
    assert found.instances == {"x": 3, "y": 2, "z": 2}


def test_a_maximum_is_kept() -> None:
    """A stage that may not have more gets no more, however busy; the next one is looked at."""
    devices = _devices(6)
    actors = _actors(devices, "x", "y", "y")
    found = _decide(_TWO, {"x": 5, "y": 3}, devices, actors, {"x": StageLimits(instances_max=2)})
    assert found.instances == {"x": 2, "y": 4}


def test_copies_stay_apart() -> None:
    """No node gets more of a stage than it may; without a bound those come first that have the fewest."""
    devices = _devices(2, each=4)
    actors = _actors(devices, "x")
    limits = {"x": StageLimits(per_node_max=2)}
    found = _decide(_TWO, {"x": 20}, devices, actors, limits)
    assert sorted(move.node_id for move in found.moves) == ["node-00", "node-01", "node-01"]
    (first, *_) = _decide(_TWO, {"x": 20}, devices, actors).moves
    assert first.node_id == "node-01"


def test_it_warms_up_beside_where_the_memory_is_enough() -> None:
    """The new one is loaded beside the old one if both fit, else the old one goes first (fault 91)."""
    model = _model(make_stage("x", 1.0, gib=40), make_stage("y", 1.0, gib=30))
    for gib, is_beside in ((80, True), (70, True), (60, False)):
        devices = _devices(3, gib=gib)
        (move,) = _decide(model, {"x": 1.4, "y": 0.1}, devices, _actors(devices, "x", "y", "y")).moves
        assert (move.replaces, move.is_beside) == ((3,), is_beside)


def test_what_does_not_fit_is_not_moved() -> None:
    """A device that is too small, or of another kind, takes nothing."""
    model = _model(make_stage("x", 1.0, gib=40), make_stage("y", 1.0, gib=10))
    small = [evolve(device, memory_bytes=30 * GIB) for device in _devices(3)[1:]]
    devices = [*_devices(1), *small]
    found = _decide(model, {"x": 1.4, "y": 0.1}, devices, _actors(devices, "x", "y", "y"))
    assert found.moves == ()
    assert found.reason == "nothing that would gain enough can be given to x (140% busy)"
    processors = [evolve(device, kind=DeviceKind.CPU) for device in _devices(3)[1:]]
    assert not _decide(_TWO, {"x": 1.4}, [*_devices(1), *processors], _actors(_devices(1), "x")).moves


def test_a_move_must_pay() -> None:
    """A load time beyond the horizon never pays; a donor that would be missed is left alone."""
    devices = _devices(4)
    actors = _actors(devices, "x", "y", "y", "y")
    for load_seconds, count in ((100.0, 1), (299.0, 1), (301.0, 0)):
        model = _model(make_stage("x", 1.0, load_seconds=load_seconds), make_stage("y", 1.0))
        assert len(_decide(model, {"x": 1.4, "y": 0.3}, devices, actors).moves) == count
    assert not _decide(_TWO, {"x": 1.4, "y": 3.3}, devices, actors).moves


def test_few_requests_prove_little() -> None:
    """What some requests say may be chance; a hundred times as many alike are believed."""
    devices = _devices(8)
    actors = _actors(devices, *"xxxyyyyy")
    load = {"x": 3.8, "y": 2.0}
    assert not _decide(_TWO, load, devices, actors, seconds=20).moves
    assert _decide(_TWO, load, devices, actors, seconds=2000).moves


def test_shared_devices_are_left_alone() -> None:
    """An actor that is not alone on its device neither moves nor gives way."""
    devices = _devices(2)
    actors = [
        PlacedActor(1, "x", "node-00", ("cuda:0",)),
        PlacedActor(2, "y", "node-01", ("cuda:0",)),
        PlacedActor(3, "y", "node-01", ("cuda:0",)),
    ]
    assert not _decide(_TWO, {"x": 3.0, "y": 0.1}, devices, actors).moves
    assert _decide(_TWO, {"x": 3.0, "y": 0.1}, _devices(3), [*actors, evolve(actors[1], node_id="node-02")])


def test_several_devices_at_once() -> None:
    """An instance on four devices takes four idle ones of one node, or those of one donor."""
    model = _model(StageProfile("x", (Timing(1.0, devices=4),), devices=4), make_stage("y", 1.0))
    devices = _devices(3, each=4)
    wide = PlacedActor(1, "x", "node-00", ("cuda:0", "cuda:1", "cuda:2", "cuda:3"))
    (move,) = _decide(model, {"x": 1.4}, devices, [wide, PlacedActor(2, "y", "node-01", ("cuda:0",))]).moves
    assert (move.node_id, len(move.devices)) == ("node-02", 4)
    wide_two = evolve(wide, actor_id=3, node_id="node-01")
    found = _decide(
        model,
        {"x": 0.2, "y": 1.4},
        devices[:9],
        [wide, wide_two, PlacedActor(2, "y", "node-02", ("cuda:0",))],
    )
    (move,) = found.moves
    assert (move.replaces, len(move.devices)) == ((3,), 1)


def test_a_pinned_minimum_needs_no_load() -> None:
    """What an operator wants is raised without any load, from idle devices or a donor."""
    devices = _devices(3)
    actors = _actors(devices, "x", "y", "y")
    found = _decide(_TWO, {}, devices, actors, {"x": StageLimits(instances_min=2)})
    assert found.instances == {"x": 2, "y": 1}


@st.composite
def _sets(draw: st.DrawFn) -> tuple[CapacityModel, dict[str, float], list[DeviceInfo], list[PlacedActor]]:
    names = ["a", "b", "c"][: draw(st.integers(2, 3))]
    stages = [
        make_stage(n, draw(st.integers(1, 30)) / 10, gib=draw(st.integers(1, 30)), load_seconds=20.0)
        for n in names
    ]
    devices = _devices(draw(st.integers(1, 4)), draw(st.integers(1, 4)), gib=40)
    placed = [(device, draw(st.sampled_from([*names, None]))) for device in devices]
    actors = [
        PlacedActor(number, name, device.node_id, (device.device,), draw(st.booleans()))
        for number, (device, name) in enumerate(placed, 1)
        if name is not None
    ]
    load = {name: draw(st.integers(0, 60)) / 10 for name in names}
    return _model(*stages), load, devices, actors


_LIMITS = st.dictionaries(
    st.sampled_from("abc"),
    st.builds(StageLimits, st.integers(1, 2), st.sampled_from([None, 2, 3]), st.sampled_from([None, 1, 2])),
)


@given(made=_sets(), limits=_LIMITS)
@settings(deadline=None, max_examples=150)
def test_what_every_decision_keeps(
    made: tuple[CapacityModel, dict[str, float], list[DeviceInfo], list[PlacedActor]],
    limits: dict[str, StageLimits],
) -> None:
    """Devices are used once, minima, maxima and spread are kept, and the busiest stage gets less busy."""
    model, load, devices, actors = made
    found = _decide(model, load, devices, actors, limits)
    by_id = {actor.actor_id: actor for actor in actors}
    taken = {(actor.node_id, actor.devices[0]) for actor in actors}
    replaced = [actor_id for move in found.moves for actor_id in move.replaces]
    assert len(set(replaced)) == len(replaced)
    after = {key: actor for key, actor in by_id.items() if key not in replaced}
    for number, move in enumerate(found.moves, 1000):
        after[number] = PlacedActor(number, move.stage, move.node_id, move.devices)
        here = {(move.node_id, device) for device in move.devices}
        assert bool(here & taken) == bool(move.replaces)
        assert all(by_id[actor_id].is_settled for actor_id in move.replaces)
        assert model.stages[move.stage].memory_bytes <= 40 * GIB
    places = [(actor.node_id, device) for actor in after.values() for device in actor.devices]
    assert len(set(places)) == len(places)
    demands = [Demand(name, rate) for name, rate in load.items()]
    counts = {name: sum(a.stage == name for a in after.values()) for name in model.stages}
    assert counts == found.instances
    given_up = {by_id[actor_id].stage for actor_id in replaced}
    for move in found.moves:
        limit = limits.get(move.stage, StageLimits())
        assert limit.instances_max is None or counts[move.stage] <= limit.instances_max
        on_node = sum(a.stage == move.stage and a.node_id == move.node_id for a in after.values())
        assert limit.per_node_max is None or on_node <= limit.per_node_max
        assert move.stage not in given_up
    for stage in given_up:
        assert counts[stage] >= limits.get(stage, StageLimits()).instances_min
    used = model.utilisation(demands, counts)
    if found.moves and not limits:
        assert max(used.values()) <= max(found.utilisation.values())


@given(made=_sets(), limits=_LIMITS, factors=st.lists(st.integers(0, 30), min_size=2, max_size=5))
@settings(deadline=None, max_examples=100)
def test_a_board_that_is_kept_changes_no_decision(
    made: tuple[CapacityModel, dict[str, float], list[DeviceInfo], list[PlacedActor]],
    limits: dict[str, StageLimits],
    factors: list[int],
) -> None:
    """However the load changed meanwhile, and whatever was decided before: as with a board filled anew."""
    model, load, devices, actors = made
    kept = KeptBoard()
    for number, factor in enumerate(factors):
        demands = tuple(Demand(name, rate * factor / 10) for name, rate in load.items())
        loads = [Load(demands[number % 2 :], 100.0), Load(demands, 100_000.0)]
        gave, took = ({demands[0].workflow}, {demands[-1].workflow}) if number % 3 == 1 else (set(), set())
        fresh = decide(model, loads, devices, actors, limits, gave=gave, took=took)
        assert decide(model, loads, devices, actors, limits, gave=gave, took=took, kept=kept) == fresh


@given(made=_sets())
@settings(deadline=None, max_examples=150)
def test_a_decision_is_followed_by_none_that_undoes_it(
    made: tuple[CapacityModel, dict[str, float], list[DeviceInfo], list[PlacedActor]],
) -> None:
    """Under the same load the set comes to rest: what was moved is not moved back."""
    model, load, devices, actors = made
    actors = [evolve(actor, is_settled=True) for actor in actors]
    gave, took = set(), set()
    for _ in range(20):
        found = _decide(model, load, devices, actors)
        if not found.moves:
            return
        by_id = {actor.actor_id: actor for actor in actors}
        for move in found.moves:
            took.add(move.stage)
            for actor_id in move.replaces:
                gave.add(by_id.pop(actor_id).stage)
            new = max(by_id, default=0) + 100
            by_id[new] = PlacedActor(new, move.stage, move.node_id, move.devices)
        actors = list(by_id.values())
    raise AssertionError(f"it does not come to rest: {gave} gave, {took} took")
