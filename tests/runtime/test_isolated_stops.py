"""Cancelling and outlasting: a call in a helper process ends when it is told to, or its process does."""

import asyncio
import os
import signal
import time

import pytest

from onepiece.errors import DeadlineExceeded, NodeLost, RequestCancelled, StageFailed
from onepiece.runtime.isolated_process import IsolationBounds
from onepiece.runtime.task_worker import Outcome
from tests.runtime.isolated_stages import hurried, linger
from tests.runtime.rig import SHORT, Rig, Started, children, is_alive, rig, until

CANCELLED = RequestCancelled("request u was cancelled", uid="u")


async def started(rigged: Rig, how: str, within: float | None = None) -> Started:
    """A call that has begun."""
    begun = len(rigged.progress)
    call = rigged.start(how=how, within=within)
    await until(lambda: len(rigged.progress) > begun)
    return call


async def test_a_cancelled_call_ends_and_its_process_stays() -> None:
    """By its coroutine, by ``report``, or by ``cancelled``; the next call runs in the same process."""
    async with rig(linger) as rigged:
        process = rigged.process.process_id
        for how in ("sleep", "report", "cancelled", "compute until stopped"):
            call = await started(rigged, how)
            call.stop(CANCELLED)
            outcome = await call.task
            assert outcome.error is CANCELLED
            assert not outcome.is_dirty
        assert (await rigged.run(how="sleep", seconds=0.0)).shipment == "sleep"
        assert rigged.process.process_id == process


async def test_a_call_that_ignores_its_cancellation_is_killed() -> None:
    """After a bound, whatever keeps it (fault 27); the actor gets a new process."""
    async with rig(linger, SHORT) as rigged:
        for how in ("block", "spin", "hold the interpreter", "refuse", "compute"):
            process = rigged.process.process_id
            call = await started(rigged, how)
            call.stop(CANCELLED)
            outcome = await call.task
            assert outcome.error is CANCELLED
            assert outcome.is_dirty
            assert not is_alive(process)
            await rigged.reload()
        assert (await rigged.run(how="sleep", seconds=0.0)).shipment == "sleep"


async def test_a_call_that_leaves_when_it_is_stopped_is_dirty() -> None:
    """Its process lives, and is given no further one."""
    async with rig(linger) as rigged:
        call = await started(rigged, "leave")
        call.stop(CANCELLED)
        outcome = await call.task
        assert outcome.error is CANCELLED
        assert outcome.is_dirty
        assert not rigged.loaded.is_broken
        await rigged.reload()


