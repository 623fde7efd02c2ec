"""An event loop on virtual time, in which several simulated processes live.

Time stands still while anything is ready to run, and jumps to the next timer when nothing is: minutes
pass in milliseconds, and no run waits for the machine it is run on. Whatever is not decided by the
programs themselves is drawn from one source of chance, so a seed gives the same run each time:

* Each *process* has its own queue, run in the order in which it was filled, as asyncio does: code may
  rely on that. *Between* processes the order is drawn, since they share no clock and no processor.
* Timers of one moment go off in the order in which they were set.
* Tasks and futures hash by a running number, not by where they lie in memory: a set of them is
  iterated in the same order in each run.

A step belongs to the process whose context it was made in. So all that a node starts, however deep,
stops with ``pause`` and is found by ``tasks_of``, without the node's code knowing of it.

There are no threads, files or sockets here: to whoever asks for one, ``AbstractEventLoop`` itself says
that it has none.
"""

import asyncio
import contextvars
import heapq
import itertools
import sys
from asyncio.events import _set_running_loop
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, Final, TypeVar, TypeVarTuple

_Result = TypeVar("_Result")
_Arguments = TypeVarTuple("_Arguments")
_ExceptionHandler = Callable[[dict[str, Any]], None]

STEPS_AT_ONE_MOMENT_MAX: Final = 500_000
SECONDS_MAX: Final = 1500.0
"""Of the world's time; what takes longer never ends."""

_SERIALS: Final = itertools.count()


class Stuck(AssertionError):  # noqa: N818  # named by what happened, as in transports.errors
    """Nothing will ever happen again, or nothing but steps that take no time."""


class Process:
    """What has one clock and one queue, and is stopped or cut off as a whole.

    Args:
        name: For the trace.
        clock_offset: What its monotonic clock shows when the loop's begins.
    """

    def __init__(self, loop: "VirtualLoop", name: str, clock_offset: float = 0.0) -> None:
        self.name = name
        self.clock_offset = clock_offset
        self.steps = 0
        """How many steps it has run."""
        self.is_paused = False
        self.resumed_at = 0.0
        """When its last pause ended, as of the loop's ``now``."""
        self._loop = loop
        self.ready: deque[_Step | _Timer] = deque()
        """Steps that wait for their turn."""
        self._fuse: tuple[int, Callable[[], None]] | None = None
        self._context = contextvars.copy_context()
        self._context.run(_PROCESS.set, self)

    def context(self) -> contextvars.Context:
        """A context of this process: what is started in it belongs to the process."""
        return self._context.copy()

    def call_soon(self, callback: Callable[[*_Arguments], object], *args: *_Arguments) -> None:
        """Run a callback as a step of this process."""
        self._loop.call_soon(callback, *args, context=self._context.copy())

    def start(self, work: Coroutine[Any, Any, _Result], name: str) -> "asyncio.Task[_Result]":
        """Run a coroutine in this process; the caller owns the task."""
        return SteadyTask(work, loop=self._loop, name=name, context=self._context.copy())

    def pause(self) -> None:
        """Run none of its steps until ``resume``; they wait, and its timers go off late."""
        self.is_paused = True

    def resume(self) -> None:
        """Go on behind a pause."""
        self.is_paused = False
        self.resumed_at = self._loop.now

    def after_steps(self, count: int, callback: Callable[[], None]) -> None:
        """Call ``callback`` behind the ``count``-th step from now: between any two awaits of its tasks."""
        self._fuse = (self.steps + count, callback)

    def next_step(self) -> "_Step | _Timer | None":
        """Take the step that is next in turn."""
        while self.ready:
            step = self.ready.popleft()
            if not step.cancelled():
                return step
        return None

    def enqueue(self, step: "_Step | _Timer") -> None:
        """Have a step wait for its turn."""
        self.ready.append(step)

    def count_step(self) -> None:
        """A step has been run."""
        self.steps += 1
        if self._fuse is not None and self.steps >= self._fuse[0]:
            callback = self._fuse[1]
            self._fuse = None
            callback()


