"""Planning: how many instances of each stage, for a rate or for a number of GPUs, before buying any.

Built on ``capacity`` and ``latency``; each instance has its devices for itself. What it promises:

* For a rate: the fewest instances with which no stage is busier than ``utilisation_max``; then, where a
  P95 is wanted, one by one those that shorten it most for each device, until it is met.
* For a number of GPUs: the instances with the highest rate that fit, exactly; then the rate at which no stage
  is busier than ``utilisation_max``, or the P95 is met, whichever comes first.
* What cannot be met is an error that says by how much and why: more instances shorten only waiting, never
  the stages' own seconds.

The *monolithic alternative* is a process for each workflow that holds every stage's weights and as many
devices as its widest stage, and takes a request through all stages in turn: the sum of their times. It is
planned by the same rules.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from attrs import evolve, frozen

from onepiece.core.capacity import Bound, CapacityModel, Demand, WorkflowShape
from onepiece.core.inventory import DeviceKind
from onepiece.core.latency import Latency, predict
from onepiece.core.service_times import StageProfile, Timing
from onepiece.errors import ConfigError

UTILISATION_MAX: Final = 0.85
WORKERS_MAX: Final = 1_000_000
"""Of one stage, in a plan."""
_NEARLY_FULL: Final = 1 - 1e-6
_ROUNDS_MAX: Final = 2_000
_BISECTIONS: Final = 60


@frozen
class Plan:
    """Instances of each stage, and what is to be expected of them under ``demands``."""

    model: CapacityModel
    demands: tuple[Demand, ...]
    instances: Mapping[str, int]
    bound: Bound
    latencies: tuple[Latency, ...]

    @property
    def rate(self) -> float:
        """Requests a second of all demands together."""
        return sum(demand.rate for demand in self.demands)

    @property
    def devices(self) -> int:
        """GPUs; where all stages run on processors, instances of these."""
        return self.model.devices(self.instances) or sum(self.instances.values())

    @property
    def utilisation(self) -> Mapping[str, float]:
        """By stage."""
        return self.model.utilisation(self.demands, self.instances)

    @property
    def device_seconds(self) -> float:
        """What one request costs: seconds of a device, idle ones included."""
        return self.devices / self.rate

    @property
    def p95_seconds(self) -> float:
        """Of the demand that has the longest."""
        return max(latency.p95_seconds for latency in self.latencies)


def plan_for_rate(
    model: CapacityModel,
    demands: Sequence[Demand],
    p95_seconds: float | None = None,
    utilisation_max: float = UTILISATION_MAX,
) -> Plan:
    """The fewest instances for these demands.

    Raises:
        ConfigError: The P95 is out of reach with any number of them, or something was not measured.
    """
    _check_rates(demands)
    if p95_seconds is not None:
        _check_reachable(model, demands, p95_seconds)
    plan = _planned(model, demands, model.instances_for(demands, utilisation_max))
    for _ in range(_ROUNDS_MAX):
        if p95_seconds is None or plan.p95_seconds <= p95_seconds:
            return plan
        full = [stage for stage, used in plan.utilisation.items() if used > _NEARLY_FULL]
        if math.isinf(plan.p95_seconds) and full:
            more = {stage: plan.instances[stage] + 1 for stage in full}
            plan = _planned(model, demands, {**plan.instances, **more})
            continue
        gain, better = max((_with_more(plan, s) for s in model.work(demands)), key=lambda each: each[0])
        if gain <= 0:
            break
        plan = better
    raise ConfigError(
        f"a P95 of {p95_seconds} s is out of reach at this rate: with {plan.devices} devices it is "
        f"{plan.p95_seconds:.3g} s, and more gain nothing. Lower the rate, or allow more time"
    )


def plan_for_devices(
    model: CapacityModel,
    mix: Sequence[Demand],
    devices: int,
    p95_seconds: float | None = None,
    utilisation_max: float = UTILISATION_MAX,
) -> Plan:
    """The highest rate, in the proportions of ``mix``, that this many GPUs bear.

    Raises:
        ConfigError: They are fewer than one instance of each stage needs, the P95 is out of reach, or
            something was not measured.
    """
    _check_rates(mix)
    instances = _best_instances(model, mix, devices)
    bound = model.bound(mix, instances).rate
    rate = utilisation_max * bound
    if p95_seconds is not None:
        _check_reachable(model, mix, p95_seconds)
        rate = _rate_within(model, mix, instances, p95_seconds, rate)
    return _planned(model, _scaled(mix, rate), instances)


def monolithic(model: CapacityModel) -> CapacityModel:
    """The same workflows, each in processes that hold all its stages."""
    profiles, shapes = [], []
    for workflow in model.workflows.values():
        profile = _joined(workflow, [model.stages[step.stage] for step in workflow.steps])
        profiles.append(profile)
        shapes.append(WorkflowShape.line(workflow.name, [profile.stage]))
    return CapacityModel.of(profiles, shapes)


def scaled_seconds(profile: StageProfile, factor: float) -> StageProfile:
    """The stage if it took ``factor`` times as long."""
    timings = tuple(
        evolve(
            timing,
            mean_seconds=timing.mean_seconds * factor,
            spread_seconds=timing.spread_seconds * factor,
        )
        for timing in profile.timings
    )
    return evolve(profile, timings=timings)


def _joined(workflow: WorkflowShape, visited: Sequence[StageProfile]) -> StageProfile:
    """One stage that does what all do; of batches and sizes that each was measured in."""
    known = [{(t.size_class, t.batch) for t in each.timings if t.devices == each.devices} for each in visited]
    held = {each.stage: each for each in visited}.values()
    devices = max(each.devices for each in held)
    timings = []
    for size_class, batch in sorted(set.intersection(*known)):
        parts = [each.timing(size_class, batch) for each in visited]
        timings.append(
            Timing(
                sum(part.mean_seconds for part in parts),
                math.sqrt(sum(part.spread_seconds**2 for part in parts)),
                size_class,
                batch,
                devices,
                min(part.samples for part in parts),
            )
        )
    if not timings:
        raise ConfigError(
            f"the stages of workflow {workflow.name!r} have no size class in common; profile all of them "
            "with the same one",
            workflow=workflow.name,
        )
    on_gpu = any(each.kind is DeviceKind.GPU for each in held)
    return StageProfile(
        f"all of {workflow.name}",
        tuple(timings),
        kind=DeviceKind.GPU if on_gpu else DeviceKind.CPU,
        devices=devices,
        batch_max=min(each.batch_max for each in held),
        memory_bytes=sum(each.memory_bytes for each in held),
        load_seconds=sum(each.load_seconds for each in held),
        output_bytes=visited[-1].output_bytes,
    )


def _planned(model: CapacityModel, demands: Sequence[Demand], instances: Mapping[str, int]) -> Plan:
    for stage in instances:
        if (workers := model.workers(stage, instances)) > WORKERS_MAX:
            raise ConfigError(
                f"stage {stage} would need {workers:.3g} workers, and a plan has at most {WORKERS_MAX} of a "
                "stage; lower the rate, or the stage's concurrency"
            )
    return Plan(
        model,
        tuple(demands),
        instances,
        model.bound(demands, instances),
        predict(model, demands, instances),
    )


def _with_more(plan: Plan, stage: str) -> tuple[float, Plan]:
    """What more instances of a stage gain, in seconds of the P95 for each device, and the plan with them."""
    more = max(1, plan.instances[stage] // 20)
    found = _planned(plan.model, plan.demands, {**plan.instances, stage: plan.instances[stage] + more})
    gain = plan.p95_seconds - found.p95_seconds
    return gain / (more * plan.model.stages[stage].devices), found


def _check_rates(demands: Sequence[Demand]) -> None:
    if not any(demand.rate > 0 for demand in demands):
        raise ConfigError("there is nothing to plan for: give at least one workflow a rate above 0")


def _check_reachable(model: CapacityModel, demands: Sequence[Demand], p95_seconds: float) -> None:
    for alone in predict(model, [evolve(demand, rate=0.0) for demand in demands], {}):
        if alone.p95_seconds > p95_seconds:
            raise ConfigError(
                f"a P95 of {p95_seconds} s is out of reach for workflow {alone.workflow!r}: its stages "
                f"alone take {alone.p95_seconds:.3g} s where nobody waits. Allow more time, or make its "
                "stages faster (fewer steps, more devices for each instance)",
                workflow=alone.workflow,
            )


def _best_instances(model: CapacityModel, mix: Sequence[Demand], devices: int) -> dict[str, int]:
    """Those with the highest rate on so many devices."""
    fewest = model.instances_for([evolve(demand, rate=0.0) for demand in mix])
    if model.devices(fewest) > devices:
        each = ", ".join(
            f"{stage} {model.stages[stage].devices}"
            for stage in fewest
            if model.stages[stage].kind is DeviceKind.GPU
        )
        raise ConfigError(
            f"{devices} GPUs are fewer than one instance of each stage needs: {model.devices(fewest)} "
            f"({each}). Give more, or let stages run on processors"
        )
    high = 1.0
    while model.devices(model.instances_for(_scaled(mix, high))) <= devices:
        high *= 2
        if high > 1e12:
            raise ConfigError("no stage runs on a GPU, so that a number of GPUs sets no rate; give a rate")
    low = 0.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if model.devices(model.instances_for(_scaled(mix, middle))) <= devices:
            low = middle
        else:
            high = middle
    return model.instances_for(_scaled(mix, low))


def _rate_within(
    model: CapacityModel,
    mix: Sequence[Demand],
    instances: Mapping[str, int],
    p95_seconds: float,
    rate: float,
) -> float:
    """The highest rate up to ``rate`` at which no demand's P95 exceeds the bound."""

    def is_met(rate: float) -> bool:
        found = predict(model, _scaled(mix, rate), instances)
        return all(each.p95_seconds <= p95_seconds for each in found)

    low, high = 0.0, rate
    if is_met(high):
        return high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low


def _scaled(mix: Sequence[Demand], rate: float) -> list[Demand]:
    """The mix at this rate of all together."""
    total = sum(demand.rate for demand in mix)
    return [evolve(demand, rate=demand.rate * rate / total) for demand in mix]
