r"""Latency: how long requests take under a load, by queueing approximations of measured service times.

Each stage is a queue with ``instances * concurrency`` workers. What is used, and whence:

* The mean wait is A. O. Allen's and J. Cunneen's: ``(c_a^2 + c_s^2) / 2`` times the wait of M/M/m, by
  Erlang's C formula (Allen, "Probability, Statistics, and Queueing Theory", 1990). It is exact for
  M/M/m, for M/G/1, and where neither arrivals nor service times vary: then nobody waits up to a
  utilisation of 1, which is the theorem of ``capacity``.
* How arrivals vary (``c_a^2``) behind stages, where streams part and where they join is W. Whitt's ("The
  Queueing Network Analyzer", Bell System Technical Journal 62, 1983).
* Who waits at all (a share by Erlang C) waits an exponential time: the tail of M/M/m. A service time is its
  mean less its spread, and an exponential rest.
* Along a workflow times add up as if independent; at joins the longest counts (``spans``).

Messages go to the actor to which their sender has the fewest under way, which is taken for one queue for
all instances. The inputs of a join meet at the instances in turn: there each has a queue of its own, whose
arrivals are so much more even.

**Batches** form from what waits. A stage that allows them works in the smallest batches that bear the load;
who finds all workers busy waits for half a batch, as it may come at any moment of one, and all wait as in
a queue of full batches whose arrivals are so much more even. This part is a rule of thumb, with nothing
but simulation behind it.

What it does not know: bursts that last, priorities, moves, a failing node. For those there is the
simulator, which runs the product's own decisions.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

from attrs import define, field, frozen

from onepiece.core.capacity import CapacityModel, Demand, Step
from onepiece.core.service_times import StageProfile
from onepiece.core.spans import Span, longest

_SWEEPS: Final = 12
"""Workflows that use the same stages in another order influence each other in a circle."""

_FORGOTTEN: Final = 10
"""Erlang's recursion begins so many roots of the load below it: what it began with counts exp(-50) then."""
_NOBODY: Final = 1e-100
"""A share that is none."""


@frozen
class Latency:
    """What requests of one demand take, in seconds; infinite where a stage cannot keep up."""

    workflow: str
    size_class: str
    mean_seconds: float
    p95_seconds: float
    unloaded_seconds: float
    """The mean where nobody else is there."""


@frozen
class StageWait:
    """How long requests wait before a stage: the mean, and the variance in square seconds."""

    mean_seconds: float = 0.0
    variance: float = 0.0

    @classmethod
    def exponential(cls, mean_seconds: float, waiting_share: float) -> "StageWait":
        """A wait that only a share of all has, exponential for these."""
        return cls(mean_seconds, mean_seconds**2 * (2 / waiting_share - 1))


def predict(
    model: CapacityModel, demands: Sequence[Demand], instances: Mapping[str, int]
) -> tuple[Latency, ...]:
    """What requests of each demand take with these instances, in the demands' order.

    Raises:
        ConfigError: A workflow or size class is not known to the model.
    """
    network = _Network.of(model, demands, instances)
    return tuple(network.latency(demand) for demand in demands)


def waits(
    model: CapacityModel, demands: Sequence[Demand], instances: Mapping[str, int]
) -> dict[str, StageWait]:
    """The wait before each stage that has work."""
    return _Network.of(model, demands, instances).waits


def queue_wait(
    rate: float, seconds: float, workers: int, arrival_variability: float, service_variability: float
) -> StageWait:
    """The wait in a queue of ``workers``; infinite where they cannot keep up.

    Args:
        rate: Arrivals a second.
        seconds: The mean service time.
        workers: How many serve at once.
        arrival_variability: Squared coefficient of variation of the gaps between arrivals.
        service_variability: The same of service times.
    """
    variability = (arrival_variability + service_variability) / 2
    load = rate * seconds
    if workers == 0 or load > workers * (1 + 1e-9):
        return StageWait(math.inf)
    if variability == 0 or load == 0:
        return StageWait()
    if load >= workers:
        return StageWait(math.inf)
    share = waiting_share(load, workers)
    mean = variability * share * seconds / (workers - load)
    return StageWait.exponential(mean, share) if mean > 0 else StageWait()


