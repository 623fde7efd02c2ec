"""Large rings under random schedules."""

import pytest

from simulations.__main__ import main
from simulations.ring_schedules import ScheduleFailed, draw, run_schedule
from transports.operations import Program
from transports.ring import Consumer


@pytest.mark.parametrize("seed", range(25))
def test_a_schedule_keeps_the_promises(seed: int) -> None:
    """Whatever order a seed draws, everything arrives once, whole and in order."""
    assert run_schedule(seed) > 0


def test_a_seed_means_the_same_run() -> None:
    """A seed that failed can be run again."""
    assert draw(3) == draw(3)
    assert run_schedule(3) == run_schedule(3)


def test_the_command_runs_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    """It counts what it ran, and ends with 0 when nothing failed."""
    assert main(["schedules", "--first", "7", "--seeds", "2"]) == 0
    assert "2 seeds" in capsys.readouterr().out


def test_the_command_names_the_seed_that_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure is printed with its seed and what was drawn, and the status is not 0."""
    monkeypatch.setattr(Consumer, "_is_expected", lambda *_: True)
    assert main(["schedules", "--seeds", "60"]) == 1
    printed = capsys.readouterr().out
    assert "promise 1 in step" in printed
    assert "Drawn(seed=" in printed


def _fails(seeds: range) -> bool:
    for seed in seeds:
        try:
            run_schedule(seed)
        except ScheduleFailed:
            return True
    return False


def test_schedules_find_a_ring_without_a_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedules can fail: suspects that are not fenced do damage within a few seeds."""

    def no_fence(self: Consumer, suspected: tuple[int, ...]) -> Program[None]:
        for session in suspected:
            self.close_session(session)
        yield from ()

    monkeypatch.setattr(Consumer, "_fence", no_fence)
    assert _fails(range(60))
