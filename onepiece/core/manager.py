"""The leading NodeManager: membership, placement and routes as one machine.

::

    heartbeat, good-bye, tick --> membership --joined, suspect, died--> placement --> orders to nodes
                                      |                                    ^  |
    workflow offered, demand ---------+------------------------------------+  +--> route table

What it promises beyond its parts:

* What must outlive the manager (``ManagerState``) is in a ``StoreState`` effect *before* any effect
  that relies on it. The driver carries effects out in order and waits for the store, so that an
  actor id that an order names, or a workflow that was confirmed, is never forgotten.
* A table is published when a route has changed, and only then; a node whose heartbeat shows an older
  table after ``resend_seconds`` is sent the newest again. After a restart nothing is published until
  the nodes had time to report what they run: until then the earlier manager's table holds.
* If a node has a table of a higher epoch, the stored state was lost or is older than the nodes'; the
  manager then takes an epoch above it. (Where another manager leads, the store refuses that.)
* Two versions of one workflow, or of a stage that two workflows share, are never served at once: the
  second is refused with both named, unless it is said to replace the first.

The driver of this machine decides nothing; ``story`` holds all it did.
"""

from collections.abc import Mapping
from typing import Final, TypeAlias

from attrs import define, evolve, field, frozen

from onepiece.core.actors import Actor
from onepiece.core.balance import BalanceConfig, BalanceMachine, NodeTold
from onepiece.core.idle_devices import IdleDevices
from onepiece.core.inventory import RegisteredWorkflow, shortened
from onepiece.core.machine import Machine
from onepiece.core.membership import (
    Expel,
    HeartbeatReceived,
    Member,
    MembershipConfig,
    MembershipMachine,
    MembershipNotice,
    NodeDied,
    NodeJoined,
    NodeLeft,
    NodeState,
    NodeSuspected,
    Tick,
)
from onepiece.core.move_book import MoveBook
from onepiece.core.pending_move import PendingMove
from onepiece.core.placement import PlacementMachine
from onepiece.core.placement_events import (
    ActorFailed,
    ActorsReported,
    DemandChanged,
    KeepMoves,
    KeepSizes,
    MovesOrdered,
    MoveTold,
    PlacementConfig,
    PlacementEvent,
    ReserveActorIds,
    SendAssign,
    SendPrefetch,
    SendUnassign,
    StageExceeded,
    TimePassed,
    WorkerChanged,
    WorkerDied,
    WorkerJoined,
    WorkflowsChanged,
)
from onepiece.core.placement_view import PlacementView
from onepiece.core.registration import why_not_same, why_not_shared
from onepiece.core.route_rows import actor_route, node_route, workflow_route
from onepiece.core.routing import (
    Problem,
    RouteEpoch,
    RouteTable,
    next_table,
)
from onepiece.core.stage_sizes import StageSizes

_PROBLEMS_MAX: Final = 64

_EPOCH_MAX: Final = 1 << 53
"""Beyond it a node's word is not believed."""


@frozen
class ManagerConfig:
    """Settings of the NodeManager."""

    membership: MembershipConfig = field(factory=MembershipConfig)
    placement: PlacementConfig = field(factory=PlacementConfig)
    balance: BalanceConfig = field(factory=BalanceConfig)
    workflows_max: int = 256

    def __attrs_post_init__(self) -> None:
        assert self.placement.adoption_seconds >= 2 * self.membership.heartbeat_seconds
        assert self.workflows_max > 0


@frozen
class ManagerState:
    """What outlives a manager: kept by the coordinator, handed to the next one that leads.

    ``epoch`` is the leading manager's, and grows with each; ``next_actor_id`` is above all ids that
    may have been used. ``demand`` and ``moves`` are those of the ``MoveBook``, ``seen_bytes`` those of the
    ``StageSizes``.
    """

    epoch: int = 0
    next_actor_id: int = 1
    workflows: tuple[RegisteredWorkflow, ...] = ()
    demand: Mapping[str, int] = field(factory=dict)
    moves: tuple[PendingMove, ...] = ()
    seen_bytes: Mapping[str, int] = field(factory=dict)


# --- events ------------------------------------------------------------------------------------


@frozen
class WorkflowOffered:
    """Somebody wants this workflow served; ``replaces`` allows another version in place of the known."""

    workflow: RegisteredWorkflow
    replaces: bool = False


@frozen
class WorkflowWithdrawn:
    """A workflow is no longer wanted; unknown names are no error."""

    name: str


