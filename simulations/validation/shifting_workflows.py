"""Two workflows of one stage each that wait as for a GPU: for demand that shifts from one to the other."""

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from onepiece import Cpu, StageContext, stage, workflow

RUN_SECONDS: Final = 0.4
LOAD_SECONDS: Final = 1.0
RED_INSTANCES, BLUE_INSTANCES = 5, 3


async def load(ctx: StageContext[None]) -> AsyncIterator[None]:
    """As weights are loaded."""
    await asyncio.sleep(LOAD_SECONDS)
    yield None


@stage(resources=Cpu(memory_gib=0.6), instances=RED_INSTANCES, setup=load)
async def red_stage(ctx: StageContext[None], number: int) -> int:
    """Wait, and give the number back."""
    await asyncio.sleep(RUN_SECONDS)
    return number


@stage(resources=Cpu(memory_gib=0.8), instances=BLUE_INSTANCES, setup=load)
async def blue_stage(ctx: StageContext[None], number: int) -> int:
    """The same, too large to be loaded beside another one."""
    await asyncio.sleep(RUN_SECONDS)
    return number


@workflow
def red(number: int) -> int:
    """One stage."""
    return red_stage(number)


@workflow
def blue(number: int) -> int:
    """One stage."""
    return blue_stage(number)
