"""The messages that nodes exchange.

Two kinds travel through rings. A *control* message is one attrs object in CBOR, sent to the small
ring that every node serves under ``control``; several may share one ring message. A *data* message
is a header (one of ``StageInput``, ``ResultInput``) followed by values whose tensors are raw bytes;
it goes to an actor's inbox or to the ring of a result store.

::

    proxy --StageInput(source="@inputs")--> actor --StageInput(source=stage)--> actor
      ^                                       |                                   |
      |<---StageReports, RequestErrored-------+-----------------------------------+
      |<---ResultStored-------- store <---ResultInput-----------------------------+
      +----StopRequest--------> every node that may hold work of the request
    proxy --ProxyLoad--> every other proxy
    node --Heartbeat--> manager --Assign, Unassign, PublishedRoutes, Expel--> node
"""

from collections.abc import Mapping, Sequence
from struct import Struct
from typing import Any, Final, TypeAlias

from attrs import field, frozen

from onepiece.codec import register
from onepiece.core.actors import Assign, Unassign
from onepiece.core.admission import ProxyLoad
from onepiece.core.inventory import ActorReport, NodeInfo
from onepiece.core.lending import LentReport
from onepiece.core.membership import Expel
from onepiece.core.placement_view import PlacementView
from onepiece.core.prefetches import Prefetch, PrefetchReport, StopPrefetch
from onepiece.core.routing import RouteEpoch, RouteTable
from onepiece.errors import CodecError
from onepiece.requests import Terms
from transports.operations import Content

CONTROL_REGION: Final = "control"
STORE_REGION: Final = "store"
STORE: Final = "@store"
"""Where the output of a workflow goes, as seen from the request's record."""

KIND_CONTROL: Final = 1
KIND_STAGE_INPUT: Final = 2
KIND_RESULT: Final = 3
KIND_RECORD: Final = 4
KIND_COPY: Final = 5
KIND_CHECKPOINT: Final = 6


Trail: TypeAlias = Mapping[str, bytes]
"""What ran before: graph node -> its finished ``StageReport``, encoded.

It travels with the values, so that a request's owner knows how a result came about even if the stages'
own reports are still on their way. Only the owner reads it; on the way nobody decodes it.
"""


@register
@frozen
class StageInput:
    """Header of values for one graph node of one request.

    The values are keyed by the stage's parameters; one message carries all parameters that come from
    ``source``, which is a graph node or ``graph.INPUTS``. ``joins`` names the actor chosen for each
    graph node with several sources, so that all of its inputs meet.
    """

    uid: str
    workflow: str
    node: str
    source: str
    owner: str
    """Control address of the proxy that accepted the request."""
    received_at: float
    deadline_at: float | None
    sent_at: float
    joins: Mapping[str, int] = field(factory=dict)
    trail: Trail = field(factory=dict)
    retained_by: str | None = None
    """Control address of the node that retains this message until it hears ``Consumed``."""
    terms: Terms = field(factory=Terms)


_ATTEMPT: Final = Struct("<Q")
_WAS_LOST: Final = 1 << 63


def with_attempt(parts: Sequence[Content], attempt: int, *, was_lost: bool = False) -> list[Content]:
    """A packed ``StageInput`` with the attempt that it is sent for, and whether a node was lost with it.

    They stand behind the message, not in it: what is retained is sent again as it is.
    """
    return [*parts, _ATTEMPT.pack(attempt | (_WAS_LOST if was_lost else 0))]


def split_attempt(payload: memoryview) -> tuple[memoryview, int, bool]:
    """The packed ``StageInput``, its attempt, and whether a node was lost with it; or ``CodecError``."""
    end = len(payload) - _ATTEMPT.size
    if end < 0:
        raise CodecError(f"a stage's input of {len(payload)} bytes is none")
    word = int(_ATTEMPT.unpack(payload[end:])[0])
    return payload[:end], word & ~_WAS_LOST, bool(word & _WAS_LOST)


@register
@frozen
class ResultInput:
    """Header of a workflow's output on its way to a result store; the value is keyed ``value``."""

    uid: str
    workflow: str
    owner: str
    content_type: str
    sent_at: float
    trail: Trail = field(factory=dict)
    source: str = ""
    """The graph node whose output this is."""
    retained_by: str | None = None


@register
@frozen
class StageReport:
    """How far a stage's run of a request has come.

    It says all of it, so that a newer report makes an older one needless. ``life`` is the life of the
    node that says it. When the run has finished, ``detail`` tells what it cost, as in the event
    ``stage_finished``, and ``heading`` names the life of the node that each output was sent to.
    """

    uid: str
    stage: str
    node_id: str
    life: str
    actor_id: int
    queued_at: float
    started_at: float | None = None
    finished_at: float | None = None
    detail: Mapping[str, Any] = field(factory=dict)
    heading: Mapping[str, str] = field(factory=dict)


@register
@frozen
class StageProgress:
    """Something a running stage tells of itself; ``kind`` is an ``EventKind`` value."""

    uid: str
    kind: str
    stage: str
    node_id: str
    life: str
    at: float
    detail: Mapping[str, Any] = field(factory=dict)


@register
@frozen
class StageReports:
    """What stages tell one owner: UID, graph node, the worker's life, and the encoded report of each.

    That is a ``StageReport`` or a ``StageProgress``. Of a short request most come when it has ended already,
    with what these runs put out; the owner sees that without decoding them.
    """

    reports: tuple[tuple[str, str, str, bytes], ...]


@register
@frozen
class RequestErrored:
    """A request cannot go on; ``error`` as of ``OnePieceError.to_wire``."""

    uid: str
    stage: str | None
    node_id: str
    error: Mapping[str, Any]


