"""``onepiece bench transport``: the ring beside other ways of carrying bytes, on this machine, now.

Rounds are paired: each round measures every backend once before the next begins, so that a busy
moment of the machine hits all of them; a ratio is the median of the rounds' own ratios. Numbers of
two runs are not to be compared.
"""

import argparse
import asyncio
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from importlib.util import find_spec
from typing import Final

from attrs import asdict, frozen
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from onepiece.cli.bench_backends import BACKENDS
from onepiece.cli.bench_ends import ECHO, LAST, LENGTH_MAX, TAKE, Near
from onepiece.cli.columns import payload_text
from onepiece.cli.counts import positive
from transports import UnknownScheme, transport_for
from transports.verbs_devices import devices_of

_RAW: Final = "raw-sockets"
_COPY: Final = "memcpy"
_COMPARED_WITH_COPY: Final = {"ring-shm", "ring-shm-copied"}
_ROUNDS: Final = 5
_ROUNDS_QUICK: Final = 2
_WARM_UP_MESSAGES: Final = 5
_MIB: Final = 1 << 20
_TABLE_COLUMNS: Final = 110


@frozen
class Metric:
    """Something that is measured of each backend."""

    name: str
    size_bytes: int
    unit: str
    count: int
    """Messages per round; a fraction of it with ``--quick``."""

    @property
    def label(self) -> str:
        """A column's title."""
        return f"{self.name.replace('_', ' ')}\n{payload_text(self.size_bytes)}\n{self.unit}"


METRICS: Final = (
    Metric("round_trip", 64, "us", 400),
    Metric("round_trip", 4096, "us", 400),
    Metric("messages", 64, "1/s", 2000),
    Metric("bandwidth", 1 * _MIB, "GB/s", 64),
    Metric("bandwidth", 16 * _MIB, "GB/s", 12),
    Metric("bandwidth", 64 * _MIB, "GB/s", 4),
)

Samples = dict[tuple[str, Metric], list[float]]
"""One value per round for each backend and metric."""


@frozen
class Row:
    """A median, and the medians of its ratios to raw blocking sockets and to copies in the same rounds."""

    backend: str
    metric: str
    size_bytes: int
    median: float
    unit: str
    ratio_to_raw_sockets: float | None
    ratio_to_memcpy: float | None


def rows_of(samples: Samples) -> list[Row]:
    """Medians and ratios; a ratio is None where what it is to was not measured."""
    return [
        Row(
            backend,
            metric.name,
            metric.size_bytes,
            statistics.median(values),
            metric.unit,
            _ratio(values, samples.get((_RAW, metric))),
            _ratio(values, samples.get((_COPY, metric))),
        )
        for (backend, metric), values in samples.items()
    ]


def _ratio(values: Sequence[float], base: Sequence[float] | None) -> float | None:
    if base is None:
        return None
    return statistics.median([value / other for value, other in zip(values, base, strict=True)])


def table_of(rows: Sequence[Row]) -> Table:
    """One line per backend, one column per metric: the median and, in brackets, ratios."""
    ratios = f"(ratio to {_RAW}) [to {_COPY}]"
    table = Table(title=f"{platform.machine()}, Python {platform.python_version()}; {ratios}")
    table.add_column("backend", no_wrap=True)
    cells: dict[str, dict[tuple[str, int], str]] = {}
    for row in rows:
        ratio = "" if row.ratio_to_raw_sockets is None else f" ({row.ratio_to_raw_sockets:.2f})"
        if row.backend in _COMPARED_WITH_COPY and row.ratio_to_memcpy is not None:
            ratio += escape(f" [{row.ratio_to_memcpy:.2f}]")
        digits = 2 if row.unit == "GB/s" else 0
        cells.setdefault(row.backend, {})[row.metric, row.size_bytes] = f"{row.median:.{digits}f}{ratio}"
    for metric in METRICS:
        table.add_column(metric.label, justify="right", min_width=10)
    for backend, values in cells.items():
        table.add_row(backend, *(values.get((metric.name, metric.size_bytes), "") for metric in METRICS))
    return table


