"""The empty stages of ``onepiece bench hop``: what a hop costs is all that they cost.

Each isolation has three stages that take arrays, so that three processes get one each, and two workflows: one
goes through them once, the other ``LAPS`` times, so that what a further hop costs is the difference. The
other benchmarks send bytes.
"""

import asyncio
from typing import Final

from onepiece import StageContext, Tensor, at_most_once, stage, workflow

__all__ = [
    "DOZE_RATE",
    "DOZE_SECONDS",
    "LAPS",
    "arrays_through_loop",
    "arrays_through_loop_laps",
    "arrays_through_threads",
    "arrays_through_threads_laps",
    "through_dozes",
    "through_loop",
    "through_loop_at_most_once",
]

LAPS: Final = 3
DOZE_SECONDS: Final = (1.0, 5.0, 1.0)
DOZE_RATE: Final = 8
"""Requests a second that the three stages which wait can do."""


@stage(isolation="loop")
async def loop_first(ctx: StageContext[None], payload: bytes) -> bytes:
    """Hand on what came, on the node's event loop."""
    return payload


@stage(isolation="loop")
async def loop_second(ctx: StageContext[None], payload: bytes) -> bytes:
    """Hand on what came, on the node's event loop."""
    return payload


@stage(isolation="loop")
async def loop_third(ctx: StageContext[None], payload: bytes) -> bytes:
    """Hand on what came, on the node's event loop."""
    return payload


@workflow
def through_loop(payload: bytes) -> bytes:
    """Three stages on the event loops of their nodes."""
    return loop_third(loop_second(loop_first(payload)))


@workflow
def through_loop_at_most_once(payload: bytes) -> bytes:
    """The same three stages, and nothing between them is retained."""
    return loop_third(at_most_once(loop_second(at_most_once(loop_first(payload)))))


@stage(isolation="loop")
async def loop_array_first(ctx: StageContext[None], payload: Tensor) -> Tensor:
    """Hand on what came, on the node's event loop."""
    return payload


@stage(isolation="loop")
async def loop_array_second(ctx: StageContext[None], payload: Tensor) -> Tensor:
    """Hand on what came, on the node's event loop."""
    return payload


@stage(isolation="loop")
async def loop_array_third(ctx: StageContext[None], payload: Tensor) -> Tensor:
    """Hand on what came, on the node's event loop."""
    return payload


@workflow
def arrays_through_loop(payload: Tensor) -> Tensor:
    """Three stages on the event loops of their nodes."""
    return loop_array_third(loop_array_second(loop_array_first(payload)))


@workflow
def arrays_through_loop_laps(payload: Tensor) -> Tensor:
    """The same three stages, one lap after the other."""
    for _ in range(LAPS):
        payload = loop_array_third(loop_array_second(loop_array_first(payload)))
    return payload


@stage(isolation="thread")
async def thread_array_first(ctx: StageContext[None], payload: Tensor) -> Tensor:
    """Hand on what came, on the thread of the device."""
    return payload


@stage(isolation="thread")
async def thread_array_second(ctx: StageContext[None], payload: Tensor) -> Tensor:
    """Hand on what came, on the thread of the device."""
    return payload


@stage(isolation="thread")
async def thread_array_third(ctx: StageContext[None], payload: Tensor) -> Tensor:
    """Hand on what came, on the thread of the device."""
    return payload


@workflow
def arrays_through_threads(payload: Tensor) -> Tensor:
    """Three stages on the threads of their devices."""
    return thread_array_third(thread_array_second(thread_array_first(payload)))


@workflow
def arrays_through_threads_laps(payload: Tensor) -> Tensor:
    """The same three stages, one lap after the other."""
    for _ in range(LAPS):
        payload = thread_array_third(thread_array_second(thread_array_first(payload)))
    return payload


@stage(isolation="loop", concurrency=round(DOZE_RATE * DOZE_SECONDS[0]))
async def doze_first(ctx: StageContext[None], payload: bytes) -> bytes:
    """Wait as for a device, as many at once as make the rate."""
    await asyncio.sleep(DOZE_SECONDS[0])
    return payload


@stage(isolation="loop", concurrency=round(DOZE_RATE * DOZE_SECONDS[1]))
async def doze_second(ctx: StageContext[None], payload: bytes) -> bytes:
    """The same for five times as long."""
    await asyncio.sleep(DOZE_SECONDS[1])
    return payload


@stage(isolation="loop", concurrency=round(DOZE_RATE * DOZE_SECONDS[2]))
async def doze_third(ctx: StageContext[None], payload: bytes) -> bytes:
    """As the first one."""
    await asyncio.sleep(DOZE_SECONDS[2])
    return payload


@workflow
def through_dozes(payload: bytes) -> bytes:
    """Three stages that can do ``DOZE_RATE`` requests a second, for ``onepiece bench admission``."""
    return doze_third(doze_second(doze_first(payload)))
