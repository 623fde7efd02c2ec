"""``python -m simulations resources``: what the published figures amount to."""

import json
from pathlib import Path

import pytest

from simulations.__main__ import main
from simulations.resources import (
    Case,
    Part,
    cases,
    compare,
    parallel_efficiency,
    resident,
    share_encoders,
    take_turns,
)

_LIMITS = {case.name: case.limit for case in cases()}


def test_resident_weights_gain_nothing() -> None:
    """Where all is resident the same seconds are spent, and small loads need more GPUs staged."""
    points = compare(resident(), (1, 64))
    assert resident().limit == pytest.approx(1.0)
    assert points[0].factor < 0.7
    assert points[1].factor == pytest.approx(1.0, abs=0.03)


def test_the_factors_that_the_page_names() -> None:
    """1.15 for eight GPUs together, 3.1 for four steps, 2.3 for off-load with eight, 32 for an encoder."""
    assert _LIMITS["eight GPUs together, 40 steps"] == pytest.approx(1.15, abs=0.01)
    assert _LIMITS["eight GPUs together, 4 steps"] == pytest.approx(3.11, abs=0.01)
    assert _LIMITS["weights off-loaded to the host, 8 steps"] == pytest.approx(2.34, abs=0.01)
    assert _LIMITS["weights off-loaded to the host, 4 steps"] == pytest.approx(3.09, abs=0.01)
    assert _LIMITS["weights off-loaded, the encoder alone"] == pytest.approx(32.2, abs=0.1)
    assert parallel_efficiency() == pytest.approx(0.863, abs=0.001)


def test_every_case_has_its_conditions_and_sources() -> None:
    """No number without what it holds for, and where it comes from."""
    for case in cases():
        assert len(case.conditions) > 40
        assert all("commit" in source for source in case.sources)
        assert case.sources


def test_both_meet_the_same_p95() -> None:
    """The target is one that both can meet: the slower one's time without load, and half more."""
    case = Case("c", Part("all", 10.0, 2), (Part("a", 1.0), Part("b", 8.0, 2)), "made up", ("nobody",))
    (point,) = compare(case, (8,))
    assert point.p95_seconds == 15.0
    assert point.rate == pytest.approx(0.8)
    assert point.monolithic_gpus >= 16
    assert case.limit == pytest.approx(20 / 17)


def test_turns_reach_sixteen_with_many_workflows_alone() -> None:
    """Among sixteen workflows that take turns it is under ten, and it grows to sixteen with over fifty."""
    sixteen, many = take_turns(resident(), 64, (16, 64))
    assert 9 < sixteen.factor < 10
    assert many.factor > 16
    (alone,) = take_turns(resident(), 64, (1,))
    assert alone.factor == 1


def test_shared_encoders_help_where_the_whole_does_not_fit() -> None:
    """On GPUs that hold everything they cost one more; where the whole needs two, they save up to half."""
    assert [each.factor for each in share_encoders(80, (1, 16))] == [0.5, pytest.approx(16 / 17)]
    assert [each.factor for each in share_encoders(40, (1, 16))] == [1.0, pytest.approx(32 / 17)]


def test_the_command_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table, the numbers as JSON, and the plot of the page."""
    out, plot = tmp_path / "r.json", tmp_path / "r.png"
    assert main(["resources", "--json", str(tmp_path / "none" / "x.json")]) == 2
    assert "in one that is not there" in capsys.readouterr().err
    assert main(["resources", "--json", str(out), "--plot", str(plot)]) == 0
    assert "in the limit" in capsys.readouterr().out
    assert len(json.loads(out.read_text())["cases"]) == len(cases())
    assert plot.read_bytes().startswith(b"\x89PNG")
