"""The helper process of an isolated stage, seen from the node.

What is promised:

* Nothing of the user's code runs in the node, and nothing here blocks its event loop: heartbeats go out
  whatever the stage does.
* The end of the process, by a signal, by ``os._exit`` or by the kernel for want of memory, is noticed by
  the exit itself. Every call that was under way ends with ``ProcessEnded`` then, which says how.
* A call that is cancelled and does not end within a bound takes its process with it.
* No process is left behind. A helper is killed by the kernel when the thread that started it ends, which
  is the node's main thread; it leaves by itself when its socket closes; and when it ends, whatever is
  still in its process group is killed: processes that the stage has started, for instance.

What is not: calls that share a process (``concurrency``) share its fate.

::

    started --IsolatedReady--> loaded --IsolatedUnload--> ending --exit--> over
       |                         |                          |
       +----- it ends, says what is no message, ignores a cancellation, or is told to end (SIGTERM,
              then SIGKILL) -----------------------------------------------------------------> over
"""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

from attrs import define, field, frozen

from onepiece.codec import materialise
from onepiece.errors import CodecError, NodeLost, OnePieceError
from onepiece.limits import (
    ISOLATED_KILL_SECONDS,
    ISOLATED_LEAVE_SECONDS,
    ISOLATED_PAUSE_SECONDS,
    ISOLATED_REFUSE_SECONDS,
    ISOLATED_STOP_SECONDS,
    ISOLATED_TERMINATE_SECONDS,
    ISOLATED_UNLOAD_SECONDS,
)
from onepiece.log import get_logger
from onepiece.requests import EventKind
from onepiece.runtime.isolated_channel import (
    EndOfIsolated,
    IsolatedCall,
    IsolatedChannel,
    IsolatedError,
    IsolatedGo,
    IsolatedPass,
    IsolatedProgress,
    IsolatedReady,
    IsolatedRefusal,
    IsolatedReturn,
    IsolatedStart,
    IsolatedStop,
    IsolatedUnload,
    IsolatedWaiting,
    Outgoing,
    Received,
    read_out,
)
from onepiece.runtime.process_exit import described_exit
from onepiece.runtime.signal import Signal
from onepiece.runtime.stage_process import Answer, ProcessEnded, Progress, StageNotLoaded, StageProcess
from onepiece.types import ANY


@frozen
class IsolationBounds:
    """How long a node waits for its helper processes; tests take shorter ones."""

    stop_seconds: float = ISOLATED_STOP_SECONDS
    leave_seconds: float = ISOLATED_LEAVE_SECONDS
    unload_seconds: float = ISOLATED_UNLOAD_SECONDS
    terminate_seconds: float = ISOLATED_TERMINATE_SECONDS
    kill_seconds: float = ISOLATED_KILL_SECONDS
    pause_seconds: float = ISOLATED_PAUSE_SECONDS
    refuse_seconds: float = ISOLATED_REFUSE_SECONDS


@define(eq=False)
class _Call:
    """A call under way."""

    progress: Progress
    answer: "asyncio.Future[Answer]" = field(factory=lambda: asyncio.get_running_loop().create_future())


