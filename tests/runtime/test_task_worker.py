"""TaskWorker: whatever a stage's function does, its stage task ends in a shipment or in a named error."""

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import anyio
import numpy as np
import pytest
from attrs import evolve

from onepiece import InvalidInput, RequestCancelled, StageContext, Tensor, stage
from onepiece.errors import DeadlineExceeded, OnePieceError, StageFailed
from onepiece.graph import Isolation
from onepiece.limits import PREVIEW_BYTES_MAX
from onepiece.requests import EventKind
from onepiece.runtime.task_worker import Outcome, RunningStage, TaskWorker
from onepiece.stage import Stage
from tests.runtime.rig import rig, stage_task_of, until

AnyStage = Stage[Any, Any, Any]

CANCELLED = RequestCancelled("request u was cancelled", uid="u")


@stage
async def fail(ctx: StageContext[None], fault: str) -> int:
    """Fail in one of several ways; the number of the thread if in none."""
    match fault:
        case "raise":
            raise ValueError("the latents are not finite")
        case "reject":
            raise InvalidInput("no such colour", field="colour")
        case "cancel":
            raise RequestCancelled("the stage saw it")
        case "exit":
            sys.exit(3)
        case "exit in a thread":
            await ctx.run(sys.exit, 3)
        case "interrupt":
            raise KeyboardInterrupt
        case "memory":
            raise MemoryError("no room")
        case "wrong type":
            wrong: Any = "text"
            return wrong  # type: ignore[no-any-return]  # what is tested
        case "no wire form":
            return 1 << 100
        case "cancel itself":
            raise asyncio.CancelledError
    return threading.get_ident()


@stage
async def hang(ctx: StageContext[None], how: str) -> str:
    """Wait for ever, in one of several ways."""
    ctx.report(step=1, total=2)
    match how:
        case "await":
            await anyio.sleep_forever()
        case "report":
            await ctx.run(_report_for_ever, ctx)
        case "swallow":
            try:
                await anyio.sleep_forever()
            except BaseException:  # noqa: BLE001 - what is tested
                return "swallowed"
        case "leave":
            try:
                await anyio.sleep_forever()
            finally:
                sys.exit(3)
    return how


def _report_for_ever(ctx: StageContext[None]) -> NoReturn:
    while True:
        ctx.report(step=2, total=2, preview=b"x")
        threading.Event().wait(0.005)


@stage(timeout=0.1)
async def hurried(ctx: StageContext[None], how: str) -> str:
    """Has a timeout."""
    await anyio.sleep_forever()
    return how


@stage
async def add(ctx: StageContext[None], left: Tensor, right: Tensor, times: int = 2) -> Tensor:
    """Use every kind of input."""
    return (left + right) * times


@stage
async def report(ctx: StageContext[None], size: int) -> None:
    """Report in all ways."""
    ctx.report(step=1, total=4, loss=0.5)
    ctx.report(preview=bytes(size), content_type="image/png")
    ctx.report()


def on_loop(given: AnyStage) -> AnyStage:
    """The same stage on the node's loop."""
    return evolve(given, spec=evolve(given.spec, isolation=Isolation.LOOP))


def on_thread(given: AnyStage) -> AnyStage:
    """The same stage as it is."""
    return given


both = pytest.mark.parametrize("place", [on_loop, on_thread], ids=["loop", "thread"])
Place = Callable[[AnyStage], AnyStage]


def failure(outcome: Outcome[Any], kind: type[OnePieceError] = StageFailed) -> OnePieceError:
    """The error that an outcome must have."""
    assert isinstance(outcome.error, kind), outcome
    assert outcome.shipment is None
    return outcome.error


@both
async def test_a_value_becomes_a_shipment(place: Place) -> None:
    """Its inputs are of the types that the signature says, and do not lie in the message any more."""
    async with rig(place(add)) as rigged:
        left, right = np.arange(5.0), np.ones(5)
        assert np.array_equal(np.asarray(await rigged.value(left=left, right=right)), (left + right) * 2)
        thrice = await rigged.value(left=left, right=right, times=3)
        assert np.array_equal(np.asarray(thrice), (left + right) * 3)


