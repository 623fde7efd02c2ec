"""A lent device's job: what it sees, how its end is told, and that nothing of it stays."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from onepiece.runtime.lent_job import LentJob, lent_environment
from tests.runtime.rig import descriptors, is_alive, until

_TELLS = """
import json, os, pathlib, sys
pathlib.Path(sys.argv[1]).write_text(json.dumps([os.nice(0), os.environ["ONEPIECE_DEVICE"], os.getsid(0)]))
"""
_LEAVES_A_CHILD = """
import pathlib, subprocess, sys, time
path = pathlib.Path(sys.argv[1])
large = "import sys, time; held = b'1' * 2**28; print(flush=True); time.sleep(3600)"
apart = sys.argv[2].endswith("apart")
child = subprocess.Popen([sys.executable, "-c", large], stdout=subprocess.PIPE, start_new_session=apart)
child.stdout.readline()
path.with_suffix(".partial").write_text(str(child.pid))
path.with_suffix(".partial").rename(path)
if sys.argv[2] == "stays":
    time.sleep(3600)
"""


class Watched:
    """A job, and when it ends."""

    def __init__(self, *command: str) -> None:
        self.ended = asyncio.Event()
        self.job = LentJob(command, "cpu:1", self.ended.set)

    async def how(self) -> str:
        """How it ends."""
        async with asyncio.timeout(20.0):
            await self.ended.wait()
        return self.job.how


async def test_it_is_of_low_priority_and_knows_its_device(tmp_path: Path) -> None:
    """Nice 19, the device's name in its environment, a session of its own; nothing stays open."""
    before = descriptors()
    watched = Watched(sys.executable, "-c", _TELLS, str(tmp_path / "told"))
    session = watched.job.process_id
    assert await watched.how() == "exited with status 0"
    assert json.loads((tmp_path / "told").read_text()) == [19, "cpu:1", session]
    assert descriptors() == before


@pytest.mark.parametrize(
    ("command", "how"),
    [
        ([sys.executable, "-c", "raise SystemExit(3)"], "exited with status 3"),
        ([sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"], "was killed by SIGSEGV"),
        (["no-such-program-is-here"], "exited with status 127"),
    ],
)
async def test_its_end_is_told_as_it_was(command: list[str], how: str) -> None:
    """What keeps it between the node and the command hides nothing."""
    assert await Watched(*command).how() == how


@pytest.mark.parametrize(("end", "by"), [(LentJob.terminate, "SIGTERM"), (LentJob.kill, "SIGKILL")])
async def test_its_end_is_that_of_all_of_it(end: Callable[[LentJob], None], by: str, tmp_path: Path) -> None:
    """The command, and a process that it has started, which the kernel takes long to take apart."""
    path = tmp_path / "child"
    watched = Watched(sys.executable, "-c", _LEAVES_A_CHILD, str(path), "stays")
    await until(path.exists)
    end(watched.job)
    assert (await watched.how()).startswith(f"was killed by {by}")
    assert not is_alive(int(path.read_text()))


async def test_a_killed_keeper_leaves_nothing(tmp_path: Path) -> None:
    """As when memory runs out: what it had is killed by the node before the end is told."""
    path = tmp_path / "child"
    watched = Watched(sys.executable, "-c", _LEAVES_A_CHILD, str(path), "stays")
    await until(path.exists)
    os.kill(watched.job.process_id, signal.SIGKILL)
    assert (await watched.how()).startswith("was killed by SIGKILL")
    assert not is_alive(int(path.read_text()))


@pytest.mark.parametrize("how", ["ends", "ends, apart"])
async def test_what_it_has_started_ends_with_it(how: str, tmp_path: Path) -> None:
    """A child that outlives the command is killed, also one in a session of its own."""
    path = tmp_path / "child"
    assert (
        await Watched(sys.executable, "-c", _LEAVES_A_CHILD, str(path), how).how() == "exited with status 0"
    )
    assert not is_alive(int(path.read_text()))


def test_it_sees_its_gpu_alone() -> None:
    """By the node's own list, if it has one; a processor changes nothing."""
    assert lent_environment("cuda:1", {})["CUDA_VISIBLE_DEVICES"] == "1"
    assert lent_environment("cuda:1", {"CUDA_VISIBLE_DEVICES": "4,6"})["CUDA_VISIBLE_DEVICES"] == "6"
    assert "CUDA_VISIBLE_DEVICES" not in lent_environment("cpu:0", {})
