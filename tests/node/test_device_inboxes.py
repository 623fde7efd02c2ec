"""Nodes whose actors have their inboxes in the memory of a GPU, which is pretended."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field

from onepiece.node.node import Node, open_node
from onepiece.node.options import NodeOptions
from onepiece.node.stopping import StopSignal
from tests.node import gpu_stages
from tests.node.in_process import SEED_ROLES, proxy_of, run, until_ready
from tests.runtime.pretended_gpu import GPUS, CountingDriver, pretended_gpu
from transports import Address

SECONDS = 30.0
INBOX_BYTES = 1 << 20
LENGTH = 300_000
_HOUSES = count()


@pytest.fixture
def driver() -> Iterator[CountingDriver]:
    """The GPU's driver."""
    gpu_stages.reset()
    with pretended_gpu() as pretended:
        yield pretended
        gpu_stages.reset()
        gc.collect()
        assert not pretended.memory, "all memory of the device is given back"


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
        memories = [each._device for each in receivers if each._device is not None]
        return [range(memory.address, memory.address + memory.size_bytes) for memory in memories]


@asynccontextmanager
async def gpu_set(
    workflow: str, directory: Path, *, workers: int = 2, devices: tuple[str, ...] = GPUS, **options: Any
) -> AsyncIterator[GpuSet]:
    """Run a workflow of ``gpu_stages`` on nodes within this process."""
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
            "seed", SEED_ROLES, workflows=(f"tests.node.gpu_stages:{workflow}",), workers=workers
        )
        seed = await stack.enter_async_context(open_node(seed_options, StopSignal()))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        made = GpuSet(seed)

        async def live(name: str, started: "asyncio.Future[Node]") -> None:
            join = (Address.parse(seed.address),)
            worker = options_of(name, frozenset({"worker"}), join=join, devices=devices)
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


async def ready(a_set: GpuSet) -> None:
    """Wait until all stages are loaded."""
    await until_ready(proxy_of(a_set.seed))


@pytest.mark.parametrize(("workflow", "copies"), [("shown", [LENGTH]), ("shown_once", [])])
async def test_a_tensor_stays_on_the_device(
    workflow: str, copies: list[int], driver: CountingDriver, tmp_path: Path
) -> None:
    """It comes from stage to stage bit for bit, into the inbox itself; the host has what is retained."""
    async with gpu_set(workflow, tmp_path, workers=3) as a_set:
        await ready(a_set)
        wanted = gpu_stages.seen(gpu_stages.pixels(7, LENGTH))
        assert await a_set.run(workflow, seed=7, length=LENGTH) == wanted
        (array,) = gpu_stages.arrived
        assert array.span is not None
        assert any(array.span.address in each for each in a_set.spans_of_inboxes())
        assert driver.copied_to_host == copies
        del array
        gpu_stages.reset()
