"""Several helper processes that work on each call together: Collaboration Mode, seen from the node.

What is promised:

* Each call goes to every rank, with the same arguments, which are laid out once. Its result is made of
  what the ranks returned in the order of the ranks, whichever of them was first.
* A rank that raises, dies, hangs or is cancelled takes the others along at once: they may be in a
  collective that waits for it, and that returns to nobody. All processes are ended then, and whoever has
  loaded the group loads it anew. The call's error names the rank that was the cause: one that died before
  one that raised, since its death is what the others complain of.
* While it loads no more ranks are in their setups than the host's gate lets through.

What is not: that a group can be saved. Which of its collectives are under way, and in which ranks, only the
ranks know. There is one exception: what *every* rank refuses by name, an input for instance, leaves the
group as it is, so that nobody can have the weights loaded anew by asking for what there is not.
"""

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from attrs import evolve

from onepiece.errors import DeadlineExceeded, OnePieceError, RequestCancelled, StageFailed
from onepiece.log import get_logger
from onepiece.requests import EventKind
from onepiece.runtime.isolated_channel import IsolatedCall, IsolatedError, IsolatedReturn, IsolatedStart
from onepiece.runtime.isolated_process import IsolatedProcess, IsolationBounds
from onepiece.runtime.isolated_start import Rank, Surroundings, persistent, running
from onepiece.runtime.stage_process import Answer, ProcessEnded, Progress, StageNotLoaded, StageProcess
from onepiece.stage import Stage

_Calls = Sequence["asyncio.Future[Answer]"]


class RankGroup(StageProcess):
    """The processes of one actor, from their start to their end; use ``open_ranks``."""

    def __init__(
        self, stage: Stage[Any, Any, Any], ranks: Sequence[IsolatedProcess], bounds: IsolationBounds
    ) -> None:
        self._stage = stage
        self._ranks = ranks
        self._bounds = bounds
        self._numbers = itertools.count(1)
        self._calls: _Calls = ()
        self._is_ending = False
        self._is_unloading = False
        self._over = asyncio.Event()

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The process id of each rank."""
        return tuple(rank.process_id for rank in self._ranks)

    @property
    def is_over(self) -> bool:
        """A rank has ended, or all are about to."""
        return self._is_ending or any(rank.is_over for rank in self._ranks)

    @property
    def has_worked(self) -> bool:
        """Whether it was given any call."""
        return any(rank.has_worked for rank in self._ranks)

    @property
    def is_dirty(self) -> bool:
        """A call has left a rank in doubt."""
        return any(rank.is_dirty for rank in self._ranks)

    @property
    def memory_bytes(self) -> int:
        """What the rank that needs most has taken of its device at most; 0 if that is not known."""
        return max(rank.memory_bytes for rank in self._ranks)

    @property
    def hangs(self) -> str:
        """Which ranks have not returned from the call that is under way."""
        missing = [str(rank) for rank, call in enumerate(self._calls) if not call.done()]
        return f"; of its {len(self._ranks)} ranks {', '.join(missing)} had not returned" if missing else ""

    async def over(self) -> str:
        """Wait until all ranks have ended; returns how the one ended that was the cause."""
        await self._over.wait()
        ended = self._ended_itself()
        return str(ended) if ended is not None else await self._ranks[0].over()

    # --- its life ------------------------------------------------------------------------------

    async def load(self, starts: Sequence[IsolatedStart], gate: asyncio.Semaphore) -> None:
        """Let all load the stage; raises ``StageNotLoaded`` or ``ProcessEnded``, which name the rank."""
        async with asyncio.TaskGroup() as tasks:
            loads = [
                tasks.create_task(_error_of(rank.load(start, gate)))
                for rank, start in zip(self._ranks, starts, strict=True)
            ]
            waiting = set(loads)
            failed = None
            while waiting and failed is None:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                failed = next((each for each in loads if each in done and each.result()), None)
            if failed is None:
                return
            await self.end()  # the others may wait for it in a collective
        error = failed.result()
        assert error is not None
        ended = self._ended_itself()
        if ended is not None:
            raise ended from error
        named = StageNotLoaded(f"{self._name(loads.index(failed))}: {error}")
        for note in getattr(error, "__notes__", ()):
            named.add_note(note)
        raise named from error

    async def watch(self) -> None:
        """End all as soon as one has ended; returns when all have."""
        async with asyncio.TaskGroup() as tasks:
            ends = [tasks.create_task(rank.over()) for rank in self._ranks]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not self._is_unloading:
                await self.end()
        self._over.set()

    async def unload(self) -> None:
        """Run the rest of all setups at the same time, as they may have collectives; bounded."""
        if self.is_over:
            return
        self._is_unloading = True
        await self._on_each(IsolatedProcess.unload)

    async def end(self) -> None:
        """End all: SIGTERM, and SIGKILL behind a bound, or at once if the caller is cancelled."""
        self._is_ending = True
        await self._on_each(IsolatedProcess.end)

    async def _on_each(self, action: Callable[[IsolatedProcess], Coroutine[Any, Any, None]]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for rank in self._ranks:
                tasks.create_task(action(rank))

    # --- calls ---------------------------------------------------------------------------------

    async def call(
        self,
        header: Callable[[int], IsolatedCall],
        values: Mapping[str, Any],
        size: int,
        *,
        progress: Progress,
        on_sent: Callable[[], None],
        stopped: Callable[[], OnePieceError | None],
    ) -> Answer:
        """Run the stage's body in every rank, and merge; see ``StageProcess``.

        If the caller is cancelled, all ranks are ended.
        """
        number = next(self._numbers)
        outgoing = await self._ranks[0].prepare(header(number), values, size)
        on_sent()
        if self.is_over:
            raise ProcessEnded(await self.over())
        told = [progress] + [_to_nobody] * (len(self._ranks) - 1)
        calls = [rank.begin(number, outgoing, tell) for rank, tell in zip(self._ranks, told, strict=True)]
        self._calls = calls
        del outgoing
        try:
            failed = await _first_failure(calls)
            if failed is not None:
                return await self._failed(calls, failed)
            answers = [call.result() for call in calls]
            if self._stage.merge is None:
                return _as_slow_as(answers, answers[0])
            return _as_slow_as(answers, await self._merged(header, answers, progress))
        except asyncio.CancelledError:
            await self.end()
            raise
        finally:
            self._calls = ()
            for rank in self._ranks:
                rank.forget(number)

    async def _merged(
        self, header: Callable[[int], IsolatedCall], answers: Sequence[Answer], progress: Progress
    ) -> Answer:
        """Have rank 0 merge: the node runs no code of the stage, and need not have what it imports."""
        number = next(self._numbers)
        merge = evolve(header(number), is_merge=True)
        partials = [answer.values["value"] for answer in answers]
        size = sum(answer.length for answer in answers)
        first = self._ranks[0]
        call = first.begin(number, await first.prepare(merge, {"partials": partials}, size), progress)
        try:
            await asyncio.wait([call])
            if isinstance(call.exception(), ProcessEnded):
                await self.end()
                raise self._ended_itself() or ProcessEnded(await self.over())
            return call.result()
        finally:
            first.forget(number)

    async def _failed(self, calls: _Calls, failed: int) -> Answer:
        if await self._all_refuse(calls, failed):
            return calls[0].result()
        await self.end()
        ended = self._ended_itself()
        if ended is not None:
            raise ended
        answer = calls[failed].result()
        assert isinstance(answer.header, IsolatedError)
        get_logger().warning("rank_failed", stage=self._stage.key, rank=failed, ranks=len(calls))
        return evolve(answer, header=evolve(answer.header, is_dirty=True))

    async def _all_refuse(self, calls: _Calls, failed: int) -> bool:
        """Whether every rank refuses the request by the same name, within a moment of the first."""
        if not _refusal(calls[failed]):
            return False
        await asyncio.wait(calls, timeout=self._bounds.refuse_seconds)
        return len({_refusal(call) for call in calls}) == 1

    def _ended_itself(self) -> ProcessEnded | None:
        """The end of the rank that went first without being told to."""
        ends = [(rank.ended_at, number) for number, rank in enumerate(self._ranks) if rank.ended_itself]
        if not ends:
            return None
        _, number = min(ends)
        return ProcessEnded(f"({self._name(number)}) {self._ranks[number].how}", number)

    def _name(self, number: int) -> str:
        return str(Rank(number, len(self._ranks)))


def _to_nobody(_kind: EventKind, _detail: Mapping[str, Any]) -> None:
    """Progress is rank 0's to tell."""


