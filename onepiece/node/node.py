r"""A node: one process's share of the set, composed of the parts its roles ask for.

::

    listener --- control ring --- Member (heartbeats, routes)        every node
       |                    \--- ActorHost (stage actors, devices)   role worker
       |                     \-- ManagerService (NodeManager)        role manager
       |                      \- ProxyService --- HTTP               role proxy
       +-------- store ring ---- StoreService (LMDB)                 role store

Life: listen, join, serve; on the first stop drain (no new requests, tell the manager, finish what is
held, deliver it) for at most ``drain_seconds``, then say good-bye and close. A second stop, or cancelling
``run_node``, closes at once; what runs then is lost with the process.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path

from attrs import define, evolve

from onepiece.core.admission import AdmissionRules
from onepiece.core.inventory import Device, NodeInfo
from onepiece.core.leader_search import LeaderSearch
from onepiece.core.retention import RetentionTable
from onepiece.errors import ConfigError, OnePieceError
from onepiece.ids import new_node_name
from onepiece.log import get_logger
from onepiece.messages import CONTROL_REGION
from onepiece.node.actor_host import ActorHost
from onepiece.node.advertising import advertised
from onepiece.node.checkpoint_service import CheckpointService
from onepiece.node.checkpoint_store import CheckpointStore
from onepiece.node.control import ControlService
from onepiece.node.drain import Drain
from onepiece.node.leadership import opening_coordinator
from onepiece.node.leftovers import Leftovers
from onepiece.node.lender import Lender, lent
from onepiece.node.member import Member
from onepiece.node.node_manager import ManagerService
from onepiece.node.node_metrics import NodeMetrics
from onepiece.node.node_stores import Stores, open_stores
from onepiece.node.options import NodeOptions, weights_of
from onepiece.node.parts import NodeParts
from onepiece.node.proxy_service import ProxyService
from onepiece.node.ready_file import ready_file
from onepiece.node.replica_service import ReplicaService
from onepiece.node.retain_service import RetainService
from onepiece.node.serving import serve_metrics, serve_proxy
from onepiece.node.state_directory import holding, next_incarnation, open_state_directory
from onepiece.node.stopping import StopSignal, unless_told
from onepiece.node.store_service import StoreService
from onepiece.runtime.checkpoints import Checkpoints
from onepiece.runtime.devices import DeviceThreads, discover_devices, parse_device
from onepiece.runtime.environment import Environment, Identity, Inboxes, Routes
from onepiece.runtime.outbox import Outbox, open_outbox
from onepiece.runtime.retainer import Output, Retainer
from onepiece.runtime.workflows import WorkflowImports
from onepiece.store import ResultStore
from transports import Address, Listener, Options, Receiver

_SHOWN_MAX = 8
_CLOSE_SECONDS = 2.0  # how long closing waits for a device's threads, which may never return
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
    copies: ReplicaService | None
    checkpoints: CheckpointStore | None
    draining: Drain
    metrics: str | None
    """Where its metrics are read, beside its proxy, if it was told to."""

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
        await self.draining.finish()


def make_info(options: NodeOptions, address: str, incarnation: int, parts: NodeParts) -> NodeInfo:
    """Who this node is, for the first of its incarnations."""
    devices: tuple[Device, ...] = ()
    if "worker" in options.roles:
        devices = tuple(parse_device(text) for text in options.devices) or discover_devices()
        names = [device.name for device in devices]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"--devices names {twice} twice: name each device once")
    return NodeInfo(
        node_id=options.name or new_node_name(parts.host_name(), parts.rng),
        incarnation=incarnation,
        address=address,
        http=None,
        roles=tuple(sorted(options.roles)),
        devices=devices,
        process_id=parts.process_id,
    )


@contextlib.asynccontextmanager
async def open_node(
    options: NodeOptions, stop: StopSignal, parts: NodeParts | None = None
) -> AsyncIterator[Node]:
    """Start a node with all its parts; leaving the context stops it at once.

    Args:
        options: Its settings.
        stop: How it is told to stop.
        parts: What it takes from the machine; a simulation gives others.

    Raises ``ListenFailed`` (of transports) if an address cannot be listened on, ``ConfigError`` for
    options that do not fit together or a workflow that cannot be imported.
    """
    wire = Options(
        secret=options.secret,
        tls_certificate=options.tls_certificate,
        tls_key=options.tls_key,
        tls_authority=options.tls_authority,
    )
    parts = parts or NodeParts()
    transport = parts.find_transport(options.listen)
    for address in options.join:
        parts.find_transport(address).check(address)  # one that nobody could ever reach is told now
    async with contextlib.AsyncExitStack() as stack:
        state_dir = stack.enter_context(open_state_directory(options.state_dir))
        listener = await stack.enter_async_context(transport.listen(options.listen, wire))
        address = advertised(listener.address, options.advertise, *options.join[:1])
        incarnation = next_incarnation(state_dir, _moment(parts))
        info = make_info(options, str(address), incarnation, parts)
        node = await _compose(options, wire, listener, info, state_dir, stop, parts, stack)
        if options.ready_file is not None:
            stack.enter_context(ready_file(options.ready_file, _ready(node)))
        get_logger().info(
            "node_started",
            node=info.node_id,
            address=node.address,
            http=node.http,
            metrics=node.metrics,
            roles=list(info.roles),
        )
        yield node


async def _compose(
    options: NodeOptions,
    wire: Options,
    listener: Listener,
    info: NodeInfo,
    state_dir: Path,
    stop: StopSignal,
    parts: NodeParts,
    stack: contextlib.AsyncExitStack,
) -> Node:
    control = ControlService(stall_seconds=min(_STALL_SECONDS, options.lease_seconds / 4))
    identity = Identity(info.node_id, info.incarnation)
    outbox = await _open_outbox(options, identity, wire, parts, stack)
    devices = await _open_devices(info, parts, stack)
    lender = await stack.enter_async_context(lent(options, info.devices, parts.monotonic, stop.now))
    stores = await open_stores(options, state_dir, parts, stack)
    tasks = await stack.enter_async_context(_cancelled_at_exit(devices, control.close))
    wake = _Wake()
    retainer = _make_retainer(options, stores.spill, tasks)
    env = _make_environment(options, info, parts, identity, listener, outbox, retainer, wake)
    outbox.deliver_locally(env.control_address, control.dispatch)
    imports = WorkflowImports(parts.workflows)
    host, leftovers = _start_host(options, env, control, devices, imports, stores, tasks, lender)
    copies = _start_store(options, stores, env, control, tasks)
    proxy = _make_proxy(options, env, tasks)
    metrics = NodeMetrics(env)
    if proxy is not None:
        serving = serve_proxy(options, proxy, metrics, parts, env.address)
        info = evolve(info, http=await stack.enter_async_context(serving))

    def next_life(at_least: int) -> int:
        return next_incarnation(state_dir, max(at_least, _moment(parts)))

    member = _make_member(options, info, env, imports, proxy, stop, next_life)
    wake.target = member.wake
    member.attach(control, host)
    if "manager" in options.roles:
        opening = opening_coordinator(options, parts, state_dir, env.control_address)
        manager = await stack.enter_async_context(ManagerService.open(options, env, imports, opening))
        _attach_manager(manager, control, proxy, metrics)
    metrics.of_node(member, host, stores, copies)
    metrics_url = await stack.enter_async_context(serve_metrics(options, metrics, parts, env.address))
    draining = Drain(env, member, host, proxy, copies, leftovers).attached(control)
    await _join(control, env, member, proxy, tasks)
    return Node(options, info, env, member, host, proxy, copies, stores.checkpoints, draining, metrics_url)


def _make_environment(
    options: NodeOptions,
    info: NodeInfo,
    parts: NodeParts,
    identity: Identity,
    listener: Listener,
    outbox: Outbox,
    retainer: Retainer,
    on_change: Callable[[], None],
) -> Environment:
    return Environment(
        identity=identity,
        address=Address.parse(info.address),
        control_address=f"{info.address}/{CONTROL_REGION}",
        inboxes=Inboxes(listener, clock=parts.monotonic, rng=parts.rng),
        outbox=outbox,
        routes=Routes(parts.monotonic),
        inbox_bytes=options.inbox_bytes,
        join_bytes=options.join_bytes,
        delivery_seconds=options.delivery_seconds,
        on_change=on_change,
        retainer=retainer,
        checkpoints=Checkpoints(options.copies),
        now=parts.now,
        monotonic=parts.monotonic,
        rng=parts.rng,
        weights=weights_of(options.weights),
    )


def _attach_manager(
    manager: ManagerService, control: ControlService, proxy: ProxyService | None, metrics: NodeMetrics
) -> None:
    manager.attach(control)
    metrics.of_manager(manager)
    if proxy is not None:
        proxy.heartbeat_ages = manager.heartbeat_ages


async def _open_devices(
    info: NodeInfo, parts: NodeParts, stack: contextlib.AsyncExitStack
) -> list[DeviceThreads]:
    return [
        await stack.enter_async_context(parts.open_device(device.name, _CLOSE_SECONDS))
        for device in info.devices
    ]


async def _open_outbox(
    options: NodeOptions,
    identity: Identity,
    wire: Options,
    parts: NodeParts,
    stack: contextlib.AsyncExitStack,
) -> Outbox:
    opening = open_outbox(
        lambda: identity.life,
        wire,
        find_transport=parts.find_transport,
        other_spellings=_joins(options),
        clock=parts.monotonic,
        rng=parts.rng,
    )
    return await stack.enter_async_context(opening)


def _start_host(
    options: NodeOptions,
    env: Environment,
    control: ControlService,
    devices: Sequence[DeviceThreads],
    imports: WorkflowImports,
    stores: Stores,
    tasks: asyncio.TaskGroup,
    lender: Lender | None,
) -> tuple[ActorHost | None, Leftovers]:
    """The actors of a worker; what outputs are asked of is answered by every node, and asked by every one."""
    host = ActorHost(env, devices, imports, tasks, lender) if "worker" in options.roles else None
    kept = stores.checkpoints
    RetainService(
        env,
        tasks,
        host.active_of if host is not None else lambda _: {},
        kept.sources_of if kept is not None else lambda _: (),
    ).attach(control)

    def owners() -> dict[str, str]:
        of_checkpoints = kept.owners() if kept is not None else {}
        of_actors = host.owners() if host is not None else {}
        return {**of_checkpoints, **env.owners, **env.retainer.owners(), **of_actors}

    leftovers = Leftovers(env, owners)
    tasks.create_task(leftovers.look(), name="leftovers")
    if host is not None:
        host.attach(control)
    return host, leftovers


def _start_store(
    options: NodeOptions,
    stores: Stores,
    env: Environment,
    control: ControlService,
    tasks: asyncio.TaskGroup,
) -> ReplicaService | None:
    if stores.results is None or stores.records is None or stores.checkpoints is None:
        return None
    copies = ReplicaService(stores.results, env, tasks, options.copies)
    copies.attach(control)
    tasks.create_task(copies.run(), name="copies")
    checkpoints = CheckpointService(stores.checkpoints, env, tasks)
    StoreService(stores.results, stores.records, copies, checkpoints, env, tasks).start(control)
    return copies


async def _join(
    control: ControlService,
    env: Environment,
    member: Member,
    proxy: ProxyService | None,
    tasks: asyncio.TaskGroup,
) -> None:
    """Open the control ring, then let the set know of this node."""
    opened: asyncio.Future[Receiver] = asyncio.get_running_loop().create_future()
    tasks.create_task(control.serve(env.inboxes, opened), name="control ring")
    await opened
    if proxy is not None:
        proxy.attach(control)
        proxy.start(member)
    tasks.create_task(member.follow_routes(), name="routes")
    tasks.create_task(member.beat(), name="heartbeats")


def _make_member(
    options: NodeOptions,
    info: NodeInfo,
    env: Environment,
    imports: WorkflowImports,
    proxy: ProxyService | None,
    stop: StopSignal,
    next_life: Callable[[int], int],
) -> Member:
    def on_new_life() -> None:
        env.retainer.release_all()
        env.outbox.forget_all()
        if proxy is not None:
            proxy.owner.disown()

    return Member(
        info,
        LeaderSearch(_joins(options) or (env.control_address,)),
        outbox=env.outbox,
        routes=env.routes,
        imports=imports,
        heartbeat_seconds=options.heartbeat_seconds,
        identity=env.identity,
        inboxes=env.inboxes,
        on_nodes_died=proxy.owner.nodes_died if proxy is not None else lambda _: None,
        on_new_life=on_new_life,
        on_must_stop=stop.order,
        next_incarnation=next_life,
        rng=env.rng,
    )


def _moment(parts: NodeParts) -> int:
    """Now, as incarnations count it: in milliseconds."""
    return int(parts.now() * 1000)


def _make_retainer(options: NodeOptions, spill: ResultStore | None, tasks: asyncio.TaskGroup) -> Retainer:
    table: RetentionTable[Output] = RetentionTable(
        options.retain_memory_bytes, options.retain_memory_bytes + options.retain_disk_bytes
    )
    return Retainer(table, spill, tasks)


class _Wake:
    """A callback that is known before what it calls."""

    def __init__(self) -> None:
        self.target: Callable[[], None] = lambda: None

    def __call__(self) -> None:
        self.target()


@contextlib.asynccontextmanager
async def _cancelled_at_exit(
    devices: Sequence[DeviceThreads], before: Callable[[], None]
) -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose tasks end with the context; they wait for a device's threads for a bounded time.

    Args:
        devices: Those with threads.
        before: Called just before the tasks are ended: from then on none can be started.
    """
    abandon: list[asyncio.TimerHandle] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            try:
                yield tasks
            finally:
                before()
                loop = asyncio.get_running_loop()
                abandon += [loop.call_later(_CLOSE_SECONDS, device.abandon) for device in devices]
                for task in list(tasks._tasks):  # noqa: SLF001 - the standard library offers no cancel_all
                    task.cancel()
    finally:
        for timer in abandon:
            timer.cancel()


