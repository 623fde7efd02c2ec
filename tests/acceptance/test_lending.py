"""Idle devices lent to a job: it runs where no actor is, and is gone before one comes, and with its node."""

import json
import shlex
import signal
import sys
from pathlib import Path

from tests.acceptance.lent_stages import DIRECTORY, living
from tests.acceptance.node_set import NodeProcess, NodeSet, eventually, open_set

# Leaves a file with its device, named by its process id, and will not end when it is asked to.
_JOB = """
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
path = pathlib.Path(os.environ["LENT_JOBS"], str(os.getpid()))
path.write_text(os.environ["ONEPIECE_DEVICE"])
time.sleep(3600)
"""


def _start_worker(a_set: NodeSet, devices: str, jobs: Path) -> NodeProcess:
    lent = ("--lend", shlex.join([sys.executable, "-c", _JOB]))
    bounds = ("--lend-idle-seconds", "0.2", "--lend-stop-seconds", "0.5")
    return a_set.start(
        *("--roles", "worker", "--join", a_set.seed.address, "--devices", devices, "--log-json", "true"),
        *(*lent, *bounds),
        environment={DIRECTORY: str(jobs)},
    )


def _events(node: NodeProcess, name: str) -> list[str]:
    """The devices of such lines of its log."""
    lines = [json.loads(line) for line in node.log().splitlines() if name in line]
    return sorted(line["device"] for line in lines)


def test_a_job_gives_way_to_an_actor_and_ends_with_its_node(tmp_path: Path) -> None:
    """Two idle devices have a job each; an actor finds its own free; a killed node leaves none."""
    kept, other = tmp_path / "kept", tmp_path / "other"
    kept.mkdir()
    other.mkdir()
    with open_set(tmp_path / "set") as a_set:
        a_set.start(
            *("--roles", "proxy,manager,store", "--workers", "2"),
            *("--workflow", "tests.acceptance.lent_stages:beside"),
        )
        worker = _start_worker(a_set, "cpu:0=1GiB,cpu:1=1GiB", kept)
        eventually(lambda: len(living(kept)) == 2, "both devices have a job")  # it is waited for a worker
        small = _start_worker(a_set, "cpu:0=0.1GiB", other)
        a_set.wait_ready()
        assert a_set.api().run("beside", {"number": 1}) == 1
        assert len(living(kept)) == 1
        taken = _events(worker, "lent_job_stopping")
        assert len(taken) == 1
        assert _events(worker, "lent_job_killed") == taken
        worker.signal(signal.SIGKILL)
        worker.wait_killed()
        eventually(lambda: not living(kept), "the killed node's jobs are gone")
        eventually(lambda: living(other), "the other node has its job")
    assert not living(other)
    assert _events(small, "lent_job_ended") == ["cpu:0"]
