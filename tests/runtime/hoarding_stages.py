"""Stages that take memory which is known: when they are loaded, and more when they run."""

from collections.abc import AsyncIterator
from typing import Final

from onepiece import Cpu, StageContext, stage, workflow

LOADED_BYTES: Final = 96 << 20
WORKING_BYTES: Final = 64 << 20


async def load(ctx: StageContext[None]) -> AsyncIterator[bytes]:
    """Fill memory, so that the system must give it."""
    yield b"x" * LOADED_BYTES


def _work(state: bytes, runs: int) -> int:
    return len(b"y" * (runs * WORKING_BYTES)) + len(state)


@stage(isolation="process", setup=load)
async def apart(ctx: StageContext[bytes], runs: int) -> int:
    """Take more for as long as this runs."""
    return await ctx.run(_work, ctx.state, runs)


@stage(resources=Cpu(count=2), setup=load)
async def together(ctx: StageContext[bytes], runs: int) -> int:
    """The same in two ranks, of which the second one takes nothing more."""
    return await ctx.run(_work, ctx.state, runs if ctx.rank == 0 else 0)


@workflow
def hoard(runs: int) -> int:
    """One process."""
    return apart(runs)


@workflow
def hoard_together(runs: int) -> int:
    """Two."""
    return together(runs)
