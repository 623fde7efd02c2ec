"""Every node is drained, stopped and started anew in turn, while requests run: none notices."""

import asyncio
import random
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import onepiece
from onepiece.client import Client
from simulations.chaos.ledger import judge
from simulations.chaos.requests import Load, Stream
from tests.acceptance.node_set import DEVICE, READY_SECONDS, NodeProcess, NodeSet, open_set

LOAD = Load(
    rate=4.0,
    in_flight_max=8,
    stage_seconds=0.05,
    payload_bytes=100_000,
    timeout_seconds=60.0,
    patience_seconds=10.0,
)
PROXIES = ("proxy-1", "proxy-2")
WORKERS = ("worker-1", "worker-2", "worker-3")


def start_all(a_set: NodeSet) -> list[NodeProcess]:
    """A manager, two proxies and three workers; three of the six keep results and requests."""
    state = a_set.directory / "state"
    seed = a_set.start(
        *("--name", "manager", "--roles", "manager,store", "--state-dir", str(state / "manager")),
        *("--workflow", "simulations.chaos.workflow:diamond", "--workers", f"{len(WORKERS)}"),
    )
    joining = ("--join", seed.address)
    nodes = [seed]
    for name in PROXIES:
        roles = ("--name", name, "--roles", "proxy,store", "--state-dir", str(state / name))
        nodes.append(a_set.start(*roles, *joining))
    worker = ("--roles", "worker", *joining, "--devices", DEVICE)
    return nodes + [a_set.start("--name", name, *worker) for name in WORKERS]


async def in_state(client: Client, name: str, state: str, incarnation: int = 0) -> int:
    """Wait until a node is seen in this state, in a later life than that; its incarnation."""
    async with asyncio.timeout(READY_SECONDS):
        while True:
            for node in await client.nodes():
                if node.node == name and node.state == state and node.incarnation > incarnation:
                    return node.incarnation
            await asyncio.sleep(0.05)


async def restart(a_set: NodeSet, client: Client, node: NodeProcess) -> None:
    """Drain a node, stop it once it has drained, and start it again."""
    name = node.node_id
    await client.drain(name)
    incarnation = await in_state(client, name, "drained")
    node.signal(signal.SIGTERM)
    assert await asyncio.to_thread(node.wait) == 0, node.log()
    assert "drained=true" in node.log()
    a_set.start_again(node)
    await in_state(client, name, "alive", incarnation)
    await client.wait_ready(READY_SECONDS)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_rolling_restart(tmp_path: Path) -> None:
    """Each node in turn is drained and restarted under load: every request finishes, once (fault 118)."""
    with open_set(tmp_path / "set") as a_set:
        nodes = await asyncio.to_thread(start_all, a_set)
        async with AsyncExitStack() as stack:
            proxies = {
                node.node_id: await stack.enter_async_context(onepiece.connect(node.http))
                for node in nodes[1 : 1 + len(PROXIES)]
            }
            client = await stack.enter_async_context(
                onepiece.connect(",".join(each.url for each in proxies.values()))
            )
            for each in proxies.values():
                await each.wait_ready(READY_SECONDS)
            stream = Stream(client, proxies, LOAD, random.Random(7))
            stop = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(stream.run(stop))
                for node in nodes:
                    await restart(a_set, client, node)
                stop.set()
            await stream.confirm(READY_SECONDS)
            for name in WORKERS:  # they let go of all that they retain while its owners are there to be asked
                await client.drain(name)
                await in_state(client, name, "drained")
                await client.resume(name)
                await in_state(client, name, "alive")
    verdict = judge(stream.submissions, [])
    assert verdict.holds, [each.trouble for each in stream.submissions if each.trouble]
    assert verdict.finished == verdict.submitted > 2 * len(nodes)
    assert not verdict.failed
