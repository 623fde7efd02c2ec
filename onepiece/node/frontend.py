"""What the HTTP side of a proxy asks of its node; the node implements it, tests fake it."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from attrs import frozen

from onepiece.core.placement_view import PlacementView
from onepiece.graph import WorkflowGraph
from onepiece.requests import RequestEvent, RequestStatus, Terms


@frozen
class Readiness:
    """``ready`` is true only when every stage of every registered workflow is loaded somewhere."""

    ready: bool
    live: bool
    draining: bool
    waiting_for: Sequence[str]
    """In words: ``image_to_video/denoise is loading on node-3``, or the placement error."""


@frozen
class NodeView:
    """One node as ``onepiece nodes`` lists it."""

    node: str
    incarnation: int
    address: str
    http: str | None
    roles: Sequence[str]
    state: str  # alive | draining | drained | suspect
    devices: Sequence[str]
    actors: Sequence[Mapping[str, Any]]  # workflow, stage, device, state, queued, running
    process_id: int
    heartbeat_age_seconds: float | None
    """Known at the node whose manager leads."""
    waits_for: Sequence[str] = ()
    """In words, what it still holds, if it drains; known where the node itself was asked."""


class ResultStream(Protocol):
    """An open result: its size, and its bytes by range. Closing it drops nothing from the store."""

    total_bytes: int
    content_type: str
    """``application/vnd.onepiece.value`` unless the workflow's output is ``bytes`` with a known type."""

    def read(self, start: int, length: int) -> AsyncIterator[bytes]:
        """The bytes from ``start`` on, in pieces of a bounded size."""
        ...


class Frontend(Protocol):
    """All of it runs on the node's event loop. Errors are ``OnePieceError``s."""

    def workflows(self) -> Mapping[str, WorkflowGraph]:
        """The registered workflows by name."""
        ...

    def readiness(self) -> Readiness:
        """Whether requests can be served now, and what is missing."""
        ...

    def nodes(self) -> Sequence[NodeView]:
        """The members of the set, this node's view."""
        ...

    async def node(self, name: str) -> NodeView:
        """One member, with what it waits for if it drains; raises as ``set_draining``."""
        ...

    async def set_draining(self, node: str, *, draining: bool) -> NodeView:
        """Have a node take no new work, or take some again; its view behind that.

        Raises ``UnknownNode``, ``NodeUnreachable`` if it does not answer, ``NotReady`` if it is stopping.
        """
        ...

    async def placement(self) -> PlacementView:
        """What the manager wants to run where; raises ``NodeUnreachable`` if it does not answer."""
        ...

    def admission(self) -> Mapping[str, Any]:
        """What the door lets in and why it refuses, for JSON."""
        ...

    def take_place(
        self,
        workflow: str,
        body_bytes: int | None,
        *,
        timeout_seconds: float | None,
        key: str | None,
        terms: Terms,
    ) -> str | None:
        """Take a place for a request before its body is read; None if it needs none: its key is known.

        Raises ``Rejected`` (unknown workflow, not ready, overloaded). The place is for ``submit``, or to be
        left.
        """
        ...

    def leave_place(self, place: str | None) -> None:
        """Nothing comes of the request; no error if the place is taken no more."""
        ...

    async def submit(
        self,
        workflow: str,
        inputs: Mapping[str, Any],
        *,
        timeout_seconds: float | None,
        key: str | None,
        terms: Terms | None = None,
        place: str | None = None,
    ) -> RequestStatus:
        """Accept a request; the same ``key`` again gives the first one's status.

        ``inputs`` are Python values that already passed ``onepiece.graph.check_inputs``. ``place`` is what
        ``take_place`` gave, and is the request's, or left, from here on; without one it is asked for now.
        """
        ...

    async def status(self, uid: str) -> RequestStatus:
        """Raises ``UnknownRequest``, ``OwnedElsewhere`` (another proxy's), ``NotReady`` (nobody's yet)."""
        ...

    def requests(self, *, limit: int, state: str | None) -> Sequence[RequestStatus]:
        """Newest first."""
        ...

    def events(self, uid: str, after: int) -> AsyncIterator[RequestEvent]:
        """Events with ``sequence > after`` as they come; ends behind the final one. Raises as ``status``."""
        ...

    async def result(self, uid: str) -> ResultStream:
        """Raises the request's error, ``UnknownRequest``, ``ResultGone``, or ``NotReady`` while it runs."""
        ...

    async def purge(self, uid: str) -> None:
        """Drop a fetched result; a tombstone stays."""
        ...

    async def cancel(self, uid: str) -> RequestStatus:
        """Cancel; idempotent, and no error if the request has ended. Raises as ``status``."""
        ...