async def test_a_stage_runs_where_it_says() -> None:
    """On the node's loop, or on the device's own thread."""
    async with rig(on_loop(fail)) as rigged:
        assert await rigged.value(fault="none") == threading.get_ident()
    async with rig(fail) as rigged:
        assert await rigged.value(fault="none") != threading.get_ident()


@both
async def test_what_the_function_raises_is_the_jobs_error(place: Place) -> None:
    """Named, with the end of its traceback; the next stage task runs."""
    async with rig(place(fail)) as rigged:
        for fault, words, cause in (
            ("raise", "ValueError: the latents are not finite", "ValueError"),
            ("wrong type", "the str 'text' where int is wanted", "WrongType"),
            ("no wire form", "an int of 101 bits", "CodecError"),
            ("cancel itself", "CancelledError", "CancelledError"),
        ):
            outcome = await rigged.run(fault=fault)
            error = failure(outcome)
            assert words in error.message
            assert error.fields["cause"] == cause
            assert (error.fields["stage"], error.fields["node"]) == ("stage", "node-1")
            assert not outcome.is_dirty
        assert "in fail" in failure(await rigged.run(fault="raise")).fields["traceback"]
        assert isinstance(await rigged.value(fault="none"), int)


@both
async def test_errors_that_name_the_cause_pass_through(place: Place) -> None:
    """Bad input and cancellation are told by the stage itself: they are not its failure."""
    async with rig(place(fail)) as rigged:
        assert failure(await rigged.run(fault="reject"), InvalidInput).fields == {"field": "colour"}
        assert failure(await rigged.run(fault="cancel"), RequestCancelled).message == "the stage saw it"


@both
@pytest.mark.parametrize("fault", ["exit", "exit in a thread", "interrupt", "memory"])
async def test_what_leaves_the_module_in_doubt_is_dirty(place: Place, fault: str) -> None:
    """The node goes on, and the actor is told to load the stage anew (faults 30 and 77)."""
    async with rig(place(fail)) as rigged:
        outcome = await rigged.run(fault=fault)
        assert failure(outcome).fields["cause"] in {"SystemExit", "KeyboardInterrupt", "MemoryError"}
        assert outcome.is_dirty
        await rigged.reload()
        assert isinstance(await rigged.value(fault="none"), int)


@both
async def test_inputs_that_do_not_fit_fail_the_job(place: Place) -> None:
    """A wrong type or an unknown parameter, as from a node with another version: named, and no crash."""
    async with rig(place(fail)) as rigged:
        assert "the int 3 where str is wanted" in failure(await rigged.run(fault=3)).message
        assert "has no parameter 'colour'" in failure(await rigged.run(colour="red")).message


@both
@pytest.mark.parametrize("size", [10, 200_000])
async def test_the_messages_memory_is_given_back_once(place: Place, size: int) -> None:
    """Whether the stage task succeeds or fails; before the function ends, as the message is copied first."""
    released: list[None] = []
    async with rig(place(add)) as rigged:
        for right in (np.ones(size), "no tensor"):
            stage_task = stage_task_of(
                {"left": np.ones(size), "right": right}, release=lambda: released.append(None)
            )
            await rigged.execute(stage_task, rigged.context(rigged.state))
            await until(lambda: released)
            assert released == [None]
            released.clear()


@both
async def test_a_cancelled_job_ends_with_its_reason(place: Place) -> None:
    """By its coroutine or by what ``report`` raises in a thread; the cancellation goes no further."""
    async with rig(place(hang)) as rigged:
        for how in ("await", "report", "swallow"):
            rigged.progress.clear()
            call = rigged.start(how=how)
            await until(lambda: rigged.progress)
            call.stop(CANCELLED)
            assert (await call.task).error is CANCELLED
            assert call.context.cancelled


@both
async def test_a_job_that_leaves_when_it_is_stopped_is_dirty(place: Place) -> None:
    """It ends with the reason that it was given; the next one must not run on what it left behind."""
    async with rig(place(hang)) as rigged:
        call = rigged.start(how="leave")
        await until(lambda: rigged.progress)
        call.stop(CANCELLED)
        outcome = await call.task
        assert outcome.error is CANCELLED
        assert outcome.is_dirty
        late = await rigged.run(how="leave", within=0.1)
        assert late.is_dirty


