import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from onepiece.core.capacity import CapacityModel, Demand, Step, WorkflowShape, matching_instances
from onepiece.core.inventory import DeviceKind
from onepiece.core.service_times import Mode, StageProfile, Timing
from onepiece.errors import ConfigError
from stages.synthetic import diamond
from tests.core.capacity_parts import greedy_seconds, loads, make_line, make_stage


@pytest.mark.parametrize(("at_once", "instances", "rate"), [(1, 3, 1 / 4), (2, 6, 1 / 2)])
def test_the_two_worked_examples(at_once: int, instances: int, rate: float) -> None:
    """Stages of 4 s and 12 s: K = 1 wants 3 of the second and gives a result every 4 s, K = 2 six and 2 s."""
    assert matching_instances(at_once, 4, 12) == instances
    model = make_line("w", make_stage("x", 4, concurrency=at_once), make_stage("y", 12))
    assert model.instances_for([Demand("w", at_once / 4)]) == {"x": 1, "y": instances}
    assert model.bound([Demand("w", 1)], {"x": 1, "y": instances}).rate == pytest.approx(rate)


@given(at_once=st.integers(1, 50), first=st.integers(1, 600), second=st.integers(1, 600))
@settings(deadline=None)
def test_the_theorem(at_once: int, first: int, second: int) -> None:
    """M = ceil(K T_Y / T_X), with which the rate is K / T_X and with one less it is below."""
    seconds, next_seconds = first / 10, second / 10
    wanted = matching_instances(at_once, seconds, next_seconds)
    assert wanted == -(-at_once * second // first)
    model = make_line("w", make_stage("x", seconds), make_stage("y", next_seconds))
    demand = [Demand("w", at_once / seconds)]
    assert model.instances_for(demand) == {"x": at_once, "y": wanted}
    assert model.bound(demand, {"x": at_once, "y": wanted}).rate == pytest.approx(at_once / seconds)
    if wanted > 1:
        assert model.bound(demand, {"x": at_once, "y": wanted - 1}).rate < at_once / seconds


@given(load=loads(), rounds=st.integers(1, 6))
@settings(deadline=None, max_examples=60)
def test_no_schedule_is_faster_than_the_bound(
    load: tuple[CapacityModel, list[Demand], dict[str, int]], rounds: int
) -> None:
    """However requests in these proportions are scheduled, they end no faster than the model says."""
    model, mix, instances = load
    requests = [demand.workflow for demand in mix for _ in range(int(demand.rate))] * rounds
    rate = len(requests) / greedy_seconds(model, requests, instances)
    assert rate <= model.bound(mix, instances).rate * (1 + 1e-9)


def test_the_bound_is_reached() -> None:
    """A pipeline with requests waiting comes within a few percent of it."""
    model = make_line("w", make_stage("x", 4), make_stage("y", 12))
    instances = {"x": 1, "y": 3}
    rate = 200 / greedy_seconds(model, ["w"] * 200, instances)
    assert 0.97 < rate / model.bound([Demand("w", 1)], instances).rate <= 1


@given(load=loads(), data=st.data())
@settings(deadline=None)
def test_more_instances_never_lower_the_rate(
    load: tuple[CapacityModel, list[Demand], dict[str, int]], data: st.DataObject
) -> None:
    """One more of any stage does no harm, and one more of the stage that limits it helps if it is alone."""
    model, mix, instances = load
    before = model.bound(mix, instances)
    stage = data.draw(st.sampled_from(sorted(instances)))
    more = model.bound(mix, instances | {stage: instances[stage] + 1})
    assert more.rate >= before.rate
    used = model.utilisation(mix, instances)
    if stage == before.stage and sum(each > 0.99 * used[stage] for each in used.values()) == 1:
        assert more.rate > before.rate


@given(load=loads())
@settings(deadline=None)
def test_instances_are_the_fewest(load: tuple[CapacityModel, list[Demand], dict[str, int]]) -> None:
    """What a rate needs bears it, and no stage could do with one less."""
    model, mix, _ = load
    total = sum(demand.rate for demand in mix)
    wanted = model.instances_for(mix)
    assert model.bound(mix, wanted).rate >= total * (1 - 1e-6)
    for stage in model.work(mix):
        if wanted[stage] > 1:
            assert model.bound(mix, wanted | {stage: wanted[stage] - 1}).rate < total


def test_shared_stages_bear_the_work_of_all() -> None:
    """A stage that two workflows use counts the demand of both, each at its rate and size."""
    times = (Timing(1.0, size_class="small"), Timing(3.0, size_class="large"))
    model = CapacityModel.of(
        [StageProfile("encode", times), StageProfile("draw", times), StageProfile("film", times)],
        [WorkflowShape.line("picture", ["encode", "draw"]), WorkflowShape.line("video", ["encode", "film"])],
    )
    demands = [Demand("picture", 2.0, "small"), Demand("video", 1.0, "large")]
    assert model.work(demands) == {"encode": 5.0, "draw": 2.0, "film": 3.0}
    assert model.instances_for(demands) == {"encode": 5, "draw": 2, "film": 3}
    bound = model.bound(demands, {"encode": 2, "draw": 2, "film": 3})
    assert bound.stage == "encode"
    assert bound.rate == pytest.approx(3.0 * 2 / 5)


def test_a_stage_that_is_visited_twice_works_twice() -> None:
    """A workflow may call one stage several times."""
    model = CapacityModel.of([make_stage("s", 0.5)], [WorkflowShape.line("w", ["s", "s", "s"])])
    assert model.work([Demand("w", 2.0)]) == {"s": 3.0}


def test_batches_raise_the_rate_up_to_the_best() -> None:
    """An instance is worth what its best batch gives, and no more than what may be formed."""
    timings = (Timing(1.0), Timing(1.6, batch=4), Timing(4.0, batch=8))
    stage = StageProfile("s", timings, batch_max=8)
    assert stage.best("").batch == 4
    assert stage.requests_per_second("") == pytest.approx(2.5)
    assert evolve(stage, batch_max=2).requests_per_second("") == pytest.approx(2 / 1.2)
    assert evolve(stage, batch_max=1).requests_per_second("") == 1
    assert evolve(stage, batch_max=64).best("").batch == 4


@given(
    seconds=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    step=st.integers(1, 4),
    batch_max=st.integers(1, 30),
)
@settings(deadline=None)
def test_no_batch_is_better_than_the_best(seconds: list[int], step: int, batch_max: int) -> None:
    """The best batch is at least as good as every batch that may be formed."""
    timings = tuple(Timing(each / 10, batch=1 + step * place) for place, each in enumerate(seconds))
    stage = StageProfile("s", timings, batch_max=batch_max)
    limit = stage.batch_limit("")
    assert limit == min(batch_max, timings[-1].batch)
    best = stage.best("").request_seconds
    assert best <= min(stage.timing("", batch).request_seconds for batch in range(1, limit + 1)) + 1e-12


def test_both_modes() -> None:
    """Workers of one instance each take a request of their own; devices together are faster with one."""
    alone = StageProfile("s", (Timing(8.0), Timing(2.5, devices=4)))
    assert alone.mode is Mode.INDIVIDUAL
    assert evolve(alone, concurrency=4).requests_per_second("") == pytest.approx(0.5)
    together = alone.on(4)
    assert together.mode is Mode.COLLABORATION
    assert together.requests_per_second("") == pytest.approx(0.4)
    model = CapacityModel.of([together], [WorkflowShape.line("w", ["s"])])
    assert model.devices({"s": 3}) == 12


def test_processors_are_no_gpus() -> None:
    """A stage on processors is counted in instances, not in GPUs."""
    model = make_line("w", make_stage("mux", 1, kind=DeviceKind.CPU), make_stage("s", 1))
    assert model.devices({"mux": 5, "s": 2}) == 2


def test_the_shape_is_that_of_the_graph() -> None:
    """A drawn workflow gives its steps, what they come after, and which of them join."""
    shape = WorkflowShape.of(diamond.graph)
    assert [(step.name, step.after) for step in shape.steps] == [
        ("split", ()),
        ("left", ("split",)),
        ("right", ("split",)),
        ("merge", ("left", "right")),
    ]
    assert shape.steps[-1].is_join
    assert sum(shape.visits.values()) == 4


def test_errors_say_what_is_missing() -> None:
    """What was not measured is named, with what was."""
    stage = StageProfile("s", (Timing(1.0, size_class="480p"),))
    with pytest.raises(ConfigError, match=r"no timing for the size class '720p', only for '480p'"):
        stage.best("720p")
    with pytest.raises(ConfigError, match="measured on 1 devices, not on 8"):
        stage.on(8).best("480p")
    with pytest.raises(ConfigError, match="in batches of 1 to 1 requests, not of 2"):
        stage.timing("480p", 2)
    with pytest.raises(ConfigError, match="no timing; profile its workflow"):
        StageProfile("s", ())
    with pytest.raises(ConfigError, match="two timings of one size class"):
        StageProfile("s", (Timing(1.0), Timing(2.0)))
    with pytest.raises(ConfigError, match="in Collaboration Mode it is 1"):
        StageProfile("s", (Timing(1.0),), devices=2, concurrency=2)
    with pytest.raises(ConfigError, match="nothing was measured of t, which workflow 'w' needs"):
        CapacityModel.of([stage], [WorkflowShape.line("w", ["s", "t"])])
    model = CapacityModel.of([stage], [WorkflowShape.line("w", ["s"])])
    with pytest.raises(ConfigError, match="no workflow 'v' in the model; there are: w"):
        model.work([Demand("v", 1.0)])
    with pytest.raises(ConfigError, match="no requests; give at least one a rate above 0"):
        model.bound([Demand("w", 0.0)], {"s": 1})
    with pytest.raises(ConfigError, match="there twice, or before one it needs"):
        WorkflowShape("w", (Step("b", "s", ("a",)), Step("a", "s")))
