"""Workflows for the tests of ``onepiece profile``."""

from collections.abc import AsyncIterator

from onepiece import Gpu, StageContext, stage, workflow


async def _fail(ctx: StageContext[None]) -> AsyncIterator[None]:
    if ctx.node:
        raise ValueError("no weights here")
    yield


@stage(isolation="process")
async def lonely(ctx: StageContext[None]) -> int:
    """Runs in a process of its own."""
    return 1


@stage(resources=Gpu(memory_gib=1, count=2))
async def broad(ctx: StageContext[None]) -> int:
    """Wants two devices."""
    return ctx.world_size


@stage(setup=_fail)
async def heavy(ctx: StageContext[None]) -> int:
    """Cannot be loaded."""
    return 1


@workflow
def apart() -> int:
    """A stage in a process of its own."""
    return lonely()


@workflow
def wide() -> int:
    """A stage on several devices."""
    return broad()


@workflow
def unloadable() -> int:
    """A stage that does not load."""
    return heavy()
