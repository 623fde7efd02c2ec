"""``python -m simulations validate`` and ``shift``: both sides are measured alike; what is off is told."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from attrs import define, evolve
from hypothesis import given
from hypothesis import strategies as st

from onepiece.core.capacity import CapacityModel, Demand, WorkflowShape
from onepiece.core.inventory import ActorState
from onepiece.core.retention import OutputKey
from onepiece.core.routing import ActorRoute, NodeRoute, RouteEpoch, RouteTable, first_of
from onepiece.runtime.under_way import UnderWay
from simulations.__main__ import main
from simulations.capacity_dispatch import PROXY, Dispatch
from simulations.capacity_trace import arrivals, steady
from simulations.capacity_world import Delays, Place
from simulations.plot import draw_charts
from simulations.validation import command, shift_command, workflows
from simulations.validation.compare import (
    compared,
    delays_of,
    instances_of,
    quantile,
    simulate,
    stage_seconds,
)
from simulations.validation.load import LoadRun, Sample, Span
from simulations.validation.report import Validation
from simulations.validation.shift_command import Look, Shift
from tests.core.capacity_parts import make_line, make_stage

DEMANDS = (Demand("w", 1.5),)
MODEL = make_line("w", make_stage("a", 0.2), make_stage("b", 1.0))
PLACES = (Place("a", "n", ("cpu:0",)), Place("b", "n", ("cpu:1",)), Place("b", "m", ("cpu:0",)))
SECONDS = 200.0


@define(eq=False)
class Instance:
    """As much of one as a dispatch wants."""

    number: int

    @property
    def actor(self) -> SimpleNamespace:
        """With its id."""
        return SimpleNamespace(actor_id=self.number)


NODE = NodeRoute("n", 1, "tcp://n", None, ("worker",), "alive", (), 1)


def route_of(instance: Instance) -> ActorRoute:
    """As the product knows it."""
    return ActorRoute(instance.number, "s", "n", 1, ("cpu:0",), "a", ActorState.READY)


def make_dispatch(count: int) -> tuple[Dispatch[Instance], list[Instance]]:
    """A stage's instances."""
    dispatch: Dispatch[Instance] = Dispatch()
    instances = [Instance(number) for number in range(count)]
    for instance in instances:
        dispatch.add(instance)
    return dispatch, instances


def test_a_sender_picks_the_fewest_of_its_own() -> None:
    """Of equals the one picked longest ago; what others have sent there it does not know."""
    dispatch, instances = make_dispatch(3)
    for _ in range(2):
        picked = []
        for _ in range(3):
            picked.append(dispatch.sender(PROXY).pick())
            dispatch.sender(PROXY).picked(picked[-1])
        assert {each.number for each in picked} == {0, 1, 2}
    dispatch.sender(PROXY).done(instances[1])
    assert dispatch.sender(PROXY).pick() is instances[1]
    dispatch.sender("other").picked(instances[1])
    assert dispatch.sender(PROXY).pick() is instances[1]
    assert dispatch.sender("other").pick() is not instances[1]


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from(["send", "meet", "done", "drain", "add"]), st.integers(0, 99))),
)
def test_the_simulated_choice_is_the_product_s(count: int, steps: list[tuple[str, int]]) -> None:
    """Whatever is sent, done, added and drained: both pick the same instance each time."""
    dispatch, instances = make_dispatch(count)
    sender, known, sent = dispatch.sender(PROXY), UnderWay(), list[tuple[OutputKey, Instance]]()
    for number, (what, place) in enumerate(steps):
        table = RouteTable(
            RouteEpoch(1, 1), actors=tuple(route_of(each) for each in dispatch.live), nodes=(NODE,)
        )
        expected = table.pick("s", known.counts, known.picked, first_of(PROXY))
        assert expected is not None
        match what:
            case "send":
                instance, key = sender.pick(), OutputKey(str(number), "a", "b")
                assert instance.number == expected.actor_id
                sender.picked(instance)
                known.sent(key, instance.number)
                sent.append((key, instance))
            case "meet":
                met, key = dispatch.meeting(), OutputKey(str(number), "a", "b")
                assert met.number == expected.actor_id
                known.sent(key, met.number)
                sent.append((key, met))
            case "done" if sent:
                key, instance = sent.pop(place % len(sent))
                known.done(key)
                sender.done(instance)
            case "drain" if len(dispatch.live) > 1:
                dispatch.remove(dispatch.live[place % len(dispatch.live)])
            case "add":
                instances.append(Instance(len(instances)))
                dispatch.add(instances[-1])