@register
@frozen
class ResultStored:
    """The result is durable at ``node_id``."""

    uid: str
    node_id: str
    result_bytes: int
    content_type: str
    trail: Trail = field(factory=dict)


@register
@frozen
class Consumed:
    """What a target took from a source need not be retained: its own output has been handed on.

    UID, source and target of each such output; they wait for company.
    """

    outputs: tuple[tuple[str, str, str], ...]


@register
@frozen
class ResendOutput:
    """The owner asks the node that retains an output to send it again."""

    uid: str
    source: str
    target: str
    owner: str
    attempt: int


@register
@frozen
class OutputHeaded:
    """Outputs were sent (again): where they are on their way to."""

    uid: str
    heading: Mapping[str, str]


@register
@frozen
class OutputNotHeld:
    """The node that was asked for an output does not have it."""

    uid: str
    source: str
    target: str


@register
@frozen
class StageWasLost:
    """What an actor had of a stage is gone, though its node lives."""

    uid: str
    stage: str
    life: str


@register
@frozen
class ReleaseRequests:
    """Nothing of these requests need be retained: they have ended, or are about to, in an error.

    Their records stay until ``DropRecords``: the error may not be stored yet, and its owner may die.
    """

    uids: tuple[str, ...]


@register
@frozen
class AskEnded:
    """A node has had something of these requests for long.

    Answered by ``ReleaseRequests`` of the ended, or by ``DropRecords`` where their records are asked about.
    """

    reply_to: str
    uids: tuple[str, ...]
    of_records: bool = False


@register
@frozen
class StopRequest:
    """Drop what is queued for the request and interrupt what runs; idempotent."""

    uid: str
    reason: Mapping[str, Any]


@register
@frozen
class ReadResult:
    """Ask a result store for bytes of a value; answered by ``ResultPiece`` with the same ``call``."""

    call: int
    reply_to: str
    uid: str
    start: int
    length: int


@register
@frozen
class ResultPiece:
    """A part of a stored value, or why there is none."""

    call: int
    total_bytes: int
    content_type: str
    data: bytes
    error: Mapping[str, Any] | None = None


@register
@frozen
class DescribeResult:
    """Ask a result store how a request ended; answered by ``ResultDescribed``."""

    call: int
    reply_to: str
    uid: str


@register
@frozen
class ResultDescribed:
    """What is stored of a request: a result, or the ``failure`` it ended in; ``error``: why neither."""

    call: int
    workflow: str = ""
    stored_at: float = 0.0
    result_bytes: int = 0
    content_type: str = ""
    failure: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None
    is_intent: bool = False
    """``failure`` is what the request is to end in, and not its end yet."""


@register
@frozen
class StoreFailure:
    """A request is to end in this error, unless something stands under its UID already; or it has ended so.

    Answered by a ``ResultDescribed`` with what stands, or with why nothing could be kept.
    """

    call: int
    reply_to: str
    uid: str
    workflow: str
    error: Mapping[str, Any]
    is_settled: bool
    """It has ended so."""


@register
@frozen
class PurgeResult:
    """Drop a fetched value and leave a tombstone; answered by an empty ``ResultPiece``."""

    call: int
    reply_to: str
    uid: str


@register
@frozen
class Heartbeat:
    """A node tells the manager that it is there and what it runs."""

    node: NodeInfo
    actors: tuple[ActorReport, ...]
    draining: bool
    routes: RouteEpoch
    drained: bool = False
    """It drains, and holds nothing any more."""
    offered: Mapping[str, Mapping[str, int]] = field(factory=dict)
    """Requests of each workflow and size class that its proxy was asked for since the process began."""
    lent: LentReport | None = None
    """The jobs on its idle devices; None: it lends none."""
    prefetches: tuple[PrefetchReport, ...] = ()
    """What it was ordered to read in advance."""


@register
@frozen
class AskPlacement:
    """Ask the manager what runs where and why; answered by ``PlacementShown`` with the same ``call``."""

    call: int
    reply_to: str


@register
@frozen
class PlacementShown:
    """What the manager knows and does."""

    call: int
    view: PlacementView


@register
@frozen
class SetDraining:
    """An operator wants a node to take no new work, or to take some again; answered by ``DrainingSet``.

    With ``draining`` None nothing changes, and the answer says how far it is.
    """

    call: int
    reply_to: str
    draining: bool | None


@register
@frozen
class DrainingSet:
    """The node does as it was told; ``error`` says why not."""

    call: int
    error: Mapping[str, Any] | None = None
    waits_for: tuple[str, ...] = ()
    """In words, what a node that drains still holds; nothing of one that does not drain."""


@register
@frozen
class Farewell:
    """A node has stopped in order; a store node says so to the others, too."""

    node_id: str
    incarnation: int


@register
@frozen
class PublishedRoutes:
    """The manager's newest table."""

    table: RouteTable


@register
@frozen
class WhoLeads:
    """A node asks a candidate who leads; answered by ``LeaderIs``, if the candidate knows."""

    reply_to: str


@register
@frozen
class LeaderIs:
    """A candidate says who leads: what is for the manager goes there. The last word counts."""

    address: str


@register
@frozen
class RegisterWorkflow:
    """Ask the manager to place a workflow; answered by ``WorkflowRegistered`` with the same ``call``."""

    call: int
    reply_to: str
    module: str


@register
@frozen
class WorkflowRegistered:
    """The manager's answer: ``error`` says why it refused."""

    call: int
    error: Mapping[str, Any] | None = None


for _wire_class in (Assign, Unassign, Prefetch, StopPrefetch, Expel, ProxyLoad):
    register(_wire_class)
