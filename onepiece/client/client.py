"""The asynchronous client of a set, through one of its proxies or several."""

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeVar, overload

import anyio
from attrs import define, field

from onepiece.client._http import Body, ClientOptions, ProxyConnection, pause
from onepiece.client.api import (
    KEY_FORM,
    KEY_HEADER,
    PRIORITY_HEADER,
    REDIRECT_PARAMETER,
    SIZE_CLASS_HEADER,
    TENANT_HEADER,
    NodeInfo,
    WorkflowInfo,
    is_key,
    node_from_plain,
    status_from_plain,
    terms_of,
    workflow_from_plain,
)
from onepiece.client.handle import RequestHandle
from onepiece.codec import VALUE_CONTENT_TYPE, Packed, pack_inputs
from onepiece.errors import (
    InvalidInput,
    NodeUnreachable,
    NotReady,
    Overloaded,
    UnknownNode,
    UnknownRequest,
    UnknownWorkflow,
)
from onepiece.graph import TypeSpec
from onepiece.ids import is_node_name, is_uid
from onepiece.limits import OTHER_SETS_MAX
from onepiece.requests import RequestStatus
from onepiece.workflow import Workflow, WorkflowCall

Output = TypeVar("Output")

SEND_BYTES: Final = 256 << 10
"""Buffers go to the socket in pieces of this size, so that none is copied whole."""


@asynccontextmanager
async def connect(url: str, options: ClientOptions | None = None) -> AsyncIterator["Client"]:
    """Talk to a set while the block lasts.

    Nothing is sent before the first call: a proxy that does not answer is told by that call, or by
    ``wait_ready``.

    Args:
        url: ``http://host:port`` of any node with the role proxy; of several, with commas between them.
            Calls go to the first until it does not answer, drains, or is not ready; then to the next.
        options: How patient to be.

    Raises:
        ConfigError: A URL is unusable.

    Cancelled: connections are closed; requests go on.
    """
    async with ProxyConnection.open(url, options or ClientOptions()) as connection:
        yield Client(connection)


