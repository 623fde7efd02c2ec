r"""Capacity: how many requests a second a set of instances serves, and how many instances a rate needs.

For a workflow that is any static graph of stages, several workflows that share stages, and service times
as they were measured (``service_times``)::

    work of a stage      W_s = sum over demands of  rate * visits of s * seconds for each request
    utilisation          W_s / (instances_s * concurrency_s)
    rate of a mix        the largest factor by which all demands can be scaled so that no stage's
                         utilisation exceeds 1:  min over s of  instances_s * concurrency_s / W_s
    instances of a rate  ceil(W_s / (concurrency_s * utilisation))

The known theorem for two stages in a row is a case of it: where X serves K requests at once in T_X
seconds, and Y takes T_Y, then M = ceil(K T_Y / T_X) instances of Y keep the rate K / T_X
(``matching_instances``).

What this promises:

* The rate is an upper bound that no schedule exceeds in the long run, as each request costs each stage its
  seconds. It is reached only with requests waiting; how long they wait is ``latency``'s question.
* More instances never lower it; ``instances_for`` gives the fewest that bear a rate.

What it does not know: the network, which overlaps with computing, and stages that share a device. Where
two instances compute on one device at once, both are slower than measured alone.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Final, Protocol, Self

from attrs import field, frozen, validators

from onepiece.core.inventory import DeviceKind
from onepiece.core.service_times import ANY_SIZE, StageProfile
from onepiece.errors import ConfigError

_ROUNDING: Final = 1e-9
"""Relative: what differs from a whole number by less is that number, as 3 * 0.1 / 0.3 is 1."""


class _Node(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def stage(self) -> str: ...


class _Graph(Protocol):
    """The part of ``onepiece.graph.WorkflowGraph`` that matters here."""

    @property
    def name(self) -> str: ...
    @property
    def nodes(self) -> Sequence[_Node]: ...
    def predecessors(self, node_id: str, /) -> Sequence[str]: ...


@frozen
class Step:
    """One call of a stage in a workflow: it begins when the steps ``after`` which it comes have ended.

    ``is_join``: its inputs come from several places and must meet at one instance.
    """

    name: str
    stage: str
    after: tuple[str, ...] = ()
    is_join: bool = False


@frozen
class WorkflowShape:
    """A workflow's steps, in topological order."""

    name: str
    steps: tuple[Step, ...] = field()

    @steps.validator
    def _are_in_order(self, _attribute: object, steps: tuple[Step, ...]) -> None:
        seen: set[str] = set()
        for step in steps:
            if step.name in seen or not seen.issuperset(step.after):
                raise ConfigError(
                    f"workflow {self.name!r}: step {step.name!r} is there twice, or before one it needs; "
                    "name each step once, behind all that it comes after",
                    workflow=self.name,
                )
            seen.add(step.name)
        if not steps:
            raise ConfigError(f"workflow {self.name!r} has no steps", workflow=self.name)

    @classmethod
    def of(cls, graph: _Graph) -> Self:
        """The shape of a workflow's graph."""
        known = {node.id for node in graph.nodes}
        before = {node.id: tuple(graph.predecessors(node.id)) for node in graph.nodes}
        return cls(
            graph.name,
            tuple(
                Step(
                    node.id,
                    node.stage,
                    tuple(name for name in before[node.id] if name in known),
                    is_join=len(before[node.id]) > 1,
                )
                for node in graph.nodes
            ),
        )

    @classmethod
    def line(cls, name: str, stages: Iterable[str]) -> Self:
        """A workflow whose stages stand in a row."""
        steps: list[Step] = []
        for place, stage in enumerate(stages):
            steps.append(Step(f"{place}", stage, tuple(step.name for step in steps[-1:])))
        return cls(name, tuple(steps))

    @cached_property
    def visits(self) -> Mapping[str, int]:
        """How often a request goes through each stage."""
        return Counter(step.stage for step in self.steps)


@frozen
class Demand:
    """Requests of one workflow and size class: ``rate`` of them a second.

    ``variability`` is the squared coefficient of variation of the time between two arrivals: 0 for equal
    gaps, 1 for independent clients (Poisson), more for bursts.
    """

    workflow: str
    rate: float = field(validator=validators.ge(0))
    size_class: str = ANY_SIZE
    variability: float = field(default=1.0, validator=validators.ge(0))


@frozen
class Bound:
    """The rate that a set of instances cannot exceed, and the stage that sets it."""

    rate: float
    stage: str


