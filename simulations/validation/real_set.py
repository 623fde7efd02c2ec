"""A set of real node processes on this machine's loopback, and where it has put its instances."""

import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

from anyio import to_thread

import onepiece
from onepiece.client import Client
from simulations.capacity_world import Place
from simulations.chaos.processes import ChaosNode, end_all, wait_listening

START_SECONDS: Final = 90.0
STOP_SECONDS: Final = 30.0
REQUESTS_MAX: Final = 5000
"""In flight: what is measured here is not the door."""


@contextlib.asynccontextmanager
async def open_real_set(
    workflows: Sequence[str], workers: int, devices: int, options: Sequence[str] = ()
) -> AsyncIterator[Client]:
    """A seed (proxy, manager, store) and ``workers`` nodes of ``devices`` devices of 1 GiB, ready to serve.

    Args:
        workflows: As ``module:name``.
        workers: Nodes.
        devices: Of each.
        options: More of the seed's.

    Raises:
        RuntimeError: A node does not come up; the end of its log is in it.
        OnePieceError: The set does not get ready.
    """
    directory = Path(tempfile.mkdtemp(prefix="onepiece-validate-"))
    nodes: list[ChaosNode] = []

    def started(name: str, roles: set[str], more: Sequence[str]) -> ChaosNode:
        node = ChaosNode(name, frozenset(roles), more, directory)
        nodes.append(node)
        node.start()
        wait_listening([node], START_SECONDS)
        return node

    def start_all() -> ChaosNode:
        named = [part for workflow in workflows for part in ("--workflow", workflow)]
        common = ("--workers", str(workers), "--copies", "1", "--requests-max", str(REQUESTS_MAX))
        seed = started("seed", {"proxy", "manager", "store"}, [*named, *common, *options])
        names = ",".join(f"cpu:{number}=1GiB" for number in range(devices))
        for number in range(workers):
            started(f"worker-{number}", {"worker"}, ["--join", seed.address, "--devices", names])
        return seed

    try:
        seed = await to_thread.run_sync(start_all)
        async with onepiece.connect(seed.http) as client:
            await client.wait_ready(START_SECONDS)
            yield client
        for node in reversed(nodes):
            await to_thread.run_sync(node.terminate, STOP_SECONDS)
    finally:
        end_all(nodes)
        shutil.rmtree(directory, ignore_errors=True)


async def places_of(client: Client) -> tuple[Place, ...]:
    """The instances that are ready, and where, in the order of their ids."""
    found = [
        (actor["actor"], Place(actor["stage"], node.node, tuple(actor["devices"])))
        for node in await client.nodes()
        for actor in node.actors
        if actor["state"] == "ready"
    ]
    return tuple(place for _, place in sorted(found))