@define(eq=False)
class Client:
    """A client of one set; made by ``connect``. Its methods may be called concurrently.

    Every call that finds nobody is repeated a few times with growing pauses, at each proxy; all of them
    are safe to repeat. A request that every proxy refuses as ``Overloaded`` is submitted to the other sets
    that they name. A rejection (``Overloaded``, ``NotReady``) by all of them is told at once and
    never repeated by itself: ``fields["retry_after_seconds"]`` says when it makes sense to.
    """

    _connection: ProxyConnection = field(repr=False)

    @property
    def url(self) -> str:
        """The URL of the proxy that calls go to now."""
        return self._connection.url

    @overload
    async def submit(
        self,
        call: WorkflowCall[Output],
        /,
        *,
        timeout: float | None = ...,
        key: str | None = ...,
        priority: int = ...,
        size_class: str = ...,
    ) -> RequestHandle[Output]: ...

    @overload
    async def submit(
        self,
        call: str,
        /,
        inputs: Mapping[str, Any] | None = ...,
        *,
        timeout: float | None = ...,
        key: str | None = ...,
        priority: int = ...,
        size_class: str = ...,
    ) -> RequestHandle[Any]: ...

    async def submit(
        self,
        call: WorkflowCall[Any] | str,
        /,
        inputs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        key: str | None = None,
        priority: int = 0,
        size_class: str = "",
    ) -> RequestHandle[Any]:
        """Submit a request; it is accepted when this returns.

        Args:
            call: A workflow called with its inputs, or a workflow's name.
            inputs: With a name: the inputs.
            timeout: Seconds from now after which the request fails with ``DeadlineExceeded``; the
                proxy's default unless given.
            key: Names the request for its submitter: the same key again gives the same request, from
                this process or any other. One is made if none is given, so that a reply that got
                lost never makes a second request.
            priority: From -2 to 2; where the set is full, each level gets more than the one below, and
                stages begin earlier with it.
            size_class: Which requests take about as long as this one ("480p"): forecasts tell them apart,
                and a stage does not let short ones wait behind long ones.

        Raises:
            Rejected: ``UnknownWorkflow``, ``InvalidInput`` (the field is named: it is of the wrong type,
                or has no form on the wire), ``PayloadTooLarge``, ``NotReady``, ``Overloaded``: nothing of
                it is kept.
            NodeUnreachable: Nobody answers.

        Cancelled: the request may have been accepted; submitting again with the same ``key`` tells.
        """
        returns: TypeSpec | None = None
        if isinstance(call, WorkflowCall):
            if inputs is not None:
                raise InvalidInput("inputs are given twice: with the workflow's call, and beside it")
            workflow, inputs, returns = call.workflow, call.inputs, call.returns
        else:
            workflow = call
        packed = pack_inputs(inputs or {})
        terms = terms_of(self._connection.options.tenant, priority, size_class)
        query = {"workflow": workflow, REDIRECT_PARAMETER: "0"}  # it turns to other sets by itself
        if timeout is not None:
            query["timeout_seconds"] = _seconds(timeout)
        headers = {
            KEY_HEADER: secrets.token_urlsafe(18) if key is None else _checked_key(key),
            "Content-Type": VALUE_CONTENT_TYPE,
            "Content-Length": str(packed.length),
            TENANT_HEADER: terms.tenant,
            PRIORITY_HEADER: str(terms.priority),
            SIZE_CLASS_HEADER: terms.size_class,
        }
        body = _body(packed)
        try:
            answer, connection = await self._post(query, headers, body), self._connection
        except Overloaded as refusal:
            answer, connection = await self._post_elsewhere(refusal, query, headers, body)
        return RequestHandle(status_from_plain(answer).uid, connection, returns)

    async def _post_elsewhere(
        self, refusal: Overloaded, query: Mapping[str, str], headers: Mapping[str, str], body: Body
    ) -> tuple[Any, ProxyConnection]:
        """Submit at another set that a refusal names; raises the first one's refusal if none takes it."""
        urls = refusal.fields.get("elsewhere")
        if not self._connection.options.tries_other_sets or not isinstance(urls, list):
            raise refusal
        for url in urls[:OTHER_SETS_MAX]:
            connection = self._connection.of_other_set(str(url))
            with suppress(NotReady, Overloaded, NodeUnreachable, UnknownWorkflow):
                path = "/v1/requests"
                return await connection.call(
                    "POST", path, query=query, headers=headers, body=body
                ), connection
        raise refusal

    async def _post(self, query: Mapping[str, str], headers: Mapping[str, str], body: Body) -> Any:
        """Submit at a proxy that takes it; the key keeps it one request, whoever else took it."""
        for _ in self._connection.urls[1:]:
            asked = self._connection.url
            try:
                return await self._connection.call(
                    "POST", "/v1/requests", query=query, headers=headers, body=body
                )
            except (NotReady, Overloaded):
                self._connection.turn_from(asked)
        return await self._connection.call("POST", "/v1/requests", query=query, headers=headers, body=body)

    @overload
    def attach(self, uid: str, workflow: Workflow[..., Output]) -> RequestHandle[Output]: ...

    @overload
    def attach(self, uid: str, workflow: None = ...) -> RequestHandle[Any]: ...

    def attach(self, uid: str, workflow: Workflow[..., Any] | None = None) -> RequestHandle[Any]:
        """The handle of a request that was submitted before, here or elsewhere; nothing is sent.

        Args:
            uid: The request's UID.
            workflow: Its workflow, for the type of the result; needed only where that holds objects
                of classes of yours.

        Raises:
            UnknownRequest: The text has not a UID's form.
        """
        if not is_uid(uid):  # it becomes part of a path, which it could lead elsewhere
            raise UnknownRequest(f"{uid[:60]!r} is no UID of a request", uid=uid[:60])
        return RequestHandle(uid, self._connection, workflow.graph.returns if workflow else None)

    async def requests(self, *, limit: int = 100, state: str | None = None) -> Sequence[RequestStatus]:
        """The latest requests of the proxy that answers, since it was started; newest first.

        Args:
            limit: How many at most.
            state: Only those in this state.

        Raises:
            InvalidInput: The limit or the state is out of range.
            NodeUnreachable: Nobody answers.
        """
        query = {"limit": str(limit)} | ({"state": state} if state is not None else {})
        answer = await self._connection.call("GET", "/v1/requests", query=query)
        return [status_from_plain(each) for each in answer["requests"]]

    async def workflows(self) -> Sequence[WorkflowInfo]:
        """What can be submitted.

        Raises:
            NodeUnreachable: Nobody answers.
        """
        answer = await self._connection.call("GET", "/v1/workflows")
        return [workflow_from_plain(each) for each in answer["workflows"]]

    async def nodes(self) -> Sequence[NodeInfo]:
        """The members of the set, as the proxy sees them.

        Raises:
            NodeUnreachable: Nobody answers.
        """
        answer = await self._connection.call("GET", "/v1/nodes")
        return [node_from_plain(each) for each in answer["nodes"]]

    async def node(self, name: str) -> NodeInfo:
        """One node of the set; ``waits_for`` says what it still holds if it drains.

        Raises:
            UnknownNode: No node of this name is in the set; those that are are listed.
            NodeUnreachable: Nobody answers, or that node does not.
        """
        return node_from_plain(await self._connection.call("GET", _node_path(name)))

    async def placement(self) -> Mapping[str, Any]:
        """What the manager wants to run where, what does, and the moves: see ``GET /v1/placement``.

        Raises:
            NodeUnreachable: Nobody answers, or the manager does not.
        """
        answer: Mapping[str, Any] = await self._connection.call("GET", "/v1/placement")
        return answer

    async def admission(self) -> Mapping[str, Any]:
        """What the proxy that answers lets in, and how often it refused and why; see the HTTP reference.

        Raises:
            NodeUnreachable: Nobody answers.
        """
        found: Mapping[str, Any] = await self._connection.call("GET", "/v1/admission")
        return found

    async def drain(self, node: str) -> NodeInfo:
        """Have a node take no new work; it finishes what it holds, and is ``drained`` when nothing is left.

        Raises:
            UnknownNode: No node of this name is in the set; those that are are listed.
            NodeUnreachable: Nobody answers, or that node does not.
        """
        return node_from_plain(await self._connection.call("POST", f"{_node_path(node)}/drain"))

    async def resume(self, node: str) -> NodeInfo:
        """Have a node that drains take work again.

        Raises:
            UnknownNode: No node of this name is in the set; those that are are listed.
            NotReady: It was told to stop, and does not resume.
            NodeUnreachable: Nobody answers, or that node does not.
        """
        return node_from_plain(await self._connection.call("POST", f"{_node_path(node)}/resume"))

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until every stage of every workflow is loaded.

        Args:
            timeout: Seconds to wait at most; for ever unless given.

        Raises:
            NotReady: Time is over; the message says what was missing.
            NodeUnreachable: Time is over, and nobody answered.
        """
        attempt = 0
        latest: NotReady | NodeUnreachable | None = None
        with anyio.move_on_after(timeout):
            while True:
                try:
                    await self._connection.call("GET", "/readyz")
                except (NotReady, NodeUnreachable) as error:
                    latest = error
                else:
                    return
                await pause(attempt)
                attempt += 1
        raise latest or NodeUnreachable(f"{self.url} did not answer within {timeout} seconds", url=self.url)


def _node_path(name: str) -> str:
    if not is_node_name(name):
        raise UnknownNode(f"{name[:60]!r} is no name of a node; see `onepiece nodes`", node=name[:60])
    return f"/v1/nodes/{name}"


def _seconds(timeout: object) -> str:
    if not isinstance(timeout, int | float):
        raise InvalidInput(f"the timeout is {timeout!r}: give seconds", field="timeout_seconds")
    return repr(float(timeout))


def _checked_key(key: object) -> str:
    if isinstance(key, str) and is_key(key) and key == key.strip():
        return key
    raise InvalidInput(f"the key is {repr(key)[:40]}: {KEY_FORM}", field="key")


def _body(packed: Packed) -> Body:
    """A body that can be sent again, should the connection break."""

    async def pieces() -> AsyncIterator[bytes]:
        for part in packed.parts:
            view = memoryview(part)
            for start in range(0, len(view), SEND_BYTES):
                yield bytes(view[start : start + SEND_BYTES])

    return pieces
