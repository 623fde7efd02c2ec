"""The benchmark of retained outputs: one short run, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onepiece.cli.bench_delivery import run


@pytest.mark.acceptance
@pytest.mark.timeout(120)
def test_a_short_run_measures_both_kinds_of_edge(capsys: pytest.CaptureFixture[str]) -> None:
    """Every round of either kind has a rate, and the ratio is that of the medians."""
    assert run(["--rounds", "2", "--requests", "4", "--in-flight", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [len(rates) for rates in told["rates"].values()] == [2, 2]
    assert told["ratio"] == pytest.approx(told["medians"]["retained"] / told["medians"]["at_most_once"])


def test_no_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing to measure is a mistake, and is said."""
    assert run(["--rounds", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err


@pytest.mark.acceptance
def test_sigterm_leaves_no_directory(tmp_path: Path) -> None:
    """A benchmark that is told to end takes its node and its files with it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "onepiece.cli.bench_delivery"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
    )
    try:
        while not list(tmp_path.glob("onepiece-bench-*/state")):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert not list(tmp_path.iterdir())
