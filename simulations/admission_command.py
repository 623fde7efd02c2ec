"""``admission``: offered load from half to five times what the set can do, and what came of it.

Three stages in a row (1 s, 5 s and 1 s; ``--workers`` of the short ones, five times as many of the long one)
behind one proxy or several that let a request wait for ``--wait-factor`` times what it takes unloaded.
Everything is simulated but the door, which is the product's own. P95 is compared with that of a nearly idle
set, goodput with what was offered or the stages can do, whichever is less. ``--plot`` draws that, and beside
it real processes (``--measured``: what ``onepiece bench admission --load-seconds 20 --json`` printed).
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from attrs import asdict, frozen

from onepiece.cli.numbers import number_from, whole_from
from onepiece.core.admission import AdmissionRules
from onepiece.errors import ConfigError
from simulations.admission import Outcome, Setting, SimStage, Source, run
from simulations.plot import Chart, Line, draw_charts

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
    parser.add_argument(
        "--workers",
        type=whole_from(1, 100),
        default=4,
        metavar="N",
        help="of the stages of a second (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw it")
    parser.add_argument("--measured", type=Path, metavar="JSON", help="draw what real processes did, too")


def measure(
    loads: Sequence[float],
    wait_factor: float,
    spread: float,
    proxies: int,
    seconds: float,
    seed: int,
    workers: int = 4,
) -> list[Row]:
    """A row for each load."""
    short, long = SimStage(1.0, workers, spread), SimStage(5.0, 5 * workers, spread)
    stages = (short, long, short)
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
    try:
        return _run(options)
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"admission: {error}\n")
        return 2


def _run(options: argparse.Namespace) -> int:
    if options.measured is not None and options.plot is None:
        raise ConfigError("--measured is drawn beside what is simulated; give --plot with it")
    measured = () if options.measured is None else read_measured(options.measured)
    rows = measure(
        options.loads,
        options.wait_factor,
        options.spread,
        options.proxies,
        options.seconds,
        options.seed,
        options.workers,
    )
    _print(rows, measured, is_json=options.json)
    if options.plot is not None:
        draw_charts(options.plot, charts(rows, measured))
    return 0


def _print(rows: Sequence[Row], measured: Sequence[Mapping[str, float]], *, is_json: bool) -> None:
    if is_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print("| load | offered/s | finished/s | refused | goodput | P50 | P95 |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.load:g} | {row.offered_per_second:.2f} | {row.finished_per_second:.2f} | {row.refused} "
            f"| {row.goodput:.1%} | {row.p50_ratio:.2f} | {row.p95_ratio:.2f} |"
        )
    if measured:
        print("\nreal processes:\n\n| load | goodput | P50 | P95 |\n|---|---|---|---|")
    for found in measured:
        ratios = f"{found['p50_ratio']:.2f} | {found['p95_ratio']:.2f}"
        print(f"| {found['load']:g} | {found['goodput']:.1%} | {ratios} |")


_MEASURED: Final = ("load", "goodput", "p50_ratio", "p95_ratio")


def read_measured(path: Path) -> list[dict[str, float]]:
    """The loads that real processes were measured under.

    Raises:
        ConfigError: That is not what ``onepiece bench admission`` prints, or has no loads.
        OSError: It cannot be read.
    """
    try:
        found = [
            {name: float(row[name]) for name in _MEASURED} for row in json.loads(path.read_bytes())["loads"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not what `onepiece bench admission --load-seconds S --json` prints: {error!r}"
        ) from error
    if not found:
        raise ConfigError(f"{path} has no loads: measure them with --load-seconds")
    return found


def charts(rows: Sequence[Row], measured: Sequence[Mapping[str, float]]) -> list[Chart]:
    """Goodput and latencies over the load, simulated and real."""
    simulated = [asdict(row, recurse=False) for row in rows]

    def lines(*shown: tuple[str, str]) -> list[Line]:
        return [
            Line(f"{name}, {side}", sorted((row["load"], row[value]) for row in found))
            for name, value in shown
            for side, found in (("simulated", simulated), ("real processes", measured))
            if found
        ]

    across = "offered, in parts of what the stages can do"
    return [
        Chart("Goodput, of what was offered or the stages can do", across, "", lines(("goodput", "goodput"))),
        Chart(
            "Accepted requests, in times of a single one's",
            across,
            "",
            lines(("P95", "p95_ratio"), ("P50", "p50_ratio")),
        ),
    ]
