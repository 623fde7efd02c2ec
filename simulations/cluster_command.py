"""``python -m simulations cluster``: the real node, several times over, in a simulated world.

Each seed draws a cluster, a load and faults, and gives the same run each time: the hash that is printed
is over all that was sent and told. The exit status is 1 if a promise was broken in any seed; then the
story of that run is printed, which ``--seed N --verbose`` tells from its beginning.

What is printed is the same each time, byte for byte; how long it took goes to the standard error.
"""

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Final

from attrs import evolve, frozen

from simulations.cluster import Report, run_seed
from simulations.sim_plan import FAULTS, REQUESTS_MOVING, STALL, Plan

HELP: Final = "run the whole cluster on virtual time, with faults drawn from a seed"

_SEED_SECONDS_MAX: Final = 300.0
"""Of real time; a seed that takes longer runs in circles."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("--seed", type=int, default=0, help="the first seed (%(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds (%(default)s)")
    parser.add_argument(
        "--seeds-from",
        type=Path,
        help="run the seeds at the beginnings of this file's lines, each with the faults it names: 7:stall",
    )
    parser.add_argument("--nodes", type=int, help="nodes of the cluster (default: 3 to 6, drawn)")
    parser.add_argument("--requests", type=int, help="requests of all clients (default: 10 to 24, drawn)")
    parser.add_argument("--faults", help=f"these faults only: none, or some of {','.join((*FAULTS, STALL))}")
    moving = f"instances move, under a load that shifts (then {REQUESTS_MOVING} requests)"
    parser.add_argument("--rebalance", action="store_true", help=moving)
    parser.add_argument("--jobs", type=int, default=1, help="seeds at work at once (%(default)s)")
    parser.add_argument("--verbose", action="store_true", help="tell the whole story")


def run(arguments: argparse.Namespace) -> int:
    """Carry the command out; returns its exit status."""
    _pin_hashes()
    seeds = _seeds(arguments)
    plans = [_plan(seed, faults, arguments) for seed, faults in seeds]
    print(f"commit {_commit()}, {len(plans)} seeds from {plans[0].seed}" if plans else "no seeds")
    begun = time.perf_counter()
    endings: Counter[str] = Counter()
    broken: list[Report] = []
    virtual_seconds = processor_seconds = 0.0
    reports = _run_all(plans, arguments.jobs, aloud=arguments.verbose)
    for (seed, faults), report in zip(seeds, reports, strict=True):
        endings.update(report.endings)
        virtual_seconds += report.virtual_seconds
        processor_seconds += report.seconds
        print(_line_of(report), flush=True)
        if report.problems:
            broken.append(report)
            again = command_of(seed, faults, arguments)
            _print_problems(report, again, with_story=not arguments.verbose)
    told = ", ".join(f"{count} {what}" for what, count in endings.most_common())
    print(f"{len(plans)} seeds, {virtual_seconds:.0f} s of theirs: {told}")
    if broken:
        print(f"BROKEN in seeds {', '.join(str(report.seed) for report in broken)}")
    requests = sum(plan.requests for plan in plans)
    sys.stderr.write(
        f"{time.perf_counter() - begun:.0f} s, {processor_seconds:.0f} s of a processor: "
        f"{requests / max(processor_seconds, 0.001):.1f} requests per second of it\n"
    )
    return 1 if broken else 0


def _pin_hashes() -> None:
    """Sets of texts are iterated in an order that Python draws anew for each process, unless told."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        arguments = [sys.executable, "-m", "simulations", *sys.argv[1:]]
        os.execve(sys.executable, arguments, environment)  # noqa: S606  # this very command again


def _seeds(arguments: argparse.Namespace) -> list[tuple[int, str | None]]:
    """Each seed, and the faults that it is run with instead of those that it draws."""
    if arguments.seeds_from is None:
        seeds = range(arguments.seed, arguments.seed + arguments.seeds)
        return [(seed, arguments.faults) for seed in seeds]
    lines = arguments.seeds_from.read_text(encoding="utf-8").splitlines()
    named = [line.split()[0].partition(":") for line in lines if line.strip() and not line.startswith("#")]
    return [(int(seed), faults or arguments.faults) for seed, _, faults in named]


