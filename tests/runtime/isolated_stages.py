"""Stages that run in helper processes, and what can go wrong in them."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import anyio
from attrs import frozen

from onepiece import RequestCancelled, StageContext, Tensor, stage, workflow

Fault = Literal[
    "none",
    "segfault",
    "_exit",
    "abort",
    "kill",
    "sys.exit",
    "sys.exit in a thread",
    "sys.exit in a callback",
    "interrupt",
    "memory",
    "raise",
    "raise much",
    "wrong type",
    "no wire form",
    "leave a process",
    "say nonsense",
    "close the socket",
]


@stage(isolation="process")
async def break_down(ctx: StageContext[None], fault: Fault) -> int:
    """Fail in one of many ways, or say in which process this is."""
    match fault:
        case "none":
            return os.getpid()
        case "segfault":
            ctypes.string_at(0)
        case "_exit":
            os._exit(3)
        case "abort":
            os.abort()
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sys.exit":
            sys.exit(4)
        case "sys.exit in a thread":
            await ctx.run(sys.exit, 5)
        case "interrupt":
            raise KeyboardInterrupt
        case "memory":
            raise MemoryError("no room for the latents")
        case "raise":
            raise ValueError("the latents are not finite")
        case "raise much":
            raise ValueError("x" * 1_000_000)
        case "wrong type":
            wrong: Any = "text"
            return wrong  # type: ignore[no-any-return]  # what is tested
        case "no wire form":
            return 1 << 100
        case "leave a process":
            return await ctx.run(_start_a_process)
        case "say nonsense":
            os.write(_socket_to_the_node(), b"nonsense")
        case "close the socket":
            os.close(_socket_to_the_node())
    await anyio.sleep_forever()
    raise AssertionError(fault)


def _socket_to_the_node() -> int:
    """As a stage can do by mistake: a loop over all descriptors, say."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(link.name))) as duplicate:
            if duplicate.type is socket.SOCK_SEQPACKET:
                return int(link.name)
    raise AssertionError("no such socket")


def _start_a_process() -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]).pid


@stage(isolation="process", concurrency=4)
async def linger(ctx: StageContext[None], how: str, seconds: float = 3600.0) -> str:
    """Take its time, in one of several ways, and say how it was interrupted."""
    ctx.report(step=1, total=2, process=os.getpid())
    match how:
        case "sleep":
            await _pause(seconds)
        case "report":
            with contextlib.suppress(RequestCancelled):
                await ctx.run(_report_until_stopped, ctx)
            raise RequestCancelled("seen by report")
        case "cancelled":
            while not ctx.cancelled:  # noqa: ASYNC110 - a flag is what a stage has
                await anyio.sleep(0.01)
        case "block":
            threading.Event().wait(seconds)
        case "spin":
            while True:
                pass
        case "hold the interpreter":
            threading.Event().wait(0.2)  # until the report has left
            ctypes.PyDLL(None).sleep(3600)
        case "refuse":
            while True:
                with contextlib.suppress(BaseException):
                    await anyio.sleep(3600)
        case "leave":
            try:
                await _pause(seconds)
            finally:
                sys.exit(3)
        case "compute":
            await ctx.run(threading.Event().wait, seconds)
        case "compute until stopped":
            await ctx.run(_wait_until_cancelled, ctx)
    return how


def _wait_until_cancelled(ctx: StageContext[None]) -> None:
    while not ctx.cancelled:
        time.sleep(0.01)


@stage(isolation="process", timeout=0.3)
async def hurried(ctx: StageContext[None], seconds: float) -> float:
    """Has a timeout."""
    await _pause(seconds)
    return seconds


async def _pause(seconds: float) -> None:
    with anyio.move_on_after(seconds):
        await anyio.sleep_forever()


def _report_until_stopped(ctx: StageContext[None]) -> None:
    while True:
        ctx.report(step=2, total=2)
        time.sleep(0.01)


@frozen
class Parcel:
    """A record with tensors of several kinds."""

    name: str
    pixels: Tensor
    extra: tuple[Tensor, bytes]


@stage(isolation="process")
async def double(ctx: StageContext[None], parcel: Parcel, times: int = 2) -> Parcel:
    """Double the pixels, pass on the rest."""
    return Parcel(f"{parcel.name}!", parcel.pixels * times, parcel.extra)


@stage(isolation="process")
async def make_tensors(ctx: StageContext[None], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Send back what came, as it came."""
    return tensors


@stage(isolation="process")
async def describe(ctx: StageContext[None]) -> dict[str, str]:
    """What the process sees of its surroundings."""
    return {
        "device": ctx.device,
        "node": ctx.node,
        "uid": ctx.uid,
        "attempt": str(ctx.attempt),
        "stage": ctx.stage,
        "deadline": str(ctx.deadline is not None and 0 < ctx.deadline < 3600),
        "thread": str(await ctx.run(threading.get_native_id) != threading.get_native_id()),
        **{name: os.environ.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")},
    }


@stage(isolation="process")
async def watched(ctx: StageContext[None], steps: int) -> int:
    """Report often, with previews."""
    for step in range(1, steps + 1):
        ctx.report(step=step, total=steps, preview=bytes([step % 256]) * 200_000, content_type="image/raw")
    return steps


class Traces:
    """A file in which a stage writes down what happens to it."""

    def __init__(self) -> None:
        self.path = Path(os.environ["ONEPIECE_TEST_TRACES"])

    def write(self, word: str) -> None:
        """Add a line."""
        with self.path.open("a") as file:
            file.write(f"{word} {os.getpid()}\n")

    def count(self, word: str) -> int:
        """How often it happened."""
        return self.path.read_text().count(word)


async def setup_with_traces(ctx: StageContext[None]) -> AsyncIterator[Traces]:
    """Load and unload, or fail in the way that the environment names."""
    traces = Traces()
    traces.write("load")
    fault = os.environ.get("ONEPIECE_TEST_SETUP", "")
    match fault:
        case "raise":
            raise OSError("the weights are not there")
        case "exit":
            sys.exit(6)
        case "crash":
            os._exit(7)
        case "crash once" if traces.count("load") == 1:
            os._exit(8)
        case "hang":
            await anyio.sleep_forever()
        case "crash when idle":
            threading.Timer(0.05, os._exit, [9]).start()
    ctx.log.info("loaded_here", fault=fault)
    yield traces
    traces.write("unload")
    if fault == "hang in unload":
        await ctx.run(threading.Event().wait, 3600)


@stage(isolation="process", setup=setup_with_traces, concurrency=2)
async def traced(ctx: StageContext[Traces], word: str) -> int:
    """Leave a trace."""
    ctx.state.write(word)
    if word == "crash":
        os._exit(10)
    return os.getpid()


@workflow
def tracing(word: str) -> int:
    """One stage."""
    return traced(word)


@workflow
def breakable(fault: Fault = "none") -> int:
    """One stage."""
    return break_down(fault)


@workflow
def lingering(how: str = "sleep", seconds: float = 3600.0) -> str:
    """One stage."""
    return linger(how, seconds)