ManagerEvent: TypeAlias = (
    HeartbeatReceived | NodeLeft | Tick | WorkflowOffered | WorkflowWithdrawn | DemandChanged
)


# --- effects -----------------------------------------------------------------------------------


@frozen
class StoreState:
    """Make this state durable before the next effect is carried out."""

    state: ManagerState


@frozen
class ConfirmWorkflow:
    """Tell whoever offered it that the workflow is registered (and stored)."""

    name: str
    digest: str


@frozen
class RefuseWorkflow:
    """Tell whoever offered it why not; ``is_mismatch``: another version is registered."""

    name: str
    digest: str
    reason: str
    is_mismatch: bool


@frozen
class PublishRoutes:
    """Send the table to all nodes."""

    table: RouteTable


@frozen
class SendRoutes:
    """Send the table to one node, which has an older one or none."""

    node_id: str
    incarnation: int
    table: RouteTable


ManagerEffect: TypeAlias = (
    StoreState
    | ConfirmWorkflow
    | RefuseWorkflow
    | PublishRoutes
    | SendRoutes
    | SendAssign
    | SendUnassign
    | SendPrefetch
    | Expel
    | MoveTold
    | StageExceeded
    | ActorFailed
    | MembershipNotice
)
"""``MoveTold``, ``StageExceeded``, ``ActorFailed`` and membership's notices are for the log."""


# --- the machine -------------------------------------------------------------------------------


