"""The messages by which requests outlive their owner, the proxy that accepted them.

A *record* is what another proxy needs to go on with a request: who owns it, and its inputs. Store nodes
keep it from before the client is told "accepted" until the request has ended.

::

    owner --ClaimKey--> store --KeyClaimed--> owner --ReleaseClaim--> store
    owner --RequestRecord--> store --RecordKept--> owner
    proxy --ListOrphans, FindRecord, ReadRecord--> store --OrphansListed, RecordFound, ResultPiece--> proxy
    proxy --TakeOver--> store --TakenOver--> proxy --AdoptRequests--> every node --RequestsHeld--> proxy
    owner --DropRecords--> store
"""

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from onepiece.codec import register
from onepiece.requests import Terms


@register
@frozen
class RequestRecord:
    """Header of a request's inputs on their way to a store node, which keeps them until it has ended.

    Answered by ``RecordKept`` with the same ``call``. ``owner_life`` is the life of the proxy's node that
    owns the request; ``adoptions`` counts how often that has changed.
    """

    call: int
    uid: str
    workflow: str
    owner: str
    owner_life: str
    key: str | None
    accepted_at: float
    deadline_at: float
    adoptions: int = 0
    joins: Mapping[str, int] = field(factory=dict)
    """The actor chosen for each graph node with several sources, as in ``StageInput``. Kept beside the
    inputs: what is retained of the request names them, so that every later owner must, too."""
    terms: Terms = field(factory=Terms)


@register
@frozen
class RecordKept:
    """The record is durable; or ``uid`` is another request's, which has the key already."""

    call: int
    uid: str
    error: Mapping[str, Any] | None = None


@register
@frozen
class ClaimKey:
    """Before a request's record goes anywhere: is its key free? Answered by ``KeyClaimed``."""

    call: int
    reply_to: str
    key: str
    uid: str
    owner_life: str


@register
@frozen
class KeyClaimed:
    """Whether the key is this request's for a while; if not, ``uid`` is the request that it stands for.

    Without that another proxy has claimed the key, and has not got its record here yet.
    """

    call: int
    granted: bool
    uid: str | None = None


@register
@frozen
class ReleaseClaim:
    """This request does not need the key, or not this store node's word for it."""

    key: str
    uid: str


@register
@frozen
class DropRecords:
    """These requests have ended: their records are needed no longer."""

    uids: tuple[str, ...]


@register
@frozen
class ListOrphans:
    """Ask a store node for records whose owner is not among ``living``; answered by ``OrphansListed``."""

    call: int
    reply_to: str
    living: tuple[str, ...]
    limit: int


@register
@frozen
class OrphansListed:
    """Records without a living owner; ``call`` of each is 0."""

    call: int
    records: tuple[RequestRecord, ...]


@register
@frozen
class TakeOver:
    """A proxy wants to own a request; answered by ``TakenOver``. The higher ``adoptions`` wins."""

    call: int
    reply_to: str
    uid: str
    owner: str
    owner_life: str
    adoptions: int


@register
@frozen
class TakenOver:
    """Whether the proxy owns the request now, as far as this store node is concerned."""

    call: int
    uid: str
    granted: bool


@register
@frozen
class ReadRecord:
    """Ask a store node for the inputs of a record; answered by ``ResultPiece``."""

    call: int
    reply_to: str
    uid: str
    start: int
    length: int


@register
@frozen
class FindRecord:
    """Ask a store node who owns a request; answered by ``RecordFound``."""

    call: int
    reply_to: str
    uid: str


@register
@frozen
class RecordFound:
    """The record of a request that has not ended (``call`` in it is 0); None if there is none here."""

    call: int
    record: RequestRecord | None


@register
@frozen
class AdoptRequests:
    """The owner of these requests died; ``owner`` goes on with them. Answered by ``RequestsHeld``."""

    call: int
    owner: str
    uids: tuple[str, ...]


@register
@frozen
class HeldRequest:
    """What one node has of a request."""

    uid: str
    active: Mapping[str, str]
    retained: tuple[str, ...]
    checkpoints: tuple[str, ...] = ()


@register
@frozen
class RequestsHeld:
    """A node's answer to ``AdoptRequests``."""

    call: int
    life: str
    held: tuple[HeldRequest, ...]