async def _error_of(loading: Coroutine[Any, Any, None]) -> Exception | None:
    try:
        await loading
    except (StageNotLoaded, ProcessEnded) as error:
        return error
    return None


async def _first_failure(calls: _Calls) -> int | None:
    """Wait until all have returned, or one has not; says which: of several at once the lowest rank."""
    waiting = set(calls)
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for rank, call in enumerate(calls):
            if call in done and (call.exception() or isinstance(call.result().header, IsolatedError)):
                return rank
    return None


def _refusal(call: "asyncio.Future[Answer]") -> str:
    """The name of the error by which the stage itself refuses its request; "" if it does anything else.

    Being cancelled or late is none: it comes over each rank at another point of its work.
    """
    if not call.done() or call.exception() is not None:
        return ""
    header = call.result().header
    if not isinstance(header, IsolatedError) or header.is_dirty:
        return ""
    error = OnePieceError.from_wire(header.error)
    if isinstance(error, StageFailed | RequestCancelled | DeadlineExceeded):
        return ""
    return str(error.fields.get("cause", type(error).__name__))


def _as_slow_as(answers: Sequence[Answer], answer: Answer) -> Answer:
    """The answer, which has taken as long as the slowest rank and the merge together."""
    seconds = max(each.header.compute_seconds for each in answers if isinstance(each.header, IsolatedReturn))
    if not isinstance(answer.header, IsolatedReturn):
        return answer
    if answer not in answers:
        seconds += answer.header.compute_seconds
    return evolve(answer, header=evolve(answer.header, compute_seconds=seconds))


@contextlib.asynccontextmanager
async def _opened(
    stage: Stage[Any, Any, Any], devices: Sequence[str], around: Surroundings
) -> AsyncIterator[RankGroup]:
    async with contextlib.AsyncExitStack() as stack:
        # It has no name and no port: nobody else can come to it, and it ends with the last who holds it.
        meeting = os.memfd_create("onepiece-ranks", os.MFD_CLOEXEC)
        try:
            started = [
                await stack.enter_async_context(
                    running(stage, device, around, Rank(number, len(devices), meeting))
                )
                for number, device in enumerate(devices)
            ]
        finally:
            os.close(meeting)
        group = RankGroup(stage, [process for process, _ in started], around.bounds)
        watching = None
        try:
            await group.load([start for _, start in started], around.load_gate)
            watching = around.tasks.create_task(group.watch(), name=f"ranks of {stage.key}")
            yield group
        finally:
            await group.end()
            if watching is not None:
                await asyncio.wait([watching])


def open_ranks(
    stage: Stage[Any, Any, Any], devices: Sequence[str], around: Surroundings
) -> AbstractAsyncContextManager[RankGroup]:
    """Start a helper process on each device and load the stage in all of them; they end with the context.

    Raises as ``open_isolated``; the error names the rank.
    """
    return persistent(stage.key, around.bounds, lambda: _opened(stage, devices, around))
