"""What inboxes in a device's memory take of it, where instances are placed."""

import pytest
from attrs import evolve

from onepiece.core.manager import ManagerConfig
from onepiece.core.placement_events import PlacementConfig
from tests.core.cluster import GIB, Cluster, make_need, make_node, make_workflow

_RING_GIB = 2


def _cluster(gpu_gib: int, *, is_apart: bool) -> Cluster:
    config = ManagerConfig(placement=PlacementConfig(inbox_bytes=_RING_GIB * GIB))
    cluster = Cluster(config)
    need = evolve(make_need("denoise", 22), inbox_on_device=is_apart)
    cluster.offer(make_workflow("video", need, make_need("decode", 2)))
    cluster.join(make_node("n", cpus=(), gpus=(gpu_gib,)))
    cluster.load()
    return cluster


def _problems(cluster: Cluster) -> dict[str, str | None]:
    return {row.stage: row.problem for row in cluster.manager.view(cluster.now).stages}


@pytest.mark.parametrize("is_apart", [True, False], ids=["device", "host"])
def test_a_ring_in_a_device_takes_room_beside_the_stage(*, is_apart: bool) -> None:
    """22 and 2 GiB fill a device of 24; with a ring of 2 GiB on it one of them is left out, by name."""
    problems = _problems(_cluster(24, is_apart=is_apart))
    assert problems["module:denoise"] is None
    assert (problems["module:decode"] is not None) is is_apart
    assert set(_problems(_cluster(26, is_apart=is_apart)).values()) == {None}


def test_a_stage_that_does_not_fit_with_its_inbox_is_told_so() -> None:
    """What it needs is told with the ring, as all of that has to be free."""
    cluster = _cluster(23, is_apart=True)
    row = next(each for each in cluster.manager.view(cluster.now).stages if each.stage == "module:denoise")
    assert row.memory_bytes == (22 + _RING_GIB) * GIB
    assert row.problem is not None
    assert "needs 24.0 GiB" in row.problem


def test_a_manager_with_inboxes_of_another_size_places_the_same_actors() -> None:
    """A restart with another ``--inbox-bytes`` refuses no workflow and stops nothing that runs."""
    cluster = _cluster(80, is_apart=True)
    before = sorted(cluster.nodes["n"].actors)
    cluster.config = ManagerConfig(placement=PlacementConfig(inbox_bytes=4 * GIB))
    cluster.restart_manager()
    cluster.advance(8.0, beating=["n"])
    assert sorted(cluster.nodes["n"].actors) == before
    assert set(_problems(cluster).values()) == {None}
