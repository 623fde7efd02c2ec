"""A request as its client holds it.

*Cancellation.* A handle is a name, not an owner. Cancelling a task that awaits ``result``, ``wait`` or
``save``, or leaving a loop over ``events``, stops the waiting and nothing else: the request goes on, and
its result stays fetchable by its UID, from this process or another one, until its time to live is
over. ``await handle.cancel()`` is what cancels a request.
"""

import mmap
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, cast

import anyio
from anyio import to_thread
from attrs import define, field

from onepiece.client._http import Persistence, ProxyConnection, Response
from onepiece.client._sse import EventParser
from onepiece.client.api import (
    EVENTS_CONTENT_TYPE,
    event_from_plain,
    status_from_plain,
    strict_json,
)
from onepiece.client.result_file import saving
from onepiece.codec import VALUE_CONTENT_TYPE, WireBytes, WireText, in_host, unpack, value_from_bytes
from onepiece.errors import (
    NodeUnreachable,
    NotReady,
    OnePieceError,
    PayloadTooLarge,
    ResultGone,
    UnknownRequest,
)
from onepiece.graph import TypeSpec
from onepiece.requests import EventKind, RequestEvent, RequestStatus

Output = TypeVar("Output")

ACCEPT: Final = f"{VALUE_CONTENT_TYPE}, */*"
_NO_EVENTS: Final = 204
FINAL_KINDS: Final = frozenset({EventKind.FINISHED, EventKind.FAILED, EventKind.CANCELLED})


