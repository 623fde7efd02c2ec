"""``python -m simulations resources``: how many GPU seconds staging saves, from published figures.

For each case the GPUs that a monolithic and a staged deployment need for the same rate and the same P95, over
loads from one busy instance to sixty-four; and what workflows that take turns save if GPUs may
change their workflow. ``docs/explanation/sixteen-fold.md`` says what it means.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any, Final

from onepiece.cli.columns import columns
from simulations.plot import Chart, Line, draw_charts
from simulations.resources import (
    SCALES,
    SLACK,
    Case,
    Point,
    TurnsPoint,
    cases,
    compare,
    parallel_efficiency,
    resident,
    share_encoders,
    take_turns,
)

HELP: Final = "GPU seconds for a request, monolithic against staged, from published figures"
_TURNS: Final = (1, 2, 4, 8, 16, 32, 64)
_TURNS_SCALE: Final = 64
_GPU_GB: Final = (80, 40)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw them")


def run(options: argparse.Namespace) -> int:
    """Carry the command out; returns its exit status."""
    for path in filter(None, (options.json, options.plot)):
        if path.is_dir() or not path.parent.is_dir():
            sys.stderr.write(f"resources: {path} is a directory, or in one that is not there\n")
            return 2
    found = [(case, compare(case)) for case in cases()]
    turns = take_turns(resident(), _TURNS_SCALE, _TURNS)
    print(
        f"GPU seconds for a request, monolithic / staged, at a P95 of {SLACK} times the time without load\n"
    )
    head = ("case", "in the limit", *(f"load {scale}" for scale in SCALES))
    rows = [
        (case.name, f"{case.limit:.2f}", *(f"{point.factor:.2f}" for point in points))
        for case, points in found
    ]
    print(columns(head, rows), end="\n\n")
    print(f"eight H100 together do {parallel_efficiency():.0%} of eight alone, in a step of Wan2.1 14B\n")
    print("GPUs fixed to a workflow / GPUs that move, where workflows are busy one at a time\n")
    print(columns(("workflows", *(str(each.workflows) for each in turns)), [_turns_row(turns)]), end="\n\n")
    print("GPUs that hold the weights, one process a workflow / stages with shared encoders, little load\n")
    shared = [
        (f"GPUs of {gb} GB", *(f"{each.factor:.2f}" for each in share_encoders(gb, _TURNS))) for gb in _GPU_GB
    ]
    print(columns(("workflows", *map(str, _TURNS)), shared), end="\n\n")
    for case, _ in found:
        print(f"{case.name}: {case.conditions}. From: {'; '.join(case.sources)}.")
    if options.json is not None:
        options.json.write_text(json.dumps(_plain(found, turns), indent=1) + "\n")
    if options.plot is not None:
        draw_charts(options.plot, _charts(found, turns))
    return 0


def _turns_row(turns: list[TurnsPoint]) -> tuple[str, ...]:
    return ("factor", *(f"{each.factor:.1f}" for each in turns))


def _plain(found: list[tuple[Case, list[Point]]], turns: list[TurnsPoint]) -> dict[str, Any]:
    return {
        "slack": SLACK,
        "cases": [
            {
                "name": case.name,
                "conditions": case.conditions,
                "sources": list(case.sources),
                "limit": case.limit,
                "points": [
                    {
                        "load": point.scale,
                        "requests_per_second": point.rate,
                        "p95_seconds": point.p95_seconds,
                        "monolithic_gpus": point.monolithic_gpus,
                        "staged_gpus": point.staged_gpus,
                        "factor": point.factor,
                    }
                    for point in points
                ],
            }
            for case, points in found
        ],
        "turns": [
            {"workflows": each.workflows, "fixed": each.fixed_gpus, "moving": each.moving_gpus}
            for each in turns
        ],
    }


def _charts(found: list[tuple[Case, list[Point]]], turns: list[TurnsPoint]) -> list[Chart]:
    lines = [
        Line(case.name, [(math.log2(point.scale), point.factor) for point in points])
        for case, points in found
        if case.limit < 10
    ]
    title = "GPU seconds for a request: monolithic / staged, same P95"
    return [
        Chart(title, "load: log2 of busy monolithic instances", "factor", lines),
        Chart(
            "Workflows that are busy in turn: GPUs fixed / GPUs that move",
            "workflows",
            "factor",
            [Line("resident, load 64", [(each.workflows, each.factor) for each in turns])],
        ),
    ]
