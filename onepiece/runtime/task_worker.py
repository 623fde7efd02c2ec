"""TaskWorker: runs one stage task at a time through the user's stage function.

What it promises, whatever the function does: the stage task ends in a shipment or in a named error, the
inbox's memory is given back before the function starts, and the next stage task runs. A function that raises
``SystemExit``, ``KeyboardInterrupt`` or ``MemoryError`` may have left its module in any state, so the
actor is loaded anew before the next stage task (``Outcome.is_dirty``).

A cancelled or late stage task is interrupted in two ways: its coroutine is cancelled, and ``ctx.report``
raises in whatever thread calls it next. A blocking call that does neither runs to its end; nothing
else of this device runs meanwhile. Only a stage with a process of its own (``isolated_process``) is
rid of such a call: the process is ended, and a new one takes the next stage task. One on several devices
(``rank_group``) has a process on each, and all of them end for any of these reasons.
"""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import cached_property
from typing import Any, Final, Generic, TypeVar

from attrs import define, field, frozen

from onepiece._bounded import described, kind_name, trace_of
from onepiece.codec import CodecError, materialise
from onepiece.context import Arguments, Result, StageContext
from onepiece.errors import DeadlineExceeded, OnePieceError, Rejected, RequestFailed, StageFailed, plainly
from onepiece.graph import Isolation, Parameter, StageSpec, check_value
from onepiece.log import get_logger
from onepiece.reporting import preview_of, reportable
from onepiece.requests import EventKind
from onepiece.runtime.devices import DeviceThreads, is_cancelled, torch_name
from onepiece.runtime.isolated_channel import IsolatedCall, IsolatedError, IsolatedReturn
from onepiece.runtime.request_scheduler import Held, StageTask
from onepiece.runtime.stage_process import Answer, ProcessEnded, Progress, StageProcess
from onepiece.stage import Stage

_COPIED_HERE_BYTES_MAX: Final = 64 << 10
_DIRTY: Final = (SystemExit, KeyboardInterrupt, MemoryError)

Clock = Callable[[], float]

Shipment = TypeVar("Shipment")

Package = Callable[[Any, float], Shipment]
"""Makes of a stage's value and its compute seconds what is to be sent; may raise ``CodecError``."""


@frozen
class Outcome(Generic[Shipment]):
    """How a stage task ended: exactly one of the two is set."""

    shipment: Shipment | None = None
    error: OnePieceError | None = None
    is_dirty: bool = False


