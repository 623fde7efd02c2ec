"""Stages that run in helper processes, and what can go wrong in them."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import anyio
import numpy as np
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
            return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]).pid
    raise AssertionError(fault)


@stage(isolation="process", concurrency=4)
async def linger(ctx: StageContext[None], how: str, seconds: float = 3600.0) -> str:
    """Take its time, in one of several ways, and say how it was interrupted."""
    ctx.report(step=1, total=2, process=os.getpid())
    match how:
        case "sleep":
            await anyio.sleep(seconds)
        case "report":
            with contextlib.suppress(RequestCancelled):
                await ctx.run(_report_until_stopped, ctx)
            raise RequestCancelled("seen by report")
        case "cancelled":
            while not ctx.cancelled:
                await anyio.sleep(0.01)
        case "block":
            time.sleep(seconds)  # noqa: ASYNC251 - what is tested
        case "spin":
            while True:
                pass
        case "hold the interpreter":
            ctypes.PyDLL(None).sleep(3600)
        case "refuse":
            while True:
                with contextlib.suppress(BaseException):
                    await anyio.sleep(3600)
        case "compute":
            await ctx.run(threading.Event().wait, seconds)
    return how


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


async def setup_with_traces(ctx: StageContext[None]) -> AsyncIterator[Path]:
    """Write down what happens to it, in the file that the environment names."""
    traces = Path(os.environ["ONEPIECE_TEST_TRACES"])
    with traces.open("a") as file:
        file.write(f"load {os.getpid()}\n")
    fault = os.environ.get("ONEPIECE_TEST_SETUP", "")
    match fault:
        case "raise":
            raise OSError("the weights are not there")
        case "exit":
            sys.exit(6)
        case "crash":
            os._exit(7)
        case "crash once" if traces.read_text().count("load") == 1:
            os._exit(8)
        case "hang":
            await anyio.sleep(3600)
        case "crash when idle":
            threading.Timer(0.05, os._exit, [9]).start()
    yield traces
    with traces.open("a") as file:
        file.write(f"unload {os.getpid()}\n")
    if fault == "hang in unload":
        await ctx.run(threading.Event().wait, 3600)


@stage(isolation="process", setup=setup_with_traces, concurrency=2)
async def traced(ctx: StageContext[Path], word: str) -> int:
    """Leave a trace."""
    with ctx.state.open("a") as file:
        file.write(f"{word} {os.getpid()}\n")
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
