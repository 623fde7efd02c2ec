"""The devices of one node, and the threads that work for them.

Each device has two threads. Its *stage thread* runs an event loop of its own for the coroutines of
stages, so that a stage that blocks stops its device, never the node: heartbeats go out and rings are
emptied meanwhile. Its *compute thread* runs what stages hand to ``ctx.run``, one call at a time, so
that work for one accelerator is issued in order while the stage's coroutine can still be interrupted.

A thread cannot be killed. A call that never returns keeps its device busy; closing gives up on it
after a bound and leaves it to the end of the process (the threads are daemons).
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future as ThreadFuture
from pathlib import Path
from typing import Any, TypeVar

from attrs import define, field

from onepiece._bounded import described
from onepiece._torch import cuda_memory_bytes
from onepiece.core.inventory import Device, DeviceKind
from onepiece.errors import CodecError, ConfigError
from onepiece.log import get_logger
from onepiece.runtime.memory_meter import DeviceMeter

_T = TypeVar("_T")

_GIB = 1 << 30


def parse_device(text: str) -> Device:
    """Read ``cpu:0``, ``cuda:1`` or ``cpu:0=4GiB``; raises ``ConfigError`` naming what is wrong."""
    name, _, size = text.partition("=")
    kind, _, index = name.partition(":")
    if kind not in {"cpu", "cuda"} or not (index.isascii() and index.isdigit()):
        raise ConfigError(f"{text!r} is no device; write cpu:0, cuda:1 or cpu:0=4GiB")
    device_kind = DeviceKind.GPU if kind == "cuda" else DeviceKind.CPU
    if not size:
        return Device(name, device_kind, _memory_of(kind, int(index)))
    number = size.removesuffix("GiB")
    try:
        memory_bytes = int(float(number) * _GIB)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{text!r}: the memory is written in GiB, for example cpu:0=4GiB") from error
    if memory_bytes <= 0:
        raise ConfigError(f"{text!r}: the memory must be more than nothing")
    return Device(name, device_kind, memory_bytes)


def torch_name(device: str) -> str:
    """What torch calls the device: ``cpu`` for any of a node's CPU devices."""
    return "cpu" if device.startswith("cpu") else device


def discover_devices() -> tuple[Device, ...]:
    """Every CUDA device if torch finds one, else one CPU device; asks torch in a helper process.

    Importing torch takes seconds and hundreds of megabytes, which a node that hosts no torch stage
    should not pay; the kernel's list of NVIDIA devices answers without it.
    """
    count = _cuda_count()
    if count == 0:
        return (parse_device("cpu:0"),)
    return tuple(parse_device(f"cuda:{index}") for index in range(count))


def count_after(device: str) -> int | None:
    """How many devices of its kind this machine has from ``cuda:1`` on; None: as many as one likes."""
    kind, _, index = device.partition(":")
    return max(0, _cuda_count() - int(index)) if kind == "cuda" else None