def test_an_instance_that_drains_is_forgotten() -> None:
    """It is not picked any more, and what it still ends changes nothing."""
    dispatch, instances = make_dispatch(2)
    dispatch.sender(PROXY).picked(instances[0])
    dispatch.remove(instances[0])
    dispatch.sender(PROXY).done(instances[0])
    assert {dispatch.sender(PROXY).pick().number for _ in range(4)} == {1}


def test_joins_meet_in_turn() -> None:
    """Each instance gets its share of the requests."""
    dispatch, instances = make_dispatch(3)
    met = [dispatch.meeting() for _ in range(6)]
    assert [met.count(instance) for instance in instances] == [2, 2, 2]


def real_run(slower: float = 1.0, began_at: float = 1000.0) -> LoadRun:
    """What the simulated set does, told as a real run; latencies are so many times as long."""
    trace = [Sample(0, began_at + at) for at, _ in arrivals([steady(1.5)], SECONDS, 3)]
    run = LoadRun(began_at, tuple(trace))
    ends = sorted(simulate(MODEL, DEMANDS, PLACES, Delays(), run, 2 * SECONDS).ends)
    begins = [at - seconds for at, seconds, _ in ends]
    samples = [
        Sample(0, began_at + begin, began_at + begin + slower * (at - begin))
        for begin, (at, _, _) in zip(begins, ends, strict=True)
    ]
    return LoadRun(began_at, tuple(samples))


def validation(slower: float) -> Validation:
    """Of one run."""
    found = Validation(MODEL, DEMANDS, PLACES, Delays())
    run = real_run(slower)
    simulated = simulate(MODEL, DEMANDS, PLACES, Delays(), run, 2 * SECONDS)
    found.rows.append(compared("load 0.75", 0.75, run, [simulated], 20.0, SECONDS))
    found.note("load 0.75", run, simulated)
    return found


def test_what_is_alike_holds_and_what_is_not_does_not() -> None:
    """The simulated set holds against itself exactly; a real one that takes a fifth longer is too far off."""
    alike, slower = validation(1.0), validation(1.2)
    assert alike.holds
    assert alike.rows[0].p95_difference == pytest.approx(0.0, abs=1e-6)
    assert alike.rows[0].rate_difference == pytest.approx(0.0, abs=1e-6)
    assert alike.rows[0].requests > 200
    assert not slower.holds
    assert slower.rows[0].p95_difference == pytest.approx(1 / 1.2 - 1, abs=0.02)


def test_the_simulated_side_is_the_mean_of_its_runs() -> None:
    """So are rate, P95 and mean; the range is that of the P95s."""
    run = real_run()
    one, other = (simulate(MODEL, DEMANDS, PLACES, Delays(hop=hop), run, 2 * SECONDS) for hop in (0.0, 0.5))
    row = compared("both", 0.75, run, [one, other], 20.0, SECONDS)
    alone = [compared("one", 0.75, run, [each], 20.0, SECONDS).simulated for each in (one, other)]
    assert row.p95_range == (alone[0].p95_seconds, alone[1].p95_seconds)
    assert row.simulated.p95_seconds == pytest.approx(sum(row.p95_range) / 2)
    assert row.simulated.mean_seconds == pytest.approx((alone[0].mean_seconds + alone[1].mean_seconds) / 2)
    assert row.simulated.rate == pytest.approx((alone[0].rate + alone[1].rate) / 2)


def test_a_request_without_a_result_is_no_measurement() -> None:
    """A run with a failed request is given up, and its error told."""
    found = validation(1.0)
    run, simulated = found.runs["load 0.75"]
    broken = evolve(run, samples=(*run.samples, Sample(0, 1000.0, 1001.0, error="it broke")))
    with pytest.raises(RuntimeError, match="1 requests of run again failed, the first with: it broke"):
        found.note("again", broken, simulated)


