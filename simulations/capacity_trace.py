"""Arrivals for ``python -m simulations capacity``: when requests of which kind come.

Each kind is a stream of its own, drawn from its own random numbers, so that a change of one leaves the
others as they are. A *rate* is a function of time; the requests of a stream are a Poisson process of that
rate, drawn by thinning: candidates come at the highest rate, and each is kept with the share that the rate
is of it then.
"""

import csv
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Final, TypeAlias

from attrs import frozen

from onepiece.core.capacity import Demand
from onepiece.errors import ConfigError

DAY_SECONDS: Final = 86_400.0
Arrival: TypeAlias = tuple[float, int]
"""When, and which demand."""


@frozen
class Rate:
    """Requests a second over time: at most ``highest``."""

    highest: float
    at: Callable[[float], float]


def steady(rate: float) -> Rate:
    """Always the same."""
    return Rate(rate, lambda _now: rate)


def day_curve(rate: float, swing: float) -> Rate:
    """A day: ``rate`` in the mean, up to ``swing`` of it more at 18 h and less at 6 h."""
    return Rate(
        rate * (1 + swing),
        lambda now: rate * (1 - swing * math.sin(2 * math.pi * now / DAY_SECONDS)),
    )


def bursts(rate: float, factor: float, burst_seconds: float, every_seconds: float) -> Rate:
    """``factor`` times as much for ``burst_seconds`` at the beginning of every ``every_seconds``.

    The mean over a period is ``rate``; at most all requests come in the burst.
    """
    share = burst_seconds / every_seconds
    high = min(rate * factor, rate / share)
    low = (rate - high * share) / (1 - share)
    return Rate(max(high, low), lambda now: high if now % every_seconds < burst_seconds else low)


def step(before: float, after: float, at_seconds: float) -> Rate:
    """One rate, and from a moment on another."""
    return Rate(max(before, after), lambda now: before if now < at_seconds else after)


def arrivals(rates: Sequence[Rate], seconds: float, seed: int) -> Iterator[Arrival]:
    """The requests of all streams in order of time, up to ``seconds``."""
    streams = [_stream(number, rate, seconds, seed) for number, rate in enumerate(rates) if rate.highest > 0]
    return heapq.merge(*streams)


def even_arrivals(demands: Sequence[Demand], seconds: float) -> Iterator[Arrival]:
    """Requests at equal gaps: the load of the theorem."""
    streams = [
        ((count / demand.rate, number) for count in range(math.ceil(seconds * demand.rate)))
        for number, demand in enumerate(demands)
        if demand.rate > 0
    ]
    return heapq.merge(*streams)


def _stream(number: int, rate: Rate, seconds: float, seed: int) -> Iterator[Arrival]:
    random = Random(seed * 1_000_003 + number)  # noqa: S311 - a simulation is to be repeatable
    now = 0.0
    while True:
        now += random.expovariate(rate.highest)
        if now >= seconds:
            return
        if random.random() * rate.highest < rate.at(now):
            yield now, number


def recorded(path: Path, demands: Sequence[Demand]) -> list[Arrival]:
    """The requests of a CSV file with the columns ``seconds``, ``workflow`` and, if need be, ``size_class``.

    Raises:
        ConfigError: It cannot be read, or has a row that is none; the line is named.
    """
    numbers = {(demand.workflow, demand.size_class): number for number, demand in enumerate(demands)}
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            if not {"seconds", "workflow"} <= set(reader.fieldnames or ()):
                raise ConfigError(
                    f"the trace {path} has no columns `seconds` and `workflow`; name them in its first line, "
                    "with commas between them"
                )
            found = list(_rows(path, reader, numbers))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}") from error
    return sorted(found)


def _rows(
    path: Path, rows: "Iterable[dict[str, str]]", numbers: dict[tuple[str, str], int]
) -> Iterator[Arrival]:
    for line, row in enumerate(rows, start=2):
        key = (row.get("workflow") or "", row.get("size_class") or "")
        try:
            seconds = float(row.get("seconds") or "")
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < math.inf or key not in numbers:
            known = ", ".join("/".join(filter(None, each)) for each in numbers)
            raise ConfigError(
                f"{path}, line {line}: wants seconds (a number from 0 on), workflow and size_class, the two "
                f"of a demand that was given: {known}"
            )
        yield seconds, numbers[key]
