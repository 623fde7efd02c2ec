"""Idle devices as the manager shows them, and what `onepiece placement` prints of them."""

from typing import Any

import pytest
from attrs import asdict, evolve

from onepiece.cli.placement import placement_text
from onepiece.core.idle_devices import IDLE_SHOWN_MAX, IdleDevices
from onepiece.core.inventory import DeviceKind
from onepiece.core.lending import JobReport, JobState, LentReport
from onepiece.core.packing import Room
from tests.core.cluster import GIB, Cluster, make_need, make_node, make_workflow


def _room(device: int, *stages: str) -> Room:
    return Room("n", f"cuda:{device:03}", DeviceKind.GPU, 80 * GIB, stages=stages)


def test_a_device_is_idle_from_the_look_that_finds_nobody_there() -> None:
    """Since then, until somebody is; then anew."""
    idle = IdleDevices()
    idle.look([_room(0), _room(1, "x")], 10.0)
    idle.look([_room(0), _room(1)], 30.0)
    assert [(row.device, row.idle_seconds) for row in idle.view(40.0)] == [
        ("cuda:000", 30.0),
        ("cuda:001", 10.0),
    ]
    idle.look([_room(0, "x"), _room(1)], 50.0)
    idle.look([_room(0), _room(1)], 60.0)
    assert [row.idle_seconds for row in idle.view(60.0)] == [0.0, 30.0]
    idle.look([], 70.0)
    assert idle.view(70.0) == ()


def test_those_with_a_job_come_first_and_what_is_shown_is_bounded() -> None:
    """A device on which an actor is has no row, whatever its job does."""
    idle = IdleDevices()
    idle.look([_room(0, "x"), *(_room(number) for number in range(1, 101))], 0.0)
    jobs = (JobReport("cuda:000", JobState.KILLED, 1.0), JobReport("cuda:100", JobState.RUNNING, 7.0))
    idle.told("n", LentReport("train", jobs))
    rows = idle.view(9.0)
    assert (len(rows), idle.count) == (IDLE_SHOWN_MAX, 100)
    assert (rows[0].device, rows[0].command, rows[0].job, rows[0].job_seconds) == (
        "cuda:100",
        "train",
        "running",
        7.0,
    )
    assert {row.job for row in rows[1:]} == {""}
    idle.forget("n")
    assert {row.job for row in idle.view(9.0)} == {""}
    idle.told("n", LentReport("train", jobs))
    idle.told("n", None)
    assert {row.job for row in idle.view(9.0)} == {""}


def _shown(cluster: Cluster) -> dict[str, Any]:
    return asdict(cluster.manager.view(cluster.now))


@pytest.mark.parametrize(
    ("job", "told"),
    [
        (JobReport("cuda:1", JobState.RUNNING, 90.0), "running"),
        (JobReport("cuda:1", JobState.NONE, 2.0), "none yet"),
        (JobReport("cuda:1", JobState.NONE, 2.0, "exit status 1"), "none (the last: exit status 1)"),
    ],
)
def test_placement_tells_what_is_idle_and_what_it_is_lent_to(job: JobReport, told: str) -> None:
    """From the heartbeat to the printed row; when the node is gone, so is the row."""
    cluster = Cluster()
    cluster.offer(make_workflow("w", make_need("x", 30)))
    cluster.join(make_node("n", cpus=(), gpus=(80, 80)))
    cluster.load()
    cluster.advance(4.0, beating=["n"])
    heard = cluster.nodes["n"].heartbeat()
    cluster.tell(evolve(heard, lent=LentReport("python train.py", (job,))))
    text = placement_text(_shown(cluster))
    (row,) = [line for line in text.splitlines() if line.startswith("n: cuda:1")]
    assert row.split("  ")[0] == "n: cuda:1"
    assert "80.0 GiB" in row
    assert "python train.py" in row
    assert told in row
    cluster.leave("n")
    assert "cuda:1" not in placement_text(_shown(cluster))
