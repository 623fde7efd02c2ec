"""The benchmark of admission and the simulation of offered loads: they run, and say what they should."""

import argparse
import json
from pathlib import Path

import pytest

from onepiece.cli import bench_admission, bench_admission_load
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


def test_a_load_is_judged_by_what_came_as_long_before_as_a_request_takes() -> None:
    """At half the load all that came is done, wherever the counting began; what was refused is not."""
    ends = bench_admission_load._End
    every = [
        bench_admission_load._Asked(number / 4, number / 4 + 7.0, ends.FINISHED) for number in range(200)
    ]
    half = bench_admission_load._judged(every, 0.5, 14.0, 20.0, 7.0, 8.0)
    assert (half.offered_per_second, half.finished_per_second, half.goodput) == (4.0, 4.0, 1.0)
    assert (half.p50_ratio, half.p95_ratio, half.refused) == (1.0, 1.0, 0)
    refused = [bench_admission_load._Asked(10.0 + number / 8, 10.1, ends.REFUSED) for number in range(80)]
    late = [bench_admission_load._Asked(20.0, 30.5, ends.FINISHED), *refused]
    full = bench_admission_load._judged([*every, *late], 1.0, 14.0, 20.0, 7.0, 8.0)
    assert full.refused == 80
    assert full.goodput == pytest.approx(81 / (20 * 8))
    assert full.p95_ratio == 1.0
    assert bench_admission_load._judged([], 1.0, 14.0, 20.0, 7.0, 8.0).goodput == 0.0


def _simulated(*words: str) -> int:
    parser = argparse.ArgumentParser()
    admission_command.add_arguments(parser)
    return admission_command.run_command(parser.parse_args([*words, "--seconds", "200"]))


def test_what_was_measured_is_drawn_beside_what_is_simulated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Both in one picture, simulated and real; what is no such measurement is named."""
    real, drawn = tmp_path / "real.json", tmp_path / "loads.png"
    row = {"load": 2.0, "goodput": 0.98, "p50_ratio": 1.1, "p95_ratio": 1.2, "refused": 9}
    real.write_text(json.dumps({"loads": [row, {**row, "load": 0.5}]}))
    assert _simulated("--loads", "0.5", "--workers", "2", "--plot", str(drawn), "--measured", str(real)) == 0
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert "| 2 | 98.0% | 1.10 | 1.20 |" in capsys.readouterr().out
    goodput, latencies = admission_command.charts([], admission_command.read_measured(real))
    assert [line.points for line in goodput.lines] == [[(0.5, 0.98), (2.0, 0.98)]]
    assert len(latencies.lines) == 2
    capsys.readouterr()
    for words, text in (('{"loads": []}', "has no loads"), ("[]", "is not what"), ("x", "is not what")):
        real.write_text(words)
        assert _simulated("--loads", "0.5", "--plot", str(drawn), "--measured", str(real)) == 2
        assert text in capsys.readouterr().err
    assert _simulated("--loads", "0.5", "--measured", str(real)) == 2
    assert "give --plot" in capsys.readouterr().err
