"""A frontend without a node behind it: for tests of the HTTP side, of clients, and of what uses them.

::

    frontend = FakeFrontend([echo])
    async with serve(build_app(frontend)) as port, connect(f"http://127.0.0.1:{port}") as client:
        handle = await client.submit(echo(text="ahoy"))
        frontend.report(handle.uid, EventKind.PROGRESS, stage="shout", step=1, total=2)
        frontend.finish(handle.uid, "AHOY!")
        assert await handle.result() == "AHOY!"
"""

import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

import anyio
import anyio.lowlevel
from attrs import define, evolve, field

from onepiece.codec import VALUE_CONTENT_TYPE, value_to_bytes
from onepiece.core.placement_view import PlacementView
from onepiece.errors import (
    NotReady,
    OnePieceError,
    OwnedElsewhere,
    Rejected,
    RequestCancelled,
    ResultGone,
    UnknownNode,
    UnknownRequest,
    UnknownWorkflow,
)
from onepiece.graph import WorkflowGraph
from onepiece.ids import new_uid
from onepiece.node.frontend import NodeView, Readiness, ResultStream
from onepiece.requests import EventKind, RequestEvent, RequestState, RequestStatus, Terms
from onepiece.workflow import Workflow

PIECE_BYTES = 4096

Answer = Callable[[str, Mapping[str, Any]], Any]


@define
class FakeRequest:
    """A request that a test drives."""

    status: RequestStatus
    inputs: Mapping[str, Any]
    events: list[RequestEvent] = field(factory=list)
    changed: anyio.Event = field(factory=anyio.Event)
    data: bytes | None = None
    content_type: str = VALUE_CONTENT_TYPE
    is_purged: bool = False


@define
class FakeResult:
    """A ``ResultStream`` over bytes."""

    data: bytes
    content_type: str
    break_after: int | None = None
    """Raise when so many bytes have been read; what a lost store looks like."""
    total_bytes: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.total_bytes = len(self.data)

    async def read(self, start: int, length: int) -> AsyncIterator[bytes]:
        """The bytes, in small pieces."""
        end = min(start + length, len(self.data))
        while start < end:
            if self.break_after is not None and start >= self.break_after:
                raise ResultGone("the store is lost")
            piece = self.data[start : min(start + PIECE_BYTES, end)]
            start += len(piece)
            await anyio.lowlevel.checkpoint()
            yield piece


