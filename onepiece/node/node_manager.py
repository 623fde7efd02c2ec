"""The NodeManager inside a node: carries out what the ``ManagerMachine`` decides.

It waits for a message or for the machine's next deadline, calls ``handle``, and carries out the
effects in their order: state is made durable before an order that relies on it is sent. Who leads is
the coordinator's to say; with the embedded one it is this node, from its start to its end.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Final

from onepiece.coordination import Coordinator
from onepiece.core.balance import BalanceConfig, patience
from onepiece.core.inventory import RegisteredWorkflow
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
from onepiece.core.placement_events import ActorFailed, MoveTold, PlacementConfig, SendAssign, SendUnassign
from onepiece.core.routing import RouteTable
from onepiece.errors import OnePieceError, SchemaMismatch, StoreFull
from onepiece.log import get_logger
from onepiece.messages import (
    CONTROL_REGION,
    AskPlacement,
    Farewell,
    Heartbeat,
    PlacementShown,
    PublishedRoutes,
    RegisterWorkflow,
    WorkflowRegistered,
)
from onepiece.node.control import ControlService
from onepiece.node.options import NodeOptions
from onepiece.runtime.outbox import Outbox
from onepiece.runtime.workflows import WorkflowImports

_EVENTS_MAX: Final = 16_384
_SETTLE_SECONDS: Final = 0.2
_LOOK_SECONDS: Final = 5.0
_STORE_AGAIN_SECONDS: Final = 0.5


class ManagerService:
    """Drives the machine of a manager that leads; use ``ManagerService.open``."""

    def __init__(
        self,
        machine: ManagerMachine,
        coordinator: Coordinator,
        outbox: Outbox,
        imports: WorkflowImports,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._machine = machine
        self._coordinator = coordinator
        self._outbox = outbox
        self._imports = imports
        self._tasks = tasks
        self._events: asyncio.Queue[ManagerEvent] = asyncio.Queue(_EVENTS_MAX)
        self._addresses: dict[tuple[str, int], str] = {}
        self._heard_at: dict[str, float] = {}
        self._offers: dict[tuple[str, str], list[RegisterWorkflow]] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        options: NodeOptions,
        outbox: Outbox,
        imports: WorkflowImports,
        opening: contextlib.AbstractAsyncContextManager[Coordinator],
    ) -> AsyncIterator["ManagerService"]:
        """Take the lead with what the last manager left, offer the configured workflows, and run.

        The manager has stopped before it gives up the lead. Raises ``ConfigError`` or
        ``DefinitionError`` if a workflow cannot be imported, or if the state is another process's.
        """
        offered = [await imports.get(reference) for reference in options.workflows]
        async with opening as coordinator, asyncio.TaskGroup() as tasks:
            state = await coordinator.lead()
            machine = ManagerMachine(config=_config(options), state=state)
            service = cls(machine, coordinator, outbox, imports, tasks)
            for workflow in offered:
                registered = RegisteredWorkflow.of(workflow.graph)
                await service.take(WorkflowOffered(registered, replaces=True))
            tasks.create_task(service.run(), name="manager")
            try:
                yield service
            finally:
                for task in list(tasks._tasks):  # noqa: SLF001 - the standard library offers no cancel_all
                    task.cancel()

    def attach(self, control: ControlService) -> None:
        """Receive heartbeats, farewells and registrations."""
        control.on(Heartbeat, self._on_heartbeat)
        control.on(Farewell, lambda message: self._enqueue(NodeLeft(message.node_id, message.incarnation)))
        control.on(AskPlacement, self._on_asked)
        control.on(RegisterWorkflow, lambda message: self._tasks.create_task(self._register(message)))

    def _on_asked(self, ask: AskPlacement) -> None:
        self._outbox.post(ask.reply_to, PlacementShown(ask.call, self._machine.view(self._now())))

    async def run(self) -> None:
        """Handle events and deadlines until cancelled."""
        while True:
            deadline = self._machine.next_deadline(self._now())
            event: ManagerEvent = Tick()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    event = await self._events.get()
            await self.take(event)

    def heartbeat_ages(self) -> Mapping[str, float]:
        """Seconds since each node was heard."""
        now = self._now()
        return {node_id: now - heard_at for node_id, heard_at in self._heard_at.items()}

    async def take(self, event: ManagerEvent) -> None:
        """Let the machine decide about one event, and carry out what it says."""
        for effect in self._machine.handle(event, self._now()):
            await self._carry_out(effect)

    def _now(self) -> float:
        """The loop's clock, so that the machine's deadlines are the loop's."""
        return asyncio.get_running_loop().time()

    def _enqueue(self, event: ManagerEvent) -> None:
        try:
            self._events.put_nowait(event)
        except asyncio.QueueFull:
            get_logger().warning("manager_overloaded", dropped=type(event).__name__)  # it is sent again

    def _on_heartbeat(self, heartbeat: Heartbeat) -> None:
        node = heartbeat.node
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
            )
        )

    async def _register(self, ask: RegisterWorkflow) -> None:
        try:
            workflow = await self._imports.get(ask.module)
        except OnePieceError as error:
            self._outbox.post(ask.reply_to, WorkflowRegistered(ask.call, error.to_wire()))
            return
        graph = workflow.graph
        self._offers.setdefault((graph.name, graph.digest), []).append(ask)
        self._enqueue(WorkflowOffered(RegisteredWorkflow.of(graph)))

    async def _carry_out(self, effect: ManagerEffect) -> None:
        match effect:
            case StoreState(state):
                await self._store(state)
            case PublishRoutes(table):
                self._forget_dead()
                for node in table.nodes:
                    self._send_table(node.node_id, node.incarnation, table)
            case SendRoutes(node_id, incarnation, table):
                self._send_table(node_id, incarnation, table)
            case SendAssign(node_id, incarnation, order) | SendUnassign(node_id, incarnation, order):
                self._post(node_id, incarnation, order)
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
            case ActorFailed(actor_id, stage, node_id, reason):
                get_logger().error("actor_failed", actor=actor_id, stage=stage, node=node_id, reason=reason)
            case _:
                get_logger().info("membership", notice=type(effect).__name__, node=_node_of(effect))

    async def _store(self, state: ManagerState) -> None:
        """Nothing that follows may be done before. While the disk takes no more this manager stands still.

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

    def _send_table(self, node_id: str, incarnation: int, table: RouteTable) -> None:
        self._post(node_id, incarnation, PublishedRoutes(table), replaces="routes")

    def _post(self, node_id: str, incarnation: int, message: object, *, replaces: object = None) -> None:
        address = self._addresses.get((node_id, incarnation))
        if address is not None:
            self._outbox.post(address, message, replaces=replaces)

    def _forget_dead(self) -> None:
        """Drop addresses of what can no longer be sent to, so that the table of them stays bounded."""
        members = self._machine.members
        for node_id, incarnation in list(self._addresses):
            member = members.get(node_id)
            if member is None or member.state is NodeState.DEAD or member.node.incarnation > incarnation:
                del self._addresses[node_id, incarnation]
                self._heard_at.pop(node_id, None)


def _node_of(effect: object) -> str:
    node = getattr(effect, "node", None)
    return str(getattr(effect, "node_id", None) or getattr(node, "node_id", ""))


def _config(options: NodeOptions) -> ManagerConfig:
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
            adoption_seconds=max(3.0, 2 * heartbeat),
            limits=options.limits,
        ),
        balance=BalanceConfig(
            mode=options.rebalance,
            look_seconds=min(_LOOK_SECONDS, options.rebalance_seconds / 6),
            policy=patience(options.rebalance_seconds),
        ),
    )
