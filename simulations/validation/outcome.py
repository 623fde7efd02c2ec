"""How the commands that run real nodes end: with a table, a file and a picture if wanted, and a status."""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from onepiece.errors import OnePieceError
from onepiece.log import configure
from simulations.plot import Chart, draw_charts


class Outcome(Protocol):
    """What a command has found."""

    @property
    def holds(self) -> bool:
        """Whether it is what it should be."""

    def told(self) -> str:
        """For people."""

    def plain(self) -> Mapping[str, Any]:
        """All that was measured, for JSON."""

    def charts(self) -> Sequence[Chart]:
        """The same as a picture."""


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """The options that say where an outcome goes."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw it")


def carry_out(
    name: str,
    measure: Callable[[argparse.Namespace], Coroutine[Any, Any, Outcome]],
    options: argparse.Namespace,
) -> int:
    """Measure, and tell; the exit status: 0 if the outcome holds, 1 if it does not, 2 if there is none."""
    configure("text", "warning")
    try:
        found = asyncio.run(measure(options))
    except (OnePieceError, OSError, RuntimeError) as error:
        sys.stderr.write(f"{name}: {error}\n")
        return 2
    print(found.told())
    if options.json is not None:
        options.json.write_text(json.dumps(found.plain(), indent=1) + "\n")
    if options.plot is not None:
        draw_charts(options.plot, found.charts())
    return 0 if found.holds else 1