async def test_a_worker_outlives_what_is_done_with_its_cancellation() -> None:
    """One worker runs them all: stopped ones, ones that swallow it, ones that cancel themselves."""
    async with rig(on_loop(hang)) as rigged:

        async def work() -> list[OnePieceError | None]:
            errors = []
            for how in ("swallow", "await", "swallow", "report", "await"):
                context = rigged.context(rigged.state)
                contexts.append(context)
                errors.append((await rigged.execute(stage_task_of({"how": how}), context)).error)
            return errors

        contexts: list[RunningStage] = []
        worker = rigged.tasks.create_task(work())
        for _ in range(5):
            await until(lambda: rigged.progress and contexts and not contexts[-1].cancelled)
            rigged.progress.clear()
            contexts[-1].stop(CANCELLED)
            worker.cancel()
        assert await worker == [CANCELLED] * 5
        assert worker.cancelling() == 0


async def test_a_cancellation_without_a_reason_is_a_cancellation() -> None:
    """The node ends: nobody wants an outcome."""
    async with rig(hang) as rigged:
        call = rigged.start(how="await")
        await until(lambda: rigged.progress)
        call.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.task


@both
async def test_a_deadline_ends_a_job(place: Place) -> None:
    """Its coroutine is cancelled, ``report`` raises, and ``on_late`` is told at once."""
    async with rig(place(hang)) as rigged:
        for how in ("await", "report"):
            rigged.late.clear()
            outcome = await rigged.run(how=how, within=0.1)
            assert failure(outcome, DeadlineExceeded).fields == {"uid": "u", "stage": "stage"}
            assert [type(error) for error in rigged.late] in ([DeadlineExceeded], [])


async def test_a_deadline_is_told_before_a_blocked_call_returns() -> None:
    """The request ends on time; its device stays busy until the call is over."""
    may_end = threading.Event()

    @stage
    async def blocked(ctx: StageContext[None], word: str) -> str:
        await ctx.run(may_end.wait, 20)
        return word

    async with rig(blocked) as rigged:
        call = rigged.start(word="x", within=0.1)
        await until(lambda: rigged.late)
        assert isinstance(rigged.late[0], DeadlineExceeded)
        assert not call.task.done()
        may_end.set()
        failure(await call.task, DeadlineExceeded)


@both
async def test_a_timeout_is_a_failure_of_the_stage(place: Place) -> None:
    """``@stage(timeout=)`` names the stage and the seconds."""
    async with rig(place(hurried)) as rigged:
        error = failure(await rigged.run(how="await"))
        assert "longer than its timeout of 0.1 s on node-1" in error.message


@both
async def test_a_job_past_its_deadline_does_not_begin(place: Place) -> None:
    """It came too late: nothing of the function runs."""
    async with rig(place(hang)) as rigged:
        failure(await rigged.run(how="await", within=-1.0), DeadlineExceeded)
        assert not rigged.progress


async def test_progress_says_how_far_and_how_long() -> None:
    """Steps with an estimate, previews by themselves, nothing for nothing."""
    async with rig(report) as rigged:
        assert await rigged.value(size=3) is None
        (kind, detail), (preview_kind, preview) = rigged.progress
        assert (kind, preview_kind) == (EventKind.PROGRESS, EventKind.PREVIEW)
        assert (detail["step"], detail["total"], detail["loss"]) == (1, 4, 0.5)
        assert detail["eta_seconds"] >= 0
        assert preview == {"data": bytes(3), "content_type": "image/png"}
        too_large = failure(await rigged.run(size=PREVIEW_BYTES_MAX + 1))
        assert "shrink it" in too_large.message


async def test_a_package_that_fails_fails_the_job() -> None:
    """What is made of the value may be too large or have no form: the stage is told."""
    async with rig(fail) as rigged:

        def package(value: Any, seconds: float) -> NoReturn:
            raise MemoryError(f"no room for {value} after {seconds >= 0}")

        worker = TaskWorker(fail, rigged.threads)
        context = rigged.context(rigged.state)
        outcome: Outcome[Any] = await worker.execute(
            stage_task_of({"fault": "none"}), context, package, rigged.late.append
        )
        assert failure(outcome).fields["cause"] == "MemoryError"
        assert outcome.is_dirty