def _cuda_count() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in {"", "-1"}])
    try:
        return len(list(Path("/proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        return 0


def _memory_of(kind: str, index: int) -> int:
    if kind == "cuda":
        try:
            return cuda_memory_bytes(index)
        except (CodecError, AssertionError, RuntimeError) as error:  # no torch, one without CUDA, no such GPU
            raise ConfigError(
                f"the device cuda:{index} cannot be used here: {str(error).splitlines()[0]}. Name a "
                "device that this machine has, as cpu:0, or install torch with CUDA; if no stage here needs "
                f"torch, say how much memory it has (cuda:{index}=80GiB)",
                device=f"cuda:{index}",
            ) from error
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@define
class DeviceThreads:
    """The two threads of one device; use ``open_device_threads``."""

    name: str
    _stage_loop: asyncio.AbstractEventLoop
    _compute: "_SerialThread"
    _stopping: bool = False
    _is_abandoned: bool = False
    _thread: threading.Thread | None = field(default=None)
    memory: DeviceMeter = field(init=False)
    _waiters: set["asyncio.Future[Any]"] = field(factory=set)
    """Of whoever waits for either thread, each on its own loop."""

    def __attrs_post_init__(self) -> None:
        self.memory = DeviceMeter(self.name)

    async def run_stage(self, make: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run a coroutine on the stage thread and wait for it from another loop.

        Cancelling the wait cancels the coroutine and still waits until it has ended.
        """
        outcome: ThreadFuture[_T] = ThreadFuture()
        started: list[asyncio.Task[_T]] = []

        def start() -> None:
            task = self._stage_loop.create_task(make())
            started.append(task)
            task.add_done_callback(lambda ended: _copy_outcome(ended, outcome))

        def cancel() -> None:
            self._stage_loop.call_soon_threadsafe(lambda: [task.cancel() for task in started])

        self._stage_loop.call_soon_threadsafe(start)
        return await self._joined(outcome, cancel)

    def abandon(self) -> None:
        """Wait no longer for what runs on the threads, which may never return: the node ends."""
        self._is_abandoned = True
        for waiter in list(self._waiters):
            waiter.get_loop().call_soon_threadsafe(waiter.cancel)

    async def run_compute(self, function: Callable[[], _T]) -> _T:
        """Run a blocking function on the compute thread; callable from any loop.

        Cancelling does not stop a function that runs: the wait goes on until it returns, then the
        cancellation is raised. One that has not begun is dropped.
        """
        return await self._joined(self._compute.submit(function))

    async def _joined(self, outcome: "ThreadFuture[_T]", cancel: Callable[[], object] | None = None) -> _T:
        """Wait for a thread's outcome; on cancellation pass it on, and wait for the end all the same."""
        waiter = asyncio.wrap_future(outcome)
        self._waiters.add(waiter)
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            if not waiter.done():
                (cancel or outcome.cancel)()
                await asyncio.wait([waiter])
            if not waiter.cancelled():
                waiter.exception()  # seen, so that the loop does not complain about it
            raise
        finally:
            self._waiters.discard(waiter)
            # An exception refers to this frame, and these to the exception: what a call had, memory of a GPU
            # among it, would stay until the garbage collector comes round.
            del outcome, waiter, cancel

    def start(self) -> None:
        """Start the stage thread; called once, by ``open_device_threads``."""
        self._thread = threading.Thread(target=self._serve, name=f"stage-{self.name}", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._stage_loop)
        while not self._stopping:
            try:
                self._stage_loop.run_forever()
            except BaseException as error:  # noqa: BLE001 - a stage's own task raised SystemExit: go on
                get_logger().error("stage_loop_interrupted", device=self.name, error=described(error))

    async def close(self, timeout_seconds: float) -> None:
        """Stop both threads; gives up after the bound on a call that does not return.

        What was abandoned has been waited for already.
        """
        bound = 0.0 if self._is_abandoned else timeout_seconds
        self._stopping = True
        self._stage_loop.call_soon_threadsafe(self._stage_loop.stop)
        self._compute.stop()
        loop = asyncio.get_running_loop()
        assert self._thread is not None
        await loop.run_in_executor(None, self._thread.join, bound)
        await loop.run_in_executor(None, self._compute.join, bound)
        if self._thread.is_alive():
            get_logger().warning("stage_thread_abandoned", device=self.name)
            return
        self._stage_loop.close()


def is_cancelled() -> bool:
    """Whether somebody has cancelled the asyncio task that this runs in: else it raised by itself."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _copy_outcome(task: "asyncio.Task[_T]", outcome: "ThreadFuture[_T]") -> None:
    if outcome.cancelled():
        return  # nobody waits any more
    if task.cancelled():
        outcome.cancel()
        outcome.set_running_or_notify_cancel()
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


class _SerialThread:
    """One daemon thread that runs submitted calls in order.

    Unlike ``ThreadPoolExecutor`` it never keeps the interpreter from exiting: a call that hangs is
    abandoned with the process.
    """

    def __init__(self, name: str) -> None:
        self._wake = threading.Condition()
        self._calls: list[tuple[ThreadFuture[Any], Callable[[], Any]]] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], _T]) -> "ThreadFuture[_T]":
        future: ThreadFuture[_T] = ThreadFuture()
        with self._wake:
            if self._stopping:
                raise RuntimeError("the device is closing: no work is taken any more")
            self._calls.append((future, function))
            self._wake.notify()
        return future

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            for future, _ in self._calls:
                future.cancel()
            self._calls.clear()
            self._wake.notify()

    def join(self, timeout_seconds: float) -> None:
        self._thread.join(timeout_seconds)

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not self._calls and not self._stopping:
                    self._wake.wait()
                if not self._calls:
                    return
                future, function = self._calls.pop(0)
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - SystemExit too is the caller's to see
                future.set_exception(error)
            else:
                future.set_result(result)
            del future, function


@contextlib.asynccontextmanager
async def open_device_threads(name: str, *, close_seconds: float) -> AsyncIterator[DeviceThreads]:
    """Start the threads of a device; they end with the context, or are abandoned after the bound."""
    device = DeviceThreads(name, asyncio.new_event_loop(), _SerialThread(f"compute-{name}"))
    device.start()
    try:
        yield device
    finally:
        await device.close(close_seconds)
