"""What a simulated set did: counts, latencies and instances over time, bounded however long it runs."""

import math
from collections.abc import Mapping
from typing import Any, Final

from attrs import define, field

from onepiece.core.give_back import GiveBack
from onepiece.core.moves import Move

_PER_E: Final = 100
"""Classes of latencies for each factor of e: each is one percent wide."""
MOVES_MAX: Final = 10_000


@define
class Histogram:
    """Lengths of time, each known to one percent."""

    counts: dict[int, int] = field(factory=dict)
    count: int = 0
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self.add_at(class_of(seconds), seconds)

    def add_at(self, place: int, seconds: float) -> None:
        """One more, of which the class is known already."""
        self.counts[place] = self.counts.get(place, 0) + 1
        self.count += 1
        self.total += seconds

    @property
    def mean(self) -> float:
        """Exact; 0 of none."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """What ``share`` of all do not exceed, to one percent; 0 of none."""
        left = share * self.count
        for place in sorted(self.counts):
            left -= self.counts[place]
            if left <= 0:
                return math.exp((place + 0.5) / _PER_E)
        return 0.0


def class_of(seconds: float) -> int:
    """The number of the class of a length of time."""
    return math.floor(math.log(max(seconds, 1e-9)) * _PER_E)


@define
class Interval:
    """What happened in a piece of the time."""

    accepted: int = 0
    refused: int = 0
    finished: Histogram = field(factory=Histogram)
    busy_device_seconds: float = 0.0
    instances: dict[str, int] = field(factory=dict)


@define(eq=False)
class Record:
    """All of it; ``interval_seconds`` is set before the run."""

    stages: tuple[str, ...]
    gpus: int
    interval_seconds: float = 60.0
    warm_up_seconds: float = 0.0
    """What comes before is not in the totals."""
    intervals: dict[int, Interval] = field(factory=dict)
    moves: list[tuple[float, Move]] = field(factory=list)
    move_count: int = 0
    given_back: list[tuple[float, GiveBack]] = field(factory=list)
    given_back_count: int = 0
    total: Interval = field(factory=Interval)
    busy_seconds: dict[str, float] = field(factory=dict)
    """Of workers, by stage."""
    ended_actors: int = 0
    last_at: float = 0.0
    _latest_place: int = -1
    _latest: Interval = field(factory=Interval)

    def _interval(self, now: float) -> Interval:
        place = int(now // self.interval_seconds)
        if place == self._latest_place:  # nearly always
            return self._latest
        found = self.intervals.get(place)
        if found is None:
            found = self.intervals[place] = Interval()
        self._latest_place, self._latest = place, found
        return found

    def _parts(self, now: float) -> tuple[Interval, ...]:
        self.last_at = now
        part = self._interval(now)
        return (part, self.total) if now >= self.warm_up_seconds else (part,)

    def accepted(self, now: float) -> None:
        """A request was let in."""
        for part in self._parts(now):
            part.accepted += 1

    def refused(self, now: float) -> None:
        """A request was sent away."""
        for part in self._parts(now):
            part.refused += 1

    def finished(self, now: float, seconds: float, demand: int) -> None:
        """A request of the demand of this number has its result."""
        place = class_of(seconds)
        for part in self._parts(now):
            part.finished.add_at(place, seconds)

    def busy(self, stage: str, now: float, seconds: float, devices: int) -> None:
        """A worker begins, and is busy for so long."""
        if now >= self.warm_up_seconds:
            self.busy_seconds[stage] = self.busy_seconds.get(stage, 0.0) + seconds
        self._interval(now).busy_device_seconds += seconds * devices

    def sample(self, now: float, serving: Mapping[str, int]) -> None:
        """So many instances of each stage serve now."""
        self._interval(now).instances = dict(serving)

    def moved(self, now: float, move: Move) -> None:
        """A move was ordered."""
        self.move_count += 1
        if len(self.moves) < MOVES_MAX:
            self.moves.append((now, move))

    def gave_back(self, now: float, give: GiveBack) -> None:
        """An instance was told to end, as it is not needed."""
        self.given_back_count += 1
        if len(self.given_back) < MOVES_MAX:
            self.given_back.append((now, give))

    def summary(self, seconds: float) -> dict[str, Any]:
        """The totals, behind the warm-up."""
        measured = seconds - self.warm_up_seconds
        done = self.total.finished
        return {
            "offered": self.total.accepted + self.total.refused,
            "refused": self.total.refused,
            "finished": done.count,
            "rate": done.count / measured,
            "mean_seconds": done.mean,
            "p50_seconds": done.quantile(0.5),
            "p95_seconds": done.quantile(0.95),
            "p99_seconds": done.quantile(0.99),
            "gpu_seconds_per_request": self.gpus * measured / done.count if done.count else None,
            "busy_workers": {stage: busy / measured for stage, busy in sorted(self.busy_seconds.items())},
            "moves": self.move_count,
            "given_back": self.given_back_count,
        }

    def series(self) -> list[dict[str, Any]]:
        """One row for each interval, in order."""
        return [
            {
                "seconds": place * self.interval_seconds,
                "accepted": part.accepted,
                "refused": part.refused,
                "finished": part.finished.count,
                "mean_seconds": part.finished.mean,
                "p95_seconds": part.finished.quantile(0.95),
                "busy_devices": part.busy_device_seconds / self.interval_seconds,
                "instances": part.instances,
            }
            for place, part in sorted(self.intervals.items())
        ]
