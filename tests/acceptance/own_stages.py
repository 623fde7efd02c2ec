"""Workflows for acceptance tests that ``stages.synthetic`` does not cover."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from onepiece import Cpu, Gpu, StageContext, Tensor, stage, workflow


class Life:
    """One life of a stage's setup, and whether it was left dirty."""

    loads = 0

    def __init__(self) -> None:
        Life.loads += 1
        self.number = Life.loads
        self.dirty = False


async def begin(ctx: StageContext[None]) -> AsyncIterator[Life]:
    """A new life with each load."""
    yield Life()


@stage(setup=begin)
async def fragile(ctx: StageContext[Life], fault: str) -> int:
    """Make a mess and die of it, or say in which life it is."""
    assert not ctx.state.dirty, "it ran on what another request left behind"
    if fault == "none":
        return ctx.state.number
    ctx.state.dirty = True
    match fault:
        case "exit":
            raise SystemExit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "memory":
            raise MemoryError("no room for the latents")
        case "exit in a thread":
            await ctx.run(_leave)
    raise RuntimeError(fault)


def _leave() -> None:
    raise SystemExit(4)


@workflow
def breakable(fault: str = "none") -> int:
    """One stage that may break itself."""
    return fragile(fault)


@stage
async def compute(ctx: StageContext[None], seconds: float) -> str:
    """Never let anybody else run: a coroutine without a single await, in pure Python."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass
    return "computed"


@workflow
def computing(seconds: float) -> str:
    """It alone."""
    return compute(seconds)


async def load_slowly(ctx: StageContext[None]) -> AsyncIterator[None]:
    """As a model loads: long enough for readiness to be seen red."""
    await ctx.run(threading.Event().wait, 1.0)
    yield


@stage(setup=load_slowly)
async def slow_to_load(ctx: StageContext[None], text: str) -> str:
    """Answers, once it is loaded."""
    return text


@workflow
def slow_start(text: str) -> str:
    """A stage that takes a while to load."""
    return slow_to_load(text)


_SHAPE = (3, 4, 5)


def odd_tensors() -> dict[str, Any]:
    """Tensors of types, shapes and strides that naive serialisers get wrong, made by torch."""
    import torch

    numbers = torch.arange(60, dtype=torch.float32).reshape(_SHAPE)
    return {
        "bfloat16": numbers.to(torch.bfloat16),
        "float8": numbers.to(torch.float8_e4m3fn),
        "bool": numbers % 2 == 0,
        "complex64": torch.complex(numbers, -numbers),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.float16),
        "no dimension": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty((0, 3), dtype=torch.float64),
        "transposed": numbers.transpose(0, 2),
        "every other": numbers[:, ::2],
        "broadcast": torch.tensor([1, 2, 3], dtype=torch.int16)[:, None].expand(3, 1000),
        "small view of much": torch.zeros(1_000_000)[10:13],
    }


@stage
async def make_tensors(ctx: StageContext[None]) -> dict[str, Tensor]:
    """Send odd tensors."""
    return odd_tensors()


@stage
async def check_tensors(ctx: StageContext[None], tensors: dict[str, Tensor]) -> dict[str, str]:
    """Compare what came with what was sent, bit by bit; says how each arrived."""
    import torch

    wanted = odd_tensors()
    assert list(tensors) == list(wanted)
    return {name: _compare(torch, tensors[name], tensor) for name, tensor in wanted.items()}


def _compare(torch: Any, came: Any, sent: Any) -> str:
    if not isinstance(came, torch.Tensor):
        return f"a {type(came).__name__}"
    if came.dtype != sent.dtype or came.shape != sent.shape:
        return f"{came.dtype} of shape {tuple(came.shape)}"
    plain = sent.contiguous()
    same = came.numel() == 0 or torch.equal(_bits(torch, came), _bits(torch, plain))
    return "equal" if same else "other bits"


def _bits(torch: Any, tensor: Any) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@workflow
def tensors() -> dict[str, str]:
    """Send odd tensors from one stage to the next."""
    return check_tensors(make_tensors())


@stage
async def common(ctx: StageContext[None], text: str) -> str:
    """A stage that two workflows share."""
    return f"{text}@{os.getpid()}"


@stage
async def shout(ctx: StageContext[None], text: str) -> str:
    """Only in one of them."""
    return text.upper()


@workflow
def plain(text: str) -> str:
    """The shared stage alone."""
    return common(text)


@workflow
def loud(text: str) -> str:
    """The shared stage, then another one."""
    return shout(common(text))


@stage(resources=Cpu(memory_gib=3000))
async def enormous(ctx: StageContext[None], text: str) -> str:
    """Fits on no device."""
    return text


@workflow
def too_large(text: str) -> str:
    """A workflow that can be placed nowhere."""
    return enormous(text)


@stage(resources=Gpu(memory_gib=1))
async def on_gpu(ctx: StageContext[None], text: str) -> str:
    """Wants a GPU."""
    return f"{text} on {ctx.device}"


@workflow
def wants_gpu(text: str) -> str:
    """Runs on a processor where no node has a GPU."""
    return on_gpu(text)


async def fail_to_load(ctx: StageContext[None]) -> AsyncIterator[None]:
    """A setup that raises."""
    if ctx.device:
        raise OSError("the weights are not there")
    yield


@stage(setup=fail_to_load)
async def unloadable(ctx: StageContext[None], text: str) -> str:
    """Never gets to run."""
    return text


@workflow
def never_ready(text: str) -> str:
    """Its stage cannot be loaded."""
    return unloadable(text)


@stage(timeout=0.3)
async def stubborn(ctx: StageContext[None], how: str) -> str:
    """Outlasts its timeout in one way or another."""
    match how:
        case "wait":
            await asyncio.Event().wait()
        case "report":
            await ctx.run(_report_for_ever, ctx)
        case "block":
            threading.Event().wait(1.5)
    return how


def _report_for_ever(ctx: StageContext[None]) -> None:
    while True:
        ctx.report(step=1, total=2)


@workflow
def overdue(how: str) -> str:
    """A stage with a timeout."""
    return stubborn(how)


@stage
async def weigh(ctx: StageContext[None], image: bytes, prompt: str) -> int:
    """The size of what came."""
    return len(image) + len(prompt)


@workflow
def weight(image: bytes, prompt: str = "") -> int:
    """The size of the inputs."""
    return weigh(image, prompt)


@stage
async def large(ctx: StageContext[None], mebibytes: int) -> bytes:
    """Many bytes."""
    return np.arange(mebibytes << 17, dtype=np.uint64).tobytes()


@workflow
def many_bytes(mebibytes: int) -> bytes:
    """A large result."""
    return large(mebibytes)
