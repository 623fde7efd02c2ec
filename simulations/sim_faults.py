"""The faults of a run, drawn one after the other; each is undone after a while, all of them at the end."""

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from random import Random
from typing import Any, Final, Protocol

from attrs import define

from simulations.loop import VirtualLoop
from simulations.sim_disk import SimDisk
from simulations.sim_machine import SimMachine
from simulations.sim_network import Network
from simulations.sim_plan import STALL, Plan
from simulations.sim_trace import Trace

STEPS_TO_DEATH_MAX: Final = 150
"""A process that is to die does so behind one of its next steps: in the middle of whatever it does."""
STEPS_TO_STALL_MAX: Final = 60
"""What a proxy does to accept a request takes about half of these."""
SHORTLY_SECONDS: Final = 30.0
RECOVERY_SECONDS: Final = 5.0
"""What the cluster needs to be whole again behind a fault."""


@define
class Losses:
    """When something was lost that a request may have needed."""

    at: list[float]
    """When nodes were cut off or stopped for so long that they may be taken for dead."""
    full: list[float]
    """When disks took nothing."""
    wipes: int = 0


class Disks(Protocol):
    """What knows where everything is kept."""

    def may_wipe(self, disk: SimDisk) -> bool:
        """Whether a disk may be replaced without a loss that no promise covers."""
        ...

    def wiped(self, disk: SimDisk) -> None:
        """It was."""
        ...


