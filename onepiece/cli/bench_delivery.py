"""``onepiece bench delivery``: what it costs that outputs are retained until the next stage is done.

One node with all roles, in a process of its own, and two workflows that differ in one thing: between the
three stages of one the edges are retained, as by default, between those of the other they are at most once.
The two take turns, round by round, so that whatever else the machine does meets both. What is compared is the
median of the rounds' rates.
"""

import argparse
import asyncio
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import onepiece
from onepiece.cli.bench_node import ends_with_sigterm, serving_node
from onepiece.cli.bench_stages import through_loop, through_loop_at_most_once
from onepiece.client import Client
from onepiece.log import configure

_MODULES: Final = "onepiece.cli.bench_stages:through_loop,onepiece.cli.bench_stages:through_loop_at_most_once"
_WORKFLOWS: Final[Mapping[str, Any]] = {"retained": through_loop, "at_most_once": through_loop_at_most_once}
_REQUEST_SECONDS: Final = 60.0
_WIDTH: Final = 14


async def measure(
    *, rounds: int, requests: int, in_flight: int, payload_bytes: int, tell: Callable[[str, float], None]
) -> dict[str, list[float]]:
    """Requests per second of each workflow, one figure for each round.

    Args:
        rounds: How many of each workflow, at least 1.
        requests: How many make a round.
        in_flight: How many at a time.
        payload_bytes: What each passes through the stages.
        tell: Called with the name of the workflow and the rate of each round.

    Raises:
        RuntimeError: The node did not start.
        OnePieceError: A request failed; figures of a run that lost work are worth nothing.
    """
    rates: dict[str, list[float]] = {name: [] for name in _WORKFLOWS}
    async with serving_node(_MODULES, through_loop, b"") as (_, url, _), onepiece.connect(url) as client:
        for call in _WORKFLOWS.values():
            await _round(client, call, in_flight, in_flight, payload_bytes)
        for number in range(rounds):
            names = list(_WORKFLOWS) if number % 2 == 0 else list(_WORKFLOWS)[::-1]
            for name in names:
                seconds = await _round(client, _WORKFLOWS[name], requests, in_flight, payload_bytes)
                rates[name].append(requests / seconds)
                tell(name, rates[name][-1])
    return rates


async def _round(client: Client, call: Any, requests: int, in_flight: int, payload_bytes: int) -> float:
    payload, numbers, started = bytes(payload_bytes), iter(range(requests)), time.monotonic()

    async def keep_busy() -> None:
        for _ in numbers:
            await (await client.submit(call(payload), timeout=_REQUEST_SECONDS)).result()

    async with asyncio.TaskGroup() as slots:
        for _ in range(in_flight):
            slots.create_task(keep_busy())
    return time.monotonic() - started


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    arguments = argparse.ArgumentParser(
        prog="onepiece bench delivery", description=(__doc__ or "").partition("\n")[0]
    )
    arguments.add_argument("--rounds", type=int, default=9, help="of each kind of edge (%(default)s)")
    arguments.add_argument("--requests", type=int, default=200, help="in a round (%(default)s)")
    arguments.add_argument("--in-flight", type=int, default=8, help="at a time (%(default)s)")
    arguments.add_argument("--payload-bytes", type=int, default=100_000, help="of each (%(default)s)")
    arguments.add_argument("--json", action="store_true", help="an object with all `rates`")
    return arguments


def run(argv: list[str]) -> int:
    """Measure and print."""
    options = parser().parse_args(argv)
    configure(level="warning")
    if min(options.rounds, options.requests, options.in_flight) < 1:
        print("onepiece bench delivery: --rounds, --requests and --in-flight are at least 1", file=sys.stderr)
        return 2

    def tell(name: str, rate: float) -> None:
        if not options.json:
            print(f"{name.ljust(_WIDTH)}{rate:8.1f} requests/s", flush=True)

    if not options.json:
        print(f"{platform.machine()}, Python {platform.python_version()}, {options.payload_bytes} bytes")
    with ends_with_sigterm():
        rates = asyncio.run(
            measure(
                rounds=options.rounds,
                requests=options.requests,
                in_flight=options.in_flight,
                payload_bytes=options.payload_bytes,
                tell=tell,
            )
        )
    medians = {name: statistics.median(each) for name, each in rates.items()}
    ratio = medians["retained"] / medians["at_most_once"]
    if options.json:
        print(json.dumps({"rates": rates, "medians": medians, "ratio": ratio}, indent=2))
    else:
        told = ", ".join(f"{name} {rate:.1f}" for name, rate in medians.items())
        print(f"median requests/s: {told}; retained to at_most_once {ratio:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
