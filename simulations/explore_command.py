"""``python -m simulations explore``: what was explored, and what was found, as tables.

Without an option the quick settings are explored. Options can be combined; the exit status is 0 only if
every promise held in the ring, every mutant was found, and each published queue was shown to fail.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Final, TypeVar

from attrs import frozen

from simulations.explore import explore
from simulations.published_ring import ADDING_QUEUE, LOCKED_RING, find_failure
from simulations.ring_model import RingModel
from simulations.ring_mutants import MUTANTS
from simulations.ring_settings import FULL, QUICK
from simulations.ring_state import Setting
from simulations.ring_words import trace_in_words

HELP: Final = "explore every interleaving of a small double ring"

_COLUMNS: Final = (
    ("producers", 9),
    ("messages", 16),
    ("slots", 5),
    ("granules", 8),
    ("crashes", 7),
    ("also", 58),
    ("states", 9),
    ("violations", 10),
    ("cannot finish", 13),
    ("seconds", 7),
)

_Work = TypeVar("_Work")
_Result = TypeVar("_Result")


@frozen
class Report:
    """What is printed of one exploration; small enough to come from another process."""

    states: int
    promise: int | None
    """The promise that is broken, if one is."""
    stuck: int
    steps: int
    words: tuple[str, ...]
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("--quick", action="store_true", help="small settings, within a minute (the default)")
    parser.add_argument("--full", action="store_true", help="all settings, some minutes and gigabytes")
    parser.add_argument("--mutants", action="store_true", help="wrong rings, each of which must be found")
    parser.add_argument("--published", action="store_true", help="two published queues, and how they fail")
    parser.add_argument("--traces", action="store_true", help="print the trace of every mutant too")
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes at work (%(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Carry the command out; returns its exit status."""
    held = True
    asked = arguments.full or arguments.mutants or arguments.published
    if arguments.quick or arguments.full or not asked:
        held &= _explore_settings(FULL if arguments.full else QUICK, arguments.jobs)
    if arguments.mutants:
        held &= _explore_mutants(arguments.jobs, traces=arguments.traces)
    if arguments.published:
        held &= _explore_published()
    return 0 if held else 1


def report(setting: Setting) -> Report:
    """Explore one setting to its end."""
    start = time.perf_counter()
    model = RingModel(setting)
    finding = explore(model)
    promise = finding.violation.promise if finding.violation else 4 if finding.stuck else None
    words = () if finding.holds else tuple(trace_in_words(model, finding))
    seconds = time.perf_counter() - start
    return Report(finding.states, promise, finding.stuck, len(finding.trace), words, seconds)


def _in_order(
    work: Callable[[_Work], _Result], items: Sequence[_Work], jobs: int
) -> Iterator[tuple[_Work, _Result]]:
    if jobs <= 1:
        for item in items:
            yield item, work(item)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from zip(items, pool.map(work, items), strict=True)


def _explore_settings(settings: Sequence[Setting], jobs: int) -> bool:
    print("The double ring: every interleaving of the programs that are shipped.\n")
    print(_row(name for name, _ in _COLUMNS))
    held = True
    states = 0
    for setting, found in _in_order(report, settings, jobs):
        messages = " | ".join(
            " ".join(str(granules or "pulled") for granules in each) for each in setting.messages
        )
        broken = int(found.promise is not None and not found.stuck)
        cells = (
            len(setting.messages),
            messages,
            setting.slots,
            setting.granules,
            setting.crashes,
            _also(setting),
            found.states,
            broken,
            found.stuck,
            f"{found.seconds:.1f}",
        )
        print(_row(cells), flush=True)
        for line in found.words:
            print(line)
        states += found.states
        held &= found.promise is None
    print(f"\n{states} states in {len(settings)} settings: " + ("all promises hold." if held else "BROKEN."))
    return held


def _also(setting: Setting) -> str:
    """What else may happen in a setting, in few words."""
    told = {
        f"{setting.suspicions} wrong suspicion": setting.suspicions,
        f"{setting.cuts} cut": setting.cuts,
        f"{setting.damages} damage{'s' if setting.damages > 1 else ''}": setting.damages,
        "guarded": setting.guarded,
        "claims": setting.claims,
        "hashes": setting.hashes,
        "torn reads": setting.torn_reads,
        "torn loads": setting.torn_loads,
        "deaths noticed": setting.deaths_noticed,
        f"{setting.places} lent at a time": setting.places > 1,
        "no generation": not setting.checks_generation,
        "regions retire": setting.retires,
        "payload apart": setting.apart,
        "near wrap": setting.near_wrap,
        "old snapshots": setting.moduli is not None,
    }
    return ", ".join(words for words, applies in told.items() if applies)


def _row(cells: Iterable[object]) -> str:
    widths = (width for _, width in _COLUMNS)
    return "  ".join(
        f"{cell:>{width}}" if isinstance(cell, int) else f"{cell!s:<{width}}"
        for cell, width in zip(cells, widths, strict=True)
    ).rstrip()


def _explore_mutants(jobs: int, *, traces: bool) -> bool:
    print("\nMutants: the ring with one thing taken away. Each must be found.\n")
    print(f"{'mutant':<58}{'broken promise':>14}{'states':>9}{'trace':>7}")
    settings = [mutant.setting for mutant in MUTANTS]
    survivors = 0
    for mutant, (_, found) in zip(MUTANTS, _in_order(report, settings, jobs), strict=True):
        promise = "SURVIVES" if found.promise is None else str(found.promise)
        print(f"{mutant.name:<58}{promise:>14}{found.states:>9}{found.steps:>7}", flush=True)
        survivors += found.promise is None
        if traces:
            print("\n".join(found.words), end="\n\n")
    print(f"\n{len(MUTANTS) - survivors} of {len(MUTANTS)} mutants found.")
    return survivors == 0


def _explore_published() -> bool:
    failed = True
    for queue in (LOCKED_RING, ADDING_QUEUE):
        for promise in (1, 2):
            failure = find_failure(queue, promise)
            if failure is None:
                failed = False
                print(f"\nPublished: {queue.name}: promise {promise} holds.")
                continue
            print(f"\nPublished: {queue.name}. Promise {promise} is broken ({failure.states} states):\n")
            for place, sentence in enumerate(failure.trace, start=1):
                print(f"{place:3}. {sentence}")
            print(f"     Promise {promise} is broken: {failure.what}.")
    return failed
