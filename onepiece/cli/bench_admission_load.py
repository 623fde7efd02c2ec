"""The part of ``onepiece bench admission`` that loads real processes: who is let in, and how long that takes.

A node with all roles in a process of its own serves three stages that wait (1 s, 5 s, 1 s; 2, 10 and 2 at
once: two requests a second), with a wait factor. Requests come at random, each by our own client,
and are not sent again when refused. The seconds before a load is counted fill or empty the set.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Final

from attrs import define, field, frozen

import onepiece
from onepiece.cli.bench_node import serving_node
from onepiece.cli.bench_stages import DOZE_SECONDS, through_dozes
from onepiece.client import Client
from onepiece.errors import OnePieceError, Overloaded

_RATE: Final = 2.0
"""What the stages can do in a second."""
_SETTLE_SECONDS: Final = 2 * sum(DOZE_SECONDS)
_IDLE_REQUESTS: Final = 4
_WORKFLOW: Final = "onepiece.cli.bench_stages:through_dozes"


@frozen
class Loaded:
    """What came of one load."""

    load: float
    offered_per_second: float
    finished_per_second: float
    refused: int
    failed: int
    goodput: float
    """Of what was offered or the stages can do, whichever is less."""
    p50_seconds: float
    p95_seconds: float
    p95_ratio: float
    """To the P95 of single requests."""


@define
class _Tally:
    offered: int = 0
    refused: int = 0
    failed: int = 0
    ended_at: list[tuple[float, float]] = field(factory=list)
    """When a request ended, and how long it took."""


async def load(loads: Sequence[float], seconds: float, wait_factor: float) -> list[Loaded]:
    """Measure each load for so many seconds."""
    rng = random.Random(1)  # noqa: S311 - no secret
    async with (
        serving_node(_WORKFLOW, through_dozes, b"", "--wait-factor", f"{wait_factor:g}") as (_, url, _),
        onepiece.connect(url) as client,
    ):
        idle = _Tally()
        for _ in range(_IDLE_REQUESTS):
            await _one(client, idle)
        unloaded = _quantile([took for _, took in idle.ended_at], 0.95)
        return [await _measure(client, each, seconds, unloaded, rng) for each in loads]


async def _measure(
    client: Client, load: float, seconds: float, unloaded: float, rng: random.Random
) -> Loaded:
    tally = _Tally()
    begun = time.monotonic()
    since, until = begun + _SETTLE_SECONDS, begun + _SETTLE_SECONDS + seconds
    counted: _Tally | None = None
    next_at = begun
    async with asyncio.TaskGroup() as tasks:
        while (now := time.monotonic()) < until:
            if counted is None and now >= since:
                counted = tally = _Tally(ended_at=tally.ended_at)
            tasks.create_task(_one(client, tally))
            next_at += rng.expovariate(load * _RATE)
            await asyncio.sleep(max(0.0, next_at - time.monotonic()))
    took = [took for at, took in tally.ended_at if since <= at < until]
    offered, finished = tally.offered / seconds, len(took) / seconds
    p95 = _quantile(took, 0.95)
    return Loaded(
        load=load,
        offered_per_second=offered,
        finished_per_second=finished,
        refused=tally.refused,
        failed=tally.failed,
        goodput=finished / min(offered, _RATE),
        p50_seconds=_quantile(took, 0.5),
        p95_seconds=p95,
        p95_ratio=p95 / unloaded,
    )


async def _one(client: Client, tally: _Tally) -> None:
    tally.offered += 1
    begun = time.monotonic()
    try:
        await (await client.submit(through_dozes(b""), timeout=60.0)).result()
    except Overloaded:
        tally.refused += 1
    except OnePieceError:
        tally.failed += 1
    else:
        now = time.monotonic()
        tally.ended_at.append((now, now - begun))


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
