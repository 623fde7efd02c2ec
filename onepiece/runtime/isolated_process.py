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
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from attrs import define, field, frozen

from onepiece.codec import materialise
from onepiece.errors import CodecError, NodeLost, OnePieceError
from onepiece.limits import (
    ISOLATED_KILL_SECONDS,
    ISOLATED_LEAVE_SECONDS,
    ISOLATED_PAUSE_SECONDS,
    ISOLATED_STARTS_MAX,
    ISOLATED_STOP_SECONDS,
    ISOLATED_TERMINATE_SECONDS,
    ISOLATED_UNLOAD_SECONDS,
)
from onepiece.log import chosen, get_logger
from onepiece.requests import EventKind
from onepiece.runtime.isolated_channel import (
    EndOfIsolated,
    IsolatedCall,
    IsolatedChannel,
    IsolatedError,
    IsolatedProgress,
    IsolatedReady,
    IsolatedRefusal,
    IsolatedReturn,
    IsolatedStart,
    IsolatedStop,
    IsolatedUnload,
    Received,
    read_out,
)
from onepiece.runtime.signal import Signal
from onepiece.stage import Stage
from onepiece.types import ANY

_ROOT: Final = str(Path(__file__).parents[2])
_BOOT: Final = """\
import sys
sys.path.insert(0, sys.argv[1])
from onepiece.runtime.isolated_child import main
main()
"""
"""With the node's own copy of this package, whatever lies in the current directory: the node may have
been started elsewhere, and the path that stages are imported by comes with ``IsolatedStart``."""
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"

Progress = Callable[[EventKind, Mapping[str, Any]], None]


@frozen
class IsolationBounds:
    """How long a node waits for its helper processes; tests take shorter ones."""

    stop_seconds: float = ISOLATED_STOP_SECONDS
    leave_seconds: float = ISOLATED_LEAVE_SECONDS
    unload_seconds: float = ISOLATED_UNLOAD_SECONDS
    terminate_seconds: float = ISOLATED_TERMINATE_SECONDS
    kill_seconds: float = ISOLATED_KILL_SECONDS
    pause_seconds: float = ISOLATED_PAUSE_SECONDS


class ProcessEnded(Exception):  # noqa: N818 - named by what has happened
    """The helper process is over; the text says how: ``was killed by SIGSEGV``."""


class StageNotLoaded(Exception):  # noqa: N818 - named by what has happened
    """The stage's module or setup raised in the helper process; the text says what."""


@frozen
class Answer:
    """A call's last word, and the values with it, which still lie as they came."""

    header: IsolatedReturn | IsolatedError
    values: Mapping[str, Any]
    length: int
    """Bytes of the message."""


@define(eq=False)
class _Call:
    """A call under way."""

    progress: Progress
    answer: "asyncio.Future[Answer]" = field(factory=lambda: asyncio.get_running_loop().create_future())


class IsolatedProcess:
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
        self._quiet = Signal()
        self._exited = asyncio.Event()
        self._over = asyncio.Event()
        self._reason = ""
        self._is_ending = False
        self._is_deaf = False
        self._has_worked = False
        self._is_dirty = False
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

    async def over(self) -> str:
        """Wait until it has ended, or has been given up; returns how."""
        await self._over.wait()
        return self._reason

    # --- its life ------------------------------------------------------------------------------

    async def load(self, start: IsolatedStart) -> None:
        """Let it load the stage; raises ``StageNotLoaded``, or ``ProcessEnded`` if it dies of that."""
        self._channel.send(self._channel.prepare(start))
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
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _on_exit(self) -> None:
        """It is a zombie: its id, and so its group's, cannot have gone to somebody else yet."""
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        self._reason = self._reason or _describe(status)
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
        """Run the stage's body there.

        Args:
            header: Makes the call's header from its number.
            values: The arguments; may lie in memory that is given back later.
            size: About how many bytes they are.
            progress: Told what the body reports.
            on_sent: Called when ``values`` are needed no longer.
            stopped: Asked on cancellation why the call is to stop.

        Raises:
            ProcessEnded: It ended before it answered.
            CodecError: The arguments cannot be sent.

        If the caller is cancelled, the call is stopped, and its end is waited for; if that takes longer
        than the bound, the process is ended.
        """
        self._has_worked = True
        number = next(self._numbers)
        outgoing = await self._channel.prepare_in_thread(header(number), values, size)
        on_sent()
        if self.is_over:
            raise ProcessEnded(await self.over())
        call = self._calls[number] = _Call(progress)
        self._channel.send(outgoing)
        del outgoing
        try:
            return await asyncio.shield(call.answer)
        except asyncio.CancelledError:
            await self._stop(number, call, stopped())
            raise
        finally:
            del self._calls[number]
            self._quiet.notify()

    async def _stop(self, number: int, call: _Call, reason: OnePieceError | None) -> None:
        is_leaving = reason is None or isinstance(reason, NodeLost)
        seconds = self._bounds.leave_seconds if is_leaving else self._bounds.stop_seconds
        told = reason or NodeLost("the stage's actor has to end")
        try:
            if not call.answer.done():
                self._channel.send(self._channel.prepare(IsolatedStop(number, told.to_wire())))
                await asyncio.wait([call.answer], timeout=seconds)
            if not call.answer.done():
                get_logger().warning(
                    "isolated_call_does_not_stop",
                    stage=self._stage,
                    process_id=self.process_id,
                    seconds=seconds,
                )
                self._reason = f"was ended, as a call ignored its cancellation for {seconds:g} s"
                await self.end()
        finally:
            if not call.answer.done():
                self._is_ending = True
                self._signal(signal.SIGKILL)
            elif not call.answer.cancelled():
                call.answer.exception()  # seen

    def _take(self, received: Received) -> None:
        match received.header:
            case IsolatedProgress(number=number, kind=kind):
                call = self._calls.get(number)
                if call is not None:
                    call.progress(_event_kind(kind), _detail(received))
            case IsolatedReturn(number=number) | IsolatedError(number=number):
                if isinstance(received.header, IsolatedError) and received.header.is_dirty:
                    self._is_dirty = True
                call = self._calls.get(number)
                if call is not None and not call.answer.done():
                    call.answer.set_result(Answer(received.header, received.values, received.body.nbytes))
            case IsolatedReady():
                if not self._ready.done():
                    self._ready.set_result(None)
            case IsolatedRefusal(error=error, traceback=traceback):
                if not self._ready.done():
                    refusal = StageNotLoaded(error)
                    refusal.add_note(traceback)
                    self._ready.set_exception(refusal)
            case other:
                raise CodecError(f"a {type(other).__name__} comes from nodes, not from their helpers")

    def _fail_all(self) -> None:
        reason = self._reason = self._reason or "was left behind, as its actor ended"
        if not self._ready.done():
            self._ready.set_exception(ProcessEnded(reason))
        if not self._ready.cancelled():
            self._ready.exception()  # seen, if nobody waits any more
        for call in self._calls.values():
            if not call.answer.done():
                call.answer.set_exception(ProcessEnded(reason))


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


