"""``make chaos``: eight node processes, a stream of requests, and a fault every second.

Prints the seed first, each fault as it happens, and then what became of the requests. The exit status is 0
only if none was lost, none duplicated, and no result corrupt. The same seed draws the same faults, but
processes are not simulated: a run is not repeated byte for byte.
"""

import argparse
import asyncio
import json
import random
import secrets
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from attrs import asdict, define, field

from onepiece.client import Client
from onepiece.errors import OnePieceError
from simulations.chaos import sockets
from simulations.chaos.faults import Fault, FaultKind, Target, draw_fault
from simulations.chaos.ledger import Kill, Verdict, judge, spread
from simulations.chaos.processes import ChaosNode, end_all, remove, wait_listening
from simulations.chaos.requests import Load, Stream, connected

HELP: Final = "kill, stop and cut off real node processes while requests run"

LEASE_SECONDS: Final = 3.0
HEARTBEAT_SECONDS: Final = 0.5
START_SECONDS: Final = 60.0
HEAL_SECONDS: Final = 60.0
STOP_SECONDS: Final = 45.0
STAGE_SECONDS: Final = 0.2
WORKERS: Final = 5
NAMES: Final = {kind.name.lower(): kind for kind in FaultKind}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("--seconds", type=float, default=120.0, help="how long (%(default)s)")
    parser.add_argument("--seed", type=int, help="draws faults and requests; one is chosen unless given")
    parser.add_argument("--rate", type=float, default=3.0, help="requests per second (%(default)s)")
    parser.add_argument("--in-flight", type=int, default=32, help="requests at once (%(default)s)")
    parser.add_argument("--payload-bytes", type=int, default=1_000_000, help="of a message (%(default)s)")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between faults (%(default)s)")
    parser.add_argument(
        "--faults", default=",".join(NAMES), help="which kinds are drawn (%(default)s)", type=_kinds
    )
    parser.add_argument(
        "--hurt", default="", metavar="NODES", help="only nodes whose name begins so, such as worker"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave logs and state of the nodes here")


def _kinds(text: str) -> list[FaultKind]:
    try:
        return [NAMES[name] for name in text.split(",") if name]
    except KeyError as error:
        raise argparse.ArgumentTypeError(f"{error} is none of {', '.join(NAMES)}") from error


def run(arguments: argparse.Namespace) -> int:
    """Carry the command out; returns its exit status."""
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}, {arguments.seconds:.0f} s", flush=True)
    if FaultKind.CUT in arguments.faults and not sockets.may_shut_down():
        print("connections are left alone: this user may not take descriptors of other processes")
        arguments.faults.remove(FaultKind.CUT)
    directory = arguments.keep or Path(tempfile.mkdtemp(prefix="onepiece-chaos-"))
    directory.mkdir(parents=True, exist_ok=True)
    chaos = Chaos(arguments, random.Random(seed), directory)  # noqa: S311 - draws faults, keeps no secret
    try:
        verdict = asyncio.run(chaos.run())
    finally:
        end_all(chaos.nodes)
    _write_ledger(directory / "ledger.json", chaos)
    print(report(verdict, chaos))
    if arguments.keep is None and verdict.holds:
        remove(directory)
    else:
        print(f"logs and state of the nodes: {directory}")
    return 0 if verdict.holds else 1


@define(eq=False)
class _Hurt:
    """A node that does not take part, and what is needed for it to."""

    node: ChaosNode
    incarnation: int
    healed_at: float | None = None
    """When it was started or resumed; None: not yet."""


