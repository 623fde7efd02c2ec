"""Live service times: what stages took lately, by stage and size class, as their reports say.

A mean and a spread that forget: the weight of a new sample is never below ``1 / MEMORY``, so that a stage
that has become slower is known to be so after some tens of requests. What this promises:

* Nothing is made up: of a stage that nobody reported there is no time (None).
* A size class that was not seen yet takes the time of the whole stage, all classes together.
* It is bounded: at most ``SIZE_CLASSES_MAX`` classes of a stage are told apart, the others are its rest.
* Several proxies see different requests of the same stages. What another one says (``heard``) counts with
  the number of its samples, and only as long as it lives.

What it does not know: batches, and what a request's inputs cost beyond its class.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Final

from attrs import define, field, frozen

from onepiece.core.service_times import ANY_SIZE
from onepiece.limits import SIZE_CLASSES_MAX

MEMORY: Final = 32
"""How many samples count, about."""


@frozen
class SeenTime:
    """What was seen of a stage's requests of one size class."""

    stage: str
    size_class: str
    mean_seconds: float
    spread_seconds: float
    samples: int


@define
class _Average:
    mean: float = 0.0
    variance: float = 0.0
    samples: int = 0

    def note(self, seconds: float) -> None:
        self.samples = min(self.samples + 1, MEMORY)
        change = seconds - self.mean
        self.mean += change / self.samples
        if self.samples > 1:
            self.variance += (change * change * (1 - 1 / self.samples) - self.variance) / self.samples


@define(eq=False)
class LiveTimes:
    """See the module's text."""

    _own: dict[str, dict[str, _Average]] = field(factory=dict)
    _heard: dict[str, dict[tuple[str, str], SeenTime]] = field(factory=dict)
    """By who said it."""

    def note(self, stage: str, size_class: str, seconds: float) -> None:
        """A request has taken so long in a stage."""
        if not (math.isfinite(seconds) and seconds >= 0):
            return  # it comes from another node's clock
        classes = self._own.get(stage)
        if classes is None:
            classes = self._own[stage] = {ANY_SIZE: _Average()}
        classes[ANY_SIZE].note(seconds)
        if size_class == ANY_SIZE:
            return
        of_class = classes.get(size_class)
        if of_class is None:
            if len(classes) > SIZE_CLASSES_MAX:
                return
            of_class = classes[size_class] = _Average()
        of_class.note(seconds)

    def hear(self, who: str, seen: Iterable[SeenTime]) -> None:
        """What another proxy has seen, all of it; replaces what it said before."""
        self._heard[who] = {(each.stage, each.size_class): each for each in seen}

    def forget_all_but(self, living: Iterable[str]) -> None:
        """Of the others only these live."""
        kept = frozenset(living)
        self._heard = {who: seen for who, seen in self._heard.items() if who in kept}

    def keep_stages(self, stages: Iterable[str]) -> None:
        """Forget stages that are no longer served."""
        kept = frozenset(stages)
        self._own = {stage: classes for stage, classes in self._own.items() if stage in kept}

    def time(self, stage: str, size_class: str) -> tuple[float, float] | None:
        """Mean and spread in seconds; None if nothing was seen of the stage."""
        return self._of(stage, size_class) or self._of(stage, ANY_SIZE)

    def mean_seconds(self, stage: str, size_class: str) -> float | None:
        """The mean alone, as ``time`` has it."""
        if self._heard:
            seen = self.time(stage, size_class)
            return None if seen is None else seen[0]
        classes = self._own.get(stage, _NOTHING)
        own = classes.get(size_class) or classes.get(ANY_SIZE)
        return None if own is None else own.mean

    def own(self) -> tuple[SeenTime, ...]:
        """What this one has seen itself."""
        return tuple(
            SeenTime(stage, size_class, seen.mean, math.sqrt(seen.variance), seen.samples)
            for stage, classes in self._own.items()
            for size_class, seen in classes.items()
        )

    def _of(self, stage: str, size_class: str) -> tuple[float, float] | None:
        seen: list[tuple[float, float, int]] = []
        own = self._own.get(stage, _NOTHING).get(size_class)
        if own is not None:
            seen.append((own.mean, math.sqrt(own.variance), own.samples))
        for heard in self._heard.values():
            other = heard.get((stage, size_class))
            if other is not None:
                seen.append((other.mean_seconds, other.spread_seconds, other.samples))
        total = sum(samples for _, _, samples in seen)
        if total == 0:
            return None
        return (
            sum(mean * samples for mean, _, samples in seen) / total,
            sum(spread * samples for _, spread, samples in seen) / total,
        )


_NOTHING: Final[Mapping[str, _Average]] = {}
