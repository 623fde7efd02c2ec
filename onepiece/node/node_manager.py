"""The NodeManager inside a node: carries out what the ``ManagerMachine`` decides.

It waits for a message or for the machine's next deadline, calls ``handle``, and carries out the
effects in their order: state is made durable before an order that relies on it is sent.

Where there is more to do than it gets done, as when many nodes join at once on a busy host, three things keep
that from feeding on itself. Events are handled as of the moment at which they came: a node whose heartbeat
waits here is not silent. Nor is one while this process stood still (``OwnTime``). And a route table is sent
when no event waits, or ``_TABLE_SECONDS`` behind the last one: tables that a newer one replaces at once would
cost each node as much as those that stay.

Who leads is the coordinator's to say; with the embedded one it is this node, from its start to its end. With
others it is a candidate: while another leads it says so to whoever takes it for the leader. One that comes to
lead begins with a machine of its own, from what is stored, and tells all nodes that it knows; one that has
lost the leadership drops all it knew.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Mapping
from typing import Final

from onepiece.coordination import Coordinator
from onepiece.core.balance import BalanceConfig, patience
from onepiece.core.inventory import RegisteredWorkflow, format_bytes
from onepiece.core.leader_search import ASK_SECONDS, SPREAD_SECONDS_MAX
from onepiece.core.manager import (
    ConfirmWorkflow,
    ManagerConfig,
    ManagerEffect,
    ManagerEvent,
    ManagerMachine,
    ManagerState,
    PublishRoutes,
    RefuseWorkflow,
    SendRoutes,
    StoreState,
    WorkflowOffered,
)
from onepiece.core.membership import (
    Expel,
    HeartbeatReceived,
    MembershipConfig,
    NodeLeft,
    NodeState,
    Tick,
)
from onepiece.core.placement_events import (
    ActorFailed,
    MoveTold,
    PlacementConfig,
    SendAssign,
    SendPrefetch,
    SendUnassign,
    StageExceeded,
)
from onepiece.core.placement_view import PlacementView
from onepiece.core.routing import RouteTable
from onepiece.errors import LeadershipLost, OnePieceError, SchemaMismatch, StoreFull
from onepiece.log import get_logger
from onepiece.messages import (
    CONTROL_REGION,
    AskPlacement,
    Farewell,
    Heartbeat,
    LeaderIs,
    PlacementShown,
    PublishedRoutes,
    RegisterWorkflow,
    WhoLeads,
    WorkflowRegistered,
)
from onepiece.node.control import ControlService
from onepiece.node.options import NodeOptions
from onepiece.node.own_time import OwnTime
from onepiece.runtime.environment import Environment
from onepiece.runtime.workflows import WorkflowImports

_EVENTS_MAX: Final = 16_384
_SETTLE_SECONDS: Final = 0.2
_LOOK_SECONDS: Final = 5.0
_STORE_AGAIN_SECONDS: Final = 0.5
_TABLE_SECONDS: Final = 1.0
_TAKEOVER_SECONDS: Final = 3 * ASK_SECONDS + SPREAD_SECONDS_MAX
"""How long a new leader waits for nodes that have to find it: three rounds of questions, and the spread."""


class ManagerService:
    """Drives the machine of a manager that leads; use ``ManagerService.open``."""

    def __init__(
        self,
        options: NodeOptions,
        env: Environment,
        coordinator: Coordinator,
        imports: WorkflowImports,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._config = _config(options, has_rivals=coordinator.has_rivals)
        self._machine: ManagerMachine | None = None
        """None: another manager leads, or none."""
        self._coordinator = coordinator
        self._env = env
        self._outbox = env.outbox
        self._imports = imports
        self._tasks = tasks
        self._offered: tuple[RegisteredWorkflow, ...] = ()
        self._events: asyncio.Queue[tuple[ManagerEvent, float]] = asyncio.Queue(_EVENTS_MAX)
        """With the moments at which they came."""
        self._time = OwnTime(asyncio.get_running_loop().time)
        self._handled_at = -math.inf
        self._unsent: RouteTable | None = None
        """The newest route table, if it was not sent yet."""
        self._sent_at = -math.inf
        self._addresses: dict[tuple[str, int], str] = {}
        self._heard_at: dict[str, float] = {}
        self._offers: dict[tuple[str, str], list[RegisterWorkflow]] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        options: NodeOptions,
        env: Environment,
        imports: WorkflowImports,
        opening: contextlib.AbstractAsyncContextManager[Coordinator],
    ) -> AsyncIterator["ManagerService"]:
        """Take the lead with what the last manager left, offer the configured workflows, and run.

        Where others may lead this does not wait for the lead. The manager has stopped before it gives up
        the lead. Raises ``ConfigError`` or ``DefinitionError`` if a workflow cannot be imported, or if
        the state is another process's.
        """
        offered = [await imports.get(reference) for reference in options.workflows]
        async with opening as coordinator, asyncio.TaskGroup() as tasks:
            service = cls(options, env, coordinator, imports, tasks)
            tasks.create_task(service._time.keep(), name="the manager's clock")
            service._offered = tuple(RegisteredWorkflow.of(workflow.graph) for workflow in offered)
            if not coordinator.has_rivals:
                await service._begin(await coordinator.lead())
            tasks.create_task(service.run(), name="manager")
            try:
                yield service
            finally:
                for task in list(tasks._tasks):  # noqa: SLF001 - the standard library offers no cancel_all
                    task.cancel()

    def attach(self, control: ControlService) -> None:
        """Receive heartbeats, farewells and registrations."""
        control.on(Heartbeat, self._on_heartbeat)
        control.on(WhoLeads, lambda message: self._tell(message.reply_to))
        control.on(Farewell, lambda message: self._enqueue(NodeLeft(message.node_id, message.incarnation)))
        control.on(AskPlacement, self._on_asked)
        control.on(RegisterWorkflow, lambda message: self._tasks.create_task(self._register(message)))

    def _on_asked(self, ask: AskPlacement) -> None:
        if self._machine is not None:  # whoever asks learns who leads, and asks again
            self._outbox.post(ask.reply_to, PlacementShown(ask.call, self._machine.view(self._now())))

    async def run(self) -> None:
        """Lead whenever it is this candidate's turn, until cancelled."""
        while True:
            try:
                if self._machine is None:
                    await self._begin(await self._coordinator.lead())
                await self._until_lost()
            except LeadershipLost as error:
                get_logger().warning("stepped_down", reason=error.message)
            self._step_down()

    async def _begin(self, state: ManagerState) -> None:
        """Lead with this state: whatever was heard before was not meant for this leadership."""
        self._forget_all()
        self._machine = ManagerMachine(config=self._config, state=state)
        get_logger().info("manager_leads", epoch=state.epoch)
        if self._coordinator.has_rivals:
            self._announce()
        for workflow in self._offered:
            await self.take(WorkflowOffered(workflow, replaces=True))

    def _announce(self) -> None:
        """Tell all nodes of the last routes, so that they need not find out; others ask."""
        own = self._env.control_address
        known = [f"{node.address}/{CONTROL_REGION}" for node in self._env.routes.table.nodes]
        for address in dict.fromkeys((own, *known)):
            self._outbox.post(address, LeaderIs(own), replaces="leader")

    async def _until_lost(self) -> None:
        """Handle events and deadlines; returns when the leadership is lost."""
        async with asyncio.TaskGroup() as tasks:
            work = tasks.create_task(self._work_until_refused())
            lost = tasks.create_task(self._coordinator.wait_lost())
            await asyncio.wait({work, lost}, return_when=asyncio.FIRST_COMPLETED)
            work.cancel()
            lost.cancel()

    async def _work_until_refused(self) -> None:
        try:
            await self._work()
        except LeadershipLost as error:
            get_logger().warning("stepped_down", reason=error.message)

    async def _work(self) -> None:
        while True:
            event, came_at = await self._next_event()
            await self.take(event, came_at)

    async def _next_event(self) -> tuple[ManagerEvent, float]:
        """What waits longest, also behind the machine's deadline; a tick if that comes and nothing waits."""
        deadline = self._leading.next_deadline(self._now())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(None if deadline is None else self._time.on_the_loop(deadline)):
                return await self._events.get()
        return (Tick(), self._now()) if self._events.empty() else self._events.get_nowait()

    def _step_down(self) -> None:
        self._machine = None
        self._forget_all()
        for ask in [ask for asks in self._offers.values() for ask in asks]:
            self._refuse(ask)
        self._offers.clear()

    def _forget_all(self) -> None:
        self._addresses.clear()
        self._heard_at.clear()
        self._unsent = None
        while not self._events.empty():
            self._events.get_nowait()

    def _does_lead(self) -> bool:
        return self._machine is not None

    @property
    def _leading(self) -> ManagerMachine:
        assert self._machine is not None, "this manager leads"
        return self._machine

    def heartbeat_ages(self) -> Mapping[str, float]:
        """Seconds since each node was heard."""
        now = self._now()
        return {node_id: now - heard_at for node_id, heard_at in self._heard_at.items()}

    def placement(self) -> PlacementView | None:
        """What is wanted to run where, and what does; None if this manager does not lead."""
        return None if self._machine is None else self._machine.view(self._now())

    def node_states(self) -> Mapping[str, NodeState]:
        """Each node that the leader knows, the dead ones too; none if this manager does not lead."""
        members = {} if self._machine is None else self._machine.members
        return {node_id: member.state for node_id, member in members.items()}

    async def take(self, event: ManagerEvent, came_at: float | None = None) -> None:
        """Let the machine decide about one event, which came then or now, and carry out what it says."""
        self._handled_at = max(self._handled_at, self._now() if came_at is None else came_at)
        for effect in self._leading.handle(event, self._handled_at):
            await self._carry_out(effect)
        if self._unsent is not None and (
            self._events.empty() or self._now() >= self._sent_at + _TABLE_SECONDS
        ):
            self._send_tables(self._unsent)

    def _now(self) -> float:
        return self._time.now()

    def _tell(self, address: str) -> None:
        """Say who leads, if that is known.

        Also where it cannot change: of several addresses that a node is to join the others may be wrong.
        """
        leader = self._env.control_address if self._machine is not None else self._coordinator.leader
        if leader is not None:
            self._outbox.post(address, LeaderIs(leader), replaces="leader")

    def _enqueue(self, event: ManagerEvent) -> None:
        if self._machine is None:
            return
        try:
            self._events.put_nowait((event, self._now()))
        except asyncio.QueueFull:
            get_logger().warning("manager_overloaded", dropped=type(event).__name__)  # it is sent again

    def _on_heartbeat(self, heartbeat: Heartbeat) -> None:
        node = heartbeat.node
        if self._machine is None:
            self._tell(f"{node.address}/{CONTROL_REGION}")
            return
        self._addresses[node.node_id, node.incarnation] = f"{node.address}/{CONTROL_REGION}"
        self._heard_at[node.node_id] = self._now()
        self._enqueue(
            HeartbeatReceived(
                node=node,
                actors=heartbeat.actors,
                draining=heartbeat.draining,
                routes=heartbeat.routes,
                drained=heartbeat.drained,
                offered=heartbeat.offered,
                lent=heartbeat.lent,
                prefetches=heartbeat.prefetches,
            )
        )

    async def _register(self, ask: RegisterWorkflow) -> None:
        if not self._does_lead():
            self._refuse(ask)
            return
        try:
            workflow = await self._imports.get(ask.module)
        except OnePieceError as error:
            self._outbox.post(ask.reply_to, WorkflowRegistered(ask.call, error.to_wire()))
            return
        if not self._does_lead():
            self._refuse(ask)
            return
        graph = workflow.graph
        self._offers.setdefault((graph.name, graph.digest), []).append(ask)
        self._enqueue(WorkflowOffered(RegisteredWorkflow.of(graph)))

    def _refuse(self, ask: RegisterWorkflow) -> None:
        leader = self._coordinator.leader
        error = LeadershipLost(
            f"{self._env.node_id} does not lead; register with {leader or 'the leader, once there is one'}",
            leader=leader,
        )
        self._outbox.post(ask.reply_to, WorkflowRegistered(ask.call, error.to_wire()))

    async def _carry_out(self, effect: ManagerEffect) -> None:
        match effect:
            case StoreState(state):
                await self._store(state)
            case PublishRoutes(table):
                self._unsent = table
            case SendRoutes(node_id, incarnation, table):
                self._send_table(node_id, incarnation, table)
            case SendAssign() | SendUnassign() | SendPrefetch():
                self._post(effect.node_id, effect.incarnation, effect.order)
            case Expel(node_id, incarnation):
                self._post(node_id, incarnation, effect)
            case ConfirmWorkflow(name, digest):
                get_logger().info("workflow_registered", workflow=name, digest=digest)
                self._answer(name, digest, None)
            case RefuseWorkflow(name, digest, reason):
                get_logger().error("workflow_refused", workflow=name, reason=reason)
                self._answer(name, digest, SchemaMismatch(reason, workflow=name))
            case MoveTold(move, outcome, reason):
                get_logger().info(
                    f"move_{outcome}", stage=move.stage, donor=move.donor, node=move.node_id, reason=reason
                )
            case StageExceeded(stage, node_id, declared, seen):
                get_logger().warning(
                    "stage_takes_more_than_declared",
                    stage=stage,
                    node=node_id,
                    declared=format_bytes(declared),
                    seen=format_bytes(seen),
                )
            case ActorFailed(actor_id, stage, node_id, reason):
                get_logger().error("actor_failed", actor=actor_id, stage=stage, node=node_id, reason=reason)
            case _:
                get_logger().info("membership", notice=type(effect).__name__, node=_node_of(effect))

    async def _store(self, state: ManagerState) -> None:
        """Nothing that follows may be done before. While nothing can be stored this manager stands still.

        The data path goes on without it, and nodes that it does not hear meanwhile are forgiven.
        """
        while True:
            try:
                await self._coordinator.store(state)
            except StoreFull as error:
                get_logger().warning("manager_state_not_stored", error=error.message)
                await asyncio.sleep(_STORE_AGAIN_SECONDS)
            else:
                return

    def _answer(self, name: str, digest: str, error: OnePieceError | None) -> None:
        wire = None if error is None else error.to_wire()
        for ask in self._offers.pop((name, digest), []):
            self._outbox.post(ask.reply_to, WorkflowRegistered(ask.call, wire))

    def _send_tables(self, table: RouteTable) -> None:
        """Send the table to all nodes."""
        self._unsent, self._sent_at = None, self._now()
        self._forget_dead()
        places = ((node.node_id, node.incarnation) for node in table.nodes)
        known = [self._addresses[place] for place in places if place in self._addresses]
        self._outbox.post_to_all(known, PublishedRoutes(table), replaces="routes")

    def _send_table(self, node_id: str, incarnation: int, table: RouteTable) -> None:
        self._post(node_id, incarnation, PublishedRoutes(table), replaces="routes")

    def _post(self, node_id: str, incarnation: int, message: object, *, replaces: object = None) -> None:
        address = self._addresses.get((node_id, incarnation))
        if address is not None:
            self._outbox.post(address, message, replaces=replaces)

    def _forget_dead(self) -> None:
        """Drop addresses of what can no longer be sent to, so that the table of them stays bounded."""
        members = self._leading.members
        for node_id, incarnation in list(self._addresses):
            member = members.get(node_id)
            if member is None or member.state is NodeState.DEAD or member.node.incarnation > incarnation:
                del self._addresses[node_id, incarnation]
                self._heard_at.pop(node_id, None)


def _node_of(effect: object) -> str:
    node = getattr(effect, "node", None)
    return str(getattr(effect, "node_id", None) or getattr(node, "node_id", ""))


def _config(options: NodeOptions, *, has_rivals: bool) -> ManagerConfig:
    heartbeat = options.heartbeat_seconds
    suspect = max(2 * heartbeat, options.lease_seconds / 2)
    return ManagerConfig(
        membership=MembershipConfig(
            heartbeat_seconds=heartbeat,
            suspect_seconds=suspect,
            lease_seconds=options.lease_seconds,
            stall_seconds=min(1.0, options.lease_seconds / 3),
        ),
        placement=PlacementConfig(
            workers_expected=options.workers,
            settle_seconds=_SETTLE_SECONDS,
            adoption_seconds=max(_TAKEOVER_SECONDS if has_rivals else 3.0, 2 * heartbeat),
            limits=options.limits,
            inbox_bytes=options.inbox_bytes,
        ),
        balance=BalanceConfig(
            mode=options.rebalance,
            look_seconds=min(_LOOK_SECONDS, options.rebalance_seconds / 6),
            policy=patience(options.rebalance_seconds),
        ),
    )
