"""Finish: when a request that comes now is likely to be done, by what is in the set.

For whoever lets requests in: quick enough for each of them, and right about where the work is. A request is
followed along its workflow. At each stage it finds what is there now, and what is before it at earlier
stages of its own way and will come there, too; by the time that it arrives, the stage has worked that off
for as long as the request was on its way. So a queue in front of one stage is waited for once, and work that
waits elsewhere, off the request's way, is not mistaken for work ahead.

Service times are means, and whoever is being served is counted as if just begun: it is late by half a
service time where few are there, and has no opinion on chance. Instances of a stage count as one queue.
"""

import math
from collections.abc import Mapping
from typing import TypeAlias

from attrs import define, field, frozen

from onepiece.core.capacity import CapacityModel

Present: TypeAlias = Mapping[str, Mapping[tuple[str, str], int]]
"""By stage: how many stage tasks wait or run there, by workflow and size class."""


@frozen
class _WayStep:
    """A step of a request's way; ``sources`` are the stages whose tasks are ahead of it there."""

    stage: str
    after: tuple[int, ...]
    sources: tuple[str, ...]
    seconds: float


@define(eq=False)
class FinishModel:
    """Predictions by the service times of ``model``; remembers each workflow's way."""

    model: CapacityModel
    _ways: dict[tuple[str, str], tuple[_WayStep, ...]] = field(factory=dict)
    _seconds: dict[tuple[str, str, str], float] = field(factory=dict)
    """Of a worker for each request, by stage, workflow and size class; 0 where it does not come by."""

    def seconds(
        self, workflow: str, size_class: str, instances: Mapping[str, int], present: Present
    ) -> float:
        """How long a request that comes now is likely to take; infinite where a stage has no instance.

        Raises:
            ConfigError: The workflow or the size class is not known to the model.
        """
        way = self._ways.get((workflow, size_class)) or self._way(workflow, size_class)
        ends: list[float] = []
        for step in way:
            workers = self.model.workers(step.stage, instances)
            if workers == 0:
                return math.inf
            arrives = max((ends[place] for place in step.after), default=0.0)
            work = 0.0
            for source in step.sources:
                for kind, count in present.get(source, {}).items():
                    if count:
                        work += count * self._of_one(step.stage, kind)
            ends.append(max(arrives, work / workers) + step.seconds)
        return max(ends)

    def _of_one(self, stage: str, kind: tuple[str, str]) -> float:
        key = (stage, *kind)
        found = self._seconds.get(key)
        if found is None:
            workflow = self.model.workflows.get(kind[0])
            comes_by = workflow is not None and stage in workflow.visits
            found = self.model.stages[stage].best(kind[1]).request_seconds if comes_by else 0.0
            self._seconds[key] = found
        return found

    def _way(self, workflow: str, size_class: str) -> tuple[_WayStep, ...]:
        steps = self.model.shape(workflow).steps
        places = {step.name: place for place, step in enumerate(steps)}
        stages: list[frozenset[str]] = []
        found = []
        for step in steps:
            after = tuple(places[name] for name in step.after)
            stages.append(frozenset({step.stage}).union(*(stages[place] for place in after)))
            seconds = self.model.stages[step.stage].timing(size_class).mean_seconds
            found.append(_WayStep(step.stage, after, tuple(sorted(stages[-1])), seconds))
        way = self._ways[workflow, size_class] = tuple(found)
        return way