class FakeFrontend:
    """A ``Frontend`` that accepts requests and leaves what becomes of them to the test.

    Args:
        workflows: What can be submitted.
        answer: Called with workflow and inputs; what it returns, or raises as ``OnePieceError``, is the
            result at once. Without it requests wait for ``finish`` or ``fail``.
    """

    def __init__(self, workflows: Iterable[Workflow[..., Any]], answer: Answer | None = None) -> None:
        self.graphs = {workflow.name: workflow.graph for workflow in workflows}
        self.answer = answer
        self.rejection: Rejected | None = None
        """What ``take_place`` and ``submit`` raise."""
        self.asked_admission: list[tuple[str, int | None]] = []
        self.readiness_now = Readiness(ready=True, live=True, draining=False, waiting_for=())
        self.node_views: Sequence[NodeView] = ()
        self.asked_nodes: list[str] = []
        self.placement_now = PlacementView("advise", (), (), {}, 0, 0)
        self.asked_terms: list[Terms] = []
        self.places: set[str] = set()
        """Those that are taken and not left."""
        self.requests_by_uid: dict[str, FakeRequest] = {}
        self.owned_elsewhere: dict[str, str] = {}
        """The HTTP address of the proxy that owns a request, by UID."""
        self.fail_with: Exception | None = None
        """What ``status`` raises: a bug of the node's."""
        self.break_result_after: int | None = None
        """Break the next reading of a result behind so many bytes."""
        self._uids_by_key: dict[str, str] = {}
        self._rng = random.Random(7)  # noqa: S311 - a test's UIDs are no secrets

    def workflows(self) -> Mapping[str, WorkflowGraph]:
        """The registered workflows."""
        return self.graphs

    def readiness(self) -> Readiness:
        """What the test set."""
        return self.readiness_now

    def nodes(self) -> Sequence[NodeView]:
        """What the test set."""
        return self.node_views

    async def node(self, name: str) -> NodeView:
        """The view that the test set."""
        self.asked_nodes.append(name)
        for view in self.node_views:
            if view.node == name:
                return view
        raise UnknownNode(f"no node {name!r}", node=name)

    async def set_draining(self, node: str, *, draining: bool) -> NodeView:
        """Change the view that the test set."""
        for number, view in enumerate(self.node_views):
            if view.node == node:
                changed = evolve(view, state="draining" if draining else "alive")
                self.node_views = [*self.node_views[:number], changed, *self.node_views[number + 1 :]]
                return changed
        raise UnknownNode(f"no node {node!r}", node=node)

    async def placement(self) -> PlacementView:
        """What the test set."""
        return self.placement_now

    def admission(self) -> Mapping[str, Any]:
        """What is taken."""
        return {"in_flight": len(self.places)}

    def take_place(
        self,
        workflow: str,
        body_bytes: int | None,
        *,
        timeout_seconds: float | None,
        key: str | None,
        terms: Terms,
    ) -> str | None:
        """Take one, unless the key is known; raises as ``submit``."""
        if key in self._uids_by_key:
            return None
        self.asked_terms.append(terms)
        self._check_admission(workflow, body_bytes)
        place = new_uid(time.time(), self._rng)
        self.places.add(place)
        return place

    def leave_place(self, place: str | None) -> None:
        """It is free again."""
        self.places.discard(place or "")

    def _check_admission(self, workflow: str, body_bytes: int | None) -> None:
        """Raise what the test set, or for an unknown workflow."""
        self.asked_admission.append((workflow, body_bytes))
        if workflow not in self.graphs:
            raise UnknownWorkflow(f"no workflow {workflow!r}; there are: {', '.join(self.graphs)}")
        if self.rejection is not None:
            raise self.rejection

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
        """Accept a request."""
        self.leave_place(place)
        if key is not None and key in self._uids_by_key:
            return self._request(self._uids_by_key[key]).status
        if place is None:
            self._check_admission(workflow, None)
        now = time.time()
        status = RequestStatus(
            uid=new_uid(now, self._rng),
            workflow=workflow,
            state=RequestState.ACCEPTED,
            accepted_at=now,
            deadline_at=None if timeout_seconds is None else now + timeout_seconds,
            finished_at=None,
            stages={node.id: "pending" for node in self.graphs[workflow].nodes},
            key=key,
        )
        if key is not None:
            self._uids_by_key[key] = status.uid
        self.requests_by_uid[status.uid] = FakeRequest(status, inputs)
        self.report(status.uid, EventKind.ACCEPTED)
        if self.answer is not None:
            try:
                self.finish(status.uid, self.answer(workflow, inputs))
            except OnePieceError as error:
                self.fail(status.uid, error)
        return self._request(status.uid).status

    async def status(self, uid: str) -> RequestStatus:
        """The request's record."""
        if self.fail_with is not None:
            raise self.fail_with
        return self._request(uid).status

    def requests(self, *, limit: int, state: str | None) -> Sequence[RequestStatus]:
        """Newest first."""
        found = [each.status for each in reversed(self.requests_by_uid.values())]
        return [status for status in found if state in {None, status.state.value}][:limit]

    async def events(self, uid: str, after: int) -> AsyncIterator[RequestEvent]:
        """The events as the test makes them."""
        request = self._request(uid)
        position = after + 1
        while True:
            changed = request.changed
            while position < len(request.events):
                yield request.events[position]
                position += 1
            if request.status.state.is_final:
                return
            await changed.wait()

    async def result(self, uid: str) -> ResultStream:
        """The result, or why there is none."""
        request = self._request(uid)
        if request.status.error is not None:
            raise OnePieceError.from_wire(request.status.error)
        if request.is_purged:
            raise ResultGone(f"the result of {uid} was fetched", uid=uid)
        if request.data is None:
            raise NotReady(f"{uid} still runs", uid=uid, retry_after_seconds=0.01)
        break_after, self.break_result_after = self.break_result_after, None
        return FakeResult(request.data, request.content_type, break_after)

    async def purge(self, uid: str) -> None:
        """Drop a result."""
        self._request(uid).is_purged = True

    async def cancel(self, uid: str) -> RequestStatus:
        """Cancel, if it has not ended."""
        request = self._request(uid)
        if not request.status.state.is_final:
            self._end(
                request, EventKind.CANCELLED, RequestState.CANCELLED, RequestCancelled("cancelled", uid=uid)
            )
        return request.status

    def report(self, uid: str, kind: EventKind, stage: str | None = None, **detail: Any) -> None:
        """Let something happen to a request."""
        request = self._request(uid)
        request.events.append(
            RequestEvent(uid, len(request.events), kind, time.time(), stage, "node-1", detail)
        )
        if kind is EventKind.STAGE_STARTED:
            request.status = evolve(request.status, state=RequestState.RUNNING)
        request.changed.set()
        request.changed = anyio.Event()

    def finish(self, uid: str, value: Any, content_type: str = VALUE_CONTENT_TYPE) -> None:
        """Let a request end with a result; with a content type, ``value`` is its bytes."""
        request = self._request(uid)
        request.data = b"".join(value_to_bytes(value)) if content_type == VALUE_CONTENT_TYPE else value
        request.content_type = content_type
        size = len(request.data)
        request.status = evolve(
            request.status,
            state=RequestState.FINISHED,
            finished_at=time.time(),
            result_bytes=size,
            content_type=content_type,
        )
        self.report(uid, EventKind.FINISHED, result_bytes=size, content_type=content_type)

    def fail(self, uid: str, error: OnePieceError) -> None:
        """Let a request fail."""
        self._end(self._request(uid), EventKind.FAILED, RequestState.FAILED, error)

    def _end(self, request: FakeRequest, kind: EventKind, state: RequestState, error: OnePieceError) -> None:
        request.status = evolve(request.status, state=state, finished_at=time.time(), error=error.to_wire())
        self.report(request.status.uid, kind, **error.to_wire())

    def _request(self, uid: str) -> FakeRequest:
        if uid in self.owned_elsewhere:
            owner = self.owned_elsewhere[uid]
            raise OwnedElsewhere(f"request {uid} is owned by {owner}", http=owner)
        try:
            return self.requests_by_uid[uid]
        except KeyError:
            raise UnknownRequest(f"no request {uid}", uid=uid) from None