async def measure(names: Sequence[str], rounds: int, *, quick: bool) -> Samples:
    """Measure backends round by round.

    Args:
        names: Of backends.
        rounds: How many values to take of each.
        quick: Send fewer messages per round.

    Returns:
        One value per round, for each backend and metric.
    """
    data = memoryview(bytes(range(256)) * (LENGTH_MAX // 256))
    samples: Samples = {(name, metric): [] for name in names for metric in METRICS if _applies(metric, name)}
    async with AsyncExitStack() as stack:
        nears = {name: await stack.enter_async_context(BACKENDS[name].open()) for name in names}
        for near in nears.values():
            await warm_up(near, data)
        for _ in range(rounds):
            for metric in METRICS:
                count = max(2, metric.count // (4 if quick else 1))
                for name, near in nears.items():
                    if (name, metric) not in samples:
                        continue
                    value = await _value(near, metric, count, data[: metric.size_bytes])
                    samples[name, metric].append(value)
    return samples


def _applies(metric: Metric, name: str) -> bool:
    return BACKENDS[name].is_answered or metric.name == "bandwidth"


async def warm_up(near: Near, data: memoryview, count: int = _WARM_UP_MESSAGES) -> None:
    """Touch every page and open every window that the rounds will use, by so many messages."""
    for _ in range(count):
        await take_seconds(near, 1, data)
        await echo_seconds(near, 1, data[:64])


async def _value(near: Near, metric: Metric, count: int, data: memoryview) -> float:
    if metric.name == "round_trip":
        return await echo_seconds(near, count, data) / count * 1e6
    seconds = await take_seconds(near, count, data)
    return count / seconds if metric.name == "messages" else count * len(data) / seconds / 1e9


async def echo_seconds(near: Near, count: int, data: memoryview) -> float:
    """Seconds for so many messages, each of which comes back before the next one goes."""
    start = time.perf_counter()
    for _ in range(count):
        await near.send(ECHO, data)
        await near.receive()
    return time.perf_counter() - start


async def take_seconds(near: Near, count: int, data: memoryview) -> float:
    """Seconds from the first message to the answer that follows the last one."""
    start = time.perf_counter()
    for _ in range(count - 1):
        await near.send(TAKE, data)
    await near.send(LAST, data)
    await near.receive()
    return time.perf_counter() - start


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    arguments = argparse.ArgumentParser(
        prog="onepiece bench transport", description=(__doc__ or "").partition("\n")[0]
    )
    arguments.add_argument("--rounds", type=positive, help=f"values per median (default {_ROUNDS})")
    arguments.add_argument("--quick", action="store_true", help="fewer rounds and messages")
    arguments.add_argument("--json", action="store_true", help="an object with `rows` on standard output")
    arguments.add_argument(
        "--backend",
        action="append",
        choices=sorted(BACKENDS),
        help="measure this one beside raw-sockets; may be given several times (default: all)",
    )
    return arguments


def chosen_backends(wanted: Sequence[str] | None) -> list[str]:
    """The backends to measure, raw sockets first; those that something is missing for are left out."""
    names = [name for name in BACKENDS if wanted is None or name in wanted or name == _RAW]
    for name in list(names):
        if (missing := _missing(name)) is not None:
            print(f"{name} is left out: {missing}", file=sys.stderr)
            names.remove(name)
    return names


def _missing(backend: str) -> str | None:
    if (missing := BACKENDS[backend].missing()) is not None:
        return missing
    if backend == "pyzmq" and find_spec("zmq") is None:
        return "pyzmq is not installed (pip install -e '.[bench]')"
    if backend in {"ring-ucx", "ring-verbs"}:
        try:
            transport_for(backend.removeprefix("ring-"))
        except UnknownScheme as missing:
            return str(missing)
    if backend == "ring-verbs" and not devices_of():
        return "the kernel knows no RDMA device; see `onepiece doctor`"
    return None


def run(argv: list[str]) -> int:
    """Measure and print; returns the exit status: 1 if a backend that was named could not be measured."""
    options = parser().parse_args(argv)
    rounds = options.rounds or (_ROUNDS_QUICK if options.quick else _ROUNDS)
    names = chosen_backends(options.backend)
    samples = asyncio.run(measure(names, rounds, quick=options.quick))
    rows = rows_of(samples)
    if options.json:
        print(json.dumps({"rounds": rounds, "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        console = Console()
        console.print(table_of(rows), width=max(console.width, _TABLE_COLUMNS), crop=False)
    return 0 if set(options.backend or ()) <= set(names) else 1


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