@lru_cache(maxsize=4096)
def waiting_share(load: float, workers: int) -> float:
    """Erlang's C: the share of arrivals that find all workers busy; ``load`` is rate times seconds.

    The recursion over the number of workers forgets where it began, so that for many of them it
    begins not far below the load.
    """
    assert 0 <= load < workers
    begin = max(0, math.floor(load - _FORGOTTEN * math.sqrt(load)))
    blocked = 1 - begin / load if begin else 1.0
    for count in range(begin + 1, workers + 1):
        blocked = load * blocked / (count + load * blocked)
        if blocked < _NOBODY:
            return 0.0
    return blocked / (1 - load / workers * (1 - blocked))


@define
class _StageLoad:
    """What arrives at a stage, and how it serves."""

    rate: float = 0.0
    streams: list[tuple[float, Demand, Step]] = field(factory=list)
    """Rate, and whence."""
    is_hashed: bool = False


@define(eq=False)
class _Network:
    """All queues at once."""

    model: CapacityModel
    instances: Mapping[str, int]
    loads: dict[str, _StageLoad]
    batches: dict[str, int]
    waits: dict[str, StageWait] = field(factory=dict)
    departures: dict[str, float] = field(factory=dict)
    """How the gaps between a stage's outputs vary."""

    @classmethod
    def of(cls, model: CapacityModel, demands: Sequence[Demand], instances: Mapping[str, int]) -> "_Network":
        loads: dict[str, _StageLoad] = {}
        for demand in demands:
            for step in model.shape(demand.workflow).steps if demand.rate else ():
                load = loads.setdefault(step.stage, _StageLoad())
                load.rate += demand.rate
                load.streams.append((demand.rate, demand, step))
                load.is_hashed |= step.is_join
        batches = {
            stage: _batch(model.stages[stage], load, model.workers(stage, instances))
            for stage, load in loads.items()
        }
        network = cls(model, instances, loads, batches)
        for _ in range(_SWEEPS):
            for stage in loads:
                network._settle(stage)
        return network

    def latency(self, demand: Demand) -> Latency:
        """What a request of this demand takes."""
        loaded = _path(self.model, demand, self.waits, self.batches)
        unloaded = _path(self.model, demand, {}, {})
        return Latency(demand.workflow, demand.size_class, loaded.mean, loaded.quantile(0.95), unloaded.mean)

    def _settle(self, stage: str) -> None:
        load, profile = self.loads[stage], self.model.stages[stage]
        count = self.instances.get(stage, 0)
        rate, workers = load.rate, count * profile.concurrency
        arrivals = self._arrivals(load, workers)
        if load.is_hashed and count:
            rate, workers = rate / count, profile.concurrency
            arrivals /= count
        self.waits[stage] = _batched_wait(profile, load, rate, workers, arrivals, self.batches[stage])
        seconds, service = _service(profile, load, self.batches[stage])
        used = min(1.0, rate * seconds / (workers * self.batches[stage])) if workers else 1.0
        after = 1 + (1 - used**2) * (arrivals - 1) + used**2 / math.sqrt(max(1, workers)) * (service - 1)
        self.departures[stage] = after

    def _arrivals(self, load: _StageLoad, workers: int) -> float:
        """How the gaps between arrivals vary, of all streams together."""
        shares = [rate / load.rate for rate, _, _ in load.streams]
        mixed = sum(
            share * self._stream(rate, demand, step)
            for share, (rate, demand, step) in zip(shares, load.streams, strict=True)
        )
        used = min(1.0, self._used(load, workers))
        streams = 1 / sum(share * share for share in shares)
        weight = 1 / (1 + 4 * (1 - used) ** 2 * (streams - 1))
        return weight * mixed + 1 - weight

    def _used(self, load: _StageLoad, workers: int) -> float:
        profile = self.model.stages[load.streams[0][2].stage]
        busy = sum(rate * profile.best(demand.size_class).request_seconds for rate, demand, _ in load.streams)
        return busy / workers if workers else 1.0

    def _stream(self, rate: float, demand: Demand, step: Step) -> float:
        """How the gaps of one stream vary: its clients', or what its part of a stage's outputs has."""
        if not step.after:
            return demand.variability
        shape = self.model.shape(demand.workflow)
        stages = [each.stage for each in shape.steps if each.name in step.after]
        parts = [rate / self.loads[stage].rate for stage in stages]
        found = [
            part * self.departures.get(stage, 1.0) + 1 - part
            for part, stage in zip(parts, stages, strict=True)
        ]
        return sum(found) / len(found)


