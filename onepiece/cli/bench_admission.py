"""``onepiece bench admission``: what it costs to refuse.

Three measurements, each as the proxy does it:

*decision*  the door alone, asked ``--rate`` times a second by several tenants of a set that is full, while
            the accepted requests report their stages and end. Moments are simulated, so that nothing is left
            out when the machine is slower; each call's processor time is measured, so that other programs'
            turns are not counted. *busy* is the share of one processor that the door takes at that rate.

*http*      a whole proxy in a process of its own, whose set is full: connections that ask as fast as they are
            refused. It is bound by HTTP (uvicorn and h11), not by the door: see the processor time that the
            proxy takes for each refusal.

*load*      with ``--load-seconds``: requests to real processes, from half to five times what they can do.
"""

import argparse
import asyncio
import heapq
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from attrs import asdict, define, field, frozen

import onepiece
from onepiece.cli.bench_admission_load import Loaded, load
from onepiece.cli.bench_node import ends_with_sigterm, serving_node
from onepiece.cli.bench_stages import through_loop
from onepiece.core.admission import Admission, AdmissionRules, BudgetLimits, RequestBudget
from onepiece.core.capacity import WorkflowShape
from onepiece.errors import Overloaded
from onepiece.log import configure
from onepiece.requests import Terms

_STAGES: Final = {"encode": (2.3, 8), "denoise": (60.0, 256), "decode": (7.1, 30)}
"""Seconds, and workers in all: about four requests a second."""
_WARM_FACTOR: Final = 3.0
"""The set is full when it was asked for so many times what a request takes, at a few times its rate."""
_WARM_LOAD: Final = 2.5
_CONNECTIONS: Final = 32
_TARGET_MS: Final = 1.0


@frozen
class Decisions:
    """What the door took, in microseconds of processor time."""

    tenants: int
    offered_per_second: float
    decisions: int
    admitted: int
    in_flight: int
    p50_us: float
    p99_us: float
    p999_us: float
    max_us: float
    busy: float


@frozen
class Refusals:
    """What a proxy refused over HTTP."""

    connections: int
    seconds: float
    refused: int
    admitted: int
    per_second: float
    p50_ms: float
    p99_ms: float
    proxy_cpu_ms: float
    """Processor time of the proxy for each."""


@define(eq=False)
class _FullSet:
    """A door, and requests that go through the stages behind it in simulated time."""

    tenants: int
    stages: Mapping[str, tuple[float, int]]
    rng: random.Random = field(factory=lambda: random.Random(1))  # noqa: S311 - no secret
    now: float = 0.0
    door: Admission = field(init=False)
    _events: list[tuple[float, int, Callable[[], None]]] = field(factory=list)
    _count: int = 0

    def __attrs_post_init__(self) -> None:
        rules = AdmissionRules(wait_factor=0.2)
        self.door = Admission(RequestBudget(BudgetLimits(total=1000, each=1000)), rules, life="bench")
        workers = {name: count for name, (_, count) in self.stages.items()}
        self.door.set_up([WorkflowShape.line("video", self.stages)], workers)

    def offer(self, gap: float) -> float:
        """Ask once, ``gap`` seconds after the last time; the seconds that it took."""
        self.now += gap
        while self._events and self._events[0][0] <= self.now:
            heapq.heappop(self._events)[2]()
        self._count += 1
        uid, terms = f"r{self._count}", Terms(f"t{self.rng.randrange(self.tenants)}")
        begun = time.thread_time()
        try:
            self.door.offer(uid, "video", terms, 3600.0, self.now)
        except Overloaded:
            return time.thread_time() - begun
        took = time.thread_time() - begun
        self._follow(uid)
        return took

    def _follow(self, uid: str) -> None:
        at = self.now
        for step, (seconds, _) in enumerate(self.stages.values()):
            name = f"{step}"
            begin, end = at, at + seconds * self.rng.uniform(0.95, 1.05)
            self._at(begin, partial(self._report, self.door.started, uid, name, begin))
            self._at(end, partial(self._report, self.door.finished, uid, name, end))
            at = end
        self._at(at, lambda: self.door.give_back(uid))

    def _report(self, told: Callable[[str, str, float, float], None], uid: str, step: str, at: float) -> None:
        told(uid, step, at, self.now)

    def _at(self, moment: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (moment, self._count, act))


def decide(tenants: int, rate: float, decisions: int, stages: Mapping[str, tuple[float, int]]) -> Decisions:
    """Measure the door alone; ``stages`` are the seconds and the workers of each."""
    full = _FullSet(tenants, stages)
    warm_rate = _WARM_LOAD * min(workers / seconds for seconds, workers in stages.values())
    while full.now < _WARM_FACTOR * sum(seconds for seconds, _ in stages.values()):
        full.offer(1 / warm_rate)
    admitted = full.door.counts["admitted"]
    took = sorted(full.offer(1 / rate) for _ in range(decisions))
    return Decisions(
        tenants=tenants,
        offered_per_second=rate,
        decisions=decisions,
        admitted=full.door.counts["admitted"] - admitted,
        in_flight=full.door.budget.in_flight,
        p50_us=_quantile(took, 0.5) * 1e6,
        p99_us=_quantile(took, 0.99) * 1e6,
        p999_us=_quantile(took, 0.999) * 1e6,
        max_us=took[-1] * 1e6,
        busy=sum(took) / decisions * rate,
    )