@define(eq=False)
class RequestHandle(Generic[Output]):
    """One request, by its UID. Made by ``Client.submit`` and ``Client.attach``."""

    uid: str
    _connection: ProxyConnection = field(repr=False)
    _returns: TypeSpec | None = field(default=None, repr=False)
    """The result's type; None takes what comes."""
    _has_ended: bool = field(default=False, init=False, repr=False)
    """The final event was seen; waiting is over for good."""

    @property
    def url(self) -> str:
        """The URL of the proxy that calls go to now; of another set, if the one that was asked was full."""
        return self._connection.url

    async def status(self) -> RequestStatus:
        """The request's record.

        Raises:
            UnknownRequest: The proxy knows no such request.
            NodeUnreachable: Nobody answers.
        """
        return status_from_plain(await self._connection.call("GET", self._path(), uid=self.uid))

    async def cancel(self) -> RequestStatus:
        """Cancel the request; one that has ended stays as it ended, and that is no error.

        Raises:
            UnknownRequest: The proxy knows no such request.
            NodeUnreachable: Nobody answers.

        Cancelled: the request may or may not be cancelled; call it again.
        """
        return status_from_plain(await self._connection.call("DELETE", self._path(), uid=self.uid))

    async def events(
        self, *, after: int = -1, cancel_on_disconnect: bool = False
    ) -> AsyncGenerator[RequestEvent, None]:
        """The request's events, from the first one on, as they come; ends behind the final one.

        A lost connection is taken up again where it broke: no event comes twice, and none that the
        proxy still has is left out (progress and previews may be, they are replaced by newer ones).

        Args:
            after: Only events of a higher sequence.
            cancel_on_disconnect: Have the proxy cancel the request when this stream ends before the
                final event, for whatever reason; also if this process dies. It is then not taken up
                again.

        Raises:
            UnknownRequest: The proxy knows no such request.
            NodeUnreachable: The connection broke and could not be taken up again.

        Cancelled: the request goes on, unless ``cancel_on_disconnect``.
        """
        persistence = Persistence(self._connection, waits_for_owner=True)
        while True:
            try:
                async with self._event_pieces(after, cancel_on_disconnect) as pieces:
                    if pieces is None:
                        self._has_ended = True
                        return
                    parser = EventParser()
                    async for piece in pieces:
                        for each in parser.feed(piece):
                            event = event_from_plain(strict_json(each.data))
                            if event.sequence <= after:
                                continue
                            after = event.sequence
                            persistence.succeeded()
                            self._has_ended |= event.kind in FINAL_KINDS
                            yield event
                            if event.kind in FINAL_KINDS:
                                return
                raise NodeUnreachable(
                    f"{self._connection.url} ended the events of {self.uid} before the final one",
                    uid=self.uid,
                    is_owner=True,
                )
            except (NodeUnreachable, NotReady) as error:
                if cancel_on_disconnect:
                    raise
                await persistence.failed(error)

    async def wait(self) -> RequestStatus:
        """Wait until the request has ended, however it did.

        Raises:
            UnknownRequest: The proxy knows no such request.
            NodeUnreachable: Nobody answers.

        Cancelled: the request goes on.
        """
        await self._wait_ended()
        return await self.status()

    async def result(self, *, keep: bool = False) -> Output:
        """Wait for the result, read it, and let the store drop it.

        Args:
            keep: Leave it in the store until its time to live is over.

        Returns:
            The value that the workflow returned, of the type its signature says: ``bytes`` for bytes,
            tensors as tensors.

        Raises:
            StageFailed, RequestCancelled, DeadlineExceeded, NodeLost, ...: How the request failed.
            ResultGone: The result was fetched before, or its time to live is over.
            PayloadTooLarge: It exceeds ``result_bytes_max``; ``save`` it.
            UnknownRequest: The proxy knows no such request.
            NodeUnreachable: Nobody answers.

        Cancelled: the request goes on, and its result stays.
        """
        await self._wait_ended()
        sink = _Memory(bytes_max=self._connection.options.result_bytes_max, uid=self.uid)
        await self._fetch(sink)
        if sink.content_type == VALUE_CONTENT_TYPE:
            value = await to_thread.run_sync(value_from_bytes, sink.data, self._returns)
        else:
            value = bytes(sink.data)
        if not keep:
            await self._drop_fetched()
        return cast("Output", value)

    async def save(self, path: Path | str, *, keep: bool = False) -> int:
        """Wait for the result and write it to a file, without having it in memory.

        Bytes are written as they are, a text as UTF-8, any other value as
        ``application/vnd.onepiece.value`` (``onepiece.codec.value_from_bytes`` reads it). The file
        appears when it is whole.

        Args:
            path: The file; replaced if it is there. A symbolic link is followed. What is no regular file
                (a named pipe, ``/dev/stdout``) is written to when the whole result is here.
            keep: Leave the result in the store until its time to live is over.

        Returns:
            The file's size in bytes.

        Raises:
            OSError: The file cannot be written.
            OnePieceError: As for ``result``.

        Cancelled: the request goes on, its result stays, and no file is left.
        """
        async with saving(Path(path), self.uid) as part:
            # Opened before the waiting: who cannot write should hear of it before the work is done.
            async with await anyio.open_file(part, "wb") as file:
                await self._wait_ended()
                sink = _File(file=file)
                await self._fetch(sink)
            if sink.content_type == VALUE_CONTENT_TYPE:
                await to_thread.run_sync(_unwrap, part)
            size = part.stat().st_size
        if not keep:
            await self._drop_fetched()
        return size

    async def drop(self) -> None:
        """Let the store drop the result, before its time to live is over; idempotent.

        ``result`` and ``save`` do so by themselves. That nobody answers is no error: the result's
        time ends anyway.

        Raises:
            UnknownRequest: The proxy knows no such request.
        """
        with suppress(NodeUnreachable, NotReady, ResultGone):
            await self._connection.call("DELETE", self._path("/result"))

    async def _drop_fetched(self) -> None:
        """Drop what is in the caller's hands: whatever becomes of that is no reason to take it away again."""
        with suppress(UnknownRequest):
            await self.drop()

    def _path(self, rest: str = "") -> str:
        return f"/v1/requests/{self.uid}{rest}"

    async def _wait_ended(self) -> None:
        if self._has_ended:
            return
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass

    @asynccontextmanager
    async def _event_pieces(
        self, after: int, cancel_on_disconnect: bool
    ) -> AsyncIterator[AsyncIterator[bytes] | None]:
        """The stream's bytes; None where the request has ended and there is no event behind ``after``."""
        headers = {"Accept": EVENTS_CONTENT_TYPE}
        if after >= 0:
            headers["Last-Event-ID"] = str(after)
        query = {"cancel_on_disconnect": "1"} if cancel_on_disconnect else None
        async with self._connection.stream(
            "GET", self._path("/events"), query=query, headers=headers
        ) as response:
            yield None if response.status_code == _NO_EVENTS else response.aiter_bytes()

    async def _fetch(self, sink: "_Sink") -> None:
        """Read the result's bytes into ``sink``; a broken connection goes on where it broke.

        The result is kept: it is dropped when it is known to be whole.
        """
        persistence = Persistence(self._connection, waits_for_owner=True)
        while not sink.is_whole:
            received = sink.received
            try:
                await self._fetch_rest(sink)
            except (NodeUnreachable, NotReady) as error:
                # Not ready: it has ended, and the store that has the result is not there, or not heard yet.
                if sink.received > received:
                    persistence.succeeded()
                if not sink.is_whole:
                    await persistence.failed(error)

    async def _fetch_rest(self, sink: "_Sink") -> None:
        headers = {"Accept": ACCEPT, "Accept-Encoding": "identity"}
        if sink.received:
            headers["Range"] = f"bytes={sink.received}-"
        async with self._connection.stream(
            "GET", self._path("/result"), query={"keep": "1"}, headers=headers
        ) as response:
            total = _total_bytes(response)
            sink.begin(total, str(response.headers.get("Content-Type", "")).partition(";")[0])
            async for piece in response.aiter_raw():
                await sink.write(piece)
        if not sink.is_whole:
            raise NodeUnreachable(
                f"{self._connection.url} sent {sink.received} of the {total} bytes of {self.uid}",
                url=self._connection.url,
            )