class IsolatedProcess(StageProcess):
    """One helper process, from its start to its end; use ``open_isolated``."""

    def __init__(
        self, stage: str, process: "subprocess.Popen[bytes]", end: socket.socket, bounds: IsolationBounds
    ) -> None:
        self._stage = stage
        self._process = process
        self._bounds = bounds
        self._loop = asyncio.get_running_loop()
        self._channel = IsolatedChannel(end, read_out)
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count(1)
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._waiting: asyncio.Future[None] = self._loop.create_future()
        self._passed: asyncio.Future[None] = self._loop.create_future()
        self._quiet = Signal()
        self._exited = asyncio.Event()
        self._over = asyncio.Event()
        self._reason = ""
        self._is_ending = False
        self._is_deaf = False
        self._has_worked = False
        self._is_dirty = False
        self._memory_bytes = 0
        self._signals: set[int] = set()
        self._ended_itself = False
        self._ended_at = 0.0
        self._pidfd = os.pidfd_open(process.pid)
        self._loop.add_reader(self._pidfd, self._on_exit)

    @property
    def process_id(self) -> int:
        """The process's id, which may be another's once this is over."""
        return self._process.pid

    @property
    def is_over(self) -> bool:
        """It has ended, or is about to: it takes no calls any more."""
        return self._is_ending or self._is_deaf or self._exited.is_set()

    @property
    def has_worked(self) -> bool:
        """Whether it was given any call."""
        return self._has_worked

    @property
    def is_dirty(self) -> bool:
        """A call has left it in doubt: it should be given no further one."""
        return self._is_dirty

    @property
    def memory_bytes(self) -> int:
        """What it has taken of its device at most; 0 if that is not known."""
        return self._memory_bytes

    @property
    def ended_itself(self) -> bool:
        """It is over, and not because it was told to."""
        return self._ended_itself

    @property
    def ended_at(self) -> float:
        """When it ended, by the loop's clock; only for one that has."""
        return self._ended_at

    @property
    def how(self) -> str:
        """How it ended; "" until it has."""
        return self._reason

    async def over(self) -> str:
        """Wait until it has ended, or has been given up; returns how."""
        await self._over.wait()
        return self._reason

    # --- its life ------------------------------------------------------------------------------

    async def load(self, start: IsolatedStart, gate: asyncio.Semaphore | None = None) -> None:
        """Let it load the stage; raises ``StageNotLoaded``, or ``ProcessEnded`` if it dies of that.

        The setup is held back until ``gate`` is open, and holds it until it is done or passes it on.
        """
        self._channel.send(self._channel.prepare(start))
        if gate is not None:
            await asyncio.wait({self._waiting, self._ready}, return_when=asyncio.FIRST_COMPLETED)
            async with gate:
                self._channel.send(self._channel.prepare(IsolatedGo()))
                await asyncio.wait({self._passed, self._ready}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.shield(self._ready)

    async def serve(self) -> None:
        """Take what it sends, until it has ended and all that it sent is taken."""
        try:
            await self._take_all()
            self._is_deaf = True
            # Its socket closes a moment before it is gone; ended now, it would not say how it ended.
            bounds = self._bounds
            await self._exits_within(bounds.unload_seconds if self._is_ending else bounds.terminate_seconds)
            await self.end()
        finally:
            self._fail_all()
            self._over.set()

    async def _take_all(self) -> None:
        try:
            while True:
                self._take(await self._channel.receive())
        except EndOfIsolated:
            return
        except Exception as error:  # noqa: BLE001 - whatever it sends, the node goes on
            self._reason = f"sent what is no message ({error}) and was ended"
            get_logger().exception("isolated_process_not_understood", stage=self._stage)
            await self.end()

    async def unload(self) -> None:
        """Let calls that are under way end, then the rest of the setup run, and the process exit.

        The calls end by themselves, in time by their deadlines; for the rest there is a bound.
        """
        if self.is_over:
            return
        self._is_ending = True
        await self._quiet.wait_for(lambda: not self._calls)
        self._channel.send(self._channel.prepare(IsolatedUnload()))
        if not await self._exits_within(self._bounds.unload_seconds):
            get_logger().warning(
                "isolated_process_does_not_unload", stage=self._stage, process_id=self.process_id
            )

    async def end(self) -> None:
        """End it if it has not: SIGTERM, and SIGKILL behind a bound; returns when it is gone.

        One that does not even die of SIGKILL hangs in the kernel, in a driver for instance; after a bound it
        is left to that. If the caller is cancelled, SIGKILL is sent at once.
        """
        self._is_ending = True
        bounds = self._bounds
        try:
            for number, seconds in (
                (signal.SIGTERM, bounds.terminate_seconds),
                (signal.SIGKILL, bounds.kill_seconds),
            ):
                self._signal(number)
                if await self._exits_within(seconds):
                    return
            self._reason = f"does not die of SIGKILL (process {self.process_id})"
            get_logger().error("isolated_process_left", stage=self._stage, process_id=self.process_id)
            self._channel.peer_is_gone()
        finally:
            self._signal(signal.SIGKILL)

    async def _exits_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._exited.wait()
        return self._exited.is_set()

    def _signal(self, number: signal.Signals) -> None:
        if not self._exited.is_set():
            self._signals.add(number)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _on_exit(self) -> None:
        """It is a zombie: its id, and so its group's, cannot have gone to somebody else yet."""
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        self._ended_at = self._loop.time()
        self._ended_itself = not self._is_ending or -status not in {0, *self._signals}
        self._reason = self._reason or described_exit(status)
        self._exited.set()
        if not self._is_ending:
            get_logger().error(
                "isolated_process_ended", stage=self._stage, process_id=self.process_id, how=self._reason
            )
        self._channel.peer_is_gone()

    def close(self) -> None:
        """Close the socket; the process must be over, or is told so by this."""
        self._channel.close()

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
        """Run the stage's body; see ``StageProcess``."""
        self._has_worked = True
        number = next(self._numbers)
        outgoing = await self.prepare(header(number), values, size)
        on_sent()
        if self.is_over:
            raise ProcessEnded(await self.over())
        answer = self.begin(number, outgoing, progress)
        del outgoing
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            await self._stop(number, answer, stopped())
            raise
        finally:
            self.forget(number)

    async def prepare(self, header: IsolatedCall, values: Mapping[str, Any], size: int) -> Outgoing:
        """Lay out a call, in a thread if it is large; raises ``CodecError`` if that cannot be."""
        return await self._channel.prepare_in_thread(header, values, size)

    def begin(self, number: int, outgoing: Outgoing, progress: Progress) -> "asyncio.Future[Answer]":
        """Send a call; its number stays taken until ``forget``. The future may be awaited, not cancelled."""
        self._has_worked = True
        call = self._calls[number] = _Call(progress)
        if self._over.is_set():  # nobody takes what it says any more
            call.answer.set_exception(ProcessEnded(self._reason))
        self._channel.send(outgoing)
        return call.answer

    def forget(self, number: int) -> None:
        """A call's answer is awaited no longer; one that comes is dropped."""
        call = self._calls.pop(number)
        if call.answer.done() and not call.answer.cancelled():
            call.answer.exception()  # seen
        self._quiet.notify()

    async def _stop(
        self, number: int, answer: "asyncio.Future[Answer]", reason: OnePieceError | None
    ) -> None:
        is_leaving = reason is None or isinstance(reason, NodeLost)
        seconds = self._bounds.leave_seconds if is_leaving else self._bounds.stop_seconds
        told = reason or NodeLost("the stage's actor has to end")
        try:
            if not answer.done():
                self._channel.send(self._channel.prepare(IsolatedStop(number, told.to_wire())))
                await asyncio.wait([answer], timeout=seconds)
            if not answer.done():
                get_logger().warning(
                    "isolated_call_does_not_stop",
                    stage=self._stage,
                    process_id=self.process_id,
                    seconds=seconds,
                )
                self._reason = f"was ended, as a call ignored its cancellation for {seconds:g} s"
                await self.end()
        finally:
            if not answer.done():
                self._is_ending = True
                self._signal(signal.SIGKILL)

    def _take(self, received: Received) -> None:
        match received.header:
            case IsolatedProgress(number=number, kind=kind):
                call = self._calls.get(number)
                if call is not None:
                    call.progress(_event_kind(kind), _detail(received))
            case IsolatedReturn(number=number) | IsolatedError(number=number):
                if isinstance(received.header, IsolatedError) and received.header.is_dirty:
                    self._is_dirty = True
                if isinstance(received.header, IsolatedReturn):
                    self._note_memory(received.header.memory_bytes)
                call = self._calls.get(number)
                if call is not None and not call.answer.done():
                    call.answer.set_result(Answer(received.header, received.values, received.body.nbytes))
            case IsolatedReady(memory_bytes):
                self._note_memory(memory_bytes)
                _settle(self._ready)
            case IsolatedWaiting():
                _settle(self._waiting)
            case IsolatedPass():
                _settle(self._passed)
            case IsolatedRefusal(error=error, traceback=traceback):
                if not self._ready.done():
                    refusal = StageNotLoaded(error)
                    refusal.add_note(traceback)
                    self._ready.set_exception(refusal)
            case other:
                raise CodecError(f"a {type(other).__name__} comes from nodes, not from their helpers")

    def _note_memory(self, memory_bytes: int) -> None:
        self._memory_bytes = max(self._memory_bytes, memory_bytes)

    def _fail_all(self) -> None:
        reason = self._reason = self._reason or "was left behind, as its actor ended"
        if not self._ready.done():
            self._ready.set_exception(ProcessEnded(reason))
        if not self._ready.cancelled():
            self._ready.exception()  # seen, if nobody waits any more
        for call in self._calls.values():
            if not call.answer.done():
                call.answer.set_exception(ProcessEnded(reason))


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def _event_kind(name: str) -> EventKind:
    try:
        return EventKind(name)
    except ValueError as error:
        raise CodecError(str(error)) from error


def _detail(received: Received) -> Mapping[str, Any]:
    detail = materialise(received.values.get("detail"), ANY)
    if not isinstance(detail, dict):
        raise CodecError(f"progress with a {type(detail).__name__}")
    return detail
