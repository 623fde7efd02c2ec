"""A NodeManager and simulated nodes for tests: the machine is the real one, time is a number.

The nodes do what a node does: they load what they are assigned, report it with each heartbeat, and
drop what they are told to. Nothing happens by itself; ``advance`` moves the time and calls the
machine at each of its deadlines.
"""

from collections.abc import Iterable

from attrs import define, evolve, field

from onepiece.core import (
    ActorReport,
    ActorState,
    Assign,
    Device,
    DeviceKind,
    Expel,
    HeartbeatReceived,
    ManagerConfig,
    ManagerEffect,
    ManagerEvent,
    ManagerMachine,
    ManagerState,
    NodeInfo,
    NodeLeft,
    PublishRoutes,
    RegisteredWorkflow,
    RouteEpoch,
    RouteTable,
    SendAssign,
    SendRoutes,
    SendUnassign,
    StageNeed,
    StoreState,
    Tick,
    WorkflowOffered,
)
from onepiece.core.placement_events import SendPrefetch
from onepiece.core.prefetches import Prefetch, PrefetchReport, StopPrefetch

GIB = 1 << 30


def make_node(  # noqa: D103 - its arguments say it
    node_id: str,
    *,
    cpus: Iterable[int] = (64,),
    gpus: Iterable[int] = (),
    incarnation: int = 1,
    roles: tuple[str, ...] = ("worker",),
) -> NodeInfo:
    devices = [Device(f"cpu:{n}", DeviceKind.CPU, size * GIB) for n, size in enumerate(cpus)]
    devices += [Device(f"cuda:{n}", DeviceKind.GPU, size * GIB) for n, size in enumerate(gpus)]
    return NodeInfo(node_id, incarnation, f"tcp://{node_id}:7070", None, roles, tuple(devices), 100)


def make_workflow(name: str, *needs: StageNeed, digest: str | None = None) -> RegisteredWorkflow:
    """A workflow of these stages."""
    digest = digest or f"digest-of-{name}"
    return RegisteredWorkflow(name, f"module:{name}", digest, f"schema of {digest}", tuple(needs))


def make_need(
    name: str, gib: int = 1, *, instances: int = 1, kind: DeviceKind = DeviceKind.GPU, devices: int = 1
) -> StageNeed:
    """What a stage ``module:NAME`` needs."""
    return StageNeed(f"module:{name}", name, kind, gib * GIB, devices, instances)


@define(eq=False)
class SimulatedNode:
    """A node's memory of what it runs."""

    info: NodeInfo
    actors: dict[int, ActorReport] = field(factory=dict)
    draining: bool = False
    routes: RouteEpoch | None = None
    prefetches: dict[str, PrefetchReport] = field(factory=dict)
    fetches_slowly: bool = False
    """What is to be read in advance is not before the test says so."""
    digest: str | None = None
    """Of its version of every workflow; None: whatever is assigned."""

    def obey(self, order: Assign) -> None:
        """Begin to load an actor; nothing happens if it is there."""
        is_other = self.digest not in {None, order.digest}
        report = ActorReport(
            order.actor_id,
            order.stage,
            order.devices,
            ActorState.LOADING,
            digest=self.digest or order.digest,
            schema_text=f"schema of {self.digest}" if is_other else "",
        )
        self.actors.setdefault(order.actor_id, report)

    def fetch(self, order: Prefetch | StopPrefetch) -> None:
        """Read in advance, or do so no longer."""
        if isinstance(order, Prefetch):
            report = PrefetchReport(order.stage, order.number, is_over=not self.fetches_slowly)
            self.prefetches[order.stage] = report
        else:
            self.prefetches.pop(order.stage, None)

    def take_routes(self, table: RouteTable) -> None:
        """Use the table if it is newer."""
        if self.routes is None or table.epoch > self.routes:
            self.routes = table.epoch

    def finish_loading(self) -> None:
        """Every actor that loads becomes ready."""
        for actor_id, report in self.actors.items():
            if report.state is ActorState.LOADING:
                address = f"{self.info.address}/actor/{actor_id}"
                self.actors[actor_id] = evolve(report, state=ActorState.READY, address=address)

    def finish_draining(self) -> None:
        """Every actor that drains is gone."""
        states = self.actors.items()
        self.actors = {each: report for each, report in states if report.state is not ActorState.DRAINING}

    def fail(self, actor_id: int, error: str) -> None:
        """An actor fails."""
        self.actors[actor_id] = evolve(self.actors[actor_id], state=ActorState.FAILED, error=error)

    def heartbeat(self) -> HeartbeatReceived:
        """What it would send now."""
        drained = self.draining and not self.actors
        return HeartbeatReceived(
            self.info,
            tuple(self.actors.values()),
            self.draining,
            self.routes,
            drained,
            prefetches=tuple(self.prefetches.values()),
        )