def _plan(seed: int, faults: str | None, arguments: argparse.Namespace) -> Plan:
    requests = arguments.requests or (REQUESTS_MOVING if arguments.rebalance else None)
    plan = Plan.draw(seed, nodes=arguments.nodes, requests=requests)
    plan = evolve(plan, rebalances=arguments.rebalance)
    if faults is None:
        return plan
    if faults == "none":
        return plan.without_faults()
    return evolve(plan, faults=tuple(faults.split(",")))


def _commit() -> str:
    """What is checked out, marked if it was changed since."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],  # noqa: S607  # git's place varies
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return described.stdout.strip() or "unknown"


def _run_all(plans: list[Plan], jobs: int, *, aloud: bool) -> "list[Report] | _Reports":
    if aloud:
        for plan in plans:
            print("\n".join(plan.lines()))
        return [run_seed(plan, aloud=True) for plan in plans]
    return _Reports(plans, jobs)


@frozen
class _Run:
    """A seed at work."""

    plan: Plan
    process: ForkProcess
    until: float


class _Reports:
    """Runs each plan in a process of its own, which begins like every other, and gives reports in order."""

    def __init__(self, plans: list[Plan], jobs: int) -> None:
        self._waiting = list(plans)
        self._order = [plan.seed for plan in plans]
        self._jobs = max(1, jobs)
        self._running: dict[Connection, _Run] = {}
        self._done: dict[int, Report] = {}
        self._context = get_context("fork")

    def __iter__(self) -> "_Reports":
        return self

    def __next__(self) -> Report:
        if not self._order:
            raise StopIteration
        seed = self._order.pop(0)
        while seed not in self._done:
            self._step()
        return self._done.pop(seed)

    def _step(self) -> None:
        while self._waiting and len(self._running) < self._jobs:
            plan = self._waiting.pop(0)
            ours, theirs = self._context.Pipe(duplex=False)
            process = self._context.Process(target=_run_apart, args=(plan, theirs), daemon=True)
            process.start()
            theirs.close()
            self._running[ours] = _Run(plan, process, time.perf_counter() + _SEED_SECONDS_MAX)
        for ready in wait(list(self._running), timeout=1.0):
            assert isinstance(ready, Connection), "nothing else is waited for"
            run = self._running.pop(ready)
            try:
                self._done[run.plan.seed] = ready.recv()
            except EOFError:
                self._done[run.plan.seed] = _no_report(run.plan, "its process has died")
            run.process.join()
        for late in [each for each, run in self._running.items() if time.perf_counter() > run.until]:
            run = self._running.pop(late)
            run.process.kill()
            run.process.join()
            self._done[run.plan.seed] = _no_report(
                run.plan, f"it ran for more than {_SEED_SECONDS_MAX:.0f} s"
            )


def _run_apart(plan: Plan, report_to: Connection) -> None:
    report_to.send(run_seed(plan))
    report_to.close()
    os._exit(0)


def _no_report(plan: Plan, why: str) -> Report:
    return Report(plan.seed, "", (why,), (), plan.requests, {}, {}, 0, 0.0, 0, 0.0)


def _line_of(report: Report) -> str:
    endings = " ".join(f"{what}:{count}" for what, count in report.endings.items())
    faults = " ".join(f"{what}:{count}" for what, count in report.faults.items())
    moves = f" | {report.moves} moves" if report.moves else ""
    verdict = "BROKEN" if report.problems else "ok"
    return (
        f"seed {report.seed:<6} {verdict:<6} {report.digest} {report.virtual_seconds:4.0f} s "
        f"{report.steps:>7} steps | {endings} | {faults}{moves}"
    )


def command_of(seed: int, faults: str | None, arguments: argparse.Namespace) -> str:
    """What tells the same run of a seed from its beginning."""
    given = {"seed": seed, "nodes": arguments.nodes, "requests": arguments.requests, "faults": faults}
    options = [f"--{name} {value}" for name, value in given.items() if value is not None]
    options += ["--rebalance"] if arguments.rebalance else []
    return " ".join(["python -m simulations cluster", *options, "--verbose"])


def _print_problems(report: Report, again: str, *, with_story: bool) -> None:
    print(f"\n--- seed {report.seed}: its latest story, and what is broken ---")
    for line in report.story if with_story else ():
        print(line)
    for problem in report.problems[:20]:
        print(f"BROKEN {problem}")
    print(f"--- tell it whole: {again} ---\n")
