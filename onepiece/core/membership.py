"""Membership: which nodes belong to the set, as the leading NodeManager sees it.

Nodes send heartbeats; who is silent is first *suspect*, then *dead*::

              heard            silent for suspect_seconds        silent for lease_seconds
      (new) ---------> alive ------------------------> suspect ------------------------> dead
                        ^  |          heard              |                                ^
              heard     |  | heard draining   <----------+                                |
                        |  v                                     left, replaced           |
                      draining ---------------------------------------------------------> +
                        ^  | heard drained: it holds nothing any more                     |
         heard draining |  v                                     left, replaced           |
                      drained ----------------------------------------------------------> +

A node that drains, or has drained, may be told to resume: heard as any other it is alive again.

What it promises:

* One *incarnation* per node id: a newer one replaces the older, which is dead for good. A dead or
  replaced incarnation never comes back; if it is heard again (its process had been stopped and goes
  on), it is told so by ``Expel`` and may join anew under a higher incarnation. This is the fence
  that keeps two processes from acting as one node.
* Of two processes under one id the later stays: the earlier one is told to stop, also if it comes back
  under an incarnation of its own making since nobody listens to its old one.
* Only a node that was heard in this manager's life can be declared dead: a manager that has just
  started expires nobody, and the time a model takes to load plays no part.
* If the *manager* stood still (it was called later than it asked for by more than
  ``stall_seconds``), all leases begin anew: the heartbeats of that time are still in its inbox.
* At most ``nodes_max`` nodes are known; the dead that were silent longest are forgotten first. A
  forgotten incarnation that is heard again joins as if it were new; its actors then are unknown to
  the NodeManager, which stops them.

What it does not promise: that a node declared dead is dead. Whoever relies on that must be fenced
(the ring fences sessions; actor ids are never used twice).
"""

import enum
from collections.abc import Mapping
from typing import Final, TypeAlias

from attrs import define, evolve, field, frozen

from onepiece.core.inventory import ActorReport, NodeInfo
from onepiece.core.lending import LentReport
from onepiece.core.machine import Machine, follow
from onepiece.core.prefetches import PrefetchReport
from onepiece.core.routing import RouteEpoch


class NodeState(enum.StrEnum):
    """Where a node is in its life."""

    ALIVE = "alive"
    DRAINING = "draining"
    """It wants no new work."""
    DRAINED = "drained"
    """It drains, holds nothing any more, and gets no new work: it may be stopped, or resume."""
    SUSPECT = "suspect"
    DEAD = "dead"


class _Trigger(enum.Enum):
    HEARD = "heard"
    HEARD_DRAINING = "heard draining"
    HEARD_DRAINED = "heard drained"
    FELL_SILENT = "fell silent"
    LEASE_ENDED = "lease ended"
    LEFT = "left"
    REPLACED = "replaced"


TRANSITIONS: Final[Mapping[tuple[NodeState, _Trigger], NodeState]] = {
    (NodeState.ALIVE, _Trigger.HEARD): NodeState.ALIVE,
    (NodeState.ALIVE, _Trigger.HEARD_DRAINING): NodeState.DRAINING,
    (NodeState.ALIVE, _Trigger.HEARD_DRAINED): NodeState.DRAINED,
    (NodeState.ALIVE, _Trigger.FELL_SILENT): NodeState.SUSPECT,
    (NodeState.ALIVE, _Trigger.LEFT): NodeState.DEAD,
    (NodeState.ALIVE, _Trigger.REPLACED): NodeState.DEAD,
    (NodeState.DRAINING, _Trigger.HEARD): NodeState.ALIVE,
    (NodeState.DRAINING, _Trigger.HEARD_DRAINING): NodeState.DRAINING,
    (NodeState.DRAINING, _Trigger.HEARD_DRAINED): NodeState.DRAINED,
    (NodeState.DRAINING, _Trigger.FELL_SILENT): NodeState.SUSPECT,
    (NodeState.DRAINING, _Trigger.LEFT): NodeState.DEAD,
    (NodeState.DRAINING, _Trigger.REPLACED): NodeState.DEAD,
    (NodeState.DRAINED, _Trigger.HEARD): NodeState.ALIVE,
    (NodeState.DRAINED, _Trigger.HEARD_DRAINING): NodeState.DRAINING,
    (NodeState.DRAINED, _Trigger.HEARD_DRAINED): NodeState.DRAINED,
    (NodeState.DRAINED, _Trigger.FELL_SILENT): NodeState.SUSPECT,
    (NodeState.DRAINED, _Trigger.LEFT): NodeState.DEAD,
    (NodeState.DRAINED, _Trigger.REPLACED): NodeState.DEAD,
    (NodeState.SUSPECT, _Trigger.HEARD): NodeState.ALIVE,
    (NodeState.SUSPECT, _Trigger.HEARD_DRAINING): NodeState.DRAINING,
    (NodeState.SUSPECT, _Trigger.HEARD_DRAINED): NodeState.DRAINED,
    (NodeState.SUSPECT, _Trigger.LEASE_ENDED): NodeState.DEAD,
    (NodeState.SUSPECT, _Trigger.LEFT): NodeState.DEAD,
    (NodeState.SUSPECT, _Trigger.REPLACED): NodeState.DEAD,
}
"""DEAD has no way out: a dead incarnation that is heard is expelled, a newer one is a new member."""


