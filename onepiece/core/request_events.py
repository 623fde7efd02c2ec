"""What a ``RequestTable`` is told, and what it wants done; ``request`` has the theory."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from attrs import field, frozen

from onepiece.core.request_record import Holding, Plan, Sending
from onepiece.requests import EventKind, RequestEvent, RequestState


@frozen
class Accepted:
    """A request was admitted and is stored; its inputs are with the owner."""

    uid: str
    workflow: str
    plan: Plan
    deadline_at: float
    key: str | None = None


@frozen
class Adopted:
    """The owner of a request died; this table goes on with it, from what the living nodes hold."""

    accepted: Accepted
    accepted_at: float
    adoptions: int
    holdings: tuple[Holding, ...]


@frozen
class Headed:
    """Inputs of these graph nodes are on their way to these nodes."""

    uid: str
    heading: Mapping[str, str]


@frozen
class StageReported:
    """An actor said something about a stage of the request."""

    uid: str
    kind: EventKind
    stage: str
    node_id: str
    life: str
    at: float
    detail: Mapping[str, Any] = field(factory=dict)
    heading: Mapping[str, str] = field(factory=dict)


@frozen
class ResultArrived:
    """The result is durable; with it comes what its stages had to say, part of which may be news."""

    uid: str
    result_bytes: int
    content_type: str
    reports: tuple[StageReported, ...] = ()


@frozen
class RequestBroke:
    """Somebody could not go on with it."""

    uid: str
    stage: str | None
    node_id: str | None
    error: Mapping[str, Any]


@frozen
class EndStands:
    """What is stored of a request that was to end without a result, by whoever came first.

    ``error`` is None if that is a result.
    """

    uid: str
    error: Mapping[str, Any] | None
    result_bytes: int = 0
    content_type: str = ""


@frozen
class CancelAsked:
    """A client wants it stopped."""

    uid: str


@frozen
class NodesDied:
    """These nodes are gone with all they held."""

    node_ids: frozenset[str]


@frozen
class StageLost:
    """The node lives, but what it had of this stage is lost (an actor crashed)."""

    uid: str
    stage: str
    node_id: str


@frozen
class OutputMissing:
    """The node that was asked to send an output again does not have it."""

    uid: str
    source: str
    target: str


@frozen
class CheckpointFound:
    """This store node has the checkpoint that was asked for, and sends it."""

    uid: str
    source: str
    target: str
    life: str


@frozen
class CheckpointMissing:
    """No store node has the checkpoint that was asked for."""

    uid: str
    source: str
    target: str


@frozen
class Tick:
    """Time has passed."""


Event: TypeAlias = (
    Accepted
    | Adopted
    | Headed
    | StageReported
    | StageLost
    | OutputMissing
    | CheckpointFound
    | CheckpointMissing
    | ResultArrived
    | RequestBroke
    | EndStands
    | CancelAsked
    | NodesDied
    | Tick
)


@frozen
class Publish:
    """Tell whoever follows the request."""

    event: RequestEvent


@frozen
class KeepError:
    """Store that the request ends in this error, and say what stands then (``EndStands``)."""

    uid: str
    workflow: str
    error: Mapping[str, Any]


@frozen
class StopStages:
    """Tell every node that may hold work of the request to drop it."""

    uid: str
    reason: Mapping[str, Any]


@frozen
class ReleaseRetained:
    """Tell these nodes that they need not retain anything of the request any more."""

    uid: str
    node_ids: frozenset[str]


@frozen
class Settled:
    """The request has ended; its place in the budget is free."""

    uid: str
    workflow: str
    state: RequestState


Effect: TypeAlias = Publish | KeepError | StopStages | ReleaseRetained | Settled | Sending