@define(eq=False)
class Chaos:
    """One run."""

    arguments: argparse.Namespace
    rng: random.Random
    directory: Path
    nodes: list[ChaosNode] = field(factory=list)
    kills: list[Kill] = field(factory=list)
    done: dict[str, int] = field(factory=dict)
    """How often each kind of fault was done."""
    stream: Stream = field(init=False)
    exits: dict[str, int | None] = field(factory=dict)
    _hurt: dict[str, _Hurt] = field(factory=dict)
    _seen: dict[str, tuple[int, str]] = field(factory=dict)
    """Incarnation and state of each node, as some proxy last told."""

    async def run(self) -> Verdict:
        """Start the set, let requests and faults come, and see what became of them."""
        self._start()
        async with AsyncExitStack() as stack:
            client, proxies = await connected(stack, self.nodes, START_SECONDS)
            load = Load(
                rate=self.arguments.rate,
                in_flight_max=self.arguments.in_flight,
                stage_seconds=STAGE_SECONDS,
                payload_bytes=self.arguments.payload_bytes,
                timeout_seconds=90.0,
                patience_seconds=30.0,
            )
            stream = self.stream = Stream(client, proxies, load, self.rng)
            async with asyncio.TaskGroup() as tasks:
                stop = asyncio.Event()
                tasks.create_task(stream.run(stop))
                await self._faults(client)
                stop.set()
            await self._confirm(client)
        for node in reversed(self.nodes):
            self.exits[node.name] = await asyncio.to_thread(node.terminate, STOP_SECONDS)
        return judge(self.stream.submissions, self.kills)

    def _start(self) -> None:
        common: tuple[str, ...] = (
            "--lease-seconds",
            f"{LEASE_SECONDS}",
            "--heartbeat-seconds",
            f"{HEARTBEAT_SECONDS}",
        )
        common += ("--store-bytes", "4096MiB", "--drain-seconds", "30")
        workflow = ("--workflow", "simulations.chaos.workflow:diamond", "--workers", f"{WORKERS}")
        manager = self._add("manager", "manager,store", *common, *workflow)
        manager.start()
        wait_listening([manager], START_SECONDS)
        joining = (*common, "--join", manager.address)
        for number in (1, 2):
            self._add(f"proxy-{number}", "proxy,store", *joining)
        for number in range(1, WORKERS + 1):
            self._add(f"worker-{number}", "worker", *joining, "--devices", "cpu:0=4GiB")
        for node in self.nodes[1:]:
            node.start()
        wait_listening(self.nodes, START_SECONDS)

    def _add(self, name: str, roles: str, *options: str) -> ChaosNode:
        node = ChaosNode(name, frozenset(roles.split(",")), options, self.directory)
        self.nodes.append(node)
        return node

    # --- faults --------------------------------------------------------------------------------

    async def _faults(self, client: Client) -> None:
        """Do a fault every so often, and see the nodes heal."""
        stop_at = time.monotonic() + self.arguments.seconds
        async with asyncio.TaskGroup() as tasks:
            while time.monotonic() < stop_at:
                await self._look(client)
                fault = draw_fault(self.rng, self._targets(), self.arguments.faults, LEASE_SECONDS)
                if fault is not None:
                    print(f"{time.strftime('%H:%M:%S')}  {fault.kind.value:24} {fault.name}", flush=True)
                    self.done[fault.kind.value] = self.done.get(fault.kind.value, 0) + 1
                    self._do(fault, tasks)
                await asyncio.sleep(self.arguments.every)

    def _targets(self) -> Sequence[Target]:
        return [
            Target(node.name, node.roles, node.name in self._hurt)
            for node in self.nodes
            if node.name.startswith(self.arguments.hurt)
        ]

    def _do(self, fault: Fault, tasks: asyncio.TaskGroup) -> None:
        node = next(node for node in self.nodes if node.name == fault.name)
        if fault.kind is FaultKind.CUT:
            if node.is_running and (connections := sockets.connections(node.pid)):
                sockets.shut_down(node.pid, self.rng.choice(connections))
            return
        incarnation, _ = self._seen.get(node.name, (0, ""))
        hurt = self._hurt[node.name] = _Hurt(node, incarnation)
        if fault.kind is FaultKind.KILL:
            self.kills.append(Kill(node.name, time.time()))
            node.kill()
        else:
            node.pause()
        tasks.create_task(self._heal(fault, hurt))

    async def _heal(self, fault: Fault, hurt: _Hurt) -> None:
        await asyncio.sleep(fault.seconds)
        if fault.kind is FaultKind.KILL:
            hurt.node.start()
        else:
            hurt.node.resume()
        hurt.healed_at = time.monotonic()

    async def _look(self, client: Client) -> None:
        """Revive what ended by itself, and learn who takes part."""
        for node in self.nodes:
            if node.name not in self._hurt or self._hurt[node.name].healed_at is not None:
                node.revive()
        try:
            async with asyncio.timeout(2.0):
                self._seen = {node.node: (node.incarnation, node.state) for node in await client.nodes()}
        except (OnePieceError, TimeoutError):
            return
        for name, hurt in list(self._hurt.items()):
            incarnation, state = self._seen.get(name, (0, ""))
            if hurt.healed_at is None or state != "alive":
                continue
            # One that was only paused keeps its life if the manager stood still at the same time.
            if incarnation > hurt.incarnation or time.monotonic() > hurt.healed_at + 3 * LEASE_SECONDS:
                del self._hurt[name]

    async def _confirm(self, client: Client) -> None:
        """When faults are over everything settles: then every key stands for its request still."""
        give_up_at = time.monotonic() + HEAL_SECONDS
        while self._hurt and time.monotonic() < give_up_at:
            await self._look(client)
            await asyncio.sleep(0.2)
        await client.wait_ready(HEAL_SECONDS)
        await self.stream.confirm(HEAL_SECONDS)


def _write_ledger(path: Path, chaos: Chaos) -> None:
    """What happened to each request and which nodes were killed, for whoever looks into a run."""
    kept = {
        "kills": [asdict(kill) for kill in chaos.kills],
        "requests": [
            asdict(
                each, value_serializer=lambda _, __, value: sorted(value) if isinstance(value, set) else value
            )
            for each in chaos.stream.submissions
        ],
    }
    path.write_text(json.dumps(kept, indent=1), encoding="utf-8")


def report(verdict: Verdict, chaos: Chaos) -> str:
    """What is printed at the end."""
    failed = ", ".join(f"{count} {name}" for name, count in sorted(verdict.failed.items())) or "none"
    faults = ", ".join(f"{count} x {kind}" for kind, count in sorted(chaos.done.items()))
    lines = [
        f"faults              {faults}",
        f"submitted           {verdict.submitted}",
        f"accepted            {verdict.accepted}",
        f"finished            {verdict.finished}",
        f"failed by name      {failed}",
        f"lost                {verdict.lost}",
        f"duplicated          {verdict.duplicated}",
        f"corrupt             {verdict.corrupt}",
        f"stage runs          {verdict.stage_runs}, of which {verdict.repeated} repeated",
        f"recovery            {spread(verdict.recoveries)}",
        f"latency             {spread(verdict.latencies)}",
    ]
    for node in chaos.nodes:
        if node.ended_by_itself:
            lines.append(f"{node.name} ended by itself with status {node.ended_by_itself}")
        if chaos.exits.get(node.name, 0) != 0:
            lines.append(f"{node.name} ended with status {chaos.exits[node.name]} when it was told to stop")
    for each in chaos.stream.submissions:
        if each.trouble:
            lines += [f"{each.uid} seed {each.seed}: {each.end}"]
            lines += [f"    {text}" for text in dict.fromkeys(each.trouble)]
    return "\n".join(lines)
