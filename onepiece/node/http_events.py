"""A request's events as server-sent events.

::

    id: 7                              the event's sequence; a client that comes back sends it as
    event: progress                    Last-Event-ID and gets what came after
    data: {"uid": ..., "sequence": 7, "kind": "progress", ...}

    : keep-alive                       when nothing happens; shows both ends that the other is there

The stream ends behind the request's final event, and when the proxy stops: then without a final
event, and the client comes back. A browser's ``EventSource`` comes back in either case, until it is answered
204: that is what it gets if it has seen the final event.
"""

import json
from collections.abc import AsyncIterator
from typing import Final

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from attrs import define
from starlette.types import Receive, Scope, Send

from onepiece.client.api import EVENTS_CONTENT_TYPE, event_to_plain
from onepiece.errors import InvalidInput
from onepiece.node.http_boundary import closing, wait_gone
from onepiece.requests import EventKind, RequestEvent

KEEP_ALIVE: Final = b": keep-alive\n\n"
_FINAL: Final = frozenset({EventKind.FINISHED, EventKind.FAILED, EventKind.CANCELLED})


def format_event(event: RequestEvent) -> bytes:
    """One event as it goes on the wire; JSON has no raw line breaks, so ``data`` is one line."""
    data = json.dumps(event_to_plain(event), separators=(",", ":"))
    return f"id: {event.sequence}\nevent: {event.kind.value}\ndata: {data}\n\n".encode()


def parse_last_event_id(text: str | None) -> int:
    """The sequence behind which a stream goes on; -1 for all of it.

    Raises:
        InvalidInput: The text is no sequence.
    """
    if text is None:
        return -1
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise InvalidInput(f"the Last-Event-ID {text[:40]!r} is no sequence", field="Last-Event-ID")
    return int(text)


async def peeked(events: AsyncIterator[RequestEvent]) -> AsyncIterator[RequestEvent] | None:
    """The same events if there is one; waits for it."""
    async for first in events:
        return _behind(first, events)
    return None


async def _behind(first: RequestEvent, rest: AsyncIterator[RequestEvent]) -> AsyncIterator[RequestEvent]:
    async with closing(rest) as events:
        yield first
        async for event in events:
            yield event


@define
class EventStream:
    """The response; ``left_early`` says, when it is over, whether the client went before the final event."""

    events: AsyncIterator[RequestEvent]
    stopping: anyio.Event
    keep_alive_seconds: float
    left_early: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the final one, the client's leaving, or the proxy's stop."""
        headers = [
            (b"content-type", EVENTS_CONTENT_TYPE.encode()),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        # Of no capacity: the next event is asked for when the last one is sent, so that a slow client
        # leaves it to the node which progress to drop.
        incoming, outgoing = anyio.create_memory_object_stream[RequestEvent](0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._produce, incoming)
            tasks.start_soon(self._watch_client, receive, tasks.cancel_scope)
            tasks.start_soon(self._watch_stop, tasks.cancel_scope)
            await self._send_all(outgoing, send)
            tasks.cancel_scope.cancel()
        if not self.left_early:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _produce(self, incoming: MemoryObjectSendStream[RequestEvent]) -> None:
        async with incoming, closing(self.events) as events:
            async for event in events:
                await incoming.send(event)

    async def _send_all(self, outgoing: MemoryObjectReceiveStream[RequestEvent], send: Send) -> None:
        async with outgoing:
            while True:
                data = KEEP_ALIVE
                with anyio.move_on_after(self.keep_alive_seconds):
                    try:
                        event = await outgoing.receive()
                    except anyio.EndOfStream:
                        return
                    data = format_event(event)
                await send({"type": "http.response.body", "body": data, "more_body": True})
                if data is not KEEP_ALIVE and event.kind in _FINAL:
                    return

    async def _watch_client(self, receive: Receive, scope: anyio.CancelScope) -> None:
        await wait_gone(receive)
        self.left_early = True
        scope.cancel()

    async def _watch_stop(self, scope: anyio.CancelScope) -> None:
        await self.stopping.wait()
        scope.cancel()
