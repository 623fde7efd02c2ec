"""A stage that steps until it is let go, in the process of the tests, and what it has done."""

import asyncio
from collections import Counter
from contextlib import suppress

from onepiece import StageContext, stage, workflow

STEPS = 50
begun: Counter[str] = Counter()
"""How often the stage was begun, by its input."""
steps: Counter[str] = Counter()
"""Steps that it has taken, by its input."""
running: set[str] = set()
may_step = asyncio.Semaphore(0)
"""Each step needs one."""


def reset() -> None:
    """For a test of its own."""
    global may_step  # noqa: PLW0603 - it belongs to the test's loop
    for each in (begun, steps, running):
        each.clear()
    may_step = asyncio.Semaphore(0)


@stage(isolation="loop")
async def slow(ctx: StageContext[None], name: str) -> str:
    """Fifty steps."""
    begun[name] += 1
    running.add(name)
    try:
        for step in range(STEPS):
            await may_step.acquire()
            ctx.report(step=step, total=STEPS)
            steps[name] += 1
    finally:
        running.discard(name)
    return f"{name}, slowly"


@stage(isolation="loop")
async def shown(ctx: StageContext[None], text: str) -> str:
    """What comes behind it."""
    return f"{text}, shown"


@workflow
def film(name: str) -> str:
    """One behind the other."""
    return shown(slow(name))


@stage(isolation="loop")
async def napping(ctx: StageContext[None], seconds: float, is_held: bool) -> str:
    """Takes so long, and for as long as it has to step if it is held."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.Event().wait()
    if is_held:
        await may_step.acquire()
    return "rested"


@workflow
def nap(seconds: float, is_held: bool) -> str:
    """It alone."""
    return napping(seconds, is_held)