def _describe(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    by_whom = " (by the kernel, if memory ran out)" if -status == signal.SIGKILL else ""
    return f"was killed by {name}{by_whom}"


def child_device(device: str) -> str:
    """What the node's device is called in a helper process, which sees no other of its kind."""
    return "cuda:0" if device.startswith("cuda") else device


def child_environment(device: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The node's environment; of its GPUs only the actor's own."""
    narrowed = dict(environment)
    kind, _, index = device.partition(":")
    if kind == "cuda":
        visible = [part.strip() for part in environment.get(_VISIBLE, "").split(",") if part.strip()]
        narrowed[_VISIBLE] = visible[int(index)] if int(index) < len(visible) else index
    return narrowed


def _spawn(stage: str, device: str, bounds: IsolationBounds) -> IsolatedProcess:
    """Start a helper; on the event loop's own thread, as the kernel watches over that one for it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            process = subprocess.Popen(  # noqa: S603 - our own module, by the interpreter that runs us
                [
                    *(sys.executable, "-P", "-c", _BOOT, _ROOT),
                    *(stage, str(theirs.fileno()), str(os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                env=child_environment(device, os.environ),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
    try:
        return IsolatedProcess(stage, process, ours, bounds)
    except BaseException:  # no descriptor for watching it
        ours.close()
        process.kill()
        process.wait()
        raise


@contextlib.asynccontextmanager
async def _open_once(
    stage: Stage[Any, Any, Any], device: str, node: str, bounds: IsolationBounds, tasks: asyncio.TaskGroup
) -> AsyncIterator[IsolatedProcess]:
    log_format, log_level = chosen()
    start = IsolatedStart(
        stage=stage.key,
        signature=stage.spec.signature,
        device=child_device(device),
        node=node,
        import_paths=tuple(sys.path),
        log_format=log_format,
        log_level=log_level,
    )
    process = _spawn(stage.key, device, bounds)
    serving = tasks.create_task(process.serve(), name=f"process of {stage.key}")
    try:
        await process.load(start)
        yield process
    finally:
        try:
            await process.end()
            await asyncio.wait([serving])
        finally:
            process.close()


@contextlib.asynccontextmanager
async def open_isolated(
    stage: Stage[Any, Any, Any], device: str, node: str, bounds: IsolationBounds, tasks: asyncio.TaskGroup
) -> AsyncIterator[IsolatedProcess]:
    """Start a helper process and load the stage in it; the process ends with the context.

    One that dies while it loads is started again, a bounded number of times. Raises ``StageNotLoaded``
    if the module or the setup raises, ``ProcessEnded`` if it dies each time, ``OSError`` if the system
    gives no process.
    """
    async with contextlib.AsyncExitStack() as stack:
        pause = bounds.pause_seconds
        for start in range(1, ISOLATED_STARTS_MAX + 1):
            try:
                process = await stack.enter_async_context(_open_once(stage, device, node, bounds, tasks))
                break
            except ProcessEnded as ended:
                if start == ISOLATED_STARTS_MAX:
                    raise ProcessEnded(f"{ended}, {start} times in a row, while it loaded") from ended
                get_logger().warning("isolated_process_died_loading", stage=stage.key, how=str(ended))
            await asyncio.sleep(pause)
            pause *= 2
        yield process
