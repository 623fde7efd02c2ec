"""Stages on several devices, and what can go wrong in one of their ranks. None of them needs torch."""

import asyncio
import ctypes
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import anyio
import numpy as np

from onepiece import Cpu, InvalidInput, StageContext, Tensor, stage, workflow
from tests.runtime.isolated_stages import Traces

Fault = Literal[
    "none",
    "raise",
    "raise as all do",
    "refuse",
    "refuse alone",
    "segfault",
    "kill",
    "_exit",
    "hang",
    "block",
]


@stage(resources=Cpu(count=2))
async def stumble(ctx: StageContext[None], fault: Fault = "none", rank: int = 1) -> list[int]:
    """Fail in one rank while the others are in a collective, or what is none but waits as long."""
    ctx.report(step=1, total=1, process=os.getpid(), rank=ctx.rank)
    if fault == "none":
        return [os.getpid(), ctx.rank, ctx.world_size]
    if ctx.rank == rank or fault in {"raise as all do", "refuse"}:
        await _fail(fault, ctx.rank)
    await ctx.run(_stand_in_a_collective)
    raise AssertionError(fault)


def _stand_in_a_collective() -> None:
    """Holds its thread, and no cancellation reaches it."""
    threading.Event().wait(3600)


async def _fail(fault: Fault, rank: int) -> None:
    match fault:
        case "raise" | "raise as all do":
            raise ValueError(f"the latents of rank {rank} are not finite")
        case "refuse" | "refuse alone":
            raise InvalidInput("there are no 7 frames", field="frames")
        case "segfault":
            ctypes.string_at(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "_exit":
            os._exit(3)
        case "hang":
            await anyio.sleep_forever()
        case "block":
            await asyncio.to_thread(_stand_in_a_collective)


@stage(resources=Cpu(count=2), timeout=1.0)
async def hurried(ctx: StageContext[None], rank: int) -> int:
    """One rank takes for ever."""
    if ctx.rank == rank:
        await anyio.sleep_forever()
    return ctx.rank


def concatenated(parts: list[Tensor]) -> Tensor:
    """All parts behind each other."""
    return np.concatenate(parts)


@stage(resources=Cpu(count=3), merge=concatenated)
async def take_turns(ctx: StageContext[None], pixels: Tensor, order: list[int], directory: str) -> Tensor:
    """Each rank squares its share; they finish in the order that is given, by the marks they leave."""
    share = np.square(np.array_split(np.asarray(pixels), ctx.world_size)[ctx.rank])
    mark, *earlier = [Path(directory, str(rank)) for rank in order[order.index(ctx.rank) :: -1]]
    while not all(each.exists() for each in earlier):  # noqa: ASYNC110 - of other processes
        await anyio.sleep(0.001)
    mark.touch()
    return share


def first_or_fail(parts: list[str]) -> str:
    """A merge that can fail in several ways."""
    match parts[0]:
        case "raise":
            raise ValueError(f"{len(parts)} parts do not fit")
        case "_exit":
            os._exit(4)
        case "wrong type":
            return 3  # type: ignore[return-value]  # what is tested
    return "+".join(parts)


@stage(resources=Cpu(count=2), merge=first_or_fail)
async def patch_up(ctx: StageContext[None], how: str) -> str:
    """Give the merge its parts."""
    return how if ctx.rank == 0 else str(ctx.rank)


async def load_the_weights(ctx: StageContext[None]) -> AsyncIterator[Traces]:
    """Note how many ranks of this host are loading, and fail as the environment says."""
    traces = Traces()
    traces.write("begin")
    fault, _, rank = os.environ.get("ONEPIECE_TEST_SETUP", "").partition(" ")
    if rank == str(ctx.rank):
        match fault:
            case "raise":
                raise OSError("the weights are not there")
            case "_exit":
                os._exit(7)
    await ctx.run(time.sleep, float(os.environ.get("ONEPIECE_TEST_LOAD_SECONDS", "0.05")))
    traces.write("end")
    yield traces
    traces.write("unload")


@stage(resources=Cpu(count=2), setup=load_the_weights)
async def weighed(ctx: StageContext[Traces], word: str) -> str:
    """Leave a trace in each rank."""
    ctx.state.write(word)
    if word == "die":
        if ctx.rank == 1:
            os._exit(10)
        await anyio.sleep_forever()
    return word


@workflow
def weighing(word: str) -> str:
    """One stage."""
    return weighed(word)


@workflow
def stumbling(fault: Fault = "none", rank: int = 1) -> list[int]:
    """One stage."""
    return stumble(fault, rank)
