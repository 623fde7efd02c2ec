"""The owner of prometheus-client: what a node shows to whoever scrapes it, in Prometheus' text format.

A *metric* is declared once, in ``metrics_catalogue``. Each part of a node is read when somebody scrapes: a
*source* looks at the live objects and gives *samples*. Nothing is updated for this while requests run, so
that a scrape costs and nothing else does. Samples of one metric with the same labels are added up, since
several actors, links or inboxes may be told apart by nothing that has few values.

::

    (live objects) --source--> samples --exposition--> text

Each node has a registry of its own. A source that fails or does not answer in time leaves its samples out,
and ``onepiece_scrape_success`` says so; the others are shown.
"""

import asyncio
import bisect
import enum
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Final

from attrs import define, field, frozen
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from onepiece.log import get_logger

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SOURCE_SECONDS: Final = 2.0
"""How long one part of a node may take to be read; Prometheus gives up on a target after ten seconds."""


class MetricKind(enum.Enum):
    """What a metric's numbers are: as it is now, a sum since the node began, or a distribution of lengths."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@define(eq=False)
class Distribution:
    """How often which length was seen, by upper bounds."""

    bounds: tuple[float, ...]
    total: float = 0.0
    _counts: list[int] = field(init=False)

    @_counts.default
    def _zeros(self) -> list[int]:
        return [0] * (len(self.bounds) + 1)

    def note(self, value: float) -> None:
        """One more was seen."""
        self._counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """How many were seen."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Each bound, as text, with how many were at most that."""
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, map(float, itertools.accumulate(self._counts)), strict=True))


@frozen(order=True)
class Metric:
    """One metric: its name as it is scraped, and the names of its labels."""

    name: str
    kind: MetricKind = field(order=False)
    meaning: str = field(order=False)
    labels: tuple[str, ...] = field(default=(), order=False)

    def of(self, value: "float | Distribution", *labels: str) -> "Sample":
        """A sample, with a value for each label."""
        assert len(labels) == len(self.labels), f"{self.name} has the labels {self.labels}, not {labels}"
        assert isinstance(value, Distribution) == (self.kind is MetricKind.HISTOGRAM), self.name
        return Sample(self, value, labels)

    @property
    def unit(self) -> str:
        """What its numbers count; "" if they count things that the name says."""
        words = self.name.split("_")
        return next((unit for unit in ("seconds", "bytes") if unit in words), "")


@frozen
class Sample:
    """A metric's value for one set of labels."""

    metric: Metric
    value: float | Distribution
    labels: tuple[str, ...]


Source = Callable[[], Awaitable[Iterable[Sample]]]
"""Reads one part of a node."""

SCRAPE_SUCCESS: Final = Metric(
    "onepiece_scrape_success",
    MetricKind.GAUGE,
    "1 if this part of the node could be read, else 0, and its metrics are missing",
    ("part",),
)


class Metrics:
    """What one node shows."""

    def __init__(self) -> None:
        self._sources: dict[str, Source] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        self._latest = _Latest()
        self._registry.register(self._latest)

    def read_from(self, part: str, source: Source) -> None:
        """Show what a part of the node has to say, from the next scrape on."""
        assert part not in self._sources, f"{part} is read already"
        self._sources[part] = source

    async def exposition(self) -> bytes:
        """All metrics as they are now, as text; takes ``SOURCE_SECONDS`` at most.

        What goes wrong in a source is logged and shown by ``onepiece_scrape_success``; it is not raised.
        """
        read = await asyncio.gather(*(_read(part, source) for part, source in self._sources.items()))
        self._latest.samples = list(itertools.chain.from_iterable(read))
        text: bytes = generate_latest(self._registry)
        return text


async def _read(part: str, source: Source) -> list[Sample]:
    try:
        async with asyncio.timeout(SOURCE_SECONDS):
            return [*await source(), SCRAPE_SUCCESS.of(1, part)]
    except Exception as error:  # noqa: BLE001 - whatever one part has, the others are to be shown
        get_logger().warning("metrics_not_read", part=part, exc_info=error)
        return [SCRAPE_SUCCESS.of(0, part)]


class _Latest(Collector):
    """Hands the registry what was read last."""

    def __init__(self) -> None:
        self.samples: Sequence[Sample] = ()

    def collect(self) -> Iterator[Family]:
        """The families, each with all its samples."""
        found: dict[Metric, dict[tuple[str, ...], float | Distribution]] = {}
        for sample in self.samples:
            values = found.setdefault(sample.metric, {})
            earlier = values.get(sample.labels, 0.0)
            if isinstance(sample.value, Distribution):
                assert sample.labels not in values, f"{sample.metric.name} of {sample.labels} comes twice"
                values[sample.labels] = sample.value
            elif not isinstance(earlier, Distribution):
                values[sample.labels] = earlier + sample.value
        return (_family(metric, dict(sorted(found[metric].items()))) for metric in sorted(found))


def _family(metric: Metric, values: "dict[tuple[str, ...], float | Distribution]") -> Family:
    family: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
    match metric.kind:
        case MetricKind.GAUGE:
            family = GaugeMetricFamily(metric.name, metric.meaning, labels=metric.labels)
        case MetricKind.COUNTER:
            family = CounterMetricFamily(metric.name, metric.meaning, labels=metric.labels)
        case MetricKind.HISTOGRAM:
            family = HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
    for labels, value in values.items():
        if isinstance(value, Distribution):
            assert isinstance(family, HistogramMetricFamily), metric.name
            family.add_metric(labels, value.buckets(), value.total)
        else:
            assert not isinstance(family, HistogramMetricFamily), metric.name
            family.add_metric(labels, value)
    return family