async def refuse(seconds: float, connections: int) -> Refusals:
    """Measure a proxy whose one place is taken."""
    took: list[float] = []
    statuses: dict[int, int] = {}
    module = "onepiece.cli.bench_stages:through_loop"
    async with serving_node(module, through_loop, b"", "--requests-max", "1") as (process, url, _):
        parts = urlsplit(url)
        async with onepiece.connect(url), asyncio.TaskGroup() as tasks:
            # A request whose body never comes holds the only place.
            holder = await _open(parts.hostname, parts.port)
            holder[1].write(_head(1 << 20))
            await asyncio.sleep(0.5)
            until, cpu_before = time.monotonic() + seconds, _cpu_seconds(process.pid)
            for _ in range(connections):
                tasks.create_task(_ask(parts.hostname, parts.port, until, took, statuses))
        cpu_seconds = _cpu_seconds(process.pid) - cpu_before
        holder[1].close()
    took.sort()
    return Refusals(
        connections=connections,
        seconds=seconds,
        refused=statuses.get(429, 0),
        admitted=sum(statuses.values()) - statuses.get(429, 0),
        per_second=statuses.get(429, 0) / seconds,
        p50_ms=_quantile(took, 0.5) * 1e3,
        p99_ms=_quantile(took, 0.99) * 1e3,
        proxy_cpu_ms=cpu_seconds * 1e3 / max(1, len(took)),
    )


def _cpu_seconds(process_id: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{process_id}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _open(host: str | None, port: int | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(host, port)


def _head(length: int) -> bytes:
    return (
        "POST /v1/requests?workflow=through_loop HTTP/1.1\r\nHost: bench\r\n"
        f"Content-Type: application/vnd.onepiece.value\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


async def _ask(
    host: str | None, port: int | None, until: float, took: list[float], statuses: dict[int, int]
) -> None:
    """Ask until the time is over, on one connection; the body is a byte, which the proxy throws away."""
    reader, writer = await _open(host, port)
    try:
        while time.monotonic() < until:
            begun = time.perf_counter()
            writer.write(_head(1) + b"x")
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            took.append(time.perf_counter() - begun)
            status = int(head.split()[1])
            statuses[status] = statuses.get(status, 0) + 1
    finally:
        writer.close()


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def run(arguments: Sequence[str]) -> int:
    """Measure and print; 1 if a decision takes a millisecond or more at the 99th percentile."""
    parser = argparse.ArgumentParser(prog="onepiece bench admission", description=__doc__)
    parser.add_argument(
        "--rate", type=float, default=10_000.0, help="offered a second (default: %(default)s)"
    )
    parser.add_argument("--decisions", type=int, default=100_000, metavar="N", help="default: %(default)s")
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 8, 1000], metavar="N")
    parser.add_argument(
        "--http-seconds",
        type=float,
        default=5.0,
        metavar="S",
        help="0 leaves HTTP out (default: %(default)s)",
    )
    parser.add_argument(
        "--load-seconds",
        type=float,
        default=0.0,
        metavar="S",
        help="measure each load so long (default: not)",
    )
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 1.0, 2.0, 5.0], metavar="X")
    parser.add_argument(
        "--wait-factor",
        type=float,
        default=0.15,
        metavar="X",
        help="of the loaded set; its P95 is bounded by about so much more than 1 (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    configure(level="warning")
    found = [decide(tenants, options.rate, options.decisions, _STAGES) for tenants in options.tenants]
    refusals = None
    if options.http_seconds > 0:
        with ends_with_sigterm():
            refusals = asyncio.run(refuse(options.http_seconds, _CONNECTIONS))
    loaded = []
    if options.load_seconds > 0:
        with ends_with_sigterm():
            loaded = asyncio.run(load(options.loads, options.load_seconds, options.wait_factor))
    if options.json:
        machine = {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "load_average": os.getloadavg()[0],
            "wait_factor": options.wait_factor,
        }
        everything: dict[str, Any] = {
            **machine,
            "decisions": [asdict(each) for each in found],
            "http": None if refusals is None else asdict(refusals),
            "loads": [asdict(each) for each in loaded],
        }
        print(json.dumps(everything, indent=2))
    else:
        _print(found, refusals)
        _print_loads(loaded)
    return 0 if all(each.p99_us < _TARGET_MS * 1000 for each in found) else 1


def _print(found: Sequence[Decisions], refusals: Refusals | None) -> None:
    print("decision, us   tenants  in flight  admitted      p50      p99    p99.9       max   busy")
    for each in found:
        print(
            f"             {each.tenants:9}  {each.in_flight:9}  {each.admitted:8}  {each.p50_us:7.1f}"
            f"  {each.p99_us:7.1f}  {each.p999_us:7.1f}  {each.max_us:8.1f}  {each.busy:5.0%}"
        )
    if refusals is not None:
        print(
            f"http: {refusals.per_second:.0f} refusals a second over {refusals.connections} connections, "
            f"p50 {refusals.p50_ms:.1f} ms, p99 {refusals.p99_ms:.1f} ms; "
            f"{refusals.proxy_cpu_ms:.2f} ms of the proxy's processor time each"
        )


def _print_loads(loaded: Sequence[Loaded]) -> None:
    if loaded:
        print(
            "  load  offered/s  finished/s  stages/s  refused  failed  goodput     P50     P95  P95/unloaded"
        )
    for each in loaded:
        print(
            f"{each.load:6.2g}  {each.offered_per_second:9.2f}  {each.finished_per_second:10.2f}"
            f"  {each.stages_per_second:8.2f}  {each.refused:7}  {each.failed:6}  {each.goodput:7.1%}"
            f"  {each.p50_seconds:5.2f} s  {each.p95_seconds:5.2f} s  {each.p95_ratio:12.2f}"
        )


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
