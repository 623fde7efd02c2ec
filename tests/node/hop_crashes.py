"""Nodes in this process, on one loop, one of which dies at a given moment of a hop.

A *trap* waits at one moment of the way of a message. The first node that comes to it goes no further, and
the test has it (or its counterpart) die there: all its tasks end and its connections break, with no word
to anybody. What was durable stays on its disk.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import define, evolve, field

from onepiece.messages import STORE, STORE_REGION
from onepiece.node.node import Node, open_node
from onepiece.node.options import NodeOptions
from onepiece.node.parts import NodeParts
from onepiece.node.record_keeper import RecordKeeper
from onepiece.node.request_owner import RequestOwner
from onepiece.node.stopping import StopSignal
from onepiece.runtime.intake import Intake
from onepiece.runtime.result_deliver import Letter, ResultDeliver
from onepiece.runtime.result_targets import StoreTarget
from onepiece.runtime.stage_actor import StageActor
from tests.node import hop_stages
from tests.node.in_process import DEVICES, until_ready
from transports import (
    Address,
    Listener,
    Options,
    RemoteMemory,
    Transport,
    transport_for,
)
from transports.operations import Chain, Claim, Claimed, CompareAndSwap, Expired
from transports.testing.forwarding import ForwardingMemory

WORKFLOWS = "tests.node.hop_stages"
LEASE_SECONDS = 2.4
HEARTBEAT_SECONDS = 0.2
NEVER = "never"
"""The moment of a trap that catches nobody."""
WORKERS = tuple(f"worker-{number}" for number in range(1, 7))
"""As many as there are actors: a node that dies takes no other stage along."""


@define(eq=False)
class Trap:
    """One moment of a hop; ``source`` and ``target`` name its graph nodes."""

    moment: str
    source: str = "refine"
    target: str = "render"
    fed: asyncio.Event = field(factory=asyncio.Event)
    """Whoever fed the source of the hop knows that its message was taken."""
    caught: asyncio.Event = field(factory=asyncio.Event)
    let_go: asyncio.Event = field(factory=asyncio.Event)
    """Whoever was caught may go on: somebody else has died."""
    sender: str | None = None
    """The node that sends over the hop, once it has begun to."""
    receiver: str | None = None
    """The node that took the message, or is about to."""

    async def reach(self, moment: str) -> None:
        """Go on, unless this is the moment and nobody was here before: then wait to be let go."""
        if moment == self.moment and not self.caught.is_set():
            self.caught.set()
            await self.let_go.wait()

    def pass_by(self, moment: str) -> None:
        """Note the moment; whoever dies of it does so very soon."""
        if moment == self.moment:
            self.caught.set()


@define(eq=False)
class Living:
    """A node that runs in a task of its own, until it dies."""

    node: Node
    task: "asyncio.Task[None]"

    async def die(self) -> None:
        """End as by a kill: without draining, without a good-bye."""
        self.task.cancel()
        await asyncio.wait([self.task])


@define(eq=False)
class HopSet:
    """A manager, two proxies and the workers."""

    living: dict[str, Living]

    async def die(self, name: str | None) -> None:
        """One of them dies."""
        assert name is not None
        await self.living.pop(name).die()

    def checkpoint_holders(self) -> list[str]:
        """The nodes that keep a checkpoint."""
        kept = {name: living.node.checkpoints for name, living in self.living.items()}
        return [name for name, store in kept.items() if store is not None and store.owners()]

    async def forget_checkpoints(self) -> None:
        """What the store nodes keep is lost."""
        for living in self.living.values():
            store = living.node.checkpoints
            for uid in store.owners() if store is not None else ():
                assert store is not None
                await store.release(uid, living.node.env.now())

    def retained_sources(self) -> set[str]:
        """The graph nodes whose outputs some node retains."""
        nodes = [living.node for living in self.living.values()]
        return {key.source for node in nodes for key in node.env.retainer.keys()}  # noqa: SIM118 - no mapping


@asynccontextmanager
async def open_hop_set(
    directory: Path, trap: Trap, workflow: str = "film", *, lease_seconds: float = LEASE_SECONDS
) -> AsyncIterator[HopSet]:
    """The set with one workflow, ready; what is left of it ends with the block.

    Nine nodes share this loop: where it is busy all the time, heartbeats are late, and leases must be longer.
    """
    a_set = HopSet({})
    lease: dict[str, Any] = {"lease_seconds": lease_seconds, "heartbeat_seconds": HEARTBEAT_SECONDS}
    async with asyncio.TaskGroup() as tasks:

        async def start(name: str, roles: str, **options: Any) -> Node:
            parts = NodeParts()
            if trap.moment != NEVER:  # what passes no trap takes less of the processor
                parts = NodeParts(
                    find_transport=lambda address: TrappedTransport(transport_for(address), trap, name)
                )
            settings = NodeOptions(
                name=name, roles=frozenset(roles.split(",")), state_dir=directory / name, **options, **lease
            )
            started: asyncio.Future[Node] = asyncio.get_running_loop().create_future()

            async def live() -> None:
                async with open_node(settings, StopSignal(), parts) as node:
                    started.set_result(node)
                    await asyncio.Event().wait()

            task = tasks.create_task(live(), name=name)
            a_set.living[name] = Living(await started, task)
            return started.result()

        workflows = (f"{WORKFLOWS}:{workflow}",)
        seed = await start("manager", "manager,store", workflows=workflows, workers=len(WORKERS))
        joining = {"join": (Address.parse(seed.address),)}
        proxies = [await start(name, "proxy,store", **joining) for name in ("proxy-1", "proxy-2")]
        for name in WORKERS:
            await start(name, "worker", devices=DEVICES, **joining)
        for each in proxies:
            assert each.proxy is not None
            await until_ready(each.proxy)
        try:
            yield a_set
        finally:
            for living in a_set.living.values():
                living.task.cancel()


# --- where the moments are -----------------------------------------------------------------------


def set_trap(trap: Trap, patch: pytest.MonkeyPatch) -> None:
    """Have the nodes of this process pass by the trap; ``TrappedMemory`` has the moments within a message."""
    _trap_actors(trap, patch)
    _trap_owners(trap, patch)

    async def in_stage(node: str) -> None:
        if trap.moment == "running" and not trap.caught.is_set():
            trap.receiver = node
            await trap.reach("running")

    hop_stages.hooks.clear()
    hop_stages.runs.clear()
    if trap.target in hop_stages.STAGES:
        hop_stages.hooks[trap.target] = in_stage


def _trap_actors(trap: Trap, patch: pytest.MonkeyPatch) -> None:
    send_on, deliver = StageActor._send_on, ResultDeliver.deliver
    take, take_from = Intake._take, Intake.take_from

    async def trapped_send_on(self: StageActor, stage_task: Any, *rest: Any) -> None:
        if stage_task.node == trap.source and trap.sender is None:
            trap.sender = self.env.node_id
            await trap.reach("computed")
        await send_on(self, stage_task, *rest)

    async def trapped_deliver(self: ResultDeliver, letters: Mapping[str, Letter]) -> dict[str, str]:
        letter = letters.get(trap.target)
        if trap.source in letters:
            return await deliver(self, {**letters, trap.source: _telling(letters[trap.source], trap.fed.set)})
        if letter is None or not _is_of_hop(trap, letter) or self.env.node_id != trap.sender:
            return await deliver(self, letters)
        await trap.reach("retained")
        told = _telling(letter, lambda: trap.pass_by("acknowledged"))
        return await deliver(self, {**letters, trap.target: told})

    async def trapped_take_from(self: Intake, *arguments: Any) -> None:
        """What is committed is not taken before somebody has died."""
        if trap.moment == "committed" and self.stage.endswith(f":{trap.target}"):
            await trap.let_go.wait()
        await take_from(self, *arguments)

    def trapped_take(self: Intake, *arguments: Any) -> None:
        async def take_later() -> None:
            await trap.reach("taken")
            take(self, *arguments)

        if self.stage.endswith(f":{trap.target}") and trap.sender is not None and trap.receiver is None:
            trap.receiver = self.env.node_id
            assert self._tasks is not None
            self._tasks.create_task(take_later())
        else:
            take(self, *arguments)

    patch.setattr(StageActor, "_send_on", trapped_send_on)
    patch.setattr(ResultDeliver, "deliver", trapped_deliver)
    patch.setattr(Intake, "_take", trapped_take)
    patch.setattr(Intake, "take_from", trapped_take_from)


def _telling(letter: Letter, tell: Callable[[], None]) -> Letter:
    """A letter whose being taken is told to ``tell``, too."""
    taken = letter.on_taken

    def on_taken() -> None:
        if taken is not None:
            taken()
        tell()

    return evolve(letter, on_taken=on_taken)


def _is_of_hop(trap: Trap, letter: Letter) -> bool:
    if isinstance(letter.target, StoreTarget):
        return trap.target == STORE
    return letter.target.header.source == trap.source


def _trap_owners(trap: Trap, patch: pytest.MonkeyPatch) -> None:
    stored, keep = RequestOwner._on_stored, RecordKeeper.keep

    def trapped_stored(self: RequestOwner, message: Any) -> None:
        if trap.moment == "finished" and not trap.caught.is_set():
            trap.caught.set()
            return  # it dies before it can act on it
        stored(self, message)

    async def trapped_keep(self: RecordKeeper, *arguments: Any) -> str:
        uid = await keep(self, *arguments)
        await trap.reach("accepted")
        return uid

    patch.setattr(RequestOwner, "_on_stored", trapped_stored)
    patch.setattr(RecordKeeper, "keep", trapped_keep)


class TrappedTransport(Transport):
    """Sessions of one node that pass by the trap."""

    def __init__(self, inner: Transport, trap: Trap, node: str) -> None:
        self.scheme = inner.scheme
        self._inner = inner
        self._trap = trap
        self._node = node

    def listen(self, address: Address, options: Options) -> AbstractAsyncContextManager[Listener]:
        """As the transport inside."""
        return self._inner.listen(address, options)

    async def connect(self, address: Address, hello: bytes, options: Options) -> RemoteMemory:
        """Open a session; those into inboxes and stores pass by the trap."""
        memory = await self._inner.connect(address, hello, options)
        wanted = STORE_REGION if self._trap.target == STORE else "actor/"
        return TrappedMemory(memory, self._trap, self._node) if address.name.startswith(wanted) else memory


class TrappedMemory(ForwardingMemory):
    """A session that stops between the operations of a message of the hop."""

    def __init__(self, inner: RemoteMemory, trap: Trap, node: str) -> None:
        super().__init__(inner)
        self._trap = trap
        self._node = node

    async def _reach(self, moment: str) -> None:
        if self._trap.sender == self._node:
            await self._trap.reach(moment)

    async def compare_and_swap(self, swap: CompareAndSwap) -> int | Expired:
        """Reserve."""
        found = await self._inner.compare_and_swap(swap)
        if found == swap.expected:
            await self._reach("reserved")
        return found

    async def claim(self, claim: Claim) -> Claimed:
        """Reserve."""
        claimed = await self._inner.claim(claim)
        if claimed.taken:
            await self._reach("reserved")
        return claimed

    async def post(self, chain: Chain) -> None:
        """Write and commit; the last write of a chain that notifies is the commit word."""
        if not chain.notify:
            await self._inner.post(chain)
            return
        if len(chain.writes) > 1:
            await self._inner.post(Chain(chain.writes[:-1], notify=False))
        await self._inner.flush()
        await self._reach("written")
        await self._inner.post(Chain(chain.writes[-1:]))
        await self._inner.flush()
        await self._reach("committed")