_PROCESS: Final[contextvars.ContextVar[Process]] = contextvars.ContextVar("process")


class SteadyFuture(asyncio.Future[Any]):
    """A future that hashes the same in each run."""

    def __init__(self, *, loop: asyncio.AbstractEventLoop) -> None:
        self._serial = next(_SERIALS)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._serial


class SteadyTask(asyncio.Task[Any]):
    """A task that hashes the same in each run."""

    def __init__(
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        loop: asyncio.AbstractEventLoop,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> None:
        self._serial = next(_SERIALS)
        self.process = _PROCESS.get() if context is None else context[_PROCESS]
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self._serial


class _Step(asyncio.Handle):
    """A callback that waits for its turn."""

    __slots__ = ("process",)

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context | None,
    ) -> None:
        self.process = _PROCESS.get() if context is None else context[_PROCESS]
        super().__init__(callback, args, loop, context)


class _Timer(asyncio.TimerHandle):
    """A callback that waits for its moment; ``when`` is on the clock of its process."""

    __slots__ = ("process",)

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context | None,
    ) -> None:
        self.process = _PROCESS.get() if context is None else context[_PROCESS]
        super().__init__(when, callback, args, loop, context)


async def elapse(seconds: float) -> None:
    """Let virtual time pass; it costs none of the real one."""
    await asyncio.sleep(seconds)


