"""The same arrivals through the simulated set, and how far that is from what the real one did.

Rates are of requests that were done within a part of the run, and so are latencies: a request that is done
behind the part's end counts in neither.

The set is chaotic: times that differ by a millisecond let another request be first somewhere, and all is
different from there on. So the simulated side is the mean of several runs, which differ in what they draw.
The least and the largest P95 among them say how far one run, the real one too, may be off by chance.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Final

from attrs import define, field, frozen

from onepiece.core.capacity import CapacityModel, Demand
from simulations.capacity_record import Record
from simulations.capacity_world import Delays, Place, World, WorldOptions
from simulations.validation.load import LoadRun, Sample

WITHIN: Final = 0.1
"""How far apart they may be, relative to the real one."""


@frozen
class Side:
    """Requests done a second, and the P95 and mean of their seconds."""

    rate: float
    p95_seconds: float
    mean_seconds: float

    @classmethod
    def of(cls, latencies: Sequence[float], seconds: float) -> "Side":
        """Of the requests that were done in so many seconds."""
        mean = _mean(latencies) if latencies else math.nan
        return cls(len(latencies) / seconds, quantile(latencies, 0.95), mean)

    @classmethod
    def mean_of(cls, sides: "Sequence[Side]") -> "Side":
        """The mean of each value."""
        return cls(
            _mean([side.rate for side in sides]),
            _mean([side.p95_seconds for side in sides]),
            _mean([side.mean_seconds for side in sides]),
        )


@frozen
class Row:
    """One part of a run on both sides."""

    name: str
    load: float
    """The busiest stage's utilisation, by the model."""
    requests: int
    real: Side
    simulated: Side
    """The mean of its runs."""
    p95_range: tuple[float, float]
    """The least and the largest of its runs' P95."""

    @property
    def rate_difference(self) -> float:
        """Of the simulated to the real one, relative."""
        return self.simulated.rate / self.real.rate - 1 if self.real.rate else math.nan

    @property
    def p95_difference(self) -> float:
        """The same of the P95."""
        return self.simulated.p95_seconds / self.real.p95_seconds - 1

    @property
    def holds(self) -> bool:
        """Both are near enough."""
        return all(abs(each) <= WITHIN for each in (self.rate_difference, self.p95_difference))


@define(eq=False)
class Finishes(Record):
    """A record that keeps every request's end, as the real side has them."""

    ends: list[tuple[float, float, int]] = field(factory=list)
    """When, after how many seconds, and of which demand."""

    def finished(self, now: float, seconds: float, demand: int) -> None:
        """A request has its result."""
        self.ends.append((now, seconds, demand))
        super().finished(now, seconds, demand)

    def latencies(self, begin: float, end: float) -> list[float]:
        """Of the requests that were done in this part of the run."""
        return [seconds for at, seconds, _ in self.ends if begin <= at < end]


def quantile(values: Sequence[float], share: float) -> float:
    """What ``share`` of all do not exceed; NaN of none."""
    if not values:
        return math.nan
    return sorted(values)[min(len(values), max(1, math.ceil(share * len(values)))) - 1]


def simulate(
    model: CapacityModel,
    demands: Sequence[Demand],
    places: Sequence[Place],
    delays: Delays,
    run: LoadRun,
    seconds: float,
    seed: int = 0,
) -> Finishes:
    """Let a run's recorded arrivals pass through the simulated set."""
    instances = instances_of(places)
    options = WorldOptions(gpus=len(places), moves=False, delays=delays, places=tuple(places), seed=seed)
    world = World(model, demands, instances, options)
    record = world.record = Finishes(tuple(instances), len(places))
    world.run(run.arrivals(), seconds)
    return record


def instances_of(places: Sequence[Place]) -> dict[str, int]:
    """How many there are of each stage."""
    found: dict[str, int] = {}
    for place in places:
        found[place.stage] = found.get(place.stage, 0) + 1
    return found


def compared(
    name: str, load: float, run: LoadRun, simulated: Sequence[Finishes], begin: float, end: float
) -> Row:
    """One part of a run on both sides; ``simulated`` are all runs of the simulated set."""
    real = run.latencies(begin, end)
    sides = [Side.of(each.latencies(begin, end), end - begin) for each in simulated]
    p95s = [side.p95_seconds for side in sides]
    return Row(
        name,
        load,
        len(real),
        Side.of(real, end - begin),
        Side.mean_of(sides),
        (min(p95s), max(p95s)),
    )


def delays_of(
    model: CapacityModel,
    demands: Sequence[Demand],
    samples: Sequence[Sample],
    crowd: Sequence[Sample],
    news: tuple[float, float],
) -> Delays:
    """What passes beside the stages' times, as means.

    Args:
        model: What steps there are.
        demands: By number.
        samples: Requests that waited for nobody.
        crowd: Requests that came at once: where they wait, a worker turns from one to the next.
        news: Taken as they are: of other nodes, and of the proxy.
    """
    entry, hop, leave = [], [], []
    for sample in samples:
        spans = sample.spans
        for step in model.shape(demands[sample.demand].workflow).steps:
            if step.after:
                hop.append(spans[step.name].begun_at - max(spans[name].ended_at for name in step.after))
            else:
                entry.append(spans[step.name].begun_at - sample.submitted_at)
        leave.append(sample.done_at - max(span.ended_at for span in spans.values()))
    return Delays(_mean(entry), _mean(hop), _mean(leave), _mean(turns_of(model, demands, crowd)), *news)


def turns_of(model: CapacityModel, demands: Sequence[Demand], samples: Sequence[Sample]) -> list[float]:
    """From the end of one run to the begin of the next, at first steps of which there is one instance.

    The first quarter is left out: by then all inputs have come, and nothing else is waited for.
    """
    found = []
    workflow = demands[samples[0].demand].workflow
    for step in model.shape(workflow).steps:
        spans = sorted((sample.spans[step.name] for sample in samples), key=lambda span: span.begun_at)
        if step.after or len({span.node for span in spans}) > 1:
            continue
        waiting = spans[len(spans) // 4 :]
        found += [later.begun_at - span.ended_at for span, later in itertools.pairwise(waiting)]
    return found


def stage_seconds(
    model: CapacityModel, demands: Sequence[Demand], samples: Sequence[Sample]
) -> Mapping[str, float]:
    """How much longer each stage took than its profile says, relative, over all its runs."""
    took: dict[str, float] = {}
    profiled: dict[str, float] = {}
    for sample in samples:
        demand = demands[sample.demand]
        for step in model.shape(demand.workflow).steps:
            span = sample.spans.get(step.name)
            if span is not None:
                mean = model.stages[step.stage].timing(demand.size_class).mean_seconds
                took[step.stage] = took.get(step.stage, 0.0) + span.seconds
                profiled[step.stage] = profiled.get(step.stage, 0.0) + mean
    return {stage: took[stage] / profiled[stage] - 1 for stage in sorted(took)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
