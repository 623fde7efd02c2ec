"""``python -m simulations capacity``: the simulated set does what queueing theory and the model say."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from onepiece.core.capacity import CapacityModel, Demand, Step, WorkflowShape
from onepiece.core.latency import predict
from onepiece.core.move_board import StageLimits
from onepiece.core.moves import MovePolicy
from onepiece.core.rebalance import RebalancePolicy
from onepiece.core.service_times import StageProfile, Timing
from onepiece.errors import ConfigError
from onepiece.profiles import WorkflowProfile, write_profile
from simulations.__main__ import main
from simulations.capacity_record import Histogram, Record
from simulations.capacity_trace import arrivals, bursts, day_curve, even_arrivals, recorded, steady, step
from simulations.capacity_world import Delays, World, WorldOptions
from simulations.plot import Chart, Line, draw_charts
from tests.core.capacity_parts import GIB, make_line, make_stage


def _run(
    model: CapacityModel,
    demands: list[Demand],
    instances: dict[str, int],
    requests: int = 12_000,
    **options: Any,
) -> dict[str, Any]:
    """The totals of a steady load on instances that stay, behind a tenth of the time."""
    seconds = requests / sum(demand.rate for demand in demands)
    world = World(model, demands, instances, WorldOptions(sum(instances.values()), moves=False, **options))
    world.record.warm_up_seconds = seconds / 10
    rates = [steady(demand.rate) for demand in demands]
    return world.run(arrivals(rates, seconds, 3), seconds).summary(seconds)


@pytest.mark.parametrize(("workers", "used"), [(1, 0.5), (1, 0.8), (8, 0.8)])
def test_one_stage_is_the_textbook_s_queue(workers: int, used: float) -> None:
    """M/D/1 and M/D/8: the simulated mean is the predicted one."""
    model, demands = make_line("w", make_stage("s", 1.0)), [Demand("w", used * workers)]
    found = _run(model, demands, {"s": workers})
    (expected,) = predict(model, demands, {"s": workers})
    assert found["mean_seconds"] == pytest.approx(expected.mean_seconds, rel=0.05)


def test_the_theorem_s_pipeline_runs_as_it_says() -> None:
    """Equal gaps at the full rate K / T_X: every request takes T_X + T_Y, to the end."""
    model = make_line("w", make_stage("x", 4.0), make_stage("y", 12.0))
    demands = [Demand("w", 0.5)]
    world = World(model, demands, {"x": 2, "y": 6}, WorldOptions(8, moves=False))
    found = world.run(even_arrivals(demands, 4000.0), 4020.0).summary(4020.0)
    assert found["finished"] == 2000
    assert found["mean_seconds"] == pytest.approx(16.0)
    assert found["p99_seconds"] == pytest.approx(16.0, rel=0.01)


def _shared() -> tuple[CapacityModel, list[Demand], dict[str, int]]:
    stages = [make_stage(n, s, spread=s / 10) for n, s in (("a", 2.0), ("b", 60.0), ("c", 8.0), ("p", 10.0))]
    shapes = [WorkflowShape.line("v", ["a", "b", "c"]), WorkflowShape.line("w", ["a", "p", "c"])]
    demands = [Demand("v", 0.32), Demand("w", 0.8)]
    return CapacityModel.of(stages, shapes), demands, {"a": 3, "b": 25, "c": 12, "p": 10}


def _diamond() -> tuple[CapacityModel, list[Demand], dict[str, int]]:
    steps = (Step("s", "s"), Step("l", "l", ("s",)), Step("r", "r", ("s",)), Step("m", "m", ("l", "r"), True))
    times = (("s", 1.0, 0.3), ("l", 2.0, 1.0), ("r", 2.0, 1.0), ("m", 1.0, 0.3))
    stages = [make_stage(name, mean, spread=spread) for name, mean, spread in times]
    model = CapacityModel.of(stages, [WorkflowShape("w", steps)])
    return model, [Demand("w", 3.2)], {"s": 4, "l": 8, "r": 8, "m": 4}


def _batched() -> tuple[CapacityModel, list[Demand], dict[str, int]]:
    stage = StageProfile("s", (Timing(1.0, 0.1), Timing(1.4, 0.1, batch=8)), batch_max=8)
    return CapacityModel.of([stage], [WorkflowShape.line("w", ["s"])]), [Demand("w", 3.0)], {"s": 1}


@pytest.mark.parametrize("made", [_shared, _diamond, _batched], ids=lambda made: made.__name__)
def test_the_model_predicts_the_simulation(made: Any) -> None:
    """Shared stages, a fork with a join, batches: mean within 10 %, P95 within 12 % at 80 % load."""
    model, demands, instances = made()
    found = _run(model, demands, instances, requests=10_000)
    predicted = predict(model, demands, instances)
    total = sum(demand.rate for demand in demands)
    mean = sum(d.rate / total * p.mean_seconds for d, p in zip(demands, predicted, strict=True))
    assert mean == pytest.approx(found["mean_seconds"], rel=0.1)
    assert max(p.p95_seconds for p in predicted) == pytest.approx(found["p95_seconds"], rel=0.12)


def test_overload_is_served_at_the_bound() -> None:
    """With more than it can bear the set finishes what the model says, and no more."""
    model, demands, instances = _shared()
    bound = model.bound(demands, instances).rate
    more = [evolve(demand, rate=demand.rate * 2) for demand in demands]
    found = _run(model, more, instances, requests=4000, timeout_seconds=200.0)
    assert 0.95 * bound < found["rate"] < 1.02 * bound
    assert found["refused"] > 0
    assert found["p95_seconds"] < 200.0 * 1.1


def _shifted(**options: Any) -> Record:
    """Two workflows on 24 GPUs; after a quarter of an hour the load goes from one to the other."""
    stages = [make_stage(name, 2.0, spread=0.2, gib=30, load_seconds=30.0) for name in ("x", "y")]
    model = CapacityModel.of(stages, [WorkflowShape.line(stage.stage, [stage.stage]) for stage in stages])
    demands = [Demand("x", 8.0), Demand("y", 2.0)]
    world = World(model, demands, {"x": 19, "y": 5}, WorldOptions(24, **options))
    world.record.warm_up_seconds = 1500.0
    trace = arrivals([step(8.0, 2.0, 900.0), step(2.0, 8.0, 900.0)], 1800.0, 1)
    return world.run(trace, 1800.0)


def test_devices_follow_the_load() -> None:
    """After the shift the moves bring the throughput back; where nothing may move it stays away."""
    followed, fixed = _shifted(), _shifted(moves=False)
    assert followed.move_count >= 10
    assert followed.summary(1800.0)["rate"] > 9.5
    assert fixed.summary(1800.0)["rate"] < 5.0
    before = [move for at, move in followed.moves if at < 900]
    assert not before
    assert all(move.stage == "y" for _, move in followed.moves)


def test_nothing_is_lost_by_a_move() -> None:
    """Every request that was accepted ends, also those that waited at a donor."""
    for gpu_bytes in (80 * GIB, 40 * GIB):  # beside the old one, and behind it
        record = _shifted(gpu_bytes=gpu_bytes, limits={"x": StageLimits(instances_min=2)})
        assert all(move.is_beside == (gpu_bytes > 60 * GIB) for _, move in record.moves)
        accepted = sum(part.accepted for part in record.intervals.values())
        finished = sum(part.finished.count for part in record.intervals.values())
        assert accepted - finished < 60
        assert record.series()[-1]["instances"]["x"] >= 2


def test_idle_devices_are_used_and_the_same_seed_is_the_same_run() -> None:
    """A set that begins too small grows into its idle GPUs; it can be repeated."""
    model, demands = make_line("w", make_stage("s", 2.0, spread=0.5, load_seconds=10.0)), [Demand("w", 4.0)]
    policy = RebalancePolicy(moves=MovePolicy(moves_max=3))

    def run() -> Record:
        world = World(model, demands, {"s": 4}, WorldOptions(12, policy=policy))
        return world.run(arrivals([steady(4.0)], 900.0, 5), 900.0)

    first, second = run(), run()
    assert first.series()[-1]["instances"]["s"] >= 10
    assert first.summary(900.0) == second.summary(900.0)
    assert [at for at, _ in first.moves] == [at for at, _ in second.moves]


def test_the_hop_s_time_is_added() -> None:
    """Each edge between two stages takes so long more."""
    model, demands = make_line("w", *(make_stage(name, 1.0) for name in "abc")), [Demand("w", 0.01)]
    found = _run(model, demands, dict.fromkeys("abc", 2), requests=200, delays=Delays(hop=0.25))
    assert found["mean_seconds"] == pytest.approx(3.5, rel=0.01)


@pytest.mark.parametrize(
    "rate", [steady(2.0), day_curve(2.0, 0.5), bursts(2.0, 4.0, 60.0, 600.0), step(1.0, 3.0, 43_200.0)]
)
def test_arrivals_have_their_mean_rate(rate: Any) -> None:
    """Whatever their shape, a day has the requests that it should, in order."""
    moments = [at for at, _ in arrivals([rate], 86_400.0, 7)]
    assert len(moments) == pytest.approx(2 * 86_400, rel=0.02)
    assert moments == sorted(moments)
    assert all(rate.at(at) <= rate.highest for at in moments[::1000])


def test_bursts_and_days_have_their_shape() -> None:
    """A burst has its share; the evening has more than the morning."""
    moments = [at for at, _ in arrivals([bursts(1.0, 5.0, 60.0, 600.0)], 60_000.0, 1)]
    assert sum(at % 600 < 60 for at in moments) / len(moments) == pytest.approx(0.5, abs=0.03)
    hours = [int(at // 3600) for at, _ in arrivals([day_curve(1.0, 0.5)], 86_400.0, 1)]
    assert hours.count(18) > 2 * hours.count(6)


def test_a_recorded_trace_is_read_and_its_faults_named(tmp_path: Path) -> None:
    """Rows come in order of time; a wrong one is named by its line."""
    demands = [Demand("video", 1.0, "480p"), Demand("picture", 1.0)]
    path = tmp_path / "trace.csv"
    path.write_text("seconds,workflow,size_class\n5,picture,\n1.5,video,480p\n")
    assert recorded(path, demands) == [(1.5, 0), (5.0, 1)]
    path.write_text("seconds,workflow,size_class\n5,picture,\n1.5,video,720p\n")
    with pytest.raises(ConfigError, match=r"line 3: wants seconds .* video/480p, picture"):
        recorded(path, demands)
    with pytest.raises(ConfigError, match="cannot be read"):
        recorded(tmp_path / "none.csv", demands)


def test_the_histogram_is_right_to_a_percent() -> None:
    """Quantiles of a thousand known lengths."""
    histogram = Histogram()
    for number in range(1, 1001):
        histogram.add(number / 10)
    assert histogram.mean == pytest.approx(50.05)
    for share in (0.01, 0.5, 0.95, 1.0):
        assert histogram.quantile(share) == pytest.approx(share * 100, rel=0.011)
    assert Histogram().quantile(0.5) == 0


def _profile(path: Path, gib: int = 30) -> str:
    stages = (make_stage("m:a", 1.0, spread=0.1, gib=2), make_stage("m:b", 5.0, spread=0.5, gib=gib))
    shape = WorkflowShape.line("video", ["m:a", "m:b"])
    write_profile(path, WorkflowProfile("m:video", "d", "a test", shape, stages))
    return str(path)


def test_the_command_writes_what_happened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text, JSON and a picture of one run, also with monolithic instances."""
    argv = ["capacity", "--profile", _profile(tmp_path / "p.json"), "--rate", "video=2", "--seconds", "600"]
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    assert main([*argv, "--json", str(out), "--plot", str(plot)]) == 0
    found = json.loads(out.read_text())
    assert found["summary"]["finished"] > 1000
    assert len(found["series"]) <= 241
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "finished" in capsys.readouterr().out
    assert main([*argv, "--monolithic", "--arrivals", "bursts", "--gpus", "20", "--timeout", "30"]) == 0
    assert "all of video" in capsys.readouterr().out
    assert main([*argv, "--arrivals", "step", "--to", "video=3", "--no-moves"]) == 0


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, and a sentence."""
    argv = ["capacity", "--profile", _profile(tmp_path / "p.json"), "--rate"]
    assert main([*argv, "film=2"]) == 2
    assert "no workflow 'film' in the model" in capsys.readouterr().err
    assert main([*argv, "video=2", "--gpus", "1"]) == 2
    assert "1 GPUs are fewer than" in capsys.readouterr().err
    assert main([*argv, "video=2", "--recorded", str(tmp_path / "none.csv")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    late = tmp_path / "late.csv"
    late.write_text("seconds,workflow\n1e12,video\n")
    for options, message in (
        (("--recorded", str(late)), "has no request in 3600 s"),
        (("--warm-up", "3600"), "leaves nothing of --seconds"),
        (("--arrivals", "bursts", "--burst-every", "60"), "never end"),
        (("--to", "video=1"), "give --arrivals step with it"),
        (("--json", str(tmp_path)), "cannot be written"),
        (("--plot", str(tmp_path / "no" / "p.png")), "cannot be written"),
    ):
        assert main([*argv, "video=2", *options]) == 2
        assert message in capsys.readouterr().err
    assert main([*argv, "video=1e5"]) == 2
    assert "GPUs, and 100000 are simulated at most" in capsys.readouterr().err
    assert main([*argv, "video=0.1", "--seconds", "10", "--gpu-memory", "1"]) == 0
    assert "which a GPU of 1 GiB does not have" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    [
        *(("--gpus", "0"), ("--gpus", "100000000"), ("--per-node", "0"), ("--gpu-memory", "nan")),
        *(
            ("--seconds", "0"),
            ("--seconds", "inf"),
            ("--warm-up", "nan"),
            ("--timeout", "-1"),
            ("--hop", "-1"),
        ),
        *(("--utilisation", "2"), ("--swing", "5"), ("--burst-every", "0"), ("--burst-factor", "nan")),
    ],
)
def test_options_without_a_sense_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: tuple[str, str]
) -> None:
    """They are named before anything is simulated."""
    with pytest.raises(SystemExit):
        main(["capacity", "--profile", _profile(tmp_path / "p.json"), "--rate", "video=1", *option])
    assert f"argument {option[0]}: '{option[1]}' is no" in capsys.readouterr().err


def test_an_instance_that_no_node_holds_is_named() -> None:
    """Nodes that are too small for a stage of several devices."""
    model = make_line("w", StageProfile("wide", (Timing(1.0, devices=4),), devices=4))
    with pytest.raises(ConfigError, match="no node has 4 GPUs left for an instance of wide"):
        World(model, [Demand("w", 1.0)], {"wide": 1}, WorldOptions(gpus=4, per_node=2))


def test_a_sender_looks_at_no_level_twice() -> None:
    """What many messages wait at is picked as fast as what is idle, and the fewest still counts."""
    model = make_line("w", make_stage("s", 1.0))
    world = World(model, [Demand("w", 1.0)], {"s": 3}, WorldOptions(gpus=3, moves=False))
    trace = [(0.0, 0)] * 9_000
    found = world.run(iter(trace), 3_000.5).summary(3_000.5)
    assert found["finished"] == 9_000


def test_a_chart_of_nothing_and_one_of_powers_can_be_drawn(tmp_path: Path) -> None:
    """No points, one point, and a logarithmic axis with zeros are no errors."""
    charts = [
        Chart("nothing", "x", "y", []),
        Chart("one", "x", "y", [Line("a", [(1.0, 1.0)])]),
        Chart(
            "powers", "x", "y", [Line("a", [(n, math.exp(n)) for n in range(9)] + [(9.0, 0.0)])], is_log=True
        ),
    ]
    draw_charts(tmp_path / "c.png", charts)
    assert (tmp_path / "c.png").stat().st_size > 1000
