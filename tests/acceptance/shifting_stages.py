"""Two workflows of one stage each that wait as for a GPU: for load that shifts from one to the other."""

import asyncio
from collections.abc import AsyncIterator

from onepiece import Cpu, StageContext, stage, workflow

STEP_SECONDS = 0.05
RUN_STEPS = 6
LOAD_STEPS = 10


async def wait(steps: int) -> None:
    """As for a GPU."""
    for _ in range(steps):
        await asyncio.sleep(STEP_SECONDS)


async def load(ctx: StageContext[None]) -> AsyncIterator[None]:
    """As weights are loaded."""
    await wait(LOAD_STEPS)
    yield None


@stage(resources=Cpu(memory_gib=0.4), instances=4, setup=load)
async def red_stage(ctx: StageContext[None], number: int) -> int:
    """Wait, and give the number back."""
    await wait(RUN_STEPS)
    return number


def weights() -> list[str]:
    """There are none; this file does."""
    return [__file__]


@stage(resources=Cpu(memory_gib=0.8), instances=2, setup=load, prefetch=weights)
async def blue_stage(ctx: StageContext[None], number: int) -> int:
    """The same, too large to be loaded beside another one."""
    await wait(RUN_STEPS)
    return -number


@workflow
def red(number: int) -> int:
    """One stage."""
    return red_stage(number)


@workflow
def blue(number: int) -> int:
    """One stage."""
    return blue_stage(number)
