"""``onepiece bench senders``: many senders of one inbox, with claims and without.

The inbox is in a process of its own, over tcp without shared memory; between two looks at its connections
its loop is busy for ``--turn-ms``, as that of a node is that has much else to do. The senders are in the
measuring process; each sends its next message when the last one is in the ring. *Without* claims they lose
swaps to each other, as to an owner that executes none; *with* them they do not. Each round measures both
ways before the next begins; the ratio is the median of the rounds' own. Numbers of two runs are not to be
compared.
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from attrs import asdict, evolve, frozen

from onepiece.cli.bench_ends import LOOPBACK, START_SECONDS, say
from onepiece.cli.numbers import number_from, whole_from
from transports import Address, Geometry, Leniency, Options, Sender, open_receiver, open_sender, transport_for
from transports.memory import Capabilities, RemoteMemory
from transports.operations import Expired, Guarded
from transports.tcp import TcpTransport
from transports.testing.forwarding import ForwardingMemory

_PLACE: Final = Address.parse(f"tcp://{LOOPBACK}:0?shm=off")
_RING: Final = Geometry(slot_count=1024, payload_bytes=64 << 20, session_count=256)
_PATIENT: Final = Options(
    connect_timeout_seconds=START_SECONDS, operation_timeout_seconds=600.0, silence_seconds=600.0
)
_SENDERS_MAX: Final = 250


@frozen
class Measured:
    """What came of one way in one round."""

    rate: float
    """Messages a second, of all senders."""
    longest_seconds: float
    """That one message took from ``send`` until it was in the ring, or until the end."""
    silent: int
    """Senders of which none got through."""


@frozen
class Cell:
    """So many senders, of messages of one size, to an inbox that is so busy."""

    senders: int
    size_bytes: int
    turn_seconds: float


class _WithoutClaims(ForwardingMemory):
    """A session as with an owner that executes no claims."""

    @property
    def capabilities(self) -> Capabilities:
        """As inside, but for that."""
        return evolve(self._inner.capabilities, claims=False)

    async def guarded(self, guarded: Guarded) -> int | Expired:
        """As inside."""
        return await self._inner.guarded(guarded)


class _WithoutClaimsTransport(TcpTransport):
    """Opens such sessions."""

    async def connect(self, address: Address, hello: bytes, options: Options) -> RemoteMemory:
        """Open one."""
        return _WithoutClaims(await super().connect(address, hello, options))


# The far end.


async def _serve(turn_seconds: float) -> None:
    leniency = Leniency(lease_seconds=60.0)
    async with (
        transport_for(_PLACE).listen(_PLACE, _PATIENT) as listener,
        open_receiver(listener, "inbox", _RING, leniency=leniency) as receiver,
        asyncio.TaskGroup() as tasks,
    ):
        say(receiver.address)
        tasks.create_task(receiver.deliver_to(receiver.release))
        if turn_seconds:
            tasks.create_task(_be_busy(turn_seconds))
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        os._exit(0)  # whoever has measured has gone


async def _be_busy(turn_seconds: float) -> None:
    while True:
        time.sleep(turn_seconds)  # noqa: ASYNC251  # that is the point
        await asyncio.sleep(0)


@asynccontextmanager
async def _inbox(turn_seconds: float) -> AsyncIterator[Address]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "onepiece.cli.bench_senders",
        str(turn_seconds),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_SECONDS):
            line = (await process.stdout.readline()).decode().strip()
        yield evolve(Address.parse(line), options=_PLACE.options)
    finally:
        process.stdin.close()
        await process.wait()


# The near end.


async def _measure(cell: Cell, seconds: float, *, claims: bool) -> Measured:
    transport = TcpTransport() if claims else _WithoutClaimsTransport()
    async with _inbox(cell.turn_seconds) as address, AsyncExitStack() as stack:
        senders = [
            open_sender(address, f"sender-{at}", options=_PATIENT, transport=transport)
            for at in range(cell.senders)
        ]
        opened = await asyncio.gather(*map(stack.enter_async_context, senders))
        begun = time.perf_counter()
        waits = await asyncio.gather(
            *(_send(sender, bytes(cell.size_bytes), begun + seconds) for sender in opened)
        )
        stack.pop_all()  # their inbox ends without them: to wait for what it has not taken would take long
        for sender in opened:
            await sender.close()
    return Measured(
        rate=sum(len(each) - 1 for each in waits) / seconds,
        longest_seconds=max(max(each) for each in waits),
        silent=sum(len(each) == 1 for each in waits),
    )


async def _send(sender: Sender, payload: bytes, until: float) -> list[float]:
    """How long each message took, and at last how long the one had waited that was not finished."""
    took: list[float] = []
    begun = time.perf_counter()
    try:
        async with asyncio.timeout(until - begun):
            while True:
                begun = time.perf_counter()
                await sender.send(payload)
                took.append(time.perf_counter() - begun)
    except TimeoutError:
        took.append(time.perf_counter() - begun)
    return took


def _row(cell: Cell, without: Sequence[Measured], with_claims: Sequence[Measured]) -> dict[str, Any]:
    def middle(way: Sequence[Measured]) -> dict[str, float]:
        rows = [asdict(each) for each in way]
        return {name: statistics.median(row[name] for row in rows) for name in rows[0]}

    ratios = [ours.rate / max(theirs.rate, 1e-9) for ours, theirs in zip(with_claims, without, strict=True)]
    return {
        **asdict(cell),
        "without": middle(without),
        "with": middle(with_claims),
        "ratio": statistics.median(ratios),
    }


async def _measure_all(cells: Sequence[Cell], rounds: int, seconds: float) -> list[dict[str, Any]]:
    found: dict[tuple[Cell, bool], list[Measured]] = {}
    for _, cell, claims in itertools.product(range(rounds), cells, (False, True)):
        found.setdefault((cell, claims), []).append(await _measure(cell, seconds, claims=claims))
    return [_row(cell, found[cell, False], found[cell, True]) for cell in cells]


def run(argv: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="onepiece bench senders", description=__doc__)
    parser.add_argument("--senders", type=whole_from(1, _SENDERS_MAX), nargs="+", default=[1, 8, 50])
    parser.add_argument("--bytes", type=whole_from(0, 1 << 20), nargs="+", default=[64, 1_000_000])
    parser.add_argument("--turn-ms", type=number_from(0.0, 1000.0), nargs="+", default=[0.0, 20.0])
    parser.add_argument("--rounds", type=whole_from(1), default=3)
    parser.add_argument(
        "--seconds", type=number_from(0.0, above=True), default=2.0, help="of each (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    chosen = itertools.product(arguments.turn_ms, arguments.bytes, arguments.senders)
    cells = [Cell(senders, size, turn / 1000) for turn, size, senders in chosen]
    rows = asyncio.run(_measure_all(cells, arguments.rounds, arguments.seconds))
    machine = f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}"
    if arguments.json:
        print(json.dumps({"machine": machine, "rows": rows}, indent=1))
        return
    print(f"{machine}\n")
    print(
        f"{'turn, ms':>8}{'bytes':>9}{'senders':>9}{'without, 1/s':>14}{'with, 1/s':>11}{'ratio':>7}"
        f"{'longest, s':>16}{'silent':>11}"
    )
    for row in rows:
        ours, theirs = row["with"], row["without"]
        print(
            f"{row['turn_seconds'] * 1000:>8.0f}{row['size_bytes']:>9}{row['senders']:>9}"
            f"{theirs['rate']:>14.1f}{ours['rate']:>11.1f}{row['ratio']:>7.2f}"
            f"{theirs['longest_seconds']:>7.2f} ->{ours['longest_seconds']:>6.2f}"
            f"{theirs['silent']:>5.0f} ->{ours['silent']:>3.0f}"
        )


if __name__ == "__main__":
    asyncio.run(_serve(float(sys.argv[1])))
