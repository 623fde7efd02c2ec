"""The benchmark of admission and the simulation of offered loads: they run, and say what they should."""

import argparse
import json

import pytest

from onepiece.cli import bench_admission
from onepiece.cli.bench_admission import decide
from simulations import admission_command
from simulations.admission_command import measure


def test_decisions_are_counted_and_a_full_set_refuses() -> None:
    """At a hundred times what the stages can do nearly all are refused, and nobody's place is lost."""
    found = decide(3, 400.0, 3000, {"a": (0.5, 2), "b": (5.0, 20)})
    assert found.decisions == 3000
    assert 10 < found.admitted < 60  # seven and a half seconds, four a second
    assert 15 < found.in_flight < 40
    assert 0 < found.p50_us <= found.p99_us <= found.max_us


def test_it_prints_one_object(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without HTTP and loads there are the decisions; the exit status says whether they were quick."""
    monkeypatch.setattr(bench_admission, "_STAGES", {"a": (1.0, 4)})
    status = bench_admission.run(["--decisions", "500", "--tenants", "1", "--http-seconds", "0", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert status == (0 if found["decisions"][0]["p99_us"] < 1000 else 1)
    assert found["http"] is None


def test_offered_loads_make_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Half and twice the load: all get in, or about half; the table says the same."""
    half, twice = measure([0.5, 2.0], 0.2, 0.0, 1, 100.0, 1)
    assert half.refused <= 5
    assert twice.refused > 200
    assert twice.goodput > 0.95
    parser = argparse.ArgumentParser()
    admission_command.add_arguments(parser)
    options = parser.parse_args(["--loads", "2", "--seconds", "200"])
    assert admission_command.run_command(options) == 0
    assert capsys.readouterr().out.count("|\n") == 3
