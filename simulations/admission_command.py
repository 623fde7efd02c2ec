"""``admission``: offered load from half to five times what the set can do, and what came of it.

Three stages in a row (1 s, 5 s and 1 s; 4, 20 and 4 workers: four requests a second) behind one proxy or
several that let a request wait for ``--wait-factor`` times what it takes unloaded. Everything is simulated
but the door, which is the product's own. P95 is compared with that of a nearly idle set, goodput with what
was offered or the stages can do, whichever is less.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Final

from attrs import asdict, frozen

from onepiece.cli.numbers import number_from, whole_from
from onepiece.core.admission import AdmissionRules
from simulations.admission import Outcome, Setting, SimStage, Source, run

HELP: Final = "offered load, and who waits for how long (the product's door, simulated stages)"
_LOADS: Final = (0.5, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0)
_IDLE_LOAD: Final = 0.05
_SECONDS_MIN: Final = 200.0
"""A request takes seven, and the first hundred do not count."""


@frozen
class Row:
    """One load."""

    load: float
    offered_per_second: float
    finished_per_second: float
    refused: int
    goodput: float
    """Of what was offered or the stages can do, whichever is less."""
    p50_ratio: float
    p95_ratio: float
    """To those of a nearly idle set."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("--loads", type=number_from(0.01, 1000), nargs="+", default=_LOADS, metavar="X")
    parser.add_argument(
        "--wait-factor", type=number_from(0, 1e6), default=0.2, metavar="X", help="default: %(default)s"
    )
    parser.add_argument(
        "--spread",
        type=number_from(0, 10),
        default=0.1,
        metavar="X",
        help="of service times, relative (default: %(default)s)",
    )
    parser.add_argument(
        "--proxies", type=whole_from(1, 100), default=1, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--seconds",
        type=number_from(_SECONDS_MIN, 1e6),
        default=600.0,
        metavar="S",
        help="default: %(default)s",
    )
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON array")


def measure(
    loads: Sequence[float], wait_factor: float, spread: float, proxies: int, seconds: float, seed: int
) -> list[Row]:
    """A row for each load."""
    stages = (SimStage(1.0, 4, spread), SimStage(5.0, 20, spread), SimStage(1.0, 4, spread))
    setting = Setting(stages, AdmissionRules(wait_factor=wait_factor), proxies=proxies, seconds=seconds)
    idle = run(setting, [Source(_IDLE_LOAD)], seed)
    return [
        _row(
            load,
            run(setting, [Source(load / proxies, proxy) for proxy in range(proxies)], seed),
            idle,
            setting,
        )
        for load in loads
    ]


def _row(load: float, found: Outcome, idle: Outcome, setting: Setting) -> Row:
    offered = found.offered / setting.seconds
    return Row(
        load=load,
        offered_per_second=offered,
        finished_per_second=found.rate,
        refused=sum(found.refused.values()),
        goodput=found.rate / min(offered, setting.rate),
        p50_ratio=found.quantile(0.5) / idle.quantile(0.5),
        p95_ratio=found.quantile(0.95) / idle.quantile(0.95),
    )


def run_command(options: argparse.Namespace) -> int:
    """Simulate, and print a table."""
    rows = measure(
        options.loads, options.wait_factor, options.spread, options.proxies, options.seconds, options.seed
    )
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    print("| load | offered/s | finished/s | refused | goodput | P50 | P95 |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.load:g} | {row.offered_per_second:.2f} | {row.finished_per_second:.2f} | {row.refused} "
            f"| {row.goodput:.1%} | {row.p50_ratio:.2f} | {row.p95_ratio:.2f} |"
        )
    return 0
