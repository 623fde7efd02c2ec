"""``make leaders``: the leading manager is killed every few seconds while requests run.

Three managers agree through a real etcd; two nodes with proxy and store, and two workers. Whoever leads is
ended by ``kill -9``, and started again at once as a candidate. Prints each kill, and then what became of the
requests and how long nobody led. The exit status is 0 only if each request that was submitted finished, with
the right bytes.
"""

import argparse
import asyncio
import random
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from attrs import define, field

from onepiece.client import Client
from onepiece.coordination import parse_coordination
from simulations.chaos.ledger import Verdict, judge, spread
from simulations.chaos.processes import ChaosNode, end_all, remove, wait_listening
from simulations.chaos.requests import Load, Stream, connected
from simulations.etcd_process import NO_ETCD, EtcdServer, has_etcd, run_etcd

HELP: Final = "kill the leading manager again and again while requests run"

START_SECONDS: Final = 60.0
LOOK_SECONDS: Final = 0.05
"""Between two looks at who leads."""
STOP_SECONDS: Final = 30.0
MANAGERS: Final = ("manager-1", "manager-2", "manager-3")
PROXIES: Final = ("proxy-1", "proxy-2")
WORKERS: Final = ("worker-1", "worker-2")

_Held = tuple[str, int]
"""Control address of a leader, and the revision of its leadership."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (%(default)s)")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between kills (%(default)s)")
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second (%(default)s)")
    parser.add_argument("--in-flight", type=int, default=8, help="requests at once (%(default)s)")
    parser.add_argument("--payload-bytes", type=int, default=100_000, help="of a message (%(default)s)")
    parser.add_argument(
        "--leader-seconds", type=int, default=2, help="the managers' --leader-seconds (%(default)s)"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave logs and state of the nodes here")


def run(arguments: argparse.Namespace) -> int:
    """Carry the command out; returns its exit status."""
    if not has_etcd():
        print(NO_ETCD)
        return 2
    directory = arguments.keep or Path(tempfile.mkdtemp(prefix="onepiece-leaders-"))
    directory.mkdir(parents=True, exist_ok=True)
    with run_etcd(directory) as server:
        leaders = Leaders(arguments, directory, server)
        try:
            verdict = asyncio.run(leaders.run())
        finally:
            end_all(leaders.nodes)
    print(report(verdict, leaders))
    has_held = verdict.holds and verdict.finished == verdict.submitted > 0 and len(leaders.vacancies) > 0
    if arguments.keep is None and has_held:
        remove(directory)
    else:
        print(f"logs and state of the nodes: {directory}")
    return 0 if has_held else 1


@define(eq=False)
class Leaders:
    """One run."""

    arguments: argparse.Namespace
    directory: Path
    etcd: EtcdServer
    nodes: list[ChaosNode] = field(factory=list)
    vacancies: list[float] = field(factory=list)
    """Seconds from each kill until another one led."""
    stream: Stream = field(init=False)

    async def run(self) -> Verdict:
        """Start the set, let requests come, kill who leads, and see what became of them."""
        self._start()
        async with AsyncExitStack() as stack:
            client, proxies = await connected(stack, self.nodes, START_SECONDS)
            self.stream = Stream(client, proxies, self._load(), random.Random(1))  # noqa: S311 - keeps no secret
            stop = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.stream.run(stop))
                await self._kill_leaders()
                stop.set()
            await self._settled(client)
        return judge(self.stream.submissions, [])

    def _load(self) -> Load:
        return Load(
            rate=self.arguments.rate,
            in_flight_max=self.arguments.in_flight,
            stage_seconds=0.05,
            payload_bytes=self.arguments.payload_bytes,
            timeout_seconds=60.0,
            patience_seconds=10.0,
        )

    def _start(self) -> None:
        leading = (
            *(
                "--coordination",
                self.etcd.coordination,
                "--leader-seconds",
                f"{self.arguments.leader_seconds}",
            ),
            *("--workflow", "simulations.chaos.workflow:diamond", "--workers", f"{len(WORKERS)}"),
        )
        managers = [self._add(name, "manager", *leading) for name in MANAGERS]
        wait_listening(managers, START_SECONDS)
        joining = ("--join", ",".join(node.address for node in managers))
        for name in PROXIES:
            self._add(name, "proxy,store", *joining)
        for name in WORKERS:
            self._add(name, "worker", *joining, "--devices", "cpu:0=4GiB")
        wait_listening(self.nodes, START_SECONDS)

    def _add(self, name: str, roles: str, *options: str) -> ChaosNode:
        node = ChaosNode(name, frozenset(roles.split(",")), options, self.directory)
        self.nodes.append(node)
        node.start()
        return node

    async def _kill_leaders(self) -> None:
        """Kill who leads every so often, or as soon as somebody does."""
        over_at = time.monotonic() + self.arguments.seconds
        next_at = time.monotonic() + self.arguments.every
        while next_at < over_at:
            await asyncio.sleep(max(0.0, next_at - time.monotonic()))
            killed, before, _ = await self._leader(None)
            killed_at = time.monotonic()
            killed.kill()
            killed.start()
            next_at = killed_at + self.arguments.every
            leader, _, seen_at = await self._leader(before)
            self.vacancies.append(seen_at - killed_at)
            print(
                f"{time.strftime('%H:%M:%S')}  {killed.name} killed, {leader.name} leads "
                f"{seen_at - killed_at:.1f} s later",
                flush=True,
            )

    async def _leader(self, before: _Held | None) -> tuple[ChaosNode, _Held, float]:
        """Who leads, as etcd has it, once that is another leadership; and when that was seen.

        The one that was killed is back under its address before its lease is over, and may lead again: its
        key is another one then, with a create revision of its own.
        """
        prefix = parse_coordination(self.etcd.coordination).prefix
        async with asyncio.timeout(START_SECONDS):
            while True:
                held = await asyncio.to_thread(self.etcd.leader, prefix)
                if held is not None and held != before:
                    address = held[0].removesuffix("/control")
                    leader = next(node for node in self.nodes if node.address == address)
                    return leader, held, time.monotonic()
                await asyncio.sleep(LOOK_SECONDS)

    async def _settled(self, client: Client) -> None:
        """Every key stands for its request still, and the whole set is seen again."""
        await client.wait_ready(START_SECONDS)
        await self.stream.confirm(START_SECONDS)
        for node in reversed(self.nodes):
            await asyncio.to_thread(node.terminate, STOP_SECONDS)


def report(verdict: Verdict, leaders: Leaders) -> str:
    """What is printed at the end."""
    failed = ", ".join(f"{count} {name}" for name, count in sorted(verdict.failed.items())) or "none"
    refusals = sum(each.refusals for each in leaders.stream.submissions)
    lines = [
        f"leaders killed        {len(leaders.vacancies)}",
        f"without a leader      {spread(sorted(leaders.vacancies), 2)}",
        f"submitted             {verdict.submitted}",
        f"accepted              {verdict.accepted}, after {refusals} tries in vain",
        f"finished              {verdict.finished}",
        f"failed by name        {failed}",
        f"lost                  {verdict.lost}",
        f"duplicated            {verdict.duplicated}",
        f"corrupt               {verdict.corrupt}",
        f"stage runs            {verdict.stage_runs}, of which {verdict.repeated} repeated",
        f"latency               {spread(verdict.latencies, 2)}",
    ]
    for each in leaders.stream.submissions:
        lines += [f"{each.uid} seed {each.seed}: {text}" for text in dict.fromkeys(each.trouble)]
    return "\n".join(lines)