def test_delays_are_what_no_stage_accounts_for() -> None:
    """Before the first stage, between two, at a join behind the later one, and behind the last."""
    shapes = [WorkflowShape.line("w", ["a", "b"])]
    model = CapacityModel.of([make_stage("a", 1.0), make_stage("b", 2.0)], shapes)
    spans = {"0": Span("n", 100.3, 101.3), "1": Span("m", 101.4, 103.6)}
    sample = Sample(0, 100.0, 103.7, spans)
    crowd = [
        Sample(0, 0.0, 9.0, {"0": Span("n", at, at + 1.0), "1": Span("m", 5.0, 6.0)}) for at in (2.04, 1.0)
    ]
    found = delays_of(model, DEMANDS, [sample, sample], crowd, (0.2, 0.05))
    assert found.turn == pytest.approx(0.04)
    assert found.entry == pytest.approx(0.3)
    assert found.hop == pytest.approx(0.1)
    assert found.exit == pytest.approx(0.1)
    assert (found.news, found.proxy_news) == (0.2, 0.05)
    slower = stage_seconds(model, DEMANDS, [sample])
    assert slower == {"a": pytest.approx(0.0), "b": pytest.approx(0.1)}


def test_quantiles_are_of_what_there_is() -> None:
    """The smallest value that the share does not exceed; of none there is none."""
    values = [float(number) for number in range(1, 101)]
    assert quantile(values, 0.95) == 95.0
    assert quantile([3.0], 0.95) == 3.0
    assert quantile([], 0.95) != quantile([], 0.95)


@pytest.mark.parametrize(("slower", "status"), [(1.0, 0), (1.2, 1)])
def test_the_command_s_exit_status_is_the_verdict(
    slower: float,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Text, JSON and a picture of what was measured; 1 if anything is too far off."""

    async def measured(_options: argparse.Namespace) -> Validation:
        return validation(slower)

    monkeypatch.setattr(command, "_measure", measured)
    out, plot = tmp_path / "v.json", tmp_path / "v.png"
    assert main(["validate", "--json", str(out), "--plot", str(plot)]) == status
    assert json.loads(out.read_text())["holds"] == (status == 0)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert f"all within 10%: {'no' if status else 'yes'}" in capsys.readouterr().out


def shift(finished_after: float = 1.0, done: int = 3) -> Shift:
    """A made-up run: all that comes is finished at once, but behind the shift only a part of it."""
    samples = []
    for number, rate in enumerate(shift_command.AFTER):
        count = int(120 * rate)
        for place in range(count):
            at = place / rate
            late = at > 30 and (place % 100) >= 100 * finished_after
            samples.append(Sample(number, at, at + (500.0 if late else 0.4)))
    stages = shift_command._stages()
    model = CapacityModel.of(
        [make_stage(stage, 0.4) for stage in stages],
        [WorkflowShape.line(name, [stage]) for name, stage in zip(shift_command.NAMES, stages, strict=True)],
    )
    looks = [Look(0.0, (5, 3), 0), Look(50.0, (2, 6), done)]
    view = {"done": done, "abandoned": 0}
    return Shift(model, 30.0, 30.0, LoadRun(0.0, tuple(samples)), looks, view, 120.0)


def test_a_shift_holds_if_few_moves_brought_the_throughput_back(tmp_path: Path) -> None:
    """Within a tenth of the model's optimum, in three moves at most, and at least one; nothing lost."""
    good = shift()
    assert good.holds
    assert [part.name for part in good.parts][-1] == "after"
    assert good.optimum == pytest.approx(sum(shift_command.AFTER))
    assert not shift(finished_after=0.85).holds
    assert not shift(done=4).holds
    assert not shift(done=0).holds
    lost = evolve(good.run, samples=(*good.run.samples, Sample(0, 1.0, 2.0, error="lost")))
    assert not Shift(good.model, 30.0, 30.0, lost, good.looks, good.view, 120.0).holds
    assert "3 moves, 0 abandoned" in good.told()
    draw_charts(tmp_path / "s.png", good.charts())
    json.dumps(good.plain())


def test_the_workflows_fit_the_devices() -> None:
    """Each instance that is declared has a device of its own."""
    assert sum(workflows.INSTANCES.values()) <= command.WORKERS * command.DEVICES
    assert instances_of(PLACES) == {"a": 1, "b": 2}
