"""``onepiece bench wires``: the ring over a wire beside the benchmark program that comes with that wire.

Both run on this machine, between two processes, in turn: each round measures the one and then the other, so
that a busy moment hits both; a ratio is the median of the rounds' own ratios. What the programs do is less:
they write over one piece of memory again and again and never look at it, where the ring reserves room, goes
round through all its memory, hashes every byte on both sides, and hands each message over.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from attrs import asdict, frozen
from rich.console import Console
from rich.table import Table

from onepiece.cli import bench_programs as programs
from onepiece.cli.bench_ends import LENGTH_MAX, Near
from onepiece.cli.bench_programs import Program, ProgramError
from onepiece.cli.bench_ring import ring_near
from onepiece.cli.bench_transport import echo_seconds, take_seconds, warm_up
from onepiece.cli.columns import payload_text
from onepiece.cli.counts import positive
from transports import TransportError
from transports.ucx_worker import SETTINGS as UCX_SETTINGS
from transports.verbs_devices import SETTINGS_VARIABLE, Device, devices_of

_ROUNDS: Final = 5
_ROUNDS_QUICK: Final = 3
_QUICK_SHARE: Final = 16
_COUNT_MIN: Final = 6
_START_SECONDS: Final = 240.0
"""For the far end: on an emulated processor its imports take most of a minute."""
_WARM_UP_MESSAGES: Final = 9
"""Of the longest kind: once through the ring's memory, and a little further."""
_MIB: Final = 1 << 20
_BANDWIDTH: Final = "GB/s"
_ONE_WAY: Final = "us one way"


@frozen
class Measure:
    """What is measured of both, in which messages."""

    unit: str
    size_bytes: int
    count: int
    """Messages per round; fewer with ``--quick``."""

    @property
    def label(self) -> str:
        """A column's title."""
        return f"{payload_text(self.size_bytes)}, {self.unit}"


MEASURES: Final = (
    Measure(_ONE_WAY, 64, 1000),
    Measure(_BANDWIDTH, _MIB, 256),
    Measure(_BANDWIDTH, 16 * _MIB, 32),
)


@frozen
class Wire:
    """A wire, as the ring and as its own programs use it.

    ``near`` and ``far`` are what the two processes find in their environment.
    """

    place: str
    near: Mapping[str, str]
    far: Mapping[str, str]
    bandwidth: Callable[[int, int], Program]
    """Of so many bytes, so many times."""
    latency: Callable[[int, int], Program]
    bandwidth_of: Callable[[str, int], float]
    latency_of: Callable[[str, int], float]


def _verbs(options: argparse.Namespace) -> Wire:
    near, far = chosen_devices(devices_of(), options.device, options.far_device)
    return Wire(
        place="verbs://127.0.0.1:0",
        near={SETTINGS_VARIABLE: f"device={near}"},
        far={SETTINGS_VARIABLE: f"device={far}"},
        bandwidth=lambda size, count: programs.write_bandwidth(far, near, size, count),
        latency=lambda size, count: programs.write_latency(far, near, size, count),
        bandwidth_of=programs.bandwidth_of,
        latency_of=programs.latency_of,
    )


def chosen_devices(devices: Sequence[Device], near: str | None, far: str | None) -> tuple[str, str]:
    """The devices of both ends: as named, else the first with an active port and the last one.

    Raises:
        ProgramError: There is none.
    """
    active = [device.name for device in devices if any(port.is_active for port in device.ports)]
    if not active:
        raise ProgramError("no RDMA device with an active port here; see `onepiece doctor`")
    return near or active[-1], far or active[0]


def _ucx(wire: str, settings: Mapping[str, str]) -> Wire:
    own = {"UCX_TLS": UCX_SETTINGS["TLS"], "UCX_ALLOC_PRIO": UCX_SETTINGS["ALLOC_PRIO"]}
    given = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
    program = own | given | dict(settings)
    return Wire(
        place=f"ucx://127.0.0.1:0?require={wire}",
        near=settings,
        far=settings,
        bandwidth=lambda size, count: programs.put_bandwidth(program, size, count),
        latency=lambda size, count: programs.put_latency(program, size, count),
        bandwidth_of=programs.put_bandwidth_of,
        latency_of=programs.put_latency_of,
    )


WIRES: Final[Mapping[str, Callable[[argparse.Namespace], Wire]]] = {
    "verbs": _verbs,
    "ucx-shm": lambda _: _ucx("shm", {}),
    "ucx-tcp": lambda _: _ucx("tcp", {"UCX_TLS": "tcp"}),
}

Samples = dict[Measure, list[tuple[float, float]]]
"""Of each round: the ring's value and the program's."""