async def test_a_process_that_does_not_die_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs in a driver, say: after a bound the actor goes on without it, and says so."""
    impatient = IsolationBounds(0.1, 0.1, 0.1, 0.1, 0.1, 0.1)
    async with rig(linger, impatient) as rigged:
        process = rigged.process.process_id
        monkeypatch.setattr("signal.pidfd_send_signal", lambda *_: None)  # as if it took no notice
        # Nothing in it runs any more, so that it does not see the socket close either.
        call = await started(rigged, "hold the interpreter")
        call.stop(CANCELLED)
        outcome = await call.task
        assert outcome.error is CANCELLED
        assert outcome.is_dirty
        assert "does not die of SIGKILL" in await rigged.loaded.broken()
        await rigged.loaded.unload()
        assert is_alive(process)
        monkeypatch.undo()
        os.kill(process, signal.SIGKILL)
        await until(lambda: process not in children())  # it is still watched, and taken note of


async def test_calls_share_the_fate_of_their_process() -> None:
    """One that must be killed takes along those beside it: their error says why."""
    async with rig(linger, SHORT) as rigged:
        beside = await started(rigged, "sleep")
        stubborn = await started(rigged, "refuse")
        stubborn.stop(CANCELLED)
        assert (await stubborn.task).error is CANCELLED
        outcome = await beside.task
        assert isinstance(outcome.error, StageFailed)
        assert "was ended, as a call ignored its cancellation for 0.3 s" in outcome.error.message
        assert outcome.is_dirty


async def test_one_call_is_stopped_alone() -> None:
    """Others in the same process go on."""
    async with rig(linger) as rigged:
        other = rigged.start(how="sleep", seconds=0.5)
        call = await started(rigged, "sleep")
        call.stop(CANCELLED)
        assert (await call.task).error is CANCELLED
        assert (await other.task).shipment == "sleep"


async def test_the_deadline_ends_a_call() -> None:
    """By its coroutine or by ``report``, and the process stays."""
    async with rig(linger) as rigged:
        process = rigged.process.process_id
        for how in ("sleep", "report"):
            outcome = await rigged.run(how=how, within=0.5)
            assert isinstance(outcome.error, DeadlineExceeded | RequestCancelled)
            assert not outcome.is_dirty
        assert is_alive(process)


async def test_a_call_that_outlasts_its_deadline_is_killed() -> None:
    """The request is told at once; the process is given the bound, then it is ended."""
    async with rig(linger, SHORT) as rigged:
        process = rigged.process.process_id
        outcome = await rigged.run(how="block", within=0.5)
        assert isinstance(outcome.error, DeadlineExceeded)
        assert outcome.is_dirty
        assert isinstance(rigged.late[0], DeadlineExceeded)
        assert not is_alive(process)


async def test_the_stages_timeout_ends_a_call() -> None:
    """``@stage(timeout=)`` is a failure of the stage, and named so."""
    async with rig(hurried) as rigged:
        outcome = await rigged.run(seconds=3600.0)
        assert isinstance(outcome.error, StageFailed)
        assert "took longer than its timeout of 0.3 s" in outcome.error.message
        assert not outcome.is_dirty
        assert (await rigged.run(seconds=0.0)).shipment == 0.0


async def test_an_actor_that_ends_does_not_wait_for_long() -> None:
    """What is told to leave has less time than what is cancelled: the node ends."""
    patient = IsolationBounds(stop_seconds=3600, leave_seconds=0.1, terminate_seconds=1, unload_seconds=1)
    async with rig(linger, patient) as rigged:
        process = rigged.process.process_id
        call = await started(rigged, "compute")
        call.stop(NodeLost("the actor was ended", uid="u"))
        assert isinstance((await call.task).error, NodeLost)
        assert not is_alive(process)


async def test_a_second_cancellation_does_not_wait_at_all() -> None:
    """Cancelled twice, as by a node that is told to stop at once: the process is killed there and then."""
    patient = IsolationBounds(stop_seconds=3600, leave_seconds=3600)
    async with rig(linger, patient) as rigged:
        process = rigged.process.process_id
        call = await started(rigged, "compute")
        call.stop(CANCELLED)
        await asyncio.sleep(0)
        call.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.task
        await until(lambda: not is_alive(process))


async def test_a_call_can_be_cancelled_at_any_moment() -> None:
    """Before it is sent, under way, or just as it ends: there is one outcome, and the process goes on."""
    async with rig(linger) as rigged:
        large = bytes(1 << 20).decode()
        for pause in (0.0, 0.0, 0.001, 0.002, 0.005, 0.01, 0.02):
            call = rigged.start(how=large, seconds=0.0)
            if pause:
                await asyncio.wait([call.task], timeout=pause)
            else:
                await asyncio.sleep(0)
            call.stop(CANCELLED)
            outcome: Outcome[object] = await call.task
            assert outcome.error is CANCELLED or outcome.shipment == large
            assert not outcome.is_dirty
        assert (await rigged.run(how="sleep", seconds=0.0)).shipment == "sleep"


async def test_the_node_goes_on_while_a_stage_computes() -> None:
    """A stage that holds its interpreter's lock holds nobody else's: timers of the node are on time.

    Compared with the same loop while nothing runs, as machines differ.
    """
    async with rig(linger, SHORT) as rigged:
        idle = await worst_lag(50)
        calls = [await started(rigged, how) for how in ("report", "hold the interpreter")]
        busy = await worst_lag(50)
        for call in calls:
            call.stop(CANCELLED)
            await call.task
        assert busy < 20 * max(idle, 0.01)


async def worst_lag(ticks: int) -> float:
    """How late the loop was at worst, in so many heartbeats."""
    worst = 0.0
    for _ in range(ticks):
        due = time.monotonic() + 0.01
        await asyncio.sleep(0.01)
        worst = max(worst, time.monotonic() - due)
    return worst