_OUSTED_MAX: Final = 8
_LEAVING: Final = frozenset({NodeState.DRAINING, NodeState.DRAINED})


@frozen
class MembershipConfig:
    """How patient the NodeManager is.

    ``heartbeat_seconds`` is what nodes are told to keep to; several may be lost before suspicion.
    """

    heartbeat_seconds: float = 0.5
    suspect_seconds: float = 2.0
    lease_seconds: float = 5.0
    stall_seconds: float = 1.0
    nodes_max: int = 1024

    def __attrs_post_init__(self) -> None:
        assert 0 < 2 * self.heartbeat_seconds <= self.suspect_seconds, "one lost heartbeat is no reason"
        assert self.suspect_seconds < self.lease_seconds
        assert 0 < self.stall_seconds < self.lease_seconds
        assert self.nodes_max > 0


# --- events ------------------------------------------------------------------------------------


@frozen
class HeartbeatReceived:
    """A node says that it is there; the first one of an incarnation is its request to join.

    ``routes`` is the epoch of the route table the node has, so that a lost table is sent again.
    """

    node: NodeInfo
    actors: tuple[ActorReport, ...] = ()
    draining: bool = False
    routes: RouteEpoch | None = None
    drained: bool = False
    """It drains, and holds nothing any more."""
    offered: Mapping[str, Mapping[str, int]] = field(factory=dict)
    """Requests of each workflow and size class that its proxy was asked for, in this life."""
    lent: LentReport | None = None
    """The jobs on its idle devices; None: it lends none."""
    prefetches: tuple[PrefetchReport, ...] = ()
    """What it was ordered to read in advance."""


@frozen
class NodeLeft:
    """A node has stopped in order and says good-bye."""

    node_id: str
    incarnation: int


@frozen
class Tick:
    """Time has passed."""


MembershipEvent: TypeAlias = HeartbeatReceived | NodeLeft | Tick


# --- effects -----------------------------------------------------------------------------------


@frozen
class Expel:
    """Tell this incarnation that it is no member.

    Where ``may_rejoin``, its process may join under a higher incarnation after it has dropped its
    actors; otherwise another process holds its id and it must stop.
    """

    node_id: str
    incarnation: int
    reason: str
    may_rejoin: bool
    newest: int = 0
    """The highest incarnation of its id that was heard; a clock that was set back may be far below it."""


@frozen
class NodeJoined:
    """A new incarnation belongs to the set."""

    node: NodeInfo


@frozen
class NodeSuspected:
    """Nothing was heard of it for a while; what it runs stays, nothing new is placed there."""

    node_id: str
    incarnation: int
    silent_seconds: float


@frozen
class NodeRecovered:
    """A suspect node was heard again in time."""

    node_id: str
    incarnation: int


@frozen
class NodeDrained:
    """The node wants to end its work; nothing new is placed there."""

    node_id: str
    incarnation: int


@frozen
class NodeEmptied:
    """A node that drains holds nothing any more."""

    node_id: str
    incarnation: int


@frozen
class NodeResumed:
    """A draining node takes part again."""

    node_id: str
    incarnation: int


@frozen
class NodeDied:
    """The incarnation is dead for good."""

    node_id: str
    incarnation: int
    reason: str


@frozen
class ManagerStalled:
    """The manager itself stood still for so long; all leases have begun anew."""

    seconds: float


MembershipNotice: TypeAlias = (
    NodeJoined
    | NodeSuspected
    | NodeRecovered
    | NodeDrained
    | NodeEmptied
    | NodeResumed
    | NodeDied
    | ManagerStalled
)
"""What membership tells the other machines, and the log."""

MembershipEffect: TypeAlias = Expel | MembershipNotice