@define(kw_only=True, eq=False)
class ManagerMachine(Machine[ManagerEvent, ManagerEffect]):
    """The leading NodeManager; see the module's text.

    Args:
        config: Settings.
        state: What the coordinator gave with the leadership; its ``epoch`` is this manager's.
    """

    config: ManagerConfig = field(factory=ManagerConfig)
    state: ManagerState
    _membership: MembershipMachine = field(init=False)
    _placement: PlacementMachine = field(init=False)
    _balance: BalanceMachine = field(init=False)
    _idle: IdleDevices = field(factory=IdleDevices, init=False)
    _table: RouteTable = field(init=False)
    _first_joined_at: float | None = field(default=None, init=False)
    _published_at: float = field(default=float("-inf"), init=False)
    _revision: int = field(default=-1, init=False)
    """Of placement, when the table was last made; -1: it must be made anew."""
    _checked: int = field(default=-1, init=False)
    _idle_revision: int = field(default=-1, init=False)
    """Of placement, when it was last looked for idle devices."""
    _sent_at: dict[str, float] = field(factory=dict, init=False)
    """When a node was last sent the table by itself."""

    def __attrs_post_init__(self) -> None:
        assert self.state.epoch > 0, "a manager that leads has an epoch of its own"
        self._membership = MembershipMachine(config=self.config.membership)
        self._placement = PlacementMachine(
            config=self.config.placement,
            manager_epoch=self.state.epoch,
            first_actor_id=self.state.next_actor_id,
            workflows=self.state.workflows,
            book=MoveBook(demand=self.state.demand, pending=self.state.moves),
            sizes=StageSizes(self.state.seen_bytes),
        )
        self._balance = BalanceMachine(config=self.config.balance)
        self._table = RouteTable(RouteEpoch(self.state.epoch, 0))

    @property
    def table(self) -> RouteTable:
        """The newest route table."""
        return self._table

    @property
    def members(self) -> Mapping[str, Member]:
        """All known nodes by id, the dead included."""
        return self._membership.members

    @property
    def actors(self) -> Mapping[int, Actor]:
        """All actors by id."""
        return self._placement.actors

    def next_deadline(self, now: float) -> float | None:
        """The earliest of the parts', and the end of holding routes back."""
        parts = (self._membership, self._placement, self._balance)
        deadlines = [part.next_deadline(now) for part in parts]
        holds_until = self._holds_until()
        if holds_until is not None and now < holds_until < float("inf"):
            deadlines.append(holds_until)
        return min((each for each in deadlines if each is not None), default=None)

    def check_invariants(self) -> None:
        """The parts agree on who lives, and the stored state covers what was used."""
        living = {
            node_id
            for node_id, member in self.members.items()
            if member.state is not NodeState.DEAD and member.node.is_worker
        }
        assert living == self._placement.workers.keys()
        assert all(actor.actor_id < self.state.next_actor_id for actor in self.actors.values())
        assert self.state.workflows == self._placement.workflows
        assert self.state.moves == self._placement.book.pending
        assert self._table.epoch.manager == self.state.epoch

    def _has_changed(self, event: ManagerEvent, effects: list[ManagerEffect]) -> bool:
        before, self._checked = self._checked, self._placement.revision
        return bool(effects) or before != self._checked

    # --- events

    def _react(self, event: ManagerEvent, now: float) -> list[ManagerEffect]:
        effects: list[ManagerEffect] = []
        match event:
            case HeartbeatReceived() | NodeLeft() | Tick():
                effects += self._on_membership(event, now)
            case WorkflowOffered():
                effects += self._on_offered(event, now)
            case WorkflowWithdrawn():
                effects += self._on_withdrawn(event, now)
            case DemandChanged():
                effects += self._place(event, now)
        return effects + self._publish(event, now)

    def _on_membership(self, event: HeartbeatReceived | NodeLeft | Tick, now: float) -> list[ManagerEffect]:
        effects: list[ManagerEffect] = self._outbid(event) if isinstance(event, HeartbeatReceived) else []
        for effect in self._membership.handle(event, now):
            effects.append(effect)
            self._revision = -1
            match effect:
                case NodeJoined():
                    assert isinstance(event, HeartbeatReceived)
                    effects += self._on_joined(event, now)
                case NodeSuspected(node_id=node_id) if node_id in self._placement.workers:
                    worker = self._placement.workers[node_id]
                    effects += self._place(
                        WorkerChanged(node_id, suspect=True, draining=worker.draining), now
                    )
                case NodeDied(node_id=node_id):
                    self._balance.forget_node(node_id)
                    self._idle.forget(node_id)
                    if node_id in self._placement.workers:
                        effects += self._place(WorkerDied(node_id), now)
        if isinstance(event, HeartbeatReceived) and not any(isinstance(e, NodeJoined) for e in effects):
            effects += self._on_accepted_heartbeat(event, now)
        elif isinstance(event, Tick):
            effects += self._place(TimePassed(), now)
            effects += self._look_around(now)
        return effects

    def _look_around(self, now: float) -> list[ManagerEffect]:
        """Let balance see what there is, and have the moves carried out that it finds worth it."""
        due_at = self._balance.next_deadline(now)
        if due_at is None or now < due_at:
            return []
        effects: list[ManagerEffect] = []
        for proposal in self._balance.handle(self._placement.seen(), now):
            effects += self._place(MovesOrdered(proposal.moves, proposal.gives_back), now)
        return effects

    def view(self, now: float) -> PlacementView:
        """What is wanted, what there is, and the moves."""
        return self._placement.view(self._balance, self._idle, now)

    def _on_joined(self, event: HeartbeatReceived, now: float) -> list[ManagerEffect]:
        if self._first_joined_at is None:
            self._first_joined_at = now
        if not event.node.is_worker:
            return []
        return self._place(WorkerJoined(event.node, event.actors, event.draining), now)

    def _outbid(self, event: HeartbeatReceived) -> list[ManagerEffect]:
        """Take an epoch above that of a table a node has: else it would ignore this manager for ever."""
        seen = 0 if event.routes is None else event.routes.manager
        if not self.state.epoch < seen < _EPOCH_MAX:
            return []
        epoch = seen + 1
        self._placement.manager_epoch = epoch
        self._table = evolve(self._table, epoch=RouteEpoch(epoch, 0))
        self._revision = -1
        return self._store(evolve(self.state, epoch=epoch))

    def _on_accepted_heartbeat(self, event: HeartbeatReceived, now: float) -> list[ManagerEffect]:
        node_id = event.node.node_id
        if self._membership.is_member(node_id, event.node.incarnation):
            told = NodeTold(node_id, event.node.incarnation, event.actors, event.offered)
            self._balance.handle(told, now)
            self._idle.told(node_id, event.lent)
        worker = self._placement.workers.get(node_id)
        if worker is None or worker.node.incarnation != event.node.incarnation:
            return []
        effects: list[ManagerEffect] = []
        if worker.suspect or worker.draining != event.draining:
            effects += self._place(WorkerChanged(node_id, suspect=False, draining=event.draining), now)
        return effects + self._place(ActorsReported(node_id, event.actors, event.prefetches), now)

    def _on_offered(self, event: WorkflowOffered, now: float) -> list[ManagerEffect]:
        offered = event.workflow
        known = {workflow.name: workflow for workflow in self.state.workflows}
        if known.get(offered.name) == offered:
            return [ConfirmWorkflow(offered.name, offered.digest)]
        if not event.replaces:
            mismatch = why_not_same(known.get(offered.name), offered)
            if mismatch is not None:
                return [RefuseWorkflow(offered.name, offered.digest, shortened(mismatch), is_mismatch=True)]
        others = tuple(workflow for workflow in self.state.workflows if workflow.name != offered.name)
        conflict = why_not_shared(others, offered)
        if conflict is not None:
            return [RefuseWorkflow(offered.name, offered.digest, shortened(conflict), is_mismatch=True)]
        if len(others) >= self.config.workflows_max:
            reason = f"{len(others)} workflows are registered, which is the bound; withdraw one first"
            return [RefuseWorkflow(offered.name, offered.digest, reason, is_mismatch=False)]
        workflows = tuple(sorted((*others, offered), key=lambda workflow: workflow.name))
        confirm = ConfirmWorkflow(offered.name, offered.digest)
        return [*self._store(evolve(self.state, workflows=workflows)), confirm, *self._replace_workflows(now)]

    def _on_withdrawn(self, event: WorkflowWithdrawn, now: float) -> list[ManagerEffect]:
        workflows = tuple(workflow for workflow in self.state.workflows if workflow.name != event.name)
        if workflows == self.state.workflows:
            return []
        return [*self._store(evolve(self.state, workflows=workflows)), *self._replace_workflows(now)]

    def _replace_workflows(self, now: float) -> list[ManagerEffect]:
        return self._place(WorkflowsChanged(self.state.workflows), now)

    # --- effects

    def _place(self, event: PlacementEvent, now: float) -> list[ManagerEffect]:
        effects: list[ManagerEffect] = []
        placed = self._placement.handle(event, now)
        if self._idle_revision != self._placement.revision:
            self._idle_revision = self._placement.revision
            self._idle.look(self._placement.rooms(), now)
        for effect in placed:
            match effect:
                case ReserveActorIds(below):
                    effects += self._store(evolve(self.state, next_actor_id=below))
                case KeepSizes(seen):
                    effects += self._store(evolve(self.state, seen_bytes=seen))
                case KeepMoves(demand, moves):
                    effects += self._store(evolve(self.state, demand=demand, moves=moves))
                case _:
                    effects.append(effect)
        return effects

    def _store(self, state: ManagerState) -> list[ManagerEffect]:
        self.state = state
        return [StoreState(state)]

    def _publish(self, event: ManagerEvent, now: float) -> list[ManagerEffect]:
        holds_until = self._holds_until()
        if holds_until is not None and now < holds_until:
            return []
        if self._revision == self._placement.revision:
            return self._resend(event, now) if isinstance(event, HeartbeatReceived) else []
        self._revision = self._placement.revision
        table = next_table(self._table, self._wanted_table())
        if table is self._table and table.epoch.counter == 0:
            table = evolve(table, epoch=table.epoch.next())
        if table is not self._table:
            self._table, self._published_at = table, now
            self._sent_at.clear()
            return [PublishRoutes(table)]
        return self._resend(event, now) if isinstance(event, HeartbeatReceived) else []

    def _holds_until(self) -> float | None:
        """When this manager knows what an earlier one's nodes run; None if there is nothing to know."""
        if self._placement.first_actor_id == 1:
            return None
        if self._first_joined_at is None:
            return float("inf")
        return self._first_joined_at + self.config.placement.adoption_seconds

    def _resend(self, event: HeartbeatReceived, now: float) -> list[ManagerEffect]:
        node_id, incarnation = event.node.node_id, event.node.incarnation
        has_newest = event.routes is not None and event.routes >= self._table.epoch
        if has_newest or not self._membership.is_member(node_id, incarnation):
            return []
        last_sent_at = self._sent_at.get(node_id, self._published_at)
        if now < last_sent_at + self.config.placement.resend_seconds:
            return []
        self._sent_at[node_id] = now
        return [SendRoutes(node_id, incarnation, self._table)]

    def _wanted_table(self) -> RouteTable:
        members = [member for _, member in sorted(self.members.items()) if member.state is not NodeState.DEAD]
        problems = sorted(self._placement.problems().items())[:_PROBLEMS_MAX]
        return RouteTable(
            epoch=self._table.epoch,
            nodes=tuple(node_route(member) for member in members),
            actors=tuple(actor_route(actor) for _, actor in sorted(self.actors.items())),
            workflows=tuple(workflow_route(workflow) for workflow in self.state.workflows),
            problems=tuple(Problem(stage, message) for stage, message in problems),
        )
