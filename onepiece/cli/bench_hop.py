"""``onepiece bench hop``: what it costs to go through a stage, beside other ways of chaining processes.

Three stages that do nothing, each in a process of its own; a payload goes from the measuring process
through all of them and back. It does so in one lap and in several. What a request costs apart from its hops
(accepting it, keeping its record, storing its result) is in both, so the difference, divided by the stages
that the longer way has more, is *a hop*: from one stage to the next, in another process.

All backends are started before the first measurement, and rounds are paired: each round measures every
backend in a cell before it goes on to the next, so that a busy moment of the machine hits all of them; a
ratio is the median of the rounds' own ratios.
Numbers of two runs are not to be compared.
"""

import argparse
import asyncio
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from typing import Any, Final

from attrs import asdict, frozen
from rich.console import Console
from rich.table import Table

from onepiece.cli.bench_hop_backends import (
    BACKENDS,
    SERIAL_BYTES,
    STAGES,
    WORKER_INBOX_BYTES,
    Chain,
    Reply,
    Seen,
)
from onepiece.cli.bench_stages import LAPS
from onepiece.cli.columns import payload_text
from onepiece.cli.counts import positive
from onepiece.errors import ConfigError
from onepiece.log import configure
from onepiece.node.loop import run_on_node_loop

HOPS_MORE: Final = STAGES * (LAPS - 1)
"""By which the longer way exceeds the shorter one."""
_BASE: Final = "pyzmq"
_REQUEST_SECONDS: Final = 60.0
_ROUNDS: Final = 5
_ROUNDS_QUICK: Final = 2
_MIB: Final = 1 << 20
_ROUND_BYTES: Final = 16 * _MIB
_TABLE_COLUMNS: Final = 120


@frozen
class Cell:
    """Payloads of one size, so many of them under way at a time."""

    size_bytes: int
    in_flight: int
    requests: int
    """Per round; a fraction of it with ``--quick``."""
    warm_up: int

    @property
    def label(self) -> str:
        """A table's title."""
        return f"{payload_text(self.size_bytes)}, {self.in_flight} in flight"


CELLS: Final = (
    Cell(64, 1, 400, 20),
    Cell(64, 8, 800, 20),
    Cell(1 * _MIB, 1, 60, 5),
    Cell(1 * _MIB, 8, 120, 8),
    Cell(16 * _MIB, 1, 12, 2),
    Cell(16 * _MIB, 8, 24, 8),
)


@frozen
class Sample:
    """One backend in one cell of one round: requests of one lap, and what a hop adds to one."""

    hop_us: float
    """Of the median latency."""
    hop_cpu_us: float
    p50_ms: float
    p99_ms: float
    requests_per_second: float
    cpu_ms_per_request: float
    """User and system time of the measuring process and the backend's own ones."""


Samples = dict[tuple[str, Cell], list[Sample]]
"""One sample per round for each backend and cell."""


@frozen
class Row:
    """Medians over the rounds; ratios are medians of the rounds' own ratios to pyzmq."""

    backend: str
    size_bytes: int
    in_flight: int
    hop_us: float
    hop_cpu_us: float
    hop_ratio_to_pyzmq: float | None
    p50_ms: float
    p99_ms: float
    requests_per_second: float
    cpu_ms_per_request: float
    p50_ratio_to_pyzmq: float | None
    hop_us_of_rounds: tuple[float, ...]


@frozen
class Measured:
    """A running chain and the processes it consists of, beside the measuring one."""

    chain: Chain
    processes: tuple[Any, ...]


def rows_of(samples: Samples) -> list[Row]:
    """Medians and ratios; a ratio is None where pyzmq was not measured."""
    rows = []
    for (backend, cell), values in samples.items():
        base = samples.get((_BASE, cell))
        rows.append(
            Row(
                backend=backend,
                size_bytes=cell.size_bytes,
                in_flight=cell.in_flight,
                hop_us=statistics.median(sample.hop_us for sample in values),
                hop_cpu_us=statistics.median(sample.hop_cpu_us for sample in values),
                hop_ratio_to_pyzmq=_ratio(values, base, lambda sample: sample.hop_us),
                p50_ms=statistics.median(sample.p50_ms for sample in values),
                p99_ms=statistics.median(sample.p99_ms for sample in values),
                requests_per_second=statistics.median(sample.requests_per_second for sample in values),
                cpu_ms_per_request=statistics.median(sample.cpu_ms_per_request for sample in values),
                p50_ratio_to_pyzmq=_ratio(values, base, lambda sample: sample.p50_ms),
                hop_us_of_rounds=tuple(sample.hop_us for sample in values),
            )
        )
    return rows


