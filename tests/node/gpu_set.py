"""Nodes in this process whose stages work on a pretended GPU, on one loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

from attrs import define, field

from onepiece.node.node import Node, open_node
from onepiece.node.options import NodeOptions
from onepiece.node.stopping import StopSignal
from tests.node.in_process import SEED_ROLES, proxy_of, run
from tests.runtime.pretended_gpu import GPUS
from transports import Address

SECONDS: Final = 30.0
INBOX_BYTES: Final = 1 << 20
_HOUSES = count()


@define(eq=False)
class GpuSet:
    """A seed, and workers with a GPU each."""

    seed: Node
    workers: dict[str, "asyncio.Task[None]"] = field(factory=dict)
    nodes: dict[str, Node] = field(factory=dict)

    async def run(self, workflow: str, **inputs: Any) -> Any:
        """A request's result."""
        return await run(proxy_of(self.seed), workflow, inputs, SECONDS)

    async def die(self, name: str) -> None:
        """A worker ends as by a kill."""
        task = self.workers.pop(name)
        task.cancel()
        await asyncio.wait([task])

    def spans_of_inboxes(self) -> list[range]:
        """Where the payload rings of inboxes on the device lie."""
        receivers = [each for node in self.nodes.values() for _, each in node.env.inboxes.receivers()]
        memories = [each._beside for each in receivers if each._beside is not None]
        return [range(memory.address, memory.address + memory.size_bytes) for memory in memories]


@asynccontextmanager
async def gpu_set(*workflows: str, directory: Path, workers: int, **options: Any) -> AsyncIterator[GpuSet]:
    """Run workflows of ``gpu_stages`` on nodes within this process."""
    house = next(_HOUSES)
    settings: dict[str, Any] = {
        "inbox_bytes": INBOX_BYTES,
        "lease_seconds": 2.4,
        "heartbeat_seconds": 0.2,
        **options,
    }

    def options_of(name: str, roles: frozenset[str], **more: Any) -> NodeOptions:
        listen = Address.parse(f"local://gpus-{house}-{name}")
        given = {"listen": listen, **more, **settings}
        return NodeOptions(name=name, roles=roles, state_dir=directory / name, **given)

    async with AsyncExitStack() as stack:
        seed_options = options_of(
            "seed",
            SEED_ROLES,
            workflows=[f"tests.node.gpu_stages:{each}" for each in workflows],
            workers=workers,
        )
        seed = await stack.enter_async_context(open_node(seed_options, StopSignal()))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        made = GpuSet(seed)

        async def live(name: str, started: "asyncio.Future[Node]") -> None:
            join = (Address.parse(seed.address),)
            worker = options_of(name, frozenset({"worker"}), join=join, devices=GPUS)
            async with open_node(worker, StopSignal()) as node:
                started.set_result(node)
                await asyncio.Event().wait()

        for number in range(workers):
            name = f"worker-{number}"
            started: asyncio.Future[Node] = asyncio.get_running_loop().create_future()
            made.workers[name] = tasks.create_task(live(name, started))
            made.nodes[name] = await started
        try:
            yield made
        finally:
            for task in made.workers.values():
                task.cancel()
