"""A manager that has more to do than it gets done, on virtual time: it buries nobody for that."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any, Final, cast

from attrs import define, field

from onepiece.core.inventory import NodeInfo
from onepiece.core.manager import ManagerEffect, ManagerState
from onepiece.core.membership import Expel, NodeState
from onepiece.core.routing import RouteEpoch, RouteTable
from onepiece.messages import Heartbeat, PublishedRoutes
from onepiece.node.node_manager import ManagerService
from onepiece.node.options import NodeOptions
from onepiece.runtime.environment import Environment
from onepiece.runtime.workflows import WorkflowImports
from simulations.loop import virtual_loop

NODES: Final = 50
EFFECT_SECONDS: Final = 0.1
"""What each effect takes, on a host that has no time for the manager."""
HEARTBEAT_SECONDS: Final = 0.5
BACKLOG_SECONDS: Final = 60.0
NO_EPOCH: Final = RouteEpoch(0, 0)


class Alone:
    """Coordinates nothing, since nobody else may lead."""

    has_rivals = False
    leader = None

    async def lead(self) -> ManagerState:
        """At once."""
        return ManagerState(epoch=1)

    async def store(self, state: ManagerState) -> None:
        """Nothing is kept."""

    async def wait_lost(self) -> None:
        """Never."""
        await asyncio.Event().wait()


@define(eq=False)
class Sent:
    """An outbox that keeps what each node has been sent: the newest table, and how many there were."""

    newest: dict[str, RouteTable] = field(factory=dict)
    tables: Counter[str] = field(factory=Counter)
    expelled: list[Expel] = field(factory=list)

    def post(self, address: str, message: object, *, replaces: object = None) -> None:
        """Take a message."""
        match message:
            case PublishedRoutes(table):
                self.newest[address] = table
                self.tables[address] += 1
            case Expel():
                self.expelled.append(message)

    def post_to_all(self, addresses: Sequence[str], message: object, *, replaces: object = None) -> None:
        """Take a message for each."""
        for address in addresses:
            self.post(address, message)


async def pass_time(seconds: float) -> None:
    """Wait until so much virtual time has passed."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.Event().wait()


class SlowManager(ManagerService):
    """It takes long over each effect."""

    async def _carry_out(self, effect: ManagerEffect) -> None:
        await pass_time(EFFECT_SECONDS)
        await super()._carry_out(effect)


@contextlib.asynccontextmanager
async def slow_manager(sent: Sent) -> AsyncIterator[SlowManager]:
    """It leads, alone."""
    table = RouteTable(NO_EPOCH)
    env = SimpleNamespace(
        outbox=sent, control_address="tcp://m:1/control", node_id="m", routes=SimpleNamespace(table=table)
    )
    opening: Any = contextlib.nullcontext(Alone())
    imports = cast("WorkflowImports", SimpleNamespace())
    async with SlowManager.open(NodeOptions(), cast("Environment", env), imports, opening) as manager:
        assert isinstance(manager, SlowManager)
        yield manager


async def beat(manager: ManagerService, sent: Sent, number: int) -> None:
    """Send heartbeats as a node does, until cancelled."""
    address = f"tcp://n:{number + 1}"
    node = NodeInfo(f"node-{number}", 1, address, None, ("store",), (), number)
    while True:
        table = sent.newest.get(f"{address}/control")
        epoch = NO_EPOCH if table is None else table.epoch
        manager._on_heartbeat(Heartbeat(node, (), False, epoch))
        await asyncio.sleep(HEARTBEAT_SECONDS)


async def fifty_join(sent: Sent) -> ManagerService:
    """All at once; the manager is left when it has had the time to get done."""
    async with slow_manager(sent) as manager, asyncio.TaskGroup() as tasks:
        beating = [tasks.create_task(beat(manager, sent, number)) for number in range(NODES)]
        await pass_time(BACKLOG_SECONDS)
        for task in beating:
            task.cancel()
        states = Counter(manager.node_states().values())
        assert states == {NodeState.ALIVE: NODES}
    return manager


def test_nodes_whose_heartbeats_wait_are_not_silent() -> None:
    """It takes two leases until all are in, and none is suspected, expelled, or told of each other one."""
    sent = Sent()
    problems: list[dict[str, Any]] = []
    loop = virtual_loop(Random(1), problems.append)
    loop.run_until_complete(fifty_join(sent))
    loop.close()
    assert not problems
    assert not sent.expelled
    assert all(len(table.nodes) == NODES for table in sent.newest.values())
    assert len(sent.newest) == NODES
    assert max(sent.tables.values()) < NODES / 2