def _batch(profile: StageProfile, load: _StageLoad, workers: int) -> int:
    """The smallest batches that bear the load; the largest if none do."""
    classes = {demand.size_class for _, demand, _ in load.streams}
    limit = max(profile.batch_limit(name) for name in classes)
    for batch in range(1, limit):
        busy = sum(
            rate * profile.timing(name, min(batch, profile.batch_limit(name))).request_seconds
            for rate, name in ((rate, demand.size_class) for rate, demand, _ in load.streams)
        )
        if busy <= workers:
            return batch
    return limit


def _service(profile: StageProfile, load: _StageLoad, batch: int) -> tuple[float, float]:
    """Mean seconds of a batch, and their squared coefficient of variation."""
    mean = square = 0.0
    for rate, demand, _ in load.streams:
        timing = profile.timing(demand.size_class, min(batch, profile.batch_limit(demand.size_class)))
        mean += rate / load.rate * timing.mean_seconds
        square += rate / load.rate * (timing.mean_seconds**2 + timing.spread_seconds**2)
    return mean, max(0.0, square / mean**2 - 1)


def _batched_wait(
    profile: StageProfile, load: _StageLoad, rate: float, workers: int, arrivals: float, batch: int
) -> StageWait:
    seconds, service = _service(profile, load, 1)
    alone = queue_wait(rate, seconds, workers, arrivals, service)
    limit = max(profile.batch_limit(demand.size_class) for _, demand, _ in load.streams)
    if limit == 1:
        return alone
    share = waiting_share(rate * seconds, workers) if rate * seconds < workers else 1.0
    seconds, service = _service(profile, load, limit)
    full = queue_wait(rate / limit, seconds, workers, arrivals / limit, service)
    if math.isinf(full.mean_seconds):
        return full
    seconds, service = _service(profile, load, batch)
    rest = share * seconds * (1 + service) / 2
    variance = share * seconds**2 * (1 + service) / 3 - rest**2
    joined = StageWait(full.mean_seconds + rest, full.variance + variance)
    return min(alone, joined, key=lambda wait: wait.mean_seconds)


def _path(
    model: CapacityModel, demand: Demand, waits: Mapping[str, StageWait], batches: Mapping[str, int]
) -> Span:
    """How long a request takes from its arrival to its last step's end."""
    ends: dict[str, Span] = {}
    steps = model.shape(demand.workflow).steps
    for step in steps:
        profile = model.stages[step.stage]
        batch = min(batches.get(step.stage, 1), profile.batch_limit(demand.size_class))
        timing = profile.timing(demand.size_class, batch)
        begin = longest((ends[name] for name in step.after), f"join of {step.name}")
        wait = waits.get(step.stage, StageWait())
        if math.isinf(wait.mean_seconds):
            return Span(math.inf)
        mean, spread = timing.mean_seconds, timing.spread_seconds
        ends[step.name] = (
            begin
            + Span.of(f"wait of {step.name}", wait.mean_seconds, wait.variance, 0.0)
            + Span.of(step.name, mean, spread * spread, max(0.0, mean - spread))
        )
    inner = {name for step in steps for name in step.after}
    return longest((end for name, end in ends.items() if name not in inner), "end")
