"""Real requests at given moments, and what became of each: when it came, when it was done, its stages' times.

The load is open: a request comes when it is to come, whether or not the ones before are done. Latency is
counted from the moment when its client begins to submit it until that client has heard that it is done. The
result is not fetched: clients share the processors with what is measured.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

from attrs import define, field, frozen

from onepiece.client import Client
from onepiece.core.capacity import Demand
from onepiece.requests import EventKind
from simulations.capacity_trace import Arrival

TIMEOUT_SECONDS: Final = 600.0


@frozen
class Span:
    """When a stage of a request began and ended, in seconds since the epoch."""

    node: str
    begun_at: float
    ended_at: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended_at - self.begun_at


@define
class Sample:
    """One request; moments are seconds since the epoch."""

    demand: int
    submitted_at: float
    done_at: float = 0.0
    spans: dict[str, Span] = field(factory=dict)
    """By step."""
    error: str | None = None

    @property
    def seconds(self) -> float:
        """How long its client waited."""
        return self.done_at - self.submitted_at


@frozen
class LoadRun:
    """What came of a trace; moments of samples are seconds since ``began_at``."""

    began_at: float
    samples: tuple[Sample, ...]

    def arrivals(self) -> list[Arrival]:
        """The recorded arrivals, in order."""
        return sorted((each.submitted_at - self.began_at, each.demand) for each in self.samples)

    def latencies(self, begin: float, end: float) -> list[float]:
        """Of the requests that were done in this part of the run."""
        return [each.seconds for each in self.samples if begin <= each.done_at - self.began_at < end]

    def failed(self) -> list[str]:
        """Errors of requests that have no result."""
        return [each.error for each in self.samples if each.error is not None]


async def run_load(
    client: Client,
    demands: Sequence[Demand],
    inputs: Sequence[Mapping[str, Any]],
    trace: Iterable[Arrival],
) -> LoadRun:
    """Submit each request of the trace in its time; returns when all have ended."""
    loop = asyncio.get_running_loop()
    samples: list[Sample] = []
    begun, began_at = loop.time(), time.time()
    async with asyncio.TaskGroup() as tasks:
        for at, number in trace:
            await asyncio.sleep(begun + at - loop.time())
            sample = Sample(number, time.time())
            samples.append(sample)
            tasks.create_task(_request(client, demands[number], inputs[number], sample))
    return LoadRun(began_at, tuple(samples))


async def _request(client: Client, demand: Demand, inputs: Mapping[str, Any], sample: Sample) -> None:
    handle = await client.submit(
        demand.workflow, dict(inputs), timeout=TIMEOUT_SECONDS, size_class=demand.size_class
    )
    begun: dict[str, float] = {}
    async with aclosing(handle.events()) as events:
        async for event in events:
            match event.kind, event.stage:
                case EventKind.STAGE_STARTED, str() as stage:
                    begun[stage] = event.at
                case EventKind.STAGE_FINISHED, str() as stage:
                    sample.spans[stage] = Span(event.node or "", begun.get(stage, event.at), event.at)
                case ((EventKind.FAILED | EventKind.CANCELLED), _):
                    sample.error = str(event.detail.get("message", event.kind.value))
                case _:
                    pass
    sample.done_at = time.time()