class Faults:
    """Does harm to a cluster.

    Args:
        machines: All of them; the first one has the manager.
        disks: What knows which disk may be replaced.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        network: Network,
        machines: Sequence[SimMachine],
        plan: Plan,
        rng: Random,
        trace: Trace,
        disks: Disks,
    ) -> None:
        self._loop = loop
        self._network = network
        self._machines = list(machines)
        self._plan = plan
        self._rng = rng
        self._trace = trace
        self._disks = disks
        self.losses = Losses([], [])
        self.counts: dict[str, int] = {}
        self._spans: list[list[float]] = []
        """When each fault began to do harm, and when that was over."""
        self._stalling = asyncio.Lock()

    def at_work(self, begin: float, end: float) -> int:
        """How many faults did harm at some time between these two."""
        spans = [(each[0], each[-1] + RECOVERY_SECONDS) for each in self._spans]
        if self._plan.poison:  # a stage's doing, and nobody's fault
            spans += [(at, at + RECOVERY_SECONDS) for machine in self._machines for at in machine.deaths]
        return sum(begun <= end and begin <= over for begun, over in spans)

    async def run(self, seconds: float) -> None:
        """Harm the cluster for so long; when this returns all is undone."""
        end = self._loop.now + seconds
        if not self._plan.faults:
            await asyncio.sleep(seconds)
            return
        async with asyncio.TaskGroup() as tasks:
            while (pause := self._rng.expovariate(1.0) * self._plan.fault_seconds) < end - self._loop.now:
                await asyncio.sleep(pause)
                kind = self._rng.choice(self._plan.faults)
                self.counts[kind] = self.counts.get(kind, 0) + 1
                tasks.create_task(self._work(kind, end), name=f"fault {kind}")
        for machine in self._machines:
            machine.start()

    async def _work(self, kind: str, end: float) -> None:
        if kind == STALL:
            await self._stall(end)
            return
        span = [self._loop.now]
        self._spans.append(span)
        await self._work_of(kind, end)
        span.append(self._loop.now)

    def _work_of(self, kind: str, end: float) -> Coroutine[Any, Any, None]:
        machine = self._rng.choice(self._machines)
        match kind:
            case "kill" | "dark":
                return self._kill(machine, end, silently=kind == "dark")
            case "stop":
                return self._stop(machine, end)
            case "pause":
                return self._pause(machine, end)
            case "cut":
                return self._cut(machine, end)
            case "isolate":
                return self._isolate(machine, end)
            case "full":
                return self._fill(machine, end)
            case "slow":
                return self._slow_down(end)
            case "reset":
                return self._reset()
            case _:
                return self._set_clock(machine)

    def losses_since(self, moment: float) -> int:
        """How many nodes were lost since then, or shortly before, in whatever way."""
        deaths = [at for machine in self._machines for at in machine.deaths]
        return sum(at >= moment - SHORTLY_SECONDS for at in (*self.losses.at, *deaths))

    async def _last(self, longest: float, end: float) -> float:
        """Let a fault last for a while; returns for how long."""
        begun = self._loop.now
        drawn = self._rng.random() ** 2 * longest
        await asyncio.sleep(max(0.0, min(drawn, end - begun)))
        return self._loop.now - begun

    def _lose(self, seconds: float) -> None:
        """Something could not be reached for so long."""
        if seconds >= self._plan.lease_seconds / 4:
            self.losses.at.append(self._loop.now)

    async def _kill(self, machine: SimMachine, end: float, *, silently: bool) -> None:
        process = machine.process
        if process is None:
            return
        process.after_steps(
            self._rng.randint(1, STEPS_TO_DEATH_MAX), lambda: machine.kill(why="a fault", silently=silently)
        )
        await machine.ended()
        is_wiped = self._rng.random() < 0.3 and machine is not self._machines[0]
        await self._last(15.0, end)
        if is_wiped and machine.is_down and self._disks.may_wipe(machine.disk):
            self._trace.tell(machine.name, "gets a new disk")
            self.losses.wipes += 1
            machine.disk.wipe()
            self._disks.wiped(machine.disk)
        machine.start()

    async def _stop(self, machine: SimMachine, end: float) -> None:
        machine.stop()
        await machine.ended()
        await self._last(10.0, end)
        machine.start()

    async def _pause(self, machine: SimMachine, end: float) -> None:
        machine.pause()
        self._lose(await self._last(20.0, end))
        machine.resume()

    async def _stall(self, end: float) -> None:
        """Stop a proxy, best one that is a store, too, in the middle of accepting; alone, past its lease."""
        async with self._stalling:
            proxies = [each for each in self._machines if "proxy" in each.options.roles]
            both = [each for each in proxies if "store" in each.options.roles]
            machine = self._rng.choice(both or proxies)
            steps, stalled = self._rng.randint(1, STEPS_TO_STALL_MAX), asyncio.Event()

            def stall() -> None:
                if self._loop.now < end:
                    machine.pause()
                    stalled.set()

            def begin() -> None:
                if machine.process is not None:
                    machine.process.after_steps(steps, stall)

            machine.when_asked["submit"] = begin
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, end - self._loop.now)):
                    await stalled.wait()
            machine.when_asked.clear()
            if not stalled.is_set():
                return
            begun = self._loop.now
            longest = self._plan.lease_seconds * (1.5 + self._rng.random()) + 3.0
            await asyncio.sleep(max(0.0, min(longest, end - begun)))
            machine.resume()
            self._lose(self._loop.now - begun)
            self._spans.append([begun, self._loop.now])
            await asyncio.sleep(max(0.0, min(3 * RECOVERY_SECONDS, end - self._loop.now)))

    async def _cut(self, machine: SimMachine, end: float) -> None:
        other = self._rng.choice([each for each in self._machines if each is not machine])
        pairs = [(machine.name, other.name), (other.name, machine.name)]
        await self._cut_pairs(pairs[: self._rng.randint(1, 2)], end)

    async def _isolate(self, machine: SimMachine, end: float) -> None:
        others = [each for each in self._machines if each is not machine]
        pairs = [(machine.name, each.name) for each in others]
        if self._rng.random() < 0.7:
            pairs += [(each.name, machine.name) for each in others]
        await self._cut_pairs(pairs, end)

    async def _cut_pairs(self, pairs: list[tuple[str, str]], end: float) -> None:
        told = ", ".join(f"{source}>{target}" for source, target in pairs)
        self._trace.tell("network", f"lets nothing through: {told}")
        for source, target in pairs:
            self._network.cut(source, target)
        self._lose(await self._last(25.0, end))
        for source, target in pairs:
            self._network.heal(source, target)
        self._trace.tell("network", f"lets everything through: {told}")

    async def _fill(self, machine: SimMachine, end: float) -> None:
        self._trace.tell(machine.name, "has a full disk")
        machine.disk.is_full = True
        self.losses.full.append(self._loop.now)
        await self._last(10.0, end)
        machine.disk.is_full = False
        self.losses.full.append(self._loop.now)
        self._trace.tell(machine.name, "has room on its disk again")

    async def _slow_down(self, end: float) -> None:
        factor = self._rng.choice((5.0, 50.0))
        self._trace.tell("network", f"is {factor} times as slow")
        self._network.slowness *= factor
        self._lose(await self._last(10.0, end))
        self._network.slowness /= factor
        self._trace.tell("network", "is as fast as before")

    async def _reset(self) -> None:
        wires = self._network.wires()
        if wires:
            wire = self._rng.choice(wires)
            self._trace.tell("network", f"resets wire {wire.number} from {wire.near.name} to {wire.far.name}")
            wire.reset()

    async def _set_clock(self, machine: SimMachine) -> None:
        change = self._rng.choice((-1.0, 1.0)) * self._rng.choice((0.1, 2.0, 60.0))
        self._trace.tell(machine.name, f"has its wall clock set by {change:+} s")
        machine.wall_offset += change