@frozen
class CapacityModel:
    """The stages and workflows of a set; see the module's text.

    Raises:
        ConfigError: A workflow has a stage that nothing was measured of.
    """

    stages: Mapping[str, StageProfile]
    workflows: Mapping[str, WorkflowShape] = field()

    @classmethod
    def of(cls, profiles: Iterable[StageProfile], workflows: Iterable[WorkflowShape]) -> Self:
        """A model of these."""
        return cls({each.stage: each for each in profiles}, {each.name: each for each in workflows})

    @workflows.validator
    def _stages_are_known(self, _attribute: object, workflows: Mapping[str, WorkflowShape]) -> None:
        for workflow in workflows.values():
            missing = sorted(workflow.visits.keys() - self.stages.keys())
            if missing:
                raise ConfigError(
                    f"nothing was measured of {', '.join(missing)}, which workflow {workflow.name!r} needs; "
                    "profile that workflow",
                    workflow=workflow.name,
                )

    def shape(self, workflow: str) -> WorkflowShape:
        """The workflow of this name; raises ``ConfigError`` listing the known ones."""
        found = self.workflows.get(workflow)
        if found is None:
            known = ", ".join(sorted(self.workflows)) or "none"
            raise ConfigError(
                f"there is no workflow {workflow!r} in the model; there are: {known}", workflow=workflow
            )
        return found

    def work(self, demands: Iterable[Demand]) -> dict[str, float]:
        """How many workers of each stage these demands keep busy; stages without work are left out."""
        found: dict[str, float] = {}
        for demand in demands:
            if demand.rate == 0:
                continue
            for stage, visits in self.shape(demand.workflow).visits.items():
                seconds = self.stages[stage].best(demand.size_class).request_seconds
                found[stage] = found.get(stage, 0.0) + demand.rate * visits * seconds
        return found

    def workers(self, stage: str, instances: Mapping[str, int]) -> int:
        """How many batches these instances of a stage work on at once."""
        return instances.get(stage, 0) * self.stages[stage].concurrency

    def utilisation(self, demands: Iterable[Demand], instances: Mapping[str, int]) -> dict[str, float]:
        """The share of time that each stage's workers are busy; above 1 it cannot keep up.

        A stage with work and no instance has an infinite one.
        """
        busy = self.work(demands)
        return {
            stage: work / workers if (workers := self.workers(stage, instances)) else math.inf
            for stage, work in busy.items()
        }

    def bound(self, mix: Sequence[Demand], instances: Mapping[str, int]) -> Bound:
        """The most requests a second, of all demands together and in the proportions of ``mix``.

        Raises:
            ConfigError: The mix has no requests, or a workflow or size class that the model does not know.
        """
        total = sum(demand.rate for demand in mix)
        busiest = max(
            ((used, stage) for stage, used in self.utilisation(mix, instances).items()), default=None
        )
        if busiest is None:
            raise ConfigError("the demands have no requests; give at least one a rate above 0")
        used, stage = busiest
        return Bound(total / used, stage)

    def instances_for(self, demands: Sequence[Demand], utilisation_max: float = 1.0) -> dict[str, int]:
        """The fewest instances that bear these demands, none busier than ``utilisation_max``.

        Every stage of a workflow that is named gets one, even where its rate is 0.
        """
        assert 0 < utilisation_max <= 1
        found = {stage: 1 for demand in demands for stage in self.shape(demand.workflow).visits}
        for stage, work in self.work(demands).items():
            found[stage] = max(1, _ceil(work / (self.stages[stage].concurrency * utilisation_max)))
        return found

    def devices(self, instances: Mapping[str, int]) -> int:
        """How many GPUs the instances take, each for itself; those on processors take none."""
        return sum(
            count * self.stages[stage].devices
            for stage, count in instances.items()
            if self.stages[stage].kind is DeviceKind.GPU
        )


def matching_instances(at_once: int, seconds: float, next_seconds: float) -> int:
    """The theorem: instances of the next stage so that none waits, ceil(K T_Y / T_X).

    Args:
        at_once: K, how many requests the stage serves at once.
        seconds: T_X, how long it takes for one.
        next_seconds: T_Y, how long the next stage takes.
    """
    assert at_once >= 1
    assert seconds > 0
    assert next_seconds > 0
    return _ceil(at_once * next_seconds / seconds)


def _ceil(value: float) -> int:
    return math.ceil(value - _ROUNDING * max(1.0, value))