@define
class _Sink:
    """Where a result goes, and how much of it is there."""

    received: int = 0
    total: int | None = None
    content_type: str = ""

    @property
    def is_whole(self) -> bool:
        return self.received == self.total

    def begin(self, total: int, content_type: str) -> None:
        """Learn what comes."""
        self.total, self.content_type = total, content_type

    async def write(self, piece: bytes) -> None:
        """Take the next bytes."""
        self.received += len(piece)


@define
class _Memory(_Sink):
    """Collects a result in memory."""

    data: bytearray = field(factory=bytearray)
    bytes_max: int = 0
    uid: str = ""

    def begin(self, total: int, content_type: str) -> None:
        if total > self.bytes_max:
            raise PayloadTooLarge(
                f"the result of {self.uid} has {total} bytes, and result_bytes_max is {self.bytes_max}: "
                "write it to a file with save(path)",
                uid=self.uid,
                bound=self.bytes_max,
            )
        _Sink.begin(self, total, content_type)

    async def write(self, piece: bytes) -> None:
        self.data += piece
        await _Sink.write(self, piece)


@define
class _File(_Sink):
    """Collects a result in a file."""

    file: Any = None

    async def write(self, piece: bytes) -> None:
        await self.file.write(piece)
        await _Sink.write(self, piece)


def _total_bytes(response: Response) -> int:
    """The size of the whole result, whether all of it comes or the rest."""
    ranged = response.headers.get("Content-Range", "").rpartition("/")[2]
    text = ranged or response.headers.get("Content-Length", "")
    if not text.isdigit():
        raise OnePieceError(f"{response.url} sent a result without its size: is it a proxy of onepiece?")
    return int(text)


def _unwrap(path: Path) -> None:
    """Make a file that holds a packed ``bytes`` or ``str`` one that holds just that."""
    bare = path.with_name(f"{path.name}.bare")
    if _write_bare(path, bare):
        bare.replace(path)


def _write_bare(path: Path, bare: Path) -> bool:
    # The map is closed when the last view of it is gone, which is when this function returns.
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    match unpack(memoryview(mapped), type(None)).values.get("value"):
        case WireBytes(buffer=buffer) | WireText(buffer=buffer):
            bare.write_bytes(in_host(buffer))
        case bytes() as data:
            bare.write_bytes(data)
        case str() as text:
            bare.write_text(text, "utf-8", newline="")
        case _:
            return False
    return True
