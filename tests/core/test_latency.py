import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onepiece.core.capacity import CapacityModel, Demand, Step, WorkflowShape
from onepiece.core.latency import predict, queue_wait, waiting_share, waits
from onepiece.core.service_times import StageProfile, Timing
from onepiece.core.spans import Span, longest
from tests.core.capacity_parts import loads, make_line, make_stage


@pytest.mark.parametrize(("load", "workers", "share"), [(0.5, 1, 0.5), (1.0, 2, 1 / 3), (2.0, 3, 4 / 9)])
def test_erlang(load: float, workers: int, share: float) -> None:
    """The share that waits, for cases that can be done by hand."""
    assert waiting_share(load, workers) == pytest.approx(share)


@given(load=st.floats(0.01, 3000.0), spare=st.integers(1, 300))
@settings(max_examples=30)
def test_erlang_for_many_workers_is_the_whole_recursion(load: float, spare: int) -> None:
    """Where it begins short of the load it comes to what it comes to from the first worker on."""
    workers = math.floor(load) + spare
    blocked = 1.0
    for count in range(1, workers + 1):
        blocked = load * blocked / (count + load * blocked)
    whole = blocked / (1 - load / workers * (1 - blocked))
    assert waiting_share(load, workers) == pytest.approx(whole, rel=1e-9, abs=1e-99)


@pytest.mark.parametrize("used", [0.1, 0.5, 0.9, 0.99])
def test_one_queue_of_exponential_times_is_exact(used: float) -> None:
    """M/M/1: the time in it is exponential, so its mean gives every quantile."""
    model = make_line("w", make_stage("s", 2.0, spread=2.0))
    (found,) = predict(model, [Demand("w", used / 2.0)], {"s": 1})
    assert found.mean_seconds == pytest.approx(2.0 / (1 - used))
    assert found.p95_seconds == pytest.approx(-math.log(0.05) * found.mean_seconds, rel=1e-6)


@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0])
def test_one_worker_has_the_mean_of_pollaczek_and_khinchine(spread: float) -> None:
    """M/G/1: the mean wait is rate times the second moment, over twice the idle share."""
    found = queue_wait(0.8, 1.0, 1, 1.0, spread**2)
    assert found.mean_seconds == pytest.approx(0.8 * (1 + spread**2) / (2 * 0.2))


def test_nobody_waits_in_the_theorem_s_pipeline() -> None:
    """Equal gaps and equal times: at the full rate K / T_X a request takes T_X + T_Y."""
    model = make_line("w", make_stage("x", 4), make_stage("y", 12))
    (found,) = predict(model, [Demand("w", 0.25, variability=0.0)], {"x": 1, "y": 3})
    assert (found.mean_seconds, found.p95_seconds, found.unloaded_seconds) == (16, 16, 16)


def test_beyond_the_bound_it_takes_for_ever() -> None:
    """A stage that cannot keep up, or is not there, has no finite latency."""
    model = make_line("w", make_stage("x", 4), make_stage("y", 12))
    for instances in ({"x": 1, "y": 2}, {"x": 1}):
        (found,) = predict(model, [Demand("w", 0.2)], instances)
        assert math.isinf(found.mean_seconds)
        assert math.isinf(found.p95_seconds)
        assert found.unloaded_seconds == 16


@given(load=loads(), share=st.floats(0.01, 0.95))
@settings(deadline=None, max_examples=40)
def test_what_waiting_can_do(load: tuple[CapacityModel, list[Demand], dict[str, int]], share: float) -> None:
    """Under load nothing is faster than without, the P95 is no less than the mean, and all is finite."""
    model, mix, instances = load
    scale = share * model.bound(mix, instances).rate / sum(demand.rate for demand in mix)
    demands = [Demand(demand.workflow, demand.rate * scale) for demand in mix]
    for found in predict(model, demands, instances):
        assert found.unloaded_seconds <= found.mean_seconds * (1 + 1e-9)
        assert found.mean_seconds <= found.p95_seconds * 1.05
        assert math.isfinite(found.p95_seconds)


@given(workers=st.integers(1, 40), share=st.floats(0.05, 0.95), variability=st.floats(0.1, 4.0))
@settings(deadline=None)
def test_another_worker_shortens_a_queue(workers: int, share: float, variability: float) -> None:
    """With one more and the same arrivals less is waited."""
    rate = share * workers
    before = queue_wait(rate, 1.0, workers, variability, 1.0)
    after = queue_wait(rate, 1.0, workers + 1, variability, 1.0)
    assert 0 < after.mean_seconds < before.mean_seconds


