"""What instances take: a declaration that measurements raise, as packing, the log and the view have it."""

from attrs import evolve

from onepiece.core.inventory import DeviceKind, StageWork
from onepiece.core.manager import ManagerEffect
from onepiece.core.packing import Room
from onepiece.core.placement_events import StageExceeded
from onepiece.core.placement_view import StageView
from onepiece.core.stage_sizes import StageSizes, with_margin
from tests.core.cluster import GIB, Cluster, make_need, make_node, make_workflow

X, Y = "module:x", "module:y"


def _sizes(gib: float) -> StageSizes:
    return StageSizes().told(X, int(gib * GIB))


def test_what_was_measured_raises_what_is_declared_and_never_lowers_it() -> None:
    """The most of all, and a tenth more; of what is not measured the declaration counts."""
    sizes = _sizes(50).told(X, 40 * GIB)
    assert sizes.wanted_bytes(make_need("x", 30)) == 55 * GIB
    assert sizes.wanted_bytes(make_need("x", 60)) == 60 * GIB
    assert sizes.wanted_bytes(make_need("y", 30)) == 30 * GIB


def test_what_creeps_up_is_no_news_each_time() -> None:
    """Nor is what no device can have."""
    sizes = _sizes(50)
    assert sizes.told(X, 51 * GIB) is sizes
    assert sizes.told(X, int(51.1 * GIB)).seen[X] > 51 * GIB
    assert sizes.told(X, 1 << 60) is sizes


def test_no_more_is_wanted_than_a_device_has() -> None:
    """It is known to run on one; the declaration stands in any case."""
    rooms = [Room("n", "cuda:0", DeviceKind.GPU, 52 * GIB), Room("n", "cpu:0", DeviceKind.CPU, 500 * GIB)]
    assert _sizes(50).needs({X: make_need("x", 30)}, rooms)[X].memory_bytes == 52 * GIB
    assert _sizes(50).needs({X: make_need("x", 60)}, rooms)[X].memory_bytes == 60 * GIB
    on_cpu = _sizes(50).needs({X: make_need("x", 30)}, rooms[1:])
    assert on_cpu[X].memory_bytes == with_margin(50 * GIB)


def test_another_version_is_measured_anew() -> None:
    """A stage that needs something else, one of another version of its workflow, and one that is gone."""
    one, two = make_workflow("w", make_need("x", 30)), make_workflow("v", make_need("y", 30))
    sizes = StageSizes({X: GIB, Y: GIB})
    assert sizes.of([one, two], [one, two]) is sizes
    assert sizes.of([one, two], [one]).seen == {X: GIB}
    assert sizes.of([one, two], [make_workflow("w", make_need("x", 40)), two]).seen == {Y: GIB}
    assert sizes.of([one, two], [evolve(one, digest="other"), two]).seen == {Y: GIB}


def _report_memory(cluster: Cluster, stage: str, gib: int) -> list[ManagerEffect]:
    node = cluster.nodes["n"]
    for actor_id, report in node.actors.items():
        if report.stage == stage:
            node.actors[actor_id] = evolve(report, work=StageWork(1, 1.0, 1.0, memory_bytes=gib * GIB))
    return cluster.beat("n")


def _view(cluster: Cluster, stage: str) -> StageView:
    return next(row for row in cluster.manager.view(cluster.now).stages if row.stage == stage)


def test_a_stage_that_takes_more_than_it_declares_is_told_and_counted() -> None:
    """Nothing is put where it would not fit beside it; another manager knows it, too."""
    cluster = Cluster()
    cluster.offer(make_workflow("w", make_need("x", 30)))
    cluster.join(make_node("n", cpus=(), gpus=(80,)))
    cluster.load()
    assert not [each for each in _report_memory(cluster, X, 20) if isinstance(each, StageExceeded)]
    told = [each for each in _report_memory(cluster, X, 50) if isinstance(each, StageExceeded)]
    assert told == [StageExceeded(X, "n", 30 * GIB, 50 * GIB)]
    assert not [each for each in _report_memory(cluster, X, 50) if isinstance(each, StageExceeded)]
    view = _view(cluster, X)
    assert (view.memory_bytes, view.seen_bytes, view.wanted_bytes) == (30 * GIB, 50 * GIB, 55 * GIB)
    assert (view.ready, view.problem) == (1, None)
    cluster.restart_manager()
    cluster.beat()
    cluster.advance(10.0, beating=["n"])
    assert _view(cluster, X).seen_bytes == 50 * GIB
    cluster.offer(make_workflow("v", make_need("y", 30)))
    problem = _view(cluster, Y).problem
    assert problem is not None
    assert "25.0 GiB of 80.0 GiB free" in problem
    cluster.offer(make_workflow("u", make_need("z", 20)))
    cluster.load()
    assert _view(cluster, "module:z").ready == 1
    cluster.offer(make_workflow("w", make_need("x", 30), digest="other"), replaces=True)
    assert _view(cluster, X).seen_bytes is None


def test_a_new_instance_gets_what_the_first_was_measured_to_take() -> None:
    """Of two devices the one that is large enough, though the other has more room than is declared."""
    cluster = Cluster()
    cluster.offer(make_workflow("w", make_need("x", 30)))
    cluster.join(make_node("n", cpus=(), gpus=(80,)))
    cluster.load()
    _report_memory(cluster, X, 50)
    cluster.join(make_node("a", cpus=(), gpus=(40,)))
    cluster.join(make_node("b", cpus=(), gpus=(60,)))
    cluster.nodes["n"].draining = True
    cluster.beat()
    cluster.load()
    assert {actor.node_id for actor in cluster.manager.actors.values() if actor.serves} == {"b"}