def _ratio(
    values: Sequence[Sample], base: Sequence[Sample] | None, read: Callable[[Sample], float]
) -> float | None:
    if base is None:
        return None
    pairs = [(read(value), read(other)) for value, other in zip(values, base, strict=True)]
    # A difference of two medians can come out as nothing on a busy machine: no ratio to that.
    ratios = [value / other for value, other in pairs if other > 0]
    return statistics.median(ratios) if ratios else None


def tables_of(rows: Sequence[Row]) -> list[Table]:
    """One table per cell, one line per backend."""
    tables = []
    for cell in CELLS:
        table = Table(title=cell.label)
        table.add_column("backend", no_wrap=True)
        for title in ("hop us", "to pyzmq", "hop CPU us", "p50 ms", "p99 ms", "req/s", "CPU ms/req"):
            table.add_column(title, justify="right", min_width=8)
        for row in rows:
            if (row.size_bytes, row.in_flight) == (cell.size_bytes, cell.in_flight):
                table.add_row(
                    row.backend,
                    f"{row.hop_us:.0f}",
                    _two_digits(row.hop_ratio_to_pyzmq),
                    f"{row.hop_cpu_us:.0f}",
                    f"{row.p50_ms:.2f}",
                    f"{row.p99_ms:.2f}",
                    f"{row.requests_per_second:.0f}",
                    f"{row.cpu_ms_per_request:.2f}",
                )
        tables.append(table)
    return tables


