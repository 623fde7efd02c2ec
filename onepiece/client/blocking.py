"""The blocking twin: the asynchronous client on an event loop in a thread of its own.

Every method does what the one of the same name in ``client`` and ``handle`` does, takes the same
arguments and raises the same errors; there is no second implementation. An exception in the calling
thread (Ctrl-C) abandons the call; requests go on, as when an asynchronous caller is cancelled.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

from anyio.from_thread import BlockingPortal, start_blocking_portal
from attrs import define, field

from onepiece.client._http import ClientOptions
from onepiece.client.api import NodeInfo, WorkflowInfo
from onepiece.client.client import Client, connect
from onepiece.client.handle import RequestHandle
from onepiece.errors import OnePieceError
from onepiece.requests import RequestEvent, RequestStatus
from onepiece.workflow import Workflow, WorkflowCall

Output = TypeVar("Output")
T = TypeVar("T")


@contextmanager
def connect_blocking(url: str, options: ClientOptions | None = None) -> Iterator["BlockingClient"]:
    """Talk to a proxy while the block lasts; see ``connect``.

    Raises:
        ConfigError: The URL is unusable.
    """
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(connect(url, options)) as client,
    ):
        yield BlockingClient(client, portal)


@define(eq=False)
class BlockingClient:
    """See ``Client``; may be used by several threads."""

    _client: Client = field(repr=False)
    _portal: BlockingPortal = field(repr=False)

    @property
    def url(self) -> str:
        """The URL of the proxy that calls go to now."""
        return self._client.url

    @overload
    def submit(
        self,
        call: WorkflowCall[Output],
        /,
        *,
        timeout: float | None = ...,
        key: str | None = ...,
        priority: int = ...,
        size_class: str = ...,
    ) -> "BlockingRequestHandle[Output]": ...

    @overload
    def submit(
        self,
        call: str,
        /,
        inputs: Mapping[str, Any] | None = ...,
        *,
        timeout: float | None = ...,
        key: str | None = ...,
        priority: int = ...,
        size_class: str = ...,
    ) -> "BlockingRequestHandle[Any]": ...

    def submit(
        self,
        call: WorkflowCall[Any] | str,
        /,
        inputs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        key: str | None = None,
        priority: int = 0,
        size_class: str = "",
    ) -> "BlockingRequestHandle[Any]":
        """See ``Client.submit``."""

        async def submit() -> RequestHandle[Any]:
            if isinstance(call, str):
                return await self._client.submit(
                    call, inputs, timeout=timeout, key=key, priority=priority, size_class=size_class
                )
            return await self._client.submit(
                call, timeout=timeout, key=key, priority=priority, size_class=size_class
            )

        return BlockingRequestHandle(_call(self._portal, submit), self._portal)

    @overload
    def attach(self, uid: str, workflow: Workflow[..., Output]) -> "BlockingRequestHandle[Output]": ...

    @overload
    def attach(self, uid: str, workflow: None = ...) -> "BlockingRequestHandle[Any]": ...

    def attach(self, uid: str, workflow: Workflow[..., Any] | None = None) -> "BlockingRequestHandle[Any]":
        """See ``Client.attach``."""
        return BlockingRequestHandle(self._client.attach(uid, workflow), self._portal)

    def requests(self, *, limit: int = 100, state: str | None = None) -> Sequence[RequestStatus]:
        """See ``Client.requests``."""
        return _call(self._portal, lambda: self._client.requests(limit=limit, state=state))

    def workflows(self) -> Sequence[WorkflowInfo]:
        """See ``Client.workflows``."""
        return _call(self._portal, self._client.workflows)

    def nodes(self) -> Sequence[NodeInfo]:
        """See ``Client.nodes``."""
        return _call(self._portal, self._client.nodes)

    def placement(self) -> Mapping[str, Any]:
        """See ``Client.placement``."""
        return _call(self._portal, self._client.placement)

    def admission(self) -> Mapping[str, Any]:
        """See ``Client.admission``."""
        return _call(self._portal, self._client.admission)

    def node(self, name: str) -> NodeInfo:
        """See ``Client.node``."""
        return _call(self._portal, lambda: self._client.node(name))

    def drain(self, node: str) -> NodeInfo:
        """See ``Client.drain``."""
        return _call(self._portal, lambda: self._client.drain(node))

    def resume(self, node: str) -> NodeInfo:
        """See ``Client.resume``."""
        return _call(self._portal, lambda: self._client.resume(node))

    def wait_ready(self, timeout: float | None = None) -> None:
        """See ``Client.wait_ready``."""
        _call(self._portal, lambda: self._client.wait_ready(timeout))


@define(eq=False)
class BlockingRequestHandle(Generic[Output]):
    """See ``RequestHandle``."""

    _handle: RequestHandle[Output]
    _portal: BlockingPortal = field(repr=False)

    @property
    def uid(self) -> str:
        """The request's UID."""
        return self._handle.uid

    @property
    def url(self) -> str:
        """See ``RequestHandle.url``."""
        return self._handle.url

    def status(self) -> RequestStatus:
        """See ``RequestHandle.status``."""
        return _call(self._portal, self._handle.status)

    def cancel(self) -> RequestStatus:
        """See ``RequestHandle.cancel``."""
        return _call(self._portal, self._handle.cancel)

    def wait(self) -> RequestStatus:
        """See ``RequestHandle.wait``."""
        return _call(self._portal, self._handle.wait)

    def result(self, *, keep: bool = False) -> Output:
        """See ``RequestHandle.result``."""
        return _call(self._portal, lambda: self._handle.result(keep=keep))

    def save(self, path: Path | str, *, keep: bool = False) -> int:
        """See ``RequestHandle.save``."""
        return _call(self._portal, lambda: self._handle.save(path, keep=keep))

    def drop(self) -> None:
        """See ``RequestHandle.drop``."""
        _call(self._portal, self._handle.drop)

    def events(self, *, after: int = -1, cancel_on_disconnect: bool = False) -> Iterator[RequestEvent]:
        """See ``RequestHandle.events``."""
        events = self._handle.events(after=after, cancel_on_disconnect=cancel_on_disconnect)

        async def next_event() -> RequestEvent | None:
            return await anext(events, None)

        try:
            while (event := _call(self._portal, next_event)) is not None:
                yield event
        finally:
            self._portal.call(events.aclose)


def _call(portal: BlockingPortal, method: Callable[[], Awaitable[T]]) -> T:
    try:
        future = portal.start_task_soon(method)
    except RuntimeError as error:
        raise OnePieceError(
            f"the client cannot be used here: {error}; use it in the block that opened it"
        ) from error
    return future.result()
