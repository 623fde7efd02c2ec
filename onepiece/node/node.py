r"""A node: one process's share of the set, composed of the parts its roles ask for.

::

    listener --- control ring --- Member (heartbeats, routes)        every node
       |                    \--- ActorHost (stage actors, devices)   role worker
       |                     \-- ManagerService (NodeManager)        role manager
       |                      \- ProxyService --- HTTP               role proxy
       +-------- store ring ---- StoreService (LMDB)                 role store

Life: listen, join, serve; on the first stop drain (no new requests, tell the manager, finish what is
held, deliver it) for at most ``drain_seconds``, then say good-bye and close. A second stop, or
cancelling ``run_node``, closes at once; what runs then is lost with the process.
"""

import asyncio
import contextlib
import json
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from attrs import define, evolve

from onepiece.core.admission import BudgetLimits, RequestBudget
from onepiece.core.inventory import Device, NodeInfo
from onepiece.errors import ConfigError, OnePieceError
from onepiece.ids import new_node_name
from onepiece.log import get_logger
from onepiece.messages import CONTROL_REGION
from onepiece.node.actor_host import ActorHost
from onepiece.node.advertising import advertised, advertised_host
from onepiece.node.control import ControlService
from onepiece.node.member import Member
from onepiece.node.node_manager import ManagerService
from onepiece.node.options import NodeOptions
from onepiece.node.proxy import ProxyOptions, build_app, serve
from onepiece.node.proxy_service import ProxyService
from onepiece.node.state_directory import open_state_directory
from onepiece.node.stopping import StopSignal, watch_signals
from onepiece.node.store_service import StoreService
from onepiece.runtime.devices import DeviceThreads, discover_devices, open_device_threads, parse_device
from onepiece.runtime.environment import Environment, Routes
from onepiece.runtime.outbox import open_outbox
from onepiece.runtime.owners import LostOwners
from onepiece.runtime.workflows import WorkflowImports
from onepiece.store import Durability, ResultStore, StoreOptions
from transports import Address, Listener, ListenFailed, Options, Receiver, transport_for

_CLOSE_SECONDS = 2.0
"""How long closing waits for a device's threads, which may never return."""
_STALL_SECONDS = 1.0
"""How long a sender may hold up a control ring, if the lease of nodes is not too short for that."""
_FAREWELL_SECONDS = 0.5
"""How long a node waits for its good-bye to be taken; a manager that has left does not take it."""


@define(eq=False)
class Node:
    """A running node; use ``open_node``."""

    options: NodeOptions
    info: NodeInfo
    env: Environment
    member: Member
    host: ActorHost | None
    proxy: ProxyService | None
    http_port: int | None = None

    @property
    def address(self) -> str:
        """Where other nodes reach it."""
        return self.info.address

    @property
    def http(self) -> str | None:
        """Where clients reach it."""
        return self.info.http

    async def drain(self) -> None:
        """Take no new work, and return when nothing is held any more."""
        self.member.drain()
        if self.proxy is not None:
            self.proxy.draining = True
            await self.proxy.settled()
        if self.host is not None:
            await self.host.idle()
        await self.env.outbox.flushed()


def make_info(options: NodeOptions, address: str, http: str | None) -> NodeInfo:
    """Who this node is, for the first of its incarnations."""
    host = socket.gethostname()
    devices: tuple[Device, ...] = ()
    if "worker" in options.roles:
        devices = tuple(parse_device(text) for text in options.devices) or discover_devices()
    return NodeInfo(
        node_id=options.name or new_node_name(host, random.SystemRandom()),
        incarnation=int(time.time() * 1000),
        address=address,
        http=http,
        roles=tuple(sorted(options.roles)),
        devices=devices,
        process_id=os.getpid(),
    )