class VirtualLoop(asyncio.AbstractEventLoop):
    """The loop of a simulated world; see the module's text.

    Args:
        rng: Draws the order between processes.
        on_exception: Told of whatever nobody caught, as of ``call_exception_handler``.
    """

    def __init__(self, rng: Random, on_exception: _ExceptionHandler) -> None:
        self.world = Process(self, "world")
        self._rng = rng
        self.on_exception = on_exception
        self._now = 0.0
        self._processes: list[Process] = [self.world]
        self._timers: list[tuple[float, int, _Timer]] = []
        self._serial = itertools.count()
        self._current = self.world
        self._is_stopping = False
        self._is_running = False
        self._is_closed = False
        self._steps_at_once = 0
        self.steps = 0
        """How many steps all processes have run."""

    # --- processes and time --------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Seconds since the world began, which no process sees."""
        return self._now

    @property
    def current(self) -> Process:
        """The process whose step is running."""
        return self._current

    def add_process(self, name: str, clock_offset: float = 0.0) -> Process:
        """A further process."""
        process = Process(self, name, clock_offset)
        self._processes.append(process)
        return process

    def remove_process(self, process: Process) -> None:
        """Forget a process that has ended."""
        self._processes.remove(process)

    def tasks_of(self, process: Process) -> list["SteadyTask"]:
        """The tasks of a process that have not ended, oldest first."""
        tasks = [each for each in asyncio.all_tasks(self) if isinstance(each, SteadyTask)]
        return sorted((each for each in tasks if each.process is process), key=hash)

    def time(self) -> float:
        """The monotonic clock of the process whose step is running."""
        return self._now + self._current.clock_offset

    def at(self, moment: float, callback: Callable[[*_Arguments], object], *args: *_Arguments) -> None:
        """Run a callback as a step of the world at a moment as of ``now``; at once if that has passed."""
        timer = _Timer(moment, callback, args, self, self.world.context())
        heapq.heappush(self._timers, (moment, next(self._serial), timer))

    # --- what asyncio asks of a loop -------------------------------------------------------------

    def call_soon(  # type: ignore[override]  # typeshed's parameter specification varies between versions
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Run a callback behind what is ready in its process."""
        step = _Step(callback, args, self, context)
        step.process.enqueue(step)
        return step

    def call_soon_threadsafe(  # type: ignore[override]  # as above
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """The same: there is one thread."""
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]  # as above
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run a callback after so many seconds."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]  # as above
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run a callback at a moment of the running process's clock."""
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._timers, (when - self._current.clock_offset, next(self._serial), timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A cancelled timer is dropped when its moment comes."""

    def create_future(self) -> "asyncio.Future[Any]":
        """A future of this loop."""
        return SteadyFuture(loop=self)

    def create_task(  # type: ignore[override]  # as above
        self,
        coro: Coroutine[Any, Any, _Result],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> "asyncio.Task[_Result]":
        """A task of the running process."""
        return SteadyTask(coro, loop=self, name=name, context=context)

    def get_debug(self) -> bool:
        """Never: debugging reads the real clock."""
        return False

    def is_running(self) -> bool:
        """Whether ``run_until_complete`` is under way."""
        return self._is_running

    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._is_closed

    def stop(self) -> None:
        """Return from ``run_until_complete`` behind this step."""
        self._is_stopping = True

    def close(self) -> None:
        """Nothing is held that would have to be given back."""
        self._is_closed = True

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Somebody failed, and nobody waits for it."""
        self.on_exception(context)

    default_exception_handler = call_exception_handler

    # --- running -------------------------------------------------------------------------------

    def run_until_complete(self, future: Coroutine[Any, Any, _Result]) -> _Result:  # type: ignore[override]  # coroutines are all that is run
        """Run a coroutine in the world's process until it ends, and everything else meanwhile.

        Raises:
            Stuck: It can never end.
        """
        with self._running():
            main = self.world.start(future, "world")
            main.add_done_callback(lambda _: self.stop(), context=self.world.context())
            while not self._is_stopping:
                self._turn()
            return main.result()

    @contextmanager
    def _running(self) -> Iterator[None]:
        hooks = sys.get_asyncgen_hooks()
        _set_running_loop(self)
        sys.set_asyncgen_hooks(firstiter=lambda _: None, finalizer=self._finalize)
        self._is_running, self._is_stopping = True, False
        try:
            yield
        finally:
            self._is_running = False
            sys.set_asyncgen_hooks(*hooks)
            _set_running_loop(None)

    def _finalize(self, generator: AsyncGenerator[Any, Any]) -> None:
        """An asynchronous generator was dropped in the middle: let it clean up."""
        if not self._is_closed:
            self.call_soon(self.create_task, generator.aclose())

    def _turn(self) -> None:
        """Run one step, or let time pass until there is one."""
        ready = [process for process in self._processes if process.ready and not process.is_paused]
        if not ready:
            self._pass_time()
            return
        process = ready[0] if len(ready) == 1 else ready[int(self._rng.random() * len(ready))]
        step = process.next_step()
        if step is None:
            return
        self.steps += 1
        self._steps_at_once += 1
        if self._steps_at_once > STEPS_AT_ONE_MOMENT_MAX:
            raise Stuck(f"{process.name} and others run step after step at {self._now:.6f}; now {step!r}")
        self._current = process
        step._run()  # noqa: SLF001  # a loop is what runs handles
        self._current = self.world
        process.count_step()

    def _pass_time(self) -> None:
        """Jump to the next timer, and let all of its moment go off."""
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not timers:
            paused = [process.name for process in self._processes if process.is_paused]
            raise Stuck(f"nothing will ever happen again at {self._now:.6f}; paused: {paused}")
        self._now = max(self._now, timers[0][0])
        if self._now > SECONDS_MAX:
            raise Stuck(f"it goes on for more than {SECONDS_MAX:.0f} s")
        self._steps_at_once = 0
        while timers and timers[0][0] <= self._now:
            timer = heapq.heappop(timers)[2]
            if not timer.cancelled():
                timer.process.enqueue(timer)


def virtual_loop(rng: Random, on_exception: _ExceptionHandler) -> VirtualLoop:
    """A loop for one run; as ``VirtualLoop``."""
    return VirtualLoop(rng, on_exception)  # type: ignore[abstract]  # no sockets, files or threads on purpose


def branch(rng: Random) -> Random:
    """A source of chance of its own, so that what one part draws does not change what others draw."""
    return Random(rng.random())  # noqa: S311  # a run must be repeatable, not secret