def _joins(options: NodeOptions) -> tuple[str, ...]:
    """The control addresses it was told to join, written as those that nodes tell each other are."""
    return tuple(f"{address.region('')}/{CONTROL_REGION}" for address in options.join)


def _make_proxy(options: NodeOptions, env: Environment, tasks: asyncio.TaskGroup) -> ProxyService | None:
    if "proxy" not in options.roles:
        return None
    return ProxyService(
        env,
        tasks,
        requests_max=options.requests_max,
        rules=AdmissionRules(options.wait_factor, weights_of(options.weights), options.other_sets),
        timeout_seconds=options.request_timeout_seconds,
        copies=options.copies,
    )


def _ready(node: Node) -> Mapping[str, object]:
    """What whoever started the node wants to know."""
    addresses = {"address": node.address, "http": node.http, "metrics": node.metrics}
    return {"node": node.info.node_id, **addresses, "process_id": os.getpid()}


async def run_node(options: NodeOptions, stop: StopSignal) -> bool:
    """Run a node until it is told to stop; says whether it had finished all it held.

    Raises ``OnePieceError`` if it is the set that told it, and what ``open_node`` raises.
    """

    async def start_and_serve() -> bool:
        with holding(options.state_dir):
            async with open_node(options, stop) as node:
                return await serve_until_stopped(node, stop)

    return await unless_told(stop, start_and_serve()) is not False


async def serve_until_stopped(node: Node, stop: StopSignal) -> bool:
    """Wait for the first stop, then drain and say good-bye; says whether nothing was left in hand."""
    stop.is_serving = True
    await stop.drain.wait()
    get_logger().info("node_draining", node=node.info.node_id, bound_seconds=node.options.drain_seconds)
    drained = await _until_drained(node, stop)
    retained = [str(key) for key in islice(node.env.retainer.keys(), _SHOWN_MAX)]
    get_logger().info("node_stopping", node=node.info.node_id, drained=drained, retained=retained)
    node.member.farewell()
    if node.copies is not None:
        node.copies.farewell()
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
