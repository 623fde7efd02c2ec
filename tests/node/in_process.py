"""Nodes in this process, on one loop: for what must be done to them from inside."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from onepiece.codec import value_from_bytes
from onepiece.errors import NodeUnreachable, NotReady
from onepiece.node.node import Node, open_node
from onepiece.node.options import NodeOptions
from onepiece.node.parts import NodeParts
from onepiece.node.proxy_service import ProxyService
from onepiece.node.stopping import StopSignal
from onepiece.requests import RequestState, RequestStatus
from transports import Address

READY_SECONDS = 20.0
DEVICES = ("cpu:0=4GiB",)
SEED_ROLES = frozenset({"proxy", "manager", "store"})

T = TypeVar("T")


@contextlib.asynccontextmanager
async def open_nodes(
    *workflows: str, directory: Path, workers: int = 2, parts: NodeParts | None = None, **options: Any
) -> AsyncIterator[list[Node]]:
    """A seed with proxy, manager and store, then workers, joined over loopback and ready."""
    async with contextlib.AsyncExitStack() as stack:
        seed = await stack.enter_async_context(
            open_node(
                NodeOptions(
                    roles=SEED_ROLES, workflows=workflows, workers=workers, state_dir=directory, **options
                ),
                StopSignal(),
                parts,
            )
        )
        nodes = [seed]
        for _ in range(workers):
            worker = NodeOptions(
                roles=frozenset({"worker"}), join=(Address.parse(seed.address),), devices=DEVICES, **options
            )
            nodes.append(await stack.enter_async_context(open_node(worker, StopSignal(), parts)))
        await until_ready(proxy_of(seed))
        yield nodes


def proxy_of(node: Node) -> ProxyService:
    """The node's proxy."""
    assert node.proxy is not None
    return node.proxy


async def until_ready(proxy: ProxyService) -> None:
    """Wait until every stage is loaded somewhere."""
    async with asyncio.timeout(READY_SECONDS):
        while not proxy.readiness().ready:  # noqa: ASYNC110 - a view, nobody is told of its change
            await asyncio.sleep(0.01)


async def ended(proxy: ProxyService, uid: str) -> RequestStatus:
    """A request's record once it has ended."""
    async for _ in proxy.events(uid, -1):
        pass
    return await proxy.status(uid)


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """What a call comes to, made again as a client does while nobody can answer it."""
    while True:
        try:
            return await call()
        except (NodeUnreachable, NotReady):
            await asyncio.sleep(0.05)


async def run(
    proxy: ProxyService, workflow: str, inputs: Mapping[str, Any], seconds: float, key: str | None = None
) -> Any:
    """A request's result, or the name of the error that it failed with; patient if it has a key."""
    accept = partial(proxy.submit, workflow, inputs, timeout_seconds=seconds, key=key)
    accepted = await (accept() if key is None else patiently(accept))
    look = partial(ended, proxy, accepted.uid)
    status = await (look() if key is None else patiently(look))
    if status.state is not RequestState.FINISHED:
        assert status.error is not None
        return status.error["error"]
    stream = await proxy.result(accepted.uid)
    data = b"".join([piece async for piece in stream.read(0, stream.total_bytes)])
    return value_from_bytes(data)