@define(eq=False, kw_only=True)
class RunningStage(StageContext[Any]):
    """The context handed to a stage function for one stage task (or, without one, to its ``setup``)."""

    state_value: Any
    device: str
    uid: str
    stage: str
    node: str
    attempt: int = 1
    deadline_at: float | None = None
    threads: DeviceThreads
    progress: Progress
    now: Clock = time.time
    """The wall clock, by which the deadline is given."""
    monotonic: Clock = time.monotonic
    rank: int = 0
    world_size: int = 1
    join: Callable[[], Any] | None = None
    """Makes the group of the ranks, or gives the one that is there."""
    started_at: float = field(init=False)
    is_dirty: bool = False
    """The stage task left its module in any state, whatever its outcome says."""
    _deadline_by: float | None = field(init=False)
    _stopped: OnePieceError | None = None

    @started_at.default
    def _start(self) -> float:
        return self.monotonic()

    @_deadline_by.default
    def _monotonic_deadline(self) -> float | None:
        """The deadline on the monotonic clock, so that a clock that is set does not move it."""
        return None if self.deadline_at is None else self.monotonic() + self.deadline_at - self.now()

    @cached_property
    def log(self) -> Any:  # type: ignore[override]  # no stage sets it
        """Made on first use: most stage tasks log nothing."""
        rank = {} if self.world_size == 1 else {"rank": self.rank}
        return get_logger(stage=self.stage, request=self.uid, node=self.node, **rank)

    @property
    def state(self) -> Any:
        """What ``setup`` yielded."""
        return self.state_value

    @property
    def group(self) -> Any:
        """The group of the ranks; blocks until all have asked for it."""
        return None if self.join is None else self.join()

    @property
    def where(self) -> str:
        """The node, and the rank if there are several."""
        return self.node if self.world_size == 1 else f"{self.node}, rank {self.rank} of {self.world_size}"

    @property
    def deadline(self) -> float | None:
        """Seconds left."""
        return None if self._deadline_by is None else self._deadline_by - self.monotonic()

    @property
    def cancelled(self) -> bool:
        """Somebody wants this stage task to stop."""
        return self._stopped is not None

    def stop(self, reason: OnePieceError) -> None:
        """Make every later ``report`` raise; the first reason stays."""
        if self._stopped is None:
            self._stopped = reason

    @property
    def stopped(self) -> OnePieceError | None:
        """Why the stage task was told to stop."""
        return self._stopped

    def report(
        self,
        *,
        step: int | None = None,
        total: int | None = None,
        preview: bytes | None = None,
        **fields: Any,
    ) -> None:
        """Tell the request's followers how far it is; raises if it is cancelled or late."""
        if self._stopped is not None:
            raise self._stopped
        if self._deadline_by is not None and self.monotonic() >= self._deadline_by:
            raise DeadlineExceeded(
                f"request {self.uid} passed its deadline in {self.stage} at step {step} of {total}",
                uid=self.uid,
                stage=self.stage,
            )
        given = {"step": step, "total": total, **fields}
        detail = reportable(
            {key: value for key, value in given.items() if key in fields or value is not None}
        )
        if preview is not None:
            content_type = detail.pop("content_type", "application/octet-stream")
            self.progress(EventKind.PREVIEW, {"data": preview_of(preview), "content_type": content_type})
        if step and total:
            elapsed = self.monotonic() - self.started_at
            detail["eta_seconds"] = elapsed / step * (total - step)
        if detail:
            self.progress(EventKind.PROGRESS, detail)

    async def run(
        self, function: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Run blocking work on the device's compute thread; a cancelled caller waits for its end."""
        return await self.threads.run_compute(functools.partial(function, *args, **kwargs))


@define(eq=False)
class TaskWorker:
    """Runs stage tasks of one actor.

    Args:
        stage: The user's stage.
        threads: The device's threads.
    """

    stage: Stage[Any, Any, Any]
    threads: DeviceThreads
    spec: StageSpec = field(init=False)
    """The stage's schema."""

    _makes_tensors_on_gpu: bool = field(init=False)

    @spec.default
    def _spec(self) -> StageSpec:
        return self.stage.spec

    @_makes_tensors_on_gpu.default
    def _might_make_them(self) -> bool:
        may_hold_torch = any(parameter.type.may_hold_torch for parameter in self.spec.parameters)
        return may_hold_torch and torch_name(self.threads.name) != "cpu"

    async def execute(
        self,
        stage_task: StageTask,
        context: RunningStage,
        package: Package[Shipment],
        on_late: Callable[[OnePieceError], None],
        announce: Callable[[], Awaitable[None]] | None = None,
    ) -> Outcome[Shipment]:
        """Run one stage task, behind ``announce``; never raises but ``CancelledError``.

        ``on_late`` is called when its time is over: a call that blocks its thread may return much later,
        or never, and until then this does not return either.

        What was told to stop (``context.stop``) ends by cancelling the asyncio task that runs this; the
        cancellation is taken back then and becomes the outcome, also if the function swallowed it.
        """
        over = self._set_bound(context, on_late)
        try:
            if announce is not None:
                await announce()
            outcome = await self._run_where_it_belongs(stage_task, context, package)
            return _stopped(context) or outcome
        except asyncio.CancelledError as error:
            if not is_cancelled():  # nobody's but the function's own
                return Outcome(error=self._failed(context, error))
            stopped = _stopped(context)
            if stopped is None:
                raise
            return stopped
        except (Exception, *_DIRTY) as error:  # noqa: BLE001 - whatever it is, it is one stage task's alone
            return Outcome(error=self._failed(context, error), is_dirty=isinstance(error, _DIRTY))
        finally:
            if over is not None:
                over.cancel()
            stage_task.release()

    async def _run_where_it_belongs(
        self, stage_task: StageTask, context: RunningStage, package: Package[Shipment]
    ) -> Outcome[Shipment]:
        match self.spec.isolation:
            case Isolation.LOOP:
                arguments = self._arguments_or_error(stage_task, context)
                stage_task.release()
                return await self._run(arguments, context, package)
            case Isolation.THREAD:
                return await self._on_thread(stage_task, context, package)
            case Isolation.PROCESS:
                return await self._in_process(stage_task, context, package)

    async def _on_thread(
        self, stage_task: StageTask, context: RunningStage, package: Package[Shipment]
    ) -> Outcome[Shipment]:
        """Small inputs are copied out here: two trips between threads instead of three.

        But none for a GPU: a copy to it may wait for all that it has been given to do.
        """
        if stage_task.received_bytes <= _COPIED_HERE_BYTES_MAX and not self._makes_tensors_on_gpu:
            arguments = self._arguments_or_error(stage_task, context)
            stage_task.release()
            return await self.threads.run_stage(lambda: self._run(arguments, context, package))
        loop = asyncio.get_running_loop()

        async def body() -> Outcome[Shipment]:
            found = self._arguments_or_error(stage_task, context)
            loop.call_soon_threadsafe(stage_task.release)
            return await self._run(found, context, package)

        return await self.threads.run_stage(body)

    async def _in_process(
        self, stage_task: StageTask, context: RunningStage, package: Package[Shipment]
    ) -> Outcome[Shipment]:
        """Nothing is copied on this loop: arguments and values pass through it as they lie in messages."""
        process = context.state_value
        assert isinstance(process, StageProcess)
        try:
            answer = await process.call(
                lambda number: IsolatedCall(
                    number, context.uid, context.stage, context.attempt, context.deadline_at
                ),
                {
                    **stage_task.constants,
                    **{parameter.name: value for parameter, value, _ in self._received(stage_task)},
                },
                stage_task.received_bytes,
                progress=context.progress,
                on_sent=stage_task.release,
                stopped=lambda: context.stopped,
            )
            match answer.header:
                case IsolatedReturn(compute_seconds=seconds):
                    return Outcome(shipment=await _package_aside(package, answer, seconds))
                case IsolatedError(error=error, is_dirty=is_dirty):
                    return Outcome(error=OnePieceError.from_wire(error), is_dirty=is_dirty)
        except ProcessEnded as ended:
            return Outcome(error=self._process_ended(context, ended), is_dirty=True)
        except CodecError as error:
            return Outcome(error=self._failed(context, error))

    def _set_bound(
        self, context: RunningStage, on_late: Callable[[OnePieceError], None]
    ) -> asyncio.TimerHandle | None:
        """When the time is over, tell everybody and cancel the task that runs this.

        A blocking call that is out of time learns so from its next ``report``.
        """
        bound = self._seconds_left(context)
        if bound is None:
            return None
        task = asyncio.current_task()
        assert task is not None

        def is_over() -> None:
            error = self._late(context)
            was_stopped = context.cancelled
            context.stop(error)
            on_late(error)
            if not was_stopped:  # else it was cancelled for another reason, and waits for its end
                task.cancel()

        return asyncio.get_running_loop().call_later(bound, is_over)

    def _seconds_left(self, context: RunningStage) -> float | None:
        bound, left = self.spec.timeout_seconds, context.deadline
        if left is None:
            return bound
        left = max(0.0, left)
        return left if bound is None else min(bound, left)

    def _late(self, context: RunningStage) -> OnePieceError:
        if self.spec.timeout_seconds is None or (context.deadline is not None and context.deadline <= 0):
            return DeadlineExceeded(
                f"request {context.uid} passed its deadline in {context.stage}{_hangs(context)}",
                uid=context.uid,
                stage=context.stage,
            )
        return StageFailed(
            f"{context.stage} of request {context.uid} took longer than its timeout of "
            f"{self.spec.timeout_seconds} s on {context.node}{_hangs(context)}",
            uid=context.uid,
            stage=context.stage,
            node=context.node,
        )

    async def _run(
        self, arguments: dict[str, Any] | OnePieceError, context: RunningStage, package: Package[Shipment]
    ) -> Outcome[Shipment]:
        if isinstance(arguments, OnePieceError):
            return Outcome(error=arguments)
        started = context.started_at = context.monotonic()
        try:
            value = await self.stage.function(context, **arguments)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            return Outcome(error=self._failed(context, error))  # nobody's but the function's own
        except (Rejected, RequestFailed) as error:
            # The stage names the cause itself: bad input, a cancelled request.
            return Outcome(error=plainly(error))
        except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
            context.is_dirty = isinstance(error, _DIRTY)
            return Outcome(error=self._failed(context, _own(error)), is_dirty=context.is_dirty)
        try:
            problem = check_value(self.spec.returns, value)
            if problem is not None:
                return Outcome(error=self._wrong_type(context, problem))
            return Outcome(shipment=package(value, context.monotonic() - started))
        except _DIRTY:
            raise
        except Exception as error:  # noqa: BLE001 - a value is the user's code too: its properties, its __repr__
            return Outcome(error=self._failed(context, error))

    def _arguments_or_error(
        self, stage_task: StageTask, context: RunningStage
    ) -> dict[str, Any] | OnePieceError:
        try:
            return self._arguments(stage_task)
        except (CodecError, MemoryError) as error:
            return self._failed(context, error)

    def _arguments(self, stage_task: StageTask) -> dict[str, Any]:
        device = torch_name(self.threads.name)
        arguments = dict(stage_task.constants)
        for parameter, value, held in self._received(stage_task):
            arguments[parameter.name] = materialise(value, parameter.type, device, is_own=held.is_own)
        return arguments

    def _received(self, stage_task: StageTask) -> Iterator[tuple[Parameter, Any, Held]]:
        """The values of all messages, as they lie there."""
        for held in stage_task.held.values():
            for name, value in held.values.items():
                parameter = self.spec.parameter(name)
                if parameter is None:
                    raise CodecError(f"{self.spec.signature} has no parameter {name!r}")
                yield parameter, value, held

    def _failed(self, context: RunningStage, error: BaseException) -> OnePieceError:
        return StageFailed(
            f"{context.stage} of request {context.uid} failed on {context.where}: {described(error)}",
            uid=context.uid,
            stage=context.stage,
            node=context.node,
            cause=kind_name(error),
            traceback=trace_of(error),
            **({} if context.world_size == 1 else {"rank": context.rank}),
        )

    def _process_ended(self, context: RunningStage, ended: ProcessEnded) -> OnePieceError:
        return StageFailed(
            f"{context.stage} of request {context.uid} failed on {context.node}: its process {ended}",
            uid=context.uid,
            stage=context.stage,
            node=context.node,
            cause="ProcessEnded",
            **({} if ended.rank is None else {"rank": ended.rank}),
        )

    def _wrong_type(self, context: RunningStage, problem: str) -> OnePieceError:
        return StageFailed(
            f"{context.stage} of request {context.uid}: {problem}",
            uid=context.uid,
            stage=context.stage,
            node=context.node,
            cause="WrongType",
        )


def _stopped(context: RunningStage) -> "Outcome[Any] | None":
    """The outcome of what was stopped by cancelling its task, which is taken back; None if it was not.

    Raises ``CancelledError`` if somebody else cancelled the task, too.
    """
    task = asyncio.current_task()
    if context.stopped is None or task is None or not task.cancelling():
        return None
    if task.uncancel() > 0:
        raise asyncio.CancelledError
    return Outcome(error=context.stopped, is_dirty=_is_dirty(context))


def _own(error: BaseException) -> BaseException:
    """What the function raised: a coroutine that raises ``StopIteration`` is said to raise another error."""
    cause = error.__cause__
    is_pythons = type(error) is RuntimeError and error.args == ("coroutine raised StopIteration",)
    return cause if is_pythons and cause is not None else error


def _is_dirty(context: RunningStage) -> bool:
    process = context.state_value
    is_process_lost = isinstance(process, StageProcess) and (process.is_over or process.is_dirty)
    return context.is_dirty or is_process_lost


def _hangs(context: RunningStage) -> str:
    process = context.state_value
    return process.hangs if isinstance(process, StageProcess) else ""


async def _package_aside(package: Package[Shipment], answer: Answer, seconds: float) -> Shipment:
    """Package a value as it came; a large one in a thread, in case it must be copied."""
    value = answer.values.get("value")
    if answer.length <= _COPIED_HERE_BYTES_MAX:
        return package(value, seconds)
    return await asyncio.get_running_loop().run_in_executor(None, package, value, seconds)
