"""How the ranks of a stage are loaded, watched over and unloaded by their actor."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from onepiece.core.inventory import ActorState
from onepiece.requests import EventKind
from tests.runtime.actor_rig import actor_rig
from tests.runtime.ranked_stages import stumbling, weighing
from tests.runtime.rig import children, descriptors, is_alive, until
from tests.tidy.sources import ROOT

READY, LOADING, FAILED = ActorState.READY, ActorState.LOADING, ActorState.FAILED


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What happened to the ranks of ``weighed``, in order."""
    path = tmp_path / "traces"
    path.touch()
    monkeypatch.setenv("ONEPIECE_TEST_TRACES", str(path))
    return lambda: [line.split()[0] for line in path.read_text().splitlines()]


async def test_ranks_load_one_after_another(
    traces: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never all at once, as each may have the whole weights in memory meanwhile (fault 87).

    Nor do those of other stages of the node, or of a group that is loaded anew.
    """
    # More than lies between the starts of two processes.
    monkeypatch.setenv("ONEPIECE_TEST_LOAD_SECONDS", "0.6")
    async with actor_rig(weighing) as rigged:
        await rigged.submit("a", word="hello")
        assert await rigged.outcome("a") == "hello"
        assert traces() == ["begin", "end"] * 2 + ["hello"] * 2
        await rigged.submit("b", word="die")
        assert "(rank 1 of 2) exited with status 10" in (await rigged.outcome("b"))["message"]
        await rigged.submit("c", word="hello")
        assert await rigged.outcome("c") == "hello"
        assert traces()[8:] == ["begin", "end"] * 2 + ["hello"] * 2
        assert rigged.states == [READY, LOADING, READY]
        assert rigged.actor.report().devices == ("cpu:0", "cpu:1")
        rigged.actor.drain()
        await asyncio.wait([rigged.running])
        assert traces()[-2:] == ["unload"] * 2


@pytest.mark.parametrize(
    ("fault", "why", "loads"),
    [
        ("raise 1", "StageNotLoaded: rank 1 of 2: OSError: the weights are not there", 1),
        ("_exit 1", "ProcessEnded: (rank 1 of 2) exited with status 7, 3 times in a row, while it loaded", 3),
    ],
)
async def test_an_actor_whose_rank_cannot_load_says_which(
    fault: str, why: str, loads: int, traces: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the other ranks do not stay behind."""
    monkeypatch.setenv("ONEPIECE_TEST_SETUP", fault)
    before, open_before = children(), descriptors()
    async with actor_rig(weighing) as rigged:
        await until(lambda: rigged.actor.state is FAILED)
        assert rigged.actor.report().error == why
        assert children() == before
    assert traces().count("begin") >= loads
    assert descriptors() == open_before


async def test_queued_requests_outlive_a_group() -> None:
    """What waits behind a request that breaks a rank runs on the new group."""
    async with actor_rig(stumbling) as rigged:
        for uid, fault in (("a", "none"), ("b", "kill"), ("c", "none")):
            await rigged.submit(uid, fault=fault)
        first, third = await rigged.outcome("a"), await rigged.outcome("c")
        assert first[1:] == third[1:] == [0, 2]
        assert first[0] != third[0]
        broken = await rigged.outcome("b")
        assert "its process (rank 1 of 2) was killed by SIGKILL" in broken["message"]
        assert broken["fields"]["rank"] == 1


async def test_an_actor_that_is_ended_leaves_no_rank() -> None:
    """Cancelled with a request in all ranks, of which none can hear anything."""
    before, open_before = children(), descriptors()
    async with actor_rig(stumbling) as rigged:
        await rigged.submit("a", fault="block")
        await rigged.heard_of("a", EventKind.PROGRESS)
        processes = children() - before
        assert len(processes) == 2
        rigged.running.cancel()
        await asyncio.wait([rigged.running])
        assert not any(map(is_alive, processes))
        assert rigged.error("a") is None  # ended with the actor, it goes on elsewhere
    assert children() == before
    assert descriptors() == open_before


async def test_ranks_die_with_their_node() -> None:
    """However it ends: by kill -9, and whatever the ranks are in."""
    command = [sys.executable, "-m", "tests.runtime.isolated_parent", "ranks"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as node:  # noqa: ASYNC220 - short
        assert node.stdout is not None
        processes = [int(word) for word in node.stdout.readline().split()]
        assert len(processes) == 2
        assert all(map(is_alive, processes))
        node.kill()
    await until(lambda: not any(map(is_alive, processes)))
    assert os.getpid() not in processes
