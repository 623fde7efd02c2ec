"""The part of ``onepiece bench admission`` that loads real processes: who is let in, and how long that takes.

A node with all roles in a process of its own serves three stages that wait (1 s, 5 s, 1 s; 8, 40 and 8 at
once: eight requests a second), with a wait factor. Requests come at random, each by our own client,
and are not sent again when refused. The seconds before a load is counted fill or empty the set.

With fewer workers no door could do it: where just as much is offered as two of them bear, and nobody waits
for long, chance alone leaves them idle for a sixth of the time (``simulations admission --workers 2``).
"""

import asyncio
import enum
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import frozen

import onepiece
from onepiece.cli.bench_node import serving_node
from onepiece.cli.bench_stages import DOZE_RATE, DOZE_SECONDS, through_dozes
from onepiece.client import Client
from onepiece.errors import OnePieceError, Overloaded

_SETTLE_SECONDS: Final = 2 * sum(DOZE_SECONDS)
_IDLE_REQUESTS: Final = 5
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
    p50_ratio: float
    """To the median of single requests, as the next."""
    p95_ratio: float
    stages_per_second: float
    """What the stages can do, by the times that they took: less than they should if the machine is busy."""


class _End(enum.Enum):
    FINISHED = enum.auto()
    REFUSED = enum.auto()
    FAILED = enum.auto()


@frozen
class _Asked:
    """A request: when it came, when that was over, and how."""

    since: float
    until: float
    end: _End


async def load(loads: Sequence[float], seconds: float, wait_factor: float) -> list[Loaded]:
    """Measure each load for so many seconds."""
    rng = random.Random(1)  # noqa: S311 - no secret
    async with (
        serving_node(_WORKFLOW, through_dozes, b"", "--wait-factor", f"{wait_factor:g}") as (_, url, _),
        onepiece.connect(url) as client,
    ):
        idle: list[_Asked] = []
        for _ in range(_IDLE_REQUESTS):
            await _one(client, idle)
        unloaded = _quantile([each.until - each.since for each in idle], 0.5)
        return [await _measure(client, each, seconds, unloaded, rng) for each in loads]


async def _measure(
    client: Client, load: float, seconds: float, unloaded: float, rng: random.Random
) -> Loaded:
    asked: list[_Asked] = []
    begun = next_at = time.monotonic()
    since = begun + _SETTLE_SECONDS
    async with asyncio.TaskGroup() as tasks:
        while next_at < since + seconds:
            await asyncio.sleep(max(0.0, next_at - time.monotonic()))
            tasks.create_task(_one(client, asked))
            next_at += rng.expovariate(load * DOZE_RATE)
    seen = await client.admission()
    return _judged(asked, load, since, seconds, unloaded, _stages_rate(seen))


def _stages_rate(seen: Mapping[str, Any]) -> float:
    rate = seen["workflows"][through_dozes.name]["requests_per_second_max"]
    return 0.0 if rate is None else float(rate)


def _judged(
    asked: Sequence[_Asked], load: float, since: float, seconds: float, unloaded: float, stages_rate: float
) -> Loaded:
    """What was done in the ``seconds`` from ``since`` on, and what came as long before as a request takes."""
    took = [
        each.until - each.since
        for each in asked
        if each.end is _End.FINISHED and since <= each.until < since + seconds
    ]
    came = [each for each in asked if since <= each.since + unloaded < since + seconds]
    ends = Counter(each.end for each in came)
    offered, finished = len(came) / seconds, len(took) / seconds
    p50, p95 = _quantile(took, 0.5), _quantile(took, 0.95)
    return Loaded(
        load=load,
        offered_per_second=offered,
        finished_per_second=finished,
        refused=ends[_End.REFUSED],
        failed=ends[_End.FAILED],
        goodput=finished / min(offered, DOZE_RATE) if offered else 0.0,
        p50_seconds=p50,
        p95_seconds=p95,
        p50_ratio=p50 / unloaded,
        p95_ratio=p95 / unloaded,
        stages_per_second=stages_rate,
    )


async def _one(client: Client, asked: list[_Asked]) -> None:
    begun = time.monotonic()
    try:
        await (await client.submit(through_dozes(b""), timeout=60.0)).result()
    except Overloaded:
        end = _End.REFUSED
    except OnePieceError:
        end = _End.FAILED
    else:
        end = _End.FINISHED
    asked.append(_Asked(begun, time.monotonic(), end))


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
