"""The ring over verbs beside perftest on the same device, in rounds: ``python -m tests.rdma.bench``.

Each round measures perftest and the ring once for each size. A ratio is the median of the rounds' own.
"""

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final

from onepiece.cli.bench_backends import BACKENDS, ECHO, LAST, TAKE, Near

_MIB: Final = 1 << 20
_ROUNDS: Final = 3
_SIZES: Final = ((1 * _MIB, 12), (16 * _MIB, 2))
_SMALL_BYTES, _SMALL_COUNT = 64, 60
_DEVICE: Final = ("-d", "rxe0", "-x", "1", "-F")
_START_SECONDS: Final = 2.0


def perftest(program: str, size: int, count: int, column: int, *options: str) -> float:
    """What perftest says of a size, in its own unit."""
    command = [program, *_DEVICE, "-s", str(size), "-n", str(max(count, 5)), *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        time.sleep(_START_SECONDS)
        said = subprocess.run([*command, "127.0.0.1"], capture_output=True, text=True, check=True).stdout
        server.wait()
    line = next(line.split() for line in said.splitlines() if line.split()[:1] == [str(size)])
    return float(line[column])


async def bandwidth(near: Near, size: int, count: int) -> float:
    """MiB/s of messages one behind the other, until the answer to the last one."""
    data = memoryview(bytes(size))
    began = time.perf_counter()
    for _ in range(count - 1):
        await near.send(TAKE, data)
    await near.send(LAST, data)
    await near.receive()
    return size * count / _MIB / (time.perf_counter() - began)


async def one_way(near: Near, count: int) -> float:
    """Microseconds of half a round trip of a small message."""
    data = memoryview(bytes(_SMALL_BYTES))
    began = time.perf_counter()
    for _ in range(count):
        await near.send(ECHO, data)
        await near.receive()
    return (time.perf_counter() - began) / count / 2 * 1e6


def told(what: str, unit: str, pairs: Sequence[tuple[float, float]]) -> str:
    """A line: both medians, and the median of the ratios."""
    theirs, ours = (statistics.median(values) for values in zip(*pairs, strict=True))
    ratio = statistics.median(our / their for their, our in pairs)
    return f"{what}: perftest {theirs:.1f} {unit}, ring {ours:.1f} {unit}, ratio {ratio:.2f}\n"


async def main() -> None:
    """Measure and print."""
    pairs: dict[int, list[tuple[float, float]]] = {}
    async with BACKENDS["ring-verbs"].open() as near:
        await bandwidth(near, 1 * _MIB, 2)
        for _ in range(_ROUNDS):
            for size, count in _SIZES:
                theirs = perftest("ib_write_bw", size, count, 3, "-e")
                pairs.setdefault(size, []).append((theirs, await bandwidth(near, size, count)))
            theirs = perftest("ib_write_lat", _SMALL_BYTES, _SMALL_COUNT, 4)
            pairs.setdefault(0, []).append((theirs, await one_way(near, _SMALL_COUNT)))
    for size, _ in _SIZES:
        sys.stdout.write(told(f"bandwidth of {size // _MIB} MiB", "MiB/s", pairs[size]))
    sys.stdout.write(told(f"{_SMALL_BYTES} B one way", "us", pairs[0]))


if __name__ == "__main__":
    asyncio.run(main())
