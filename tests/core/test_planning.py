import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from onepiece.core.capacity import CapacityModel, Demand, WorkflowShape
from onepiece.core.inventory import DeviceKind
from onepiece.core.latency import predict
from onepiece.core.planning import monolithic, plan_for_devices, plan_for_rate, scaled_seconds
from onepiece.core.service_times import StageProfile, Timing
from onepiece.errors import ConfigError
from tests.core.capacity_parts import GIB, loads, make_line, make_stage

_PIPELINE = make_line("w", make_stage("x", 4.0, spread=0.4, gib=2), make_stage("y", 12.0, spread=1.0, gib=30))


def test_a_rate_gets_the_fewest_instances() -> None:
    """No stage is busier than is allowed, and with one less it would be."""
    plan = plan_for_rate(_PIPELINE, [Demand("w", 1.0)], utilisation_max=0.8)
    assert plan.instances == {"x": 5, "y": 15}
    assert plan.devices == 20
    assert plan.device_seconds == 20
    assert plan.bound.rate == pytest.approx(1.25)


def test_a_p95_gets_what_shortens_it_most() -> None:
    """Instances are added until it is met, and no fewer devices would have met it."""
    loose = plan_for_rate(_PIPELINE, [Demand("w", 1.0)], utilisation_max=1.0)
    tight = plan_for_rate(_PIPELINE, [Demand("w", 1.0)], p95_seconds=20.0, utilisation_max=1.0)
    assert loose.p95_seconds > 20 >= tight.p95_seconds
    assert tight.devices > loose.devices
    for first in range(4, tight.devices - 12):
        fewer = {"x": first, "y": tight.devices - 1 - first}
        (latency,) = predict(_PIPELINE, [Demand("w", 1.0)], fewer)
        assert latency.p95_seconds > 20


def test_what_is_out_of_reach_says_why() -> None:
    """More instances do not make a stage faster, and fewer GPUs than stages are too few."""
    with pytest.raises(ConfigError, match=r"'w': its stages alone take 1\d\.\d s where nobody waits"):
        plan_for_rate(_PIPELINE, [Demand("w", 1.0)], p95_seconds=10.0)
    with pytest.raises(ConfigError, match="1 GPUs are fewer than one instance of each stage needs: 2"):
        plan_for_devices(_PIPELINE, [Demand("w", 1.0)], 1)
    with pytest.raises(ConfigError, match="give at least one workflow a rate above 0"):
        plan_for_rate(_PIPELINE, [Demand("w", 0.0)])
    on_cpu = make_line("w", make_stage("x", 1.0, kind=DeviceKind.CPU))
    with pytest.raises(ConfigError, match="no stage runs on a GPU"):
        plan_for_devices(on_cpu, [Demand("w", 1.0)], 4)


def _best_by_trying(model: CapacityModel, mix: list[Demand], devices: int) -> float:
    """The highest bound of all ways to give out the devices."""
    stages = sorted(model.work(mix))
    best = 0.0

    def give(place: int, left: int, instances: dict[str, int]) -> None:
        nonlocal best
        if place == len(stages):
            best = max(best, model.bound(mix, instances).rate)
            return
        for count in range(1, left - (len(stages) - place - 1) + 1):
            give(place + 1, left - count, {**instances, stages[place]: count})

    give(0, devices, {})
    return best


@given(load=loads(), extra=st.integers(0, 5))
@settings(deadline=None, max_examples=60)
def test_devices_get_the_highest_rate(
    load: tuple[CapacityModel, list[Demand], dict[str, int]], extra: int
) -> None:
    """For few devices the outcome is that of trying every way to give them out."""
    model, mix, _ = load
    used = len(model.work(mix))
    assume(used > 0)
    devices = used + extra
    plan = plan_for_devices(model, mix, devices, utilisation_max=1.0 - 1e-9)
    assert plan.devices <= devices
    assert plan.bound.rate == pytest.approx(_best_by_trying(model, mix, devices))
    assert plan.rate == pytest.approx(plan.bound.rate)


def test_devices_with_a_p95_get_the_rate_that_meets_it() -> None:
    """The P95 bounds the rate where it is the tighter bound."""
    free = plan_for_devices(_PIPELINE, [Demand("w", 1.0)], 8, utilisation_max=0.99)
    bound = plan_for_devices(_PIPELINE, [Demand("w", 1.0)], 8, p95_seconds=20.0, utilisation_max=0.99)
    assert bound.rate < free.rate
    assert bound.p95_seconds == pytest.approx(20.0, rel=1e-3)


def test_the_monolithic_alternative() -> None:
    """One process holds all weights, and each request takes the sum of all stages on all its devices."""
    times = (Timing(2.0, 0.3), Timing(3.0, 0.4, batch=2))
    wide = StageProfile("wide", (Timing(8.0, devices=4),), devices=4, memory_bytes=30 * GIB)
    stages = [StageProfile("a", times, memory_bytes=10 * GIB, batch_max=2), wide]
    model = monolithic(CapacityModel.of(stages, [WorkflowShape.line("w", ["a", "wide", "a"])]))
    (joined,) = model.stages.values()
    assert joined.best("").mean_seconds == 12
    assert joined.best("").spread_seconds == pytest.approx(0.3 * 2**0.5)
    assert (joined.devices, joined.memory_bytes) == (4, 40 * GIB)
    assert model.devices(model.instances_for([Demand("w", 1.0)])) == 48


def test_shared_stages_pay_where_each_workflow_would_hold_its_own() -> None:
    """Many workflows of little load share the encoder, where as processes each needs a GPU."""
    encode = make_stage("encode", 0.1)
    heads = [make_stage(f"head{n}", 0.1) for n in range(4)]
    shapes = [WorkflowShape.line(f"w{n}", ["encode", f"head{n}"]) for n in range(4)]
    model = CapacityModel.of([encode, *heads], shapes)
    demands = [Demand(shape.name, 0.5) for shape in shapes]
    assert plan_for_rate(model, demands).instances["encode"] == 1
    assert plan_for_rate(monolithic(model), demands).devices == 4


def test_a_faster_stage_needs_fewer() -> None:
    """Scaling a stage's seconds scales what it needs."""
    faster = scaled_seconds(_PIPELINE.stages["y"], 0.5)
    model = CapacityModel.of([_PIPELINE.stages["x"], faster], _PIPELINE.workflows.values())
    assert plan_for_rate(model, [Demand("w", 1.0)], utilisation_max=0.8).instances == {"x": 5, "y": 8}


def test_no_common_size_is_an_error() -> None:
    """Stages that were measured in different size classes cannot be joined."""
    stages = [StageProfile(name, (Timing(1.0, size_class=name),)) for name in ("a", "b")]
    model = CapacityModel.of(stages, [WorkflowShape.line("w", ["a", "b"])])
    with pytest.raises(ConfigError, match="no size class in common"):
        monolithic(model)