@contextlib.asynccontextmanager
async def open_node(options: NodeOptions, stop: StopSignal) -> AsyncIterator[Node]:
    """Start a node with all its parts; leaving the context stops it at once.

    Raises ``ListenFailed`` (of transports) if an address cannot be listened on, ``ConfigError`` for
    options that do not fit together or a workflow that cannot be imported.
    """
    wire = Options(
        secret=options.secret,
        tls_certificate=options.tls_certificate,
        tls_key=options.tls_key,
        tls_authority=options.tls_authority,
    )
    transport = transport_for(options.listen)
    async with contextlib.AsyncExitStack() as stack:
        has_state = options.roles & {"store", "manager"}
        state_dir = stack.enter_context(open_state_directory(options.state_dir)) if has_state else None
        listener = await stack.enter_async_context(transport.listen(options.listen, wire))
        address = advertised(listener.address, options.advertise, options.join)
        info = make_info(options, str(address), None)
        node = await _compose(options, wire, listener, info, state_dir, stop, stack)
        if options.ready_file is not None:
            _write_ready_file(options.ready_file, node)
            stack.callback(options.ready_file.unlink, missing_ok=True)
        get_logger().info(
            "node_started", node=info.node_id, address=node.address, http=node.http, roles=list(info.roles)
        )
        yield node


async def _compose(
    options: NodeOptions,
    wire: Options,
    listener: Listener,
    info: NodeInfo,
    state_dir: Path | None,
    stop: StopSignal,
    stack: contextlib.AsyncExitStack,
) -> Node:
    control = ControlService(stall_seconds=min(_STALL_SECONDS, options.lease_seconds / 4))
    control_address = f"{info.address}/{CONTROL_REGION}"
    wake = _Wake()
    env = await _open_environment(options, wire, listener, info, wake, stack)
    env.outbox.deliver_locally(control_address, control.dispatch)
    imports = WorkflowImports()
    store = await _open_store(options, state_dir, stack)
    devices = [
        await stack.enter_async_context(open_device_threads(device.name, close_seconds=_CLOSE_SECONDS))
        for device in info.devices
    ]
    tasks = await stack.enter_async_context(_cancelled_at_exit(devices))
    host = ActorHost(env, devices, imports, tasks) if "worker" in options.roles else None
    proxy = _make_proxy(options, env, control_address, tasks)
    if proxy is not None:
        http_port = await stack.enter_async_context(_serve_http(options, proxy))
        info = evolve(info, http=_http_url(options.http, http_port, env.address))
        proxy.attach(control)
        tasks.create_task(proxy.tick(), name="proxy tick")
    member = Member(
        info,
        _manager_address(options, control_address),
        outbox=env.outbox,
        routes=env.routes,
        owners=env.owners,
        imports=imports,
        heartbeat_seconds=options.heartbeat_seconds,
        on_nodes_died=proxy.nodes_died if proxy is not None else lambda _: None,
        on_expelled=proxy.expelled if proxy is not None else lambda: None,
        on_must_stop=stop.order,
    )
    wake.target = member.wake
    member.attach(control, host)
    if host is not None:
        host.attach(control)
    if store is not None:
        StoreService(store, env, tasks).start(control)
    if "manager" in options.roles:
        assert state_dir is not None
        opening = ManagerService.open(options, env.outbox, imports, state_dir)
        manager = await stack.enter_async_context(opening)
        manager.attach(control)
        if proxy is not None:
            proxy.heartbeat_ages = manager.heartbeat_ages
    opened: asyncio.Future[Receiver] = asyncio.get_running_loop().create_future()
    tasks.create_task(control.serve(listener, opened), name="control ring")
    await opened
    tasks.create_task(member.follow_routes(), name="routes")
    tasks.create_task(member.beat(), name="heartbeats")
    return Node(options, info, env, member, host, proxy)


async def _open_environment(
    options: NodeOptions,
    wire: Options,
    listener: Listener,
    info: NodeInfo,
    wake: "_Wake",
    stack: contextlib.AsyncExitStack,
) -> Environment:
    outbox = await stack.enter_async_context(open_outbox(f"{info.node_id}.{info.incarnation}", wire))
    return Environment(
        node_id=info.node_id,
        address=Address.parse(info.address),
        listener=listener,
        outbox=outbox,
        routes=Routes(),
        owners=LostOwners(),
        inbox_bytes=options.inbox_bytes,
        join_bytes=options.join_bytes,
        on_change=wake,
    )


class _Wake:
    """A callback that is known before what it calls."""

    def __init__(self) -> None:
        self.target: Callable[[], None] = lambda: None

    def __call__(self) -> None:
        self.target()


