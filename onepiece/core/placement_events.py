"""What placement is told and what it answers: its settings, events and effects."""

from collections.abc import Mapping
from typing import TypeAlias

from attrs import field, frozen

from onepiece.core.actors import Assign, Unassign
from onepiece.core.give_back import GiveBack
from onepiece.core.inventory import ActorReport, NodeInfo, RegisteredWorkflow
from onepiece.core.move_board import StageLimits
from onepiece.core.moves import Move
from onepiece.core.pending_move import PendingMove
from onepiece.core.prefetches import Prefetch, PrefetchReport, StopPrefetch
from onepiece.core.retries import RetryPolicy


@frozen
class PlacementConfig:
    """Patience and bounds of placement; see the module's text."""

    workers_expected: int = 1
    settle_seconds: float = 0.0
    settle_limit_seconds: float = 60.0
    adoption_seconds: float = 3.0
    resend_seconds: float = 2.0
    sends_max: int = 5
    load_seconds_max: float = 1800.0
    retries: RetryPolicy = field(factory=RetryPolicy)
    proven_seconds: float = 60.0
    actors_max: int = 2048
    allow_cpu_fallback: bool = True
    limits: Mapping[str, StageLimits] = field(factory=dict)
    """What an operator wants of a stage whatever its definition and the load say."""
    inbox_bytes: int = 0
    """What an inbox in a device's memory takes of it."""

    def __attrs_post_init__(self) -> None:
        assert self.workers_expected >= 0
        assert 0 <= self.settle_seconds <= self.settle_limit_seconds
        assert 0 <= self.adoption_seconds <= self.settle_limit_seconds
        assert self.resend_seconds > 0
        assert self.sends_max >= 1
        assert self.actors_max > 0
        assert self.inbox_bytes >= 0


# --- events ------------------------------------------------------------------------------------


@frozen
class WorkflowsChanged:
    """These are all workflows now registered."""

    workflows: tuple[RegisteredWorkflow, ...]


@frozen
class WorkerJoined:
    """A node that may run actors is there (a new incarnation), with what it runs already."""

    node: NodeInfo
    actors: tuple[ActorReport, ...] = ()
    draining: bool = False


@frozen
class WorkerChanged:
    """A worker became suspect or trusted again, or drains or no longer."""

    node_id: str
    suspect: bool
    draining: bool


@frozen
class WorkerDied:
    """A worker is gone, and with it its actors."""

    node_id: str


@frozen
class ActorsReported:
    """A worker's heartbeat: all actors it has."""

    node_id: str
    actors: tuple[ActorReport, ...]
    prefetches: tuple[PrefetchReport, ...] = ()


@frozen
class DemandChanged:
    """How many instances of which stage are wanted by measured load."""

    instances: Mapping[str, int]


@frozen
class MovesOrdered:
    """These moves are worth it, or these instances are not needed: carry that out."""

    moves: tuple[Move, ...]
    gives_back: tuple[GiveBack, ...] = ()


@frozen
class TimePassed:
    """A moment that was asked for is here."""


PlacementEvent: TypeAlias = (
    WorkflowsChanged
    | WorkerJoined
    | WorkerChanged
    | WorkerDied
    | ActorsReported
    | DemandChanged
    | MovesOrdered
    | TimePassed
)


# --- effects -----------------------------------------------------------------------------------


@frozen
class SendAssign:
    """Send an order to a node."""

    node_id: str
    incarnation: int
    order: Assign


@frozen
class SendUnassign:
    """Send an order to a node."""

    node_id: str
    incarnation: int
    order: Unassign


@frozen
class SendPrefetch:
    """Send an order to a node."""

    node_id: str
    incarnation: int
    order: Prefetch | StopPrefetch


@frozen
class ReserveActorIds:
    """Store, before anything after it is carried out, that ids below ``below`` may have been used."""

    below: int


@frozen
class KeepMoves:
    """Store, before anything after it is carried out, what is wanted and which moves are under way."""

    demand: Mapping[str, int]
    moves: tuple[PendingMove, ...]


@frozen
class MoveTold:
    """A move has begun (``outcome`` "begun"), is done, given back, or abandoned, and why; for the log."""

    move: PendingMove
    outcome: str
    reason: str


@frozen
class KeepSizes:
    """Store what instances of stages were measured to take, by stage."""

    seen: Mapping[str, int]


@frozen
class StageExceeded:
    """An instance takes more of a device than its stage declares; for the log."""

    stage: str
    node_id: str
    declared_bytes: int
    seen_bytes: int


@frozen
class ActorFailed:
    """An actor failed, and why; for the log."""

    actor_id: int
    stage: str
    node_id: str
    reason: str


PlacementEffect: TypeAlias = (
    SendAssign
    | SendUnassign
    | SendPrefetch
    | ReserveActorIds
    | KeepMoves
    | KeepSizes
    | MoveTold
    | StageExceeded
    | ActorFailed
)