def test_a_join_has_a_queue_for_each_instance() -> None:
    """What must meet at one instance waits longer than what may go to any."""
    merge = make_stage("merge", 1.0)
    stages = [make_stage("a", 0.1), make_stage("b", 0.1), merge]
    two = (Step("a", "a"), Step("b", "b"))
    joining = WorkflowShape("w", (*two, Step("m", "merge", ("a", "b"), is_join=True)))
    free = WorkflowShape("w", (*two, Step("m", "merge", ("a", "b"))))
    instances, demands = {"a": 4, "b": 4, "merge": 8}, [Demand("w", 6.0)]
    hashed, pooled = (
        waits(CapacityModel.of(stages, [shape]), demands, instances)["merge"].mean_seconds
        for shape in (joining, free)
    )
    assert hashed > 1.5 * pooled


def test_the_longest_branch_counts() -> None:
    """Behind a fork a request takes as long as its slower branch, and only once what both have in common."""
    steps = (Step("s", "s"), Step("l", "l", ("s",)), Step("r", "r", ("s",)), Step("m", "m", ("l", "r")))
    profiles = [make_stage(name, seconds) for name, seconds in (("s", 1), ("l", 2), ("r", 5), ("m", 1))]
    model = CapacityModel.of(profiles, [WorkflowShape("w", steps)])
    (found,) = predict(model, [Demand("w", 0.0)], {})
    assert found.unloaded_seconds == 7


def test_batches_bear_what_single_requests_do_not() -> None:
    """Where requests pile up the stage works in batches, and the wait stays finite."""
    timings = (Timing(1.0), Timing(1.4, batch=8))
    model = CapacityModel.of([StageProfile("s", timings, batch_max=8)], [WorkflowShape.line("w", ["s"])])
    (low,) = predict(model, [Demand("w", 0.1)], {"s": 1})
    (high,) = predict(model, [Demand("w", 3.0)], {"s": 1})
    assert low.mean_seconds < 1.2
    assert 1.5 < high.mean_seconds < 3
    (over,) = predict(model, [Demand("w", 6.0)], {"s": 1})
    assert math.isinf(over.mean_seconds)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95, 0.999])
@pytest.mark.parametrize("count", [1, 4, 40])
def test_a_sum_of_exponential_spans_is_exact(count: int, share: float) -> None:
    """Its quantile is that of the Erlang distribution, whose share follows from a sum of Poisson terms."""
    total = sum((Span.of(f"{n}", 1.0, 1.0, 0.0) for n in range(count)), Span())
    value = total.quantile(share)
    term, below = -value, 0.0
    for place in range(count):
        below += math.exp(term)
        term += math.log(value / (place + 1))
    assert 1 - below == pytest.approx(share, abs=1e-3)


def test_a_sum_of_very_many_is_as_good() -> None:
    """Where the distribution is nearly normal its quantile is, too."""
    total = Span(2000.0, 0.0, {"all of them": 2000**0.5})
    assert total.quantile(0.95) == pytest.approx(2000 + 1.6449 * 2000**0.5 + 0.57, abs=0.02)


def test_constant_spans_are_exact() -> None:
    """What does not vary has one length: the sum along a row, and the longest of several."""
    constant = [Span.of(f"{n}", float(n), 0.0, float(n)) for n in range(1, 4)]
    assert sum(constant, Span()).quantile(0.95) == 6
    assert longest(constant, "join").quantile(0.95) == 3
    assert longest([], "join").mean == 0


def test_the_longest_of_spans_is_near_to_what_is_drawn() -> None:
    """Clark's mean and our P95 of the longer of two that share a part, against a hundred thousand draws."""
    shared, left, right = (Span.of(name, 2.0, 1.0, 1.0) for name in "slr")
    found = longest([shared + left, shared + right], "join")
    random = Random(1)
    drawn = sorted(
        2.0 + random.expovariate(1.0) + max(random.expovariate(1.0), random.expovariate(1.0))
        for _ in range(100_000)
    )
    assert found.mean == pytest.approx(sum(drawn) / len(drawn), rel=0.03)
    assert found.quantile(0.95) == pytest.approx(drawn[95_000], rel=0.06)