@contextlib.asynccontextmanager
async def _cancelled_at_exit(devices: Sequence[DeviceThreads]) -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose tasks end with the context; they wait for a device's threads for a bounded time."""
    abandon: list[asyncio.TimerHandle] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            try:
                yield tasks
            finally:
                loop = asyncio.get_running_loop()
                abandon += [loop.call_later(_CLOSE_SECONDS, device.abandon) for device in devices]
                for task in list(tasks._tasks):  # noqa: SLF001 - the standard library offers no cancel_all
                    task.cancel()
    finally:
        for timer in abandon:
            timer.cancel()


def _manager_address(options: NodeOptions, own: str) -> str:
    if options.join is None:
        return own
    return str(options.join.region(CONTROL_REGION))


def _make_proxy(
    options: NodeOptions, env: Environment, control_address: str, tasks: asyncio.TaskGroup
) -> ProxyService | None:
    if "proxy" not in options.roles:
        return None
    return ProxyService(
        env,
        control_address,
        tasks,
        budget=RequestBudget(BudgetLimits(total=options.requests_max, each=options.requests_max)),
        timeout_seconds=options.request_timeout_seconds,
    )


def _http_url(text: str, port: int, own: Address) -> str:
    host = advertised_host(text.rpartition(":")[0], own)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.asynccontextmanager
async def _serve_http(options: NodeOptions, proxy: ProxyService) -> AsyncIterator[int]:
    host, _, port = options.http.rpartition(":")
    app = build_app(proxy, ProxyOptions(body_bytes_max=options.body_bytes_max))
    async with contextlib.AsyncExitStack() as stack:
        try:
            bound = await stack.enter_async_context(serve(app, host, int(port)))
        except ConfigError as error:
            if "port" not in error.fields:
                raise
            raise ListenFailed(f"--http: {error.message}") from error
        yield bound


async def _open_store(
    options: NodeOptions, state_dir: Path | None, stack: contextlib.AsyncExitStack
) -> ResultStore | None:
    """The result store, opened before the tasks that use it so that it is closed behind them."""
    if "store" not in options.roles:
        return None
    assert state_dir is not None
    store_options = StoreOptions(
        byte_budget=options.store_bytes,
        ttl_seconds=options.result_ttl_seconds,
        durability=Durability(options.store_durability),
    )
    return await stack.enter_async_context(ResultStore.open(state_dir / "results", store_options))


def _write_ready_file(path: Path, node: Node) -> None:
    content = {
        "node": node.info.node_id,
        "address": node.address,
        "http": node.http,
        "process_id": os.getpid(),
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.replace(path)


async def run_node(options: NodeOptions, stop: StopSignal) -> bool:
    """Run a node until it is told to stop; says whether it had finished all it held.

    Raises ``OnePieceError`` if it is the set that told it, and what ``open_node`` raises.
    """
    async with open_node(options, stop) as node:
        await stop.drain.wait()
        get_logger().info("node_draining", node=node.info.node_id, bound_seconds=options.drain_seconds)
        drained = await _until_drained(node, stop)
        get_logger().info("node_stopping", node=node.info.node_id, drained=drained)
        node.member.farewell()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_SECONDS):
                await node.env.outbox.flushed()
        if stop.reason is not None:
            raise OnePieceError(f"{node.info.node_id} had to stop: {stop.reason}")
    return drained


async def _until_drained(node: Node, stop: StopSignal) -> bool:
    """Drain, within the bound and until a second stop; says whether nothing was left."""
    async with asyncio.TaskGroup() as tasks:
        draining = tasks.create_task(node.drain())
        second = tasks.create_task(stop.now.wait())
        done, _ = await asyncio.wait(
            {draining, second}, timeout=node.options.drain_seconds, return_when=asyncio.FIRST_COMPLETED
        )
        draining.cancel()
        second.cancel()
    return draining in done


async def run_dev(workflow: str, *, http: str, listen: str) -> None:
    """Run everything in one process, for ``onepiece dev``; until cancelled or a signal stops it."""
    options = NodeOptions(listen=Address.parse(listen), http=http, workflows=(workflow,), drain_seconds=5.0)
    stop = StopSignal()
    with watch_signals(stop):
        await run_node(options, stop)
