"""Store nodes in this process: real stores, rings and control messages; no manager, no HTTP.

The test plays the manager: it says which nodes are in the route table, and when they hear of it.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from attrs import define, evolve, field

from onepiece.core.membership import NodeState
from onepiece.core.replication_events import ReplicationConfig
from onepiece.core.retention import RetentionTable
from onepiece.core.routing import NodeRoute, RouteEpoch, RouteTable, diff
from onepiece.errors import OnePieceError
from onepiece.messages import CONTROL_REGION, KIND_COPY, KIND_RECORD, STORE_REGION
from onepiece.node.control import ControlService
from onepiece.node.replica_service import ReplicaService
from onepiece.runtime.environment import Environment, Identity, Inboxes, Routes
from onepiece.runtime.outbox import open_outbox
from onepiece.runtime.retainer import Retainer
from onepiece.store import PutOutcome, ResultStore, StoreOptions
from transports import Address, Delivery, Geometry, Options, Receiver, transport_for

CONFIG = ReplicationConfig(
    page_records_max=8,
    page_seconds=0.01,
    settle_seconds=0.05,
    retry_seconds=0.05,
    retry_seconds_max=0.2,
    round_seconds=600.0,
)
OPTIONS = StoreOptions(byte_budget=16 << 20, chunk_bytes=4096, transaction_bytes=16384)

_EPOCHS = itertools.count(1)
_SETS = itertools.count(1)


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for a condition; fails if it does not come about."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - a view, nobody is told of its change
            await asyncio.sleep(0.005)


@define(eq=False)
class StoreNode:
    """One running store node."""

    env: Environment
    store: ResultStore
    copies: ReplicaService
    control: ControlService
    tasks: asyncio.TaskGroup
    route: NodeRoute
    take_record: "Callable[[Receiver, Delivery], Awaitable[None]] | None" = None
    """What takes the records of requests, where there is such a part."""

    async def put(self, uid: str, value: bytes, *, seconds: float | None = None) -> None:
        """Store a result as the node's service does: durable first, then copied."""
        outcome = await self.store.put(
            uid, [value], content_type="x", ttl_seconds=seconds, now=self.env.now()
        )
        assert outcome is PutOutcome.STORED
        self.copies.stored(uid)

    async def purge(self, uid: str) -> None:
        """Purge a result as the node's service does."""
        await self.store.purge(uid, self.env.now())
        self.copies.purged(uid)

    async def read(self, uid: str) -> bytes | str:
        """The result here, or the name of the error that a reader gets."""
        try:
            return b"".join([piece async for piece in self.store.read(uid)])
        except OnePieceError as error:
            return type(error).__name__

    async def settled(self) -> None:
        """Wait until it has brought all others up to date."""
        async with asyncio.timeout(20.0):
            await self.copies.settled()


@define(eq=False)
class StoreNodes:
    """All of them; ``directory`` keeps their disks from one life to the next."""

    directory: Path
    number: int = field(factory=lambda: next(_SETS))
    options: StoreOptions = OPTIONS
    copies: int = 2
    config: ReplicationConfig = CONFIG
    inbox_bytes: int = 4 << 20
    nodes: dict[str, StoreNode] = field(factory=dict)

    @asynccontextmanager
    async def run(self, name: str, *, incarnation: int = 1) -> AsyncIterator[StoreNode]:
        """A node with what its disk has; the route tables do not change."""
        address = f"local://stores{self.number}-{name}"
        identity = Identity(name, incarnation)
        async with AsyncExitStack() as stack:
            parsed = Address.parse(address)
            listener = await stack.enter_async_context(transport_for(parsed).listen(parsed, Options()))
            store = await stack.enter_async_context(ResultStore.open(self.directory / name, self.options))
            outbox = await stack.enter_async_context(open_outbox(lambda: identity.life, Options()))
            tasks = await stack.enter_async_context(_cancelled_at_exit())
            env = Environment(
                identity=identity,
                address=parsed,
                control_address=f"{address}/{CONTROL_REGION}",
                inboxes=Inboxes(listener),
                outbox=outbox,
                routes=Routes(),
                inbox_bytes=self.inbox_bytes,
                join_bytes=0,
                on_change=lambda: None,
                retainer=Retainer(RetentionTable(0, 0), None, tasks),
            )
            control = ControlService(stall_seconds=1.0)
            copies = ReplicaService(store, env, tasks, self.copies, self.config)
            copies.attach(control)
            opened: asyncio.Future[Receiver] = asyncio.get_running_loop().create_future()
            tasks.create_task(control.serve(env.inboxes, opened))
            await opened
            ready = asyncio.Event()
            route = NodeRoute(name, incarnation, address, None, ("store",), NodeState.ALIVE, (), 1)
            node = StoreNode(env, store, copies, control, tasks, route)
            tasks.create_task(_serve(node, ready))
            await ready.wait()
            tasks.create_task(copies.run())
            self.nodes[name] = node
            try:
                yield node
            finally:
                del self.nodes[name]

    @asynccontextmanager
    async def run_all(self, *names: str) -> AsyncIterator[list[StoreNode]]:
        """Several nodes that know of each other and have settled."""
        async with AsyncExitStack() as stack:
            nodes = [await stack.enter_async_context(self.run(name)) for name in names]
            self.publish()
            for node in nodes:
                await node.settled()
            yield nodes

    def publish(self, *, to: Iterable[str] | None = None, draining: str | None = None) -> None:
        """Have nodes hear who is there: all of those that run."""
        routes = tuple(
            evolve(node.route, state=NodeState.DRAINING) if name == draining else node.route
            for name, node in self.nodes.items()
        )
        table = RouteTable(RouteEpoch(1, next(_EPOCHS)), routes)
        for name in self.nodes if to is None else to:
            node = self.nodes[name]
            for gone in diff(node.env.routes.table, table).nodes_gone:
                node.env.outbox.drop(f"{gone.address}/{CONTROL_REGION}")
            node.env.routes.update(table, {}, {})
            node.copies.routes_changed()

    async def settled(self) -> None:
        """Wait until every node has brought all others up to date."""
        for node in self.nodes.values():
            await node.settled()


async def _serve(node: StoreNode, ready: asyncio.Event) -> None:
    geometry = Geometry(slot_count=64, payload_bytes=node.env.inbox_bytes, session_count=64)
    async with node.env.inboxes.open(STORE_REGION, geometry) as inbox:
        ready.set()
        while True:
            delivery = await inbox.receive()
            if delivery.kind == KIND_RECORD and node.take_record is not None:
                await node.take_record(inbox, delivery)
                continue
            assert delivery.kind == KIND_COPY
            await node.copies.take_copy(inbox, delivery)


@asynccontextmanager
async def _cancelled_at_exit() -> AsyncIterator[asyncio.TaskGroup]:
    async with asyncio.TaskGroup() as tasks:
        try:
            yield tasks
        finally:
            for task in list(tasks._tasks):
                task.cancel()
