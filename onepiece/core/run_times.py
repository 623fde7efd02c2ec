"""Run times: the mean and spread of each stage's runs by size class, from counters that actors report.

What it promises:

* They are those that were measured: of the latest ``SAMPLES_MAX`` runs or so of a stage, all of its actors
  together; older ones fade. Of each size class the same by itself, ``CLASSES_MAX`` a stage at most.
* Counters grow for as long as an actor lives, so that a report that is lost loses nothing, and one that comes
  late or twice counts nothing twice.
* A class that a stage has not finished a run of takes the time of the whole stage, all classes together; a
  stage that has not finished any run has none.
* It is bounded by the actors and stages there are.
"""

import math
from collections.abc import Collection
from typing import Final

from attrs import define, evolve, field, frozen

from onepiece.core.inventory import ActorReport, RunSums, StageWork
from onepiece.core.service_times import ANY_SIZE, Timing

SAMPLES_MAX: Final = 256
CLASSES_MAX: Final = 64
_SECONDS_MIN: Final = 1e-6


@frozen
class _Sums:
    """Of runs, their seconds and the squares of these; the older ones count less."""

    runs: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0

    def with_more(self, before: RunSums, now: RunSums) -> "_Sums":
        """What an actor has done since, added."""
        more = now.runs - before.runs
        total = self.runs + more
        is_full = total > SAMPLES_MAX and self.runs > 0
        fade = max(0.0, min(1.0, (SAMPLES_MAX - more) / self.runs)) if is_full else 1.0
        return _Sums(
            self.runs * fade + more,
            self.seconds * fade + now.seconds - before.seconds,
            self.squares * fade + now.squares - before.squares,
        )

    def timing(self) -> Timing:
        """Mean and spread."""
        mean = self.seconds / self.runs
        spread = math.sqrt(max(0.0, self.squares / self.runs - mean * mean))
        return Timing(max(mean, _SECONDS_MIN), spread, samples=max(1, round(self.runs)))


@define(eq=False)
class RunTimes:
    """See the module's text."""

    _work: dict[int, StageWork] = field(factory=dict)
    """By actor, as last reported."""
    _sums: dict[str, dict[str, _Sums]] = field(factory=dict)
    """By stage and class; ``ANY_SIZE`` is all of them together."""

    def take(self, report: ActorReport) -> None:
        """What an actor has done so far."""
        work, before = report.work, self._work.get(report.actor_id, StageWork())
        if work.runs < before.runs:
            return  # it comes late
        self._work[report.actor_id] = work
        self._add(report.stage, ANY_SIZE, before.all_runs, work.all_runs)
        for size_class, runs in work.classes.items():
            self._add(report.stage, size_class, before.classes.get(size_class, RunSums()), runs)

    def _add(self, stage: str, size_class: str, before: RunSums, now: RunSums) -> None:
        classes = self._sums.setdefault(stage, {})
        is_new = size_class not in classes
        if now.runs <= before.runs or now.seconds < before.seconds or (is_new and len(classes) > CLASSES_MAX):
            return
        classes[size_class] = classes.get(size_class, _Sums()).with_more(before, now)

    def timing(self, stage: str, size_class: str = ANY_SIZE) -> Timing | None:
        """What a run of the class takes; None if nothing was measured of the stage."""
        classes = self._sums.get(stage, {})
        sums = classes.get(size_class) or classes.get(ANY_SIZE)
        return None if sums is None else evolve(sums.timing(), size_class=size_class)

    def classes(self) -> frozenset[str]:
        """Those of which any stage has finished a run."""
        return frozenset(size_class for classes in self._sums.values() for size_class in classes)

    def keep(self, actor_ids: Collection[int], stages: Collection[str]) -> None:
        """Forget the others."""
        self._work = {actor_id: work for actor_id, work in self._work.items() if actor_id in actor_ids}
        self._sums = {stage: classes for stage, classes in self._sums.items() if stage in stages}

    def check_invariants(self) -> None:
        """Nothing was counted backwards."""
        assert all(sums.runs >= 0 for classes in self._sums.values() for sums in classes.values())