def _two_digits(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


async def measure(names: Sequence[str], rounds: int, cells: Sequence[Cell] = CELLS) -> Samples:
    """Measure backends round by round.

    Args:
        names: Of backends.
        rounds: How many samples to take of each.
        cells: What to measure.

    Returns:
        One sample per round, for each backend and cell.

    Raises:
        RuntimeError: A backend did not start, or a wrong payload came back.
    """
    samples: Samples = {(name, cell): [] for cell in cells for name in names}
    async with AsyncExitStack() as stack:
        chains = {name: await stack.enter_async_context(_started(name)) for name in names}
        if any(cell.size_bytes >= _MIB for cell in cells):
            for name, measured in chains.items():
                await _go_round(name, measured.chain)
        for _ in range(rounds):
            for cell in cells:
                for name, measured in chains.items():
                    samples[name, cell].append(await _sample(name, measured, cell))
    return samples


@asynccontextmanager
async def _started(name: str) -> AsyncIterator[Measured]:
    """A backend's chain; its processes are the children that appear while it starts."""
    import psutil

    own = psutil.Process()
    before = {child.pid for child in own.children(recursive=True)}
    async with BACKENDS[name].open() as chain:
        await _pass_through(name, chain, bytearray(64), 0, LAPS)
        children = own.children(recursive=True)
        yield Measured(chain, (own, *(child for child in children if child.pid not in before)))


async def _go_round(name: str, chain: Chain) -> None:
    """Let every ring of the workers be used once from end to end: its memory comes with the first use.

    A machine that has to find that memory first takes longer for it than for all the rest of a hop.
    """
    payload = bytearray(_ROUND_BYTES)
    for number in range(-(-WORKER_INBOX_BYTES // (_ROUND_BYTES * LAPS))):
        await _pass_through(name, chain, payload, number, LAPS)


@frozen
class _Burst:
    """Requests through so many laps."""

    latencies: list[float]
    seconds: float
    cpu_seconds: float

    @property
    def p50(self) -> float:
        """The median latency in seconds."""
        return statistics.median(self.latencies)

    @property
    def cpu_per_request(self) -> float:
        """In seconds."""
        return self.cpu_seconds / len(self.latencies)


async def _sample(name: str, measured: Measured, cell: Cell) -> Sample:
    short, long = await _burst(name, measured, cell, 1), await _burst(name, measured, cell, LAPS)
    return Sample(
        hop_us=(long.p50 - short.p50) / HOPS_MORE * 1e6,
        hop_cpu_us=(long.cpu_per_request - short.cpu_per_request) / HOPS_MORE * 1e6,
        p50_ms=short.p50 * 1e3,
        p99_ms=_percentile(short.latencies, 0.99) * 1e3,
        requests_per_second=len(short.latencies) / short.seconds,
        cpu_ms_per_request=short.cpu_per_request * 1e3,
    )


async def _burst(name: str, measured: Measured, cell: Cell, laps: int) -> _Burst:
    payloads = [bytearray([7 + slot]) * cell.size_bytes for slot in range(cell.in_flight)]
    for number in range(cell.warm_up):
        await _pass_through(name, measured.chain, payloads[number % cell.in_flight], number, laps)
    latencies: list[float] = []
    unchecked: list[_Answered] = []

    async def keep_busy(payload: bytearray) -> None:
        while len(latencies) + cell.in_flight <= cell.requests:
            serial = len(latencies) * cell.in_flight + payload[-1]
            seconds, answered = await _answer(measured.chain, payload, serial, laps)
            latencies.append(seconds)
            if BACKENDS[name].is_checked_later:
                unchecked.append(answered)
            else:
                await answered.check(name)

    gc.collect()
    cpu_before, started = _cpu_seconds(measured), time.perf_counter()
    async with asyncio.TaskGroup() as slots:
        for payload in payloads:
            slots.create_task(keep_busy(payload))
    burst = _Burst(latencies, time.perf_counter() - started, _cpu_seconds(measured) - cpu_before)
    for answered in unchecked:
        await answered.check(name)
    return burst


@frozen
class _Answered:
    """A reply, and what must be seen in it."""

    reply: Reply
    wanted: Seen

    async def check(self, name: str) -> None:
        """Raise ``RuntimeError`` if it is the answer to something else."""
        seen = await self.reply.close()
        if seen != self.wanted:
            raise RuntimeError(f"{name} gave back {seen} where {self.wanted} was sent")


async def _answer(chain: Chain, payload: bytearray, serial: int, laps: int) -> tuple[float, _Answered]:
    """Send a payload under a serial number; the seconds until the reply was there, and the reply."""
    mark = serial.to_bytes(SERIAL_BYTES, "little")
    payload[:SERIAL_BYTES] = mark
    started = time.perf_counter()
    async with asyncio.timeout(_REQUEST_SECONDS):
        reply = await chain.request(payload, laps)
    return time.perf_counter() - started, _Answered(reply, Seen(len(payload), mark, payload[-1]))


async def _pass_through(name: str, chain: Chain, payload: bytearray, serial: int, laps: int) -> None:
    """Send a payload and check its reply, off the clock."""
    _, answered = await _answer(chain, payload, serial, laps)
    await answered.check(name)


def _percentile(values: Sequence[float], share: float) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


def _cpu_seconds(measured: Measured) -> float:
    times = [process.cpu_times() for process in measured.processes]
    return float(sum(each.user + each.system for each in times))


def quick_cells(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """A quarter of the requests."""
    return tuple(
        Cell(cell.size_bytes, cell.in_flight, max(2 * cell.in_flight, cell.requests // 4), cell.warm_up)
        for cell in cells
    )


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    arguments = argparse.ArgumentParser(
        prog="onepiece bench hop", description=(__doc__ or "").partition("\n")[0]
    )
    arguments.add_argument("--rounds", type=positive, help=f"samples per median (default {_ROUNDS})")
    arguments.add_argument("--quick", action="store_true", help="fewer rounds and requests")
    arguments.add_argument("--json", action="store_true", help="an object with `rows` on standard output")
    arguments.add_argument(
        "--backend",
        action="append",
        choices=sorted(BACKENDS),
        help="measure this one; may be given several times (default: all that are installed)",
    )
    arguments.add_argument(
        "--size",
        type=positive,
        action="append",
        metavar="BYTES",
        help="measure payloads of this size alone; may be given several times",
    )
    return arguments


def chosen_backends(wanted: Sequence[str] | None) -> list[str]:
    """The backends to measure; those that are not installed are named and left out."""
    names = [name for name in BACKENDS if wanted is None or name in wanted]
    for name in list(names):
        backend = BACKENDS[name]
        if not backend.is_installed:
            print(f"{name} is not installed and is left out (pip install {backend.extra})", file=sys.stderr)
            names.remove(name)
    return names


def run(argv: list[str]) -> int:
    """Measure and print; returns the exit status."""
    options = parser().parse_args(argv)
    if find_spec("psutil") is None:
        raise ConfigError(
            "psutil counts the processes' CPU seconds and is not installed; pip install -e '.[bench]'"
        )
    rounds = options.rounds or (_ROUNDS_QUICK if options.quick else _ROUNDS)
    cells = quick_cells(CELLS) if options.quick else CELLS
    if options.size is not None:
        cells = tuple(cell for cell in cells if cell.size_bytes in options.size)
    configure(level="warning")
    rows = rows_of(run_on_node_loop(measure(chosen_backends(options.backend), rounds, cells)))
    if options.json:
        print(json.dumps({"rounds": rounds, "rows": [asdict(row) for row in rows]}, indent=2))
        return 0
    console = Console()
    console.print(f"{platform.machine()}, Python {platform.python_version()}, {rounds} rounds")
    for table in tables_of(rows):
        if table.row_count:
            console.print(table, width=max(console.width, _TABLE_COLUMNS), crop=False)
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
