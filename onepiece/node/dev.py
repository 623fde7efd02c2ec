"""Everything in one process on one machine, for ``onepiece dev``."""

import asyncio
from collections.abc import Callable, Coroutine

from onepiece.core.inventory import DeviceKind
from onepiece.errors import ConfigError
from onepiece.node.node import Node, open_node, serve_until_stopped
from onepiece.node.options import NodeOptions, is_exposed
from onepiece.node.stopping import StopSignal, unless_told, watch_signals
from onepiece.runtime.devices import discover_devices
from onepiece.runtime.unjoined import in_unjoined_thread
from onepiece.runtime.workflows import import_workflow
from transports import Address


async def _devices_for(reference: str) -> tuple[str, ...]:
    """On a machine without GPUs: as many CPU devices as a stage of the workflow wants to work together."""
    workflow = await in_unjoined_thread(import_workflow, reference)
    count = max(spec.resources.count for spec in workflow.graph.stages.values())
    has_gpus = discover_devices()[0].kind is DeviceKind.GPU
    return () if has_gpus or count == 1 else tuple(f"cpu:{index}" for index in range(count))


async def run_dev(
    workflow: str, *, http: str, listen: str, started: Callable[[Node], Coroutine[None, None, None]]
) -> None:
    """Run everything in one process, for ``onepiece dev``; until cancelled or a signal stops it.

    Args:
        workflow: ``module:workflow``.
        http: Where clients reach it; port 0 takes a free one.
        listen: Where nodes reach it.
        started: Called with the node once it has bound its addresses; cancelled when it stops.

    Raises:
        ConfigError: Other machines could reach ``listen``, or the workflow cannot be imported.
    """
    stop = StopSignal()

    async def start_and_serve() -> None:
        options = await _options(workflow, http, listen)
        async with open_node(options, stop) as node, asyncio.TaskGroup() as tasks:
            telling = tasks.create_task(started(node), name="started")
            await serve_until_stopped(node, stop)
            telling.cancel()

    with watch_signals(stop):
        await unless_told(stop, start_and_serve())


async def _options(workflow: str, http: str, listen: str) -> NodeOptions:
    """All roles, for one workflow; raises as ``run_dev``."""
    options = NodeOptions(
        listen=Address.parse(listen),
        http=http,
        workflows=(workflow,),
        devices=await _devices_for(workflow),
        drain_seconds=5.0,
    )
    if is_exposed(options):
        raise ConfigError(
            f"--listen {listen} can be reached from other machines, and this node has no secret: "
            "listen on 127.0.0.1, or run `python -m onepiece.node` with a --secret-file"
        )
    return options
