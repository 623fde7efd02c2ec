"""A run of the simulated cluster: real nodes, simulated everything else, one seed.

::

    warm up     all nodes start; nothing goes wrong until every stage is loaded somewhere
    load        clients submit, follow, cancel; faults come and go
    calm        no more faults, every machine is started; everything must settle
    judge       every proxy is asked for every request; then all nodes end, and nothing of them is left
"""

import asyncio
import gc
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Final

from attrs import frozen

from onepiece.log import captured
from simulations.loop import Stuck, VirtualLoop, branch, virtual_loop
from simulations.sim_checks import SETTLE_SECONDS, Checks
from simulations.sim_clients import Clients, Wish
from simulations.sim_faults import Faults
from simulations.sim_fences import Fences
from simulations.sim_machine import SimMachine, World
from simulations.sim_network import SILENCE_SECONDS, Network
from simulations.sim_plan import Plan
from simulations.sim_stages import DIAMOND, LINE, diamond, line
from simulations.sim_trace import Trace

WARM_SECONDS: Final = 120.0
MEMORY_DIRECTORY: Final = Path("/dev/shm")  # noqa: S108  # a directory of its own is made in it


@frozen
class Report:
    """What a run has shown."""

    seed: int
    digest: str
    """The same for two runs of a seed exactly if they were the same, byte for byte."""
    problems: tuple[str, ...]
    story: tuple[str, ...]
    requests: int
    endings: dict[str, int]
    faults: dict[str, int]
    moves: int
    """That were done."""
    virtual_seconds: float
    steps: int
    seconds: float


class Cluster:
    """One run."""

    def __init__(self, loop: VirtualLoop, plan: Plan, directory: Path, trace: Trace, rng: Random) -> None:
        self.trace = trace
        self._loop = loop
        self._plan = plan
        self._network = Network(loop, branch(rng), plan.weather, trace.arrived)
        self._world = World(
            loop,
            self._network,
            trace,
            branch(rng),
            directory,
            {LINE: line, DIAMOND: diamond},
            lost_answers=plan.lost_answers,
            repeated_calls=plan.repeated_calls,
        )
        skews = branch(rng)
        self.machines = [
            SimMachine(
                self._world,
                plan.node_options(number),
                disk_seconds=plan.disk_seconds,
                wall_offset=skews.uniform(-1.0, 1.0) * plan.skew_seconds,
            )
            for number in range(plan.nodes)
        ]
        self.checks = Checks(loop, self.machines, trace)
        self.fences = Fences(loop, trace)
        self._world.watch = self.fences.watch
        self._network.on_write = self.fences.check
        proxies = [machine for machine in self.machines if "proxy" in machine.options.roles]
        self.clients = Clients(loop, proxies, branch(rng), trace)
        self.faults = Faults(loop, self._network, self.machines, plan, branch(rng), trace, self.checks)
        self._wishes = branch(rng)

    async def run(self) -> None:
        """All phases."""
        for machine in self.machines:
            machine.start()
        try:
            if await self._warm_up():
                await self._load()
        finally:
            for machine in self.machines:
                await machine.close()
        await asyncio.sleep(2 * SILENCE_SECONDS)
        if wires := self._network.wires():
            self.trace.fail(f"no process lives, and {len(wires)} wires are open")

    async def _warm_up(self) -> bool:
        give_up_at = self._loop.now + WARM_SECONDS
        while waiting := self._waits_for():
            if self._loop.now >= give_up_at:
                self.trace.fail(f"not ready after {WARM_SECONDS:.0f} s, without any fault: {waiting}")
                return False
            await asyncio.sleep(0.5)
        self.trace.tell("phase", "load")
        return True

    def _waits_for(self) -> list[str]:
        """What is missing until every proxy would take requests."""
        found: list[str] = []
        for machine in self.machines:
            node = machine.node
            if node is None:
                found.append(f"{machine.name} has not started")
            elif node.proxy is not None and not node.proxy.readiness().ready:
                found += node.proxy.readiness().waiting_for
        return found

    async def _load(self) -> None:
        plan = self._plan
        wishes = [
            Wish.draw(number, self._wishes, plan.load_seconds, plan.poison) for number in range(plan.requests)
        ]
        if plan.rebalances:
            wishes = [wish.shifted(plan.load_seconds) for wish in wishes]
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self.checks.watch(), name="watch")
            served = tasks.create_task(self.clients.run(wishes), name="clients")
            await self.faults.run(plan.load_seconds)
            self.trace.tell("phase", "calm")
            self._world.lost_answers = self._world.repeated_calls = 0.0
            self._network.calm_down()
            await asyncio.wait([served], timeout=SETTLE_SECONDS)
            if served.done():
                await self.checks.settle()
                self.trace.tell("phase", "judge")
                await self.checks.judge(self.clients, self.faults)
            else:
                self._tell_hanging()
                served.cancel()
            watching.cancel()

    def _tell_hanging(self) -> None:
        for request in self.clients.requests:
            if request.ended_at is None and request.doing.startswith(("asks", "was told", "submits")):
                self.trace.fail(
                    f"{SETTLE_SECONDS:.0f} s after the last fault nobody knows how request "
                    f"{request.wish.number} ({request.uid}) ends: its client {request.doing}; "
                    f"{self.checks.where(request.uid or '')}"
                )


def run_seed(plan: Plan, *, aloud: bool = False) -> Report:
    """Run one seed in this process."""
    rng = Random(f"run {plan.seed}")  # noqa: S311  # a run must be repeatable, not secret
    loop = virtual_loop(branch(rng), lambda _: None)
    trace = Trace(loop, aloud=aloud)
    loop.on_exception = trace.take_exception
    begun = time.process_time()
    parent = MEMORY_DIRECTORY if MEMORY_DIRECTORY.is_dir() else None
    with (
        tempfile.TemporaryDirectory(prefix="onepiece-simulation-", dir=parent) as directory,
        captured(trace.take_log),
        _no_collection(),
    ):
        cluster = Cluster(loop, plan, Path(directory), trace, rng)
        try:
            loop.run_until_complete(cluster.run())
        except Stuck as stuck:
            trace.fail(str(stuck))
        loop.close()
    endings: Counter[str] = Counter()
    for request in cluster.clients.requests:
        for ending in request.endings:
            endings["result" if ending.is_result else ending.what] += 1
        if request.uid is None:
            endings["not accepted"] += 1
    return Report(
        seed=plan.seed,
        digest=trace.digest,
        problems=tuple(trace.problems),
        story=tuple(trace.story()),
        requests=plan.requests,
        endings=dict(sorted(endings.items())),
        faults=dict(sorted(cluster.faults.counts.items())),
        moves=trace.moves,
        virtual_seconds=loop.now,
        steps=loop.steps,
        seconds=time.process_time() - begun,
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Let no garbage be found at a moment that depends on what ran before in this process."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