@define(eq=False)
class Cluster:
    """See the module's text."""

    config: ManagerConfig = field(factory=ManagerConfig)
    now: float = 0.0
    nodes: dict[str, SimulatedNode] = field(factory=dict)
    stored: ManagerState = field(factory=ManagerState)
    loses_orders: bool = False
    drains_slowly: bool = False
    """What an actor holds is not finished before the test says so."""
    loses_routes: bool = False
    expelled: list[Expel] = field(factory=list)
    manager: ManagerMachine = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.restart_manager()

    def restart_manager(self) -> None:
        """A new manager with what the last one stored."""
        self.stored = evolve(self.stored, epoch=self.stored.epoch + 1)
        self.manager = ManagerMachine(config=self.config, state=self.stored)

    def tell(self, event: ManagerEvent) -> list[ManagerEffect]:
        """Tell the manager, and carry out what it says."""
        effects = self.manager.handle(event, self.now)
        for effect in effects:
            self._carry_out(effect)
        return effects

    def offer(self, workflow: RegisteredWorkflow, *, replaces: bool = False) -> list[ManagerEffect]:
        """Register a workflow."""
        return self.tell(WorkflowOffered(workflow, replaces))

    def join(self, info: NodeInfo, *, digest: str | None = None) -> list[ManagerEffect]:
        """A node starts and is heard; ``digest`` is that of the workflows installed there."""
        self.nodes[info.node_id] = SimulatedNode(info, digest=digest)
        return self.beat(info.node_id)

    def beat(self, *node_ids: str) -> list[ManagerEffect]:
        """These nodes (or all) are heard."""
        effects: list[ManagerEffect] = []
        for node_id in node_ids or list(self.nodes):
            effects += self.tell(self.nodes[node_id].heartbeat())
        return effects

    def load(self, *node_ids: str) -> list[ManagerEffect]:
        """These nodes (or all) finish loading and are heard."""
        for node_id in node_ids or list(self.nodes):
            self.nodes[node_id].finish_loading()
        return self.beat(*node_ids)

    def leave(self, node_id: str) -> list[ManagerEffect]:
        """A node stops in order."""
        info = self.nodes.pop(node_id).info
        return self.tell(NodeLeft(node_id, info.incarnation))

    def advance(self, seconds: float, *, beating: Iterable[str] = ()) -> list[ManagerEffect]:
        """Let time pass; the nodes named (and no others) are heard every half second."""
        end = self.now + seconds
        names = list(beating)
        next_beat = self.now + 0.5
        effects: list[ManagerEffect] = []
        while True:
            deadline = self.manager.next_deadline(self.now)
            moments = [end, *([next_beat] if names else []), *([deadline] if deadline is not None else [])]
            self.now = max(self.now, min(moments))
            if names and self.now >= next_beat:
                next_beat += 0.5
                for name in names:
                    effects += self.beat(name)
            if deadline is not None and self.now >= deadline:
                effects += self.tell(Tick())
            if self.now >= end:
                return effects

    def _carry_out(self, effect: ManagerEffect) -> None:
        match effect:
            case StoreState(state):
                self.stored = state
            case SendAssign(node_id, incarnation, order) if not self.loses_orders:
                node = self.nodes.get(node_id)
                if node is not None and node.info.incarnation == incarnation:
                    node.obey(order)
            case SendUnassign(node_id, incarnation, stop) if not self.loses_orders:
                node = self.nodes.get(node_id)
                if node is not None and node.info.incarnation == incarnation:
                    gone = node.actors.pop(stop.actor_id, None)
                    if gone is not None and self.drains_slowly:
                        node.actors[stop.actor_id] = evolve(gone, state=ActorState.DRAINING)
            case SendPrefetch(node_id, incarnation, fetch) if not self.loses_orders:
                node = self.nodes.get(node_id)
                if node is not None and node.info.incarnation == incarnation:
                    node.fetch(fetch)
            case PublishRoutes(table) if not self.loses_routes:
                for node in self.nodes.values():
                    node.take_routes(table)
            case SendRoutes(node_id, _, table) if not self.loses_routes and node_id in self.nodes:
                self.nodes[node_id].take_routes(table)
            case Expel():
                self.expelled.append(effect)