@frozen
class Row:
    """Medians, and the median of the rounds' own ratios of the ring to the program."""

    measure: str
    size_bytes: int
    unit: str
    ring: float
    program: float
    ratio: float
    """Above 1 the ring carries more, or takes longer."""
    ratios: tuple[float, ...]


def rows_of(samples: Samples) -> list[Row]:
    """One for each measure."""
    rows = []
    for measure, values in samples.items():
        ratios = tuple(ring / program for ring, program in values)
        rings, others = zip(*values, strict=True)
        rows.append(
            Row(
                measure=measure.label,
                size_bytes=measure.size_bytes,
                unit=measure.unit,
                ring=statistics.median(rings),
                program=statistics.median(others),
                ratio=statistics.median(ratios),
                ratios=ratios,
            )
        )
    return rows


async def measure_wire(wire: Wire, rounds: int, *, quick: bool) -> Samples:
    """Measure the ring and the wire's own program, round by round.

    Args:
        wire: That carries both.
        rounds: How many pairs of values to take.
        quick: Send fewer messages per round.

    Raises:
        ProgramError: The program is missing or failed.
        TransportError: The ring cannot use this wire.
    """
    data = memoryview(bytes(range(256)) * (LENGTH_MAX // 256))
    samples: Samples = {measure: [] for measure in MEASURES}
    async with ring_near(wire.place, far_environment=wire.far, start_seconds=_START_SECONDS) as near:
        await warm_up(near, data[: MEASURES[-1].size_bytes], _WARM_UP_MESSAGES)
        for _ in range(rounds):
            for measure in MEASURES:
                count = max(_COUNT_MIN, measure.count // (_QUICK_SHARE if quick else 1))
                ring = await _of_ring(near, measure, count, data[: measure.size_bytes])
                samples[measure].append((ring, await _of_program(wire, measure, count)))
    return samples


async def _of_ring(near: Near, measure: Measure, count: int, data: memoryview) -> float:
    if measure.unit == _ONE_WAY:
        return await echo_seconds(near, count, data) / count / 2 * 1e6
    return count * len(data) / await take_seconds(near, count, data) / 1e9


async def _of_program(wire: Wire, measure: Measure, count: int) -> float:
    size = measure.size_bytes
    if measure.unit == _ONE_WAY:
        return wire.latency_of(await programs.output_of(wire.latency(size, count)), size)
    return wire.bandwidth_of(await programs.output_of(wire.bandwidth(size, count)), size)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """These variables in this process's environment, where transports read them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def table_of(name: str, rows: Sequence[Row]) -> Table:
    """One line for each measure."""
    load = os.getloadavg()[0]
    title = f"{name}: {platform.machine()}, {os.cpu_count()} processors, load {load:.1f}"
    table = Table(title=title)
    table.add_column("")
    for column in ("ring", "the wire's own program", "ratio", "ratios of the rounds"):
        table.add_column(column, justify="right")
    for row in rows:
        ratios = " ".join(f"{ratio:.2f}" for ratio in sorted(row.ratios))
        table.add_row(row.measure, f"{row.ring:.4g}", f"{row.program:.4g}", f"{row.ratio:.2f}", ratios)
    return table


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    arguments = argparse.ArgumentParser(
        prog="onepiece bench wires", description=(__doc__ or "").partition("\n")[0]
    )
    arguments.add_argument("wire", choices=sorted(WIRES))
    arguments.add_argument("--rounds", type=positive, help=f"pairs per median (default {_ROUNDS})")
    arguments.add_argument("--quick", action="store_true", help="fewer rounds and messages")
    arguments.add_argument("--json", action="store_true", help="an object with `rows` on standard output")
    arguments.add_argument("--device", help="verbs: where packets leave (default: the last active one)")
    arguments.add_argument("--far-device", help="verbs: where they arrive (default: the first active one)")
    return arguments


def run(argv: list[str]) -> int:
    """Measure and print; returns the exit status."""
    options = parser().parse_args(argv)
    rounds = options.rounds or (_ROUNDS_QUICK if options.quick else _ROUNDS)
    try:
        wire = WIRES[options.wire](options)
        with _environment(wire.near):
            rows = rows_of(asyncio.run(measure_wire(wire, rounds, quick=options.quick)))
    except (ProgramError, TransportError, TimeoutError) as error:
        print(f"{options.wire} cannot be measured: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(
            json.dumps(
                {"wire": options.wire, "rounds": rounds, "rows": [asdict(row) for row in rows]}, indent=2
            )
        )
    else:
        console = Console()
        console.print(table_of(options.wire, rows), width=max(console.width, 100), crop=False)
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
