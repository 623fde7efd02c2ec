"""The simulated cluster: seeds that have found something, some that have not yet, and that a run repeats."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Final

import pytest
from attrs import evolve

from onepiece.core.balance import RebalanceMode
from simulations.cluster import run_seed
from simulations.cluster_command import add_arguments, command_of
from simulations.sim_clients import Wish
from simulations.sim_plan import REQUESTS_MOVING, Plan

ROOT: Final = Path(__file__).parents[2]
SEEDS: Final = Path(__file__).with_name("seeds.txt")
FRESH: Final = 1_000_000
"""Of a range that nobody has been through."""


def simulate(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command; in a process of its own, since it pins the order of sets."""
    return subprocess.run(
        [sys.executable, "-m", "simulations", "cluster", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def seed_lines() -> list[str]:
    """The lines of the file of seeds that name one."""
    lines = SEEDS.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _is_run_anyway(line: str) -> bool:
    """Whether the seed is among those that ``make test`` runs one after the other, with all faults."""
    seed = line.split(maxsplit=1)[0]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(r"simulations cluster --seed 0 --seeds (\d+)", makefile)
    assert found is not None
    return seed.isdigit() and int(seed) < int(found[1])


def test_seeds_are_named_once_with_what_they_found() -> None:
    """Each line is a seed, perhaps with the faults it is run with, and words; none is there twice."""
    seeds = [line.split(maxsplit=1) for line in seed_lines()]
    assert seeds
    assert all(len(words) == 2 and words[0].partition(":")[0].isdigit() for words in seeds)
    assert len({words[0] for words in seeds}) == len(seeds)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_seeds_have_found_stays_mended(tmp_path: Path) -> None:
    """No seed that once showed a broken promise shows one now; the first ones ``make test`` runs itself."""
    others = tmp_path / "seeds.txt"
    others.write_text("\n".join(line for line in seed_lines() if not _is_run_anyway(line)))
    assert others.read_text()
    done = simulate("--seeds-from", str(others))
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_some_seeds_hold() -> None:
    """Neither a few of the seeds that everything was tried on hold, nor only those."""
    done = simulate("--seed", str(FRESH), "--seeds", "2")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [26])
def test_instances_move_and_every_promise_holds(seed: int) -> None:
    """Under a load that shifts, while nodes are cut off, killed and slow: what moves loses no request."""
    done = simulate("--rebalance", "--requests", "60", "--seed", str(seed))
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(rf"seed {seed} .* [1-9]\d* moves", done.stdout), "nothing moved, so this shows nothing"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_seed_is_the_same_run_each_time() -> None:
    """What is told of a run, and the hash over all that was sent, is the same byte for byte."""
    once, again = (simulate("--seed", "11", "--verbose", "--requests", "8").stdout for _ in range(2))
    assert once == again
    assert once.startswith("commit ")
    assert len(once.splitlines()) > 20
    other = simulate("--seed", "12", "--verbose", "--requests", "8").stdout
    assert other != once


def test_a_broken_promise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in which two results differ is no success: its check can fail, and says for which request."""
    monkeypatch.setattr("simulations.sim_clients.expected", lambda *_: "another digest")
    report = run_seed(Plan.draw(3, nodes=3, requests=4).without_faults())
    assert any("must be another digest" in problem for problem in report.problems)


@pytest.mark.parametrize(
    "options",
    [
        ["--seed", "5"],
        ["--seed", "5", "--rebalance"],
        ["--seed", "5", "--rebalance", "--faults", "kill,cut", "--nodes", "4", "--requests", "9"],
    ],
)
def test_a_broken_seed_is_told_with_the_command_that_repeats_it(options: list[str]) -> None:
    """Whatever decides about the run is in it."""

    def parsed(words: list[str]) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        return parser.parse_args(words)

    given = parsed(options)
    again = parsed(command_of(5, given.faults, given).split()[4:])
    assert again.verbose
    again.verbose = False
    assert again == given


def test_where_instances_move_each_has_a_device_and_the_load_shifts() -> None:
    """All lines, then all diamonds, on nodes that move; without being asked for nothing moves."""
    plan = evolve(Plan.draw(3, requests=REQUESTS_MOVING), rebalances=True)
    options = [plan.node_options(number) for number in range(plan.nodes)]
    assert all(each.rebalance is RebalanceMode.ON for each in options)
    assert sum(len(each.devices) for each in options) >= 12
    rng = Random(1)
    drawn = [Wish.draw(number, rng, 20.0, 0.1).shifted(20.0) for number in range(200)]
    assert {wish.workflow for wish in drawn if wish.at < 10.0} == {"line"}
    assert {wish.workflow for wish in drawn if wish.at >= 10.0} == {"diamond"}
    stages = {"line": {"begin", "middle", "finish"}, "diamond": {"split", "left", "right", "merge"}}
    assert all(w.failing_stage in stages[w.workflow] for w in drawn if w.failure != "none")
    still = Plan.draw(3)
    assert not still.rebalances
    assert still.node_options(0).rebalance is RebalanceMode.ADVISE
