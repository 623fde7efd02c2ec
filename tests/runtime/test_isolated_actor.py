"""An actor whose stage runs in a helper process: what its owner, its manager and its queue see."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from onepiece.core.inventory import ActorState
from onepiece.errors import RequestCancelled
from onepiece.requests import EventKind
from tests.runtime.actor_rig import actor_rig
from tests.runtime.isolated_stages import breakable, lingering, tracing
from tests.runtime.rig import children, descriptors, is_alive, until

READY, LOADING, FAILED = ActorState.READY, ActorState.LOADING, ActorState.FAILED


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """Counts what happened to ``traced``."""
    path = tmp_path / "traces"
    path.touch()
    monkeypatch.setenv("ONEPIECE_TEST_TRACES", str(path))

    def happened(word: str) -> int:
        return [line.split()[0] for line in path.read_text().splitlines()].count(word)

    return happened


async def test_queued_requests_outlive_a_crash() -> None:
    """The one that crashed ends in ``StageFailed``; those behind it wait for the new process and run."""
    async with actor_rig(breakable) as rigged:
        for uid, fault in (("a", "none"), ("b", "segfault"), ("c", "none"), ("d", "memory"), ("e", "none")):
            await rigged.submit(uid, fault=fault)
        first, second, third = [await rigged.outcome(uid) for uid in "ace"]
        assert len({first, second, third}) == 3  # each in a process of its own
        crash, doubt = await rigged.outcome("b"), await rigged.outcome("d")
        assert crash["error"] == "StageFailed"
        assert "its process was killed by SIGSEGV" in crash["message"]
        assert doubt["fields"]["cause"] == "MemoryError"
        # Unhealthy meanwhile, so that nobody sends more here (faults 30 and 31).
        assert rigged.states == [READY, LOADING, READY, LOADING, READY]


async def test_calls_that_die_together_cost_one_reload() -> None:
    """Each of them finds the stage broken; it is loaded again once, and the next calls are left alone."""
    before = children()
    async with actor_rig(lingering) as rigged:
        for uid in "abc":
            await rigged.submit(uid, how="sleep")
            await rigged.heard_of(uid, EventKind.PROGRESS)
        (process,) = children() - before
        os.kill(process, signal.SIGKILL)
        for uid in "abc":
            assert "was killed by SIGKILL" in (await rigged.outcome(uid))["message"]
        for uid in "defg":
            await rigged.submit(uid, seconds=0.0)
        for uid in "defg":
            assert await rigged.outcome(uid) == "sleep"
        assert rigged.states == [READY, LOADING, READY]


async def test_a_process_killed_while_idle_is_replaced_at_once() -> None:
    """Nobody needs to call first: the model is loaded again before the next request."""
    async with actor_rig(breakable) as rigged:
        await rigged.submit("a")
        process = await rigged.outcome("a")
        os.kill(process, signal.SIGKILL)
        await until(lambda: rigged.states == [READY, LOADING, READY])
        await rigged.submit("b")
        assert await rigged.outcome("b") not in {process, None}


async def test_a_process_that_keeps_dying_idle_fails_the_actor(
    traces: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a few times, with the reason, so that the manager looks for another place."""
    monkeypatch.setenv("ONEPIECE_TEST_SETUP", "crash when idle")
    before = children()
    async with actor_rig(tracing) as rigged:
        await until(lambda: rigged.actor.state is FAILED)
        assert rigged.actor.report().error == "its process exited with status 9, 3 times before any work"
        assert traces("load") == 3
        await rigged.submit("a", word="hello")
        refused = await rigged.outcome("a")
        assert refused["error"] == "StageFailed"
        assert "exited with status 9" in refused["message"]
        assert children() == before


async def test_an_actor_that_cannot_load_again_fails(
    traces: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits is refused with the reason, rather than kept for ever (fault 31)."""
    async with actor_rig(tracing) as rigged:
        monkeypatch.setenv("ONEPIECE_TEST_SETUP", "crash")
        for uid in ("a", "b", "c", "d"):
            await rigged.submit(uid, word="crash")
        for uid in ("a", "b", "c", "d"):
            assert (await rigged.outcome(uid))["error"] == "StageFailed"
        await until(lambda: rigged.actor.state is FAILED)
        assert "exited with status 7, 3 times in a row, while it loaded" in str(rigged.actor.error)


async def test_an_actor_that_never_loaded_says_why(
    traces: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its report, for the manager and for people."""
    monkeypatch.setenv("ONEPIECE_TEST_SETUP", "raise")
    async with actor_rig(tracing) as rigged:
        assert rigged.states == [FAILED]
        assert rigged.actor.report().error == "StageNotLoaded: OSError: the weights are not there"
        assert traces("load") == 1


async def test_a_cancelled_request_frees_the_actor() -> None:
    """The call is told to stop, its process stays, and the next request runs."""
    async with actor_rig(lingering) as rigged:
        await rigged.submit("a", how="sleep")
        await rigged.heard_of("a", EventKind.PROGRESS)
        rigged.actor.stop_request("a", RequestCancelled("request a was cancelled", uid="a"))
        assert (await rigged.outcome("a"))["error"] == "RequestCancelled"
        await rigged.submit("b", seconds=0.0)
        assert await rigged.outcome("b") == "sleep"
        assert rigged.states == [READY]
        assert rigged.actor.is_idle


async def test_progress_reaches_the_owner() -> None:
    """As from a stage in the node, with the stage's own fields."""
    async with actor_rig(lingering) as rigged:
        await rigged.submit("a", seconds=0.0)
        assert await rigged.outcome("a") == "sleep"
        await rigged.heard_of("a", EventKind.STAGE_FINISHED)
        assert rigged.kinds("a") == ["queued", "stage_started", "progress", "stage_finished"]


async def test_an_actor_that_is_ended_leaves_no_process() -> None:
    """Cancelled with calls in hand that take no notice: they are given a moment, then all is gone."""
    before, open_before = children(), descriptors()
    async with actor_rig(lingering) as rigged:
        for uid, how in (("a", "compute"), ("b", "sleep"), ("c", "refuse")):
            await rigged.submit(uid, how=how)
            await rigged.heard_of(uid, EventKind.PROGRESS)
        (process,) = children() - before
        rigged.running.cancel()
        await asyncio.wait([rigged.running])
        assert not is_alive(process)
        assert rigged.error("a") is None  # ended with the actor, they go on elsewhere
    assert children() == before
    assert descriptors() == open_before


async def test_a_drained_actor_finishes_and_unloads(traces: Callable[[str], int]) -> None:
    """What is queued runs; then the rest of the setup does, in the process."""
    async with actor_rig(tracing) as rigged:
        for uid in "abcd":
            await rigged.submit(uid, word="hello")
        rigged.actor.drain()
        await asyncio.wait([rigged.running])
        for uid in "abcd":
            assert isinstance(await rigged.outcome(uid), int)
        assert (traces("hello"), traces("unload")) == (4, 1)