# --- the machine -------------------------------------------------------------------------------


@frozen
class Member:
    """One node id and its latest incarnation."""

    node: NodeInfo
    state: NodeState
    joined_at: float
    heard_at: float
    actors: tuple[ActorReport, ...] = ()
    routes: RouteEpoch | None = None
    """The epoch of the route table that the node has."""
    death: str = ""
    """Why it is dead."""
    ousted: tuple[tuple[str, int], ...] = ()
    """Address and process id of other processes that it, or those before it, replaced while they lived."""


@define(kw_only=True, eq=False)
class MembershipMachine(Machine[MembershipEvent, MembershipEffect]):
    """Who belongs to the set; see the module's text."""

    config: MembershipConfig = field(factory=MembershipConfig)
    _members: dict[str, Member] = field(factory=dict, init=False)
    _next_look_at: float | None = field(default=None, init=False)
    """No node becomes suspect or dead before; the driver is asked to call then."""

    @property
    def members(self) -> Mapping[str, Member]:
        """All known nodes, the dead included, by id."""
        return self._members

    def is_member(self, node_id: str, incarnation: int) -> bool:
        """Whether this incarnation belongs to the set now."""
        member = self._members.get(node_id)
        return (
            member is not None
            and member.node.incarnation == incarnation
            and member.state is not NodeState.DEAD
        )

    def next_deadline(self, now: float) -> float | None:
        """When to look next: no node becomes suspect or dead before, and perhaps none then."""
        return self._next_look_at

    def check_invariants(self) -> None:
        """One record per id, within the bound, whose silence fits its state."""
        assert len(self._members) <= self.config.nodes_max
        for node_id, member in self._members.items():
            assert node_id == member.node.node_id
            assert member.joined_at <= member.heard_at <= self._now
            assert (member.state is NodeState.DEAD) == bool(member.death)
            if member.state is not NodeState.DEAD:
                assert self._now < member.heard_at + self._patience(member.state)

    def _patience(self, state: NodeState) -> float:
        return self.config.lease_seconds if state is NodeState.SUSPECT else self.config.suspect_seconds

    def _react(self, event: MembershipEvent, now: float) -> list[MembershipEffect]:
        effects = self._forgive_own_stall(now)
        match event:
            case HeartbeatReceived():
                effects += self._on_heartbeat(event, now)
            case NodeLeft():
                effects += self._on_left(event)
            case Tick():
                pass
        if self._next_look_at is not None and now >= self._next_look_at:
            effects += self._expire(now)
            self._next_look_at = self._earliest_end()
        return effects

    def _has_changed(self, event: MembershipEvent, effects: list[MembershipEffect]) -> bool:
        return bool(effects) or not isinstance(event, HeartbeatReceived)

    def _earliest_end(self) -> float | None:
        ends = [
            member.heard_at + self._patience(member.state)
            for member in self._members.values()
            if member.state is not NodeState.DEAD
        ]
        return min(ends, default=None)

    def _look_by(self, moment: float) -> None:
        self._next_look_at = moment if self._next_look_at is None else min(self._next_look_at, moment)

    def _forgive_own_stall(self, now: float) -> list[MembershipEffect]:
        missed = 0.0 if self._next_look_at is None else now - self._next_look_at
        if missed <= self.config.stall_seconds:
            return []
        for node_id, member in self._members.items():
            if member.state is not NodeState.DEAD:
                self._members[node_id] = evolve(member, heard_at=now)
        self._next_look_at = self._earliest_end()
        return [ManagerStalled(missed)]

    def _on_heartbeat(self, event: HeartbeatReceived, now: float) -> list[MembershipEffect]:
        node = event.node
        member = self._members.get(node.node_id)
        if member is None:
            return self._join(event, now)
        if node.incarnation > member.node.incarnation:
            if member.state is NodeState.DEAD:
                return self._join(event, now)
            if _process(node) in member.ousted:
                return [self._expel_older(node, member)]
            died = self._bury(member, _Trigger.REPLACED, f"incarnation {node.incarnation} replaced it")
            ousted = member.ousted
            if _process(node) != _process(member.node):
                ousted = (*ousted, _process(member.node))[-_OUSTED_MAX:]
            return [died, *self._join(event, now, ousted)]
        if node.incarnation < member.node.incarnation:
            return [self._expel_older(node, member)]
        if member.state is NodeState.DEAD:
            reason = f"it was declared dead ({member.death}); its actors may run elsewhere by now"
            return [Expel(node.node_id, node.incarnation, reason, may_rejoin=True)]
        return self._hear(member, event, now)

    def _join(
        self, event: HeartbeatReceived, now: float, ousted: tuple[tuple[str, int], ...] = ()
    ) -> list[MembershipEffect]:
        node = event.node
        if node.node_id not in self._members and not self._make_room():
            reason = f"the set has {self.config.nodes_max} nodes, which is its bound (nodes_max)"
            return [Expel(node.node_id, node.incarnation, reason, may_rejoin=True)]
        state = TRANSITIONS[NodeState.ALIVE, _heard(event)]
        self._members[node.node_id] = Member(node, state, now, now, event.actors, event.routes, ousted=ousted)
        self._look_by(now + self._patience(state))
        effects: list[MembershipEffect] = [NodeJoined(node)]
        if state in _LEAVING:
            effects.append(NodeDrained(node.node_id, node.incarnation))
        return effects

    def _make_room(self) -> bool:
        if len(self._members) < self.config.nodes_max:
            return True
        dead = [member for member in self._members.values() if member.state is NodeState.DEAD]
        if not dead:
            return False
        oldest = min(dead, key=lambda member: (member.heard_at, member.node.node_id))
        del self._members[oldest.node.node_id]
        return True

    def _expel_older(self, node: NodeInfo, newer: Member) -> Expel:
        holder = newer.node
        held = newer.state is not NodeState.DEAD
        reason = (
            f"incarnation {holder.incarnation} of {node.node_id} (process {holder.process_id} at "
            f"{holder.address}) has taken its place"
        )
        if held:
            reason += "; give each process a node id of its own"
        return Expel(node.node_id, node.incarnation, reason, may_rejoin=not held, newest=holder.incarnation)

    def _hear(self, member: Member, event: HeartbeatReceived, now: float) -> list[MembershipEffect]:
        state = follow(TRANSITIONS, member.state, _heard(event))
        node_id, incarnation = event.node.node_id, event.node.incarnation
        self._members[node_id] = evolve(
            member, state=state, heard_at=now, actors=event.actors, routes=event.routes
        )
        self._look_by(now + self._patience(state))
        effects: list[MembershipEffect] = []
        if member.state is NodeState.SUSPECT:
            effects.append(NodeRecovered(node_id, incarnation))
        if state in _LEAVING and member.state not in _LEAVING:
            effects.append(NodeDrained(node_id, incarnation))
        if state is NodeState.DRAINED and member.state is not NodeState.DRAINED:
            effects.append(NodeEmptied(node_id, incarnation))
        if state is NodeState.DRAINING and member.state is NodeState.DRAINED:
            effects.append(NodeDrained(node_id, incarnation))
        if state is NodeState.ALIVE and member.state in _LEAVING:
            effects.append(NodeResumed(node_id, incarnation))
        return effects

    def _on_left(self, event: NodeLeft) -> list[MembershipEffect]:
        if not self.is_member(event.node_id, event.incarnation):
            return []
        return [self._bury(self._members[event.node_id], _Trigger.LEFT, "it left")]

    def _expire(self, now: float) -> list[MembershipEffect]:
        effects: list[MembershipEffect] = []
        for node_id in list(self._members):
            member = self._members[node_id]
            silent = now - member.heard_at
            if member.state in {NodeState.ALIVE, *_LEAVING} and self._is_over(member, now):
                state = follow(TRANSITIONS, member.state, _Trigger.FELL_SILENT)
                member = self._members[node_id] = evolve(member, state=state)
                effects.append(NodeSuspected(node_id, member.node.incarnation, silent))
            if member.state is NodeState.SUSPECT and self._is_over(member, now):
                effects.append(self._bury(member, _Trigger.LEASE_ENDED, f"silent for {silent:.1f} s"))
        return effects

    def _is_over(self, member: Member, now: float) -> bool:
        return now >= member.heard_at + self._patience(member.state)

    def _bury(self, member: Member, trigger: _Trigger, reason: str) -> NodeDied:
        node = member.node
        self._members[node.node_id] = evolve(
            member, state=follow(TRANSITIONS, member.state, trigger), actors=(), death=reason
        )
        return NodeDied(node.node_id, node.incarnation, reason)


def _process(node: NodeInfo) -> tuple[str, int]:
    return node.address, node.process_id


def _heard(event: HeartbeatReceived) -> _Trigger:
    if not event.draining:
        return _Trigger.HEARD
    return _Trigger.HEARD_DRAINED if event.drained else _Trigger.HEARD_DRAINING
