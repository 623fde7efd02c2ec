"""A result over HTTP: as it is stored, by range, or converted for a client that asks for another form.

========================  ===========================================================================
``Accept``                what comes
========================  ===========================================================================
the stored type           the stored bytes; ranges of them
``application/json``      a value without tensors, as JSON
``application/octet-stream``  the bytes of a value that is ``bytes``
``*/*`` or nothing        bytes and plain values in their own form, all else as it is stored
========================  ===========================================================================

A whole result that was sent whole is purged, unless the client says ``?keep=1``. That it was sent does
not prove that it arrived: our own client keeps it, checks its length, and then deletes it.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

import anyio
from anyio import to_thread
from attrs import define, frozen
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from onepiece.client.api import BYTES_CONTENT_TYPE, JSON_CONTENT_TYPE, to_plain
from onepiece.codec import VALUE_CONTENT_TYPE, value_from_bytes
from onepiece.node.frontend import ResultStream
from onepiece.node.http_boundary import closing, wait_gone

_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


@frozen
class Span:
    """A part of a result: ``start`` to ``end``, the latter not included."""

    start: int
    end: int


def parse_range(text: str | None, total_bytes: int) -> Span | None:
    """The span that a ``Range`` header asks for; None for the whole.

    A header of another form, or one with several ranges, is passed over, as HTTP allows.

    Raises:
        HTTPException: 416, the span does not begin within the result.
    """
    found = _RANGE.fullmatch(text.strip()) if text else None
    if found is None:
        return None
    first, last = found.groups()
    if not first and not last:
        return None
    if not first:  # the last so many bytes
        start, end = max(0, total_bytes - int(last)), total_bytes
        beyond = int(last) == 0 or total_bytes == 0
    else:
        start = int(first)
        end = min(int(last) + 1, total_bytes) if last else total_bytes
        beyond = start >= total_bytes
        if last and int(last) < start:
            return None
    if beyond:
        raise HTTPException(
            416,
            f"the range {text!r} does not lie in a result of {total_bytes} bytes",
            {"Content-Range": f"bytes */{total_bytes}"},
        )
    return Span(start, end)


def accepts(header: str | None, content_type: str) -> bool:
    """Whether an ``Accept`` header names this type itself."""
    return any(part.partition(";")[0].strip().lower() == content_type for part in (header or "").split(","))


def accepts_anything(header: str | None) -> bool:
    """Whether an ``Accept`` header leaves the choice to us."""
    return not header or accepts(header, "*/*") or accepts(header, "application/*")


@frozen
class Converted:
    """A result in another form than the stored one."""

    content_type: str
    body: bytes


def is_converted(stream: ResultStream, accept: str | None, bytes_max: int) -> bool:
    """Whether the client wants another form than the stored one (or may, if it takes anything).

    Raises:
        HTTPException: 406, it cannot be had in a form that the client takes.
    """
    if accepts(accept, stream.content_type):
        return False
    if stream.content_type != VALUE_CONTENT_TYPE:
        if accepts_anything(accept) or accepts(accept, BYTES_CONTENT_TYPE):
            return False
        raise _not_acceptable(accept, stream.content_type)
    if stream.total_bytes <= bytes_max:
        return True
    if accepts_anything(accept):
        return False
    raise HTTPException(
        406,
        f"a result of {stream.total_bytes} bytes is not converted, {bytes_max} at most; "
        f"accept {VALUE_CONTENT_TYPE}",
    )


async def convert(stream: ResultStream, accept: str | None) -> Converted | None:
    """The result in another form; None if its value has none and the client takes it as it is stored.

    Raises:
        HTTPException: 406, the value has no form that the client takes.
    """
    data = bytearray()
    async with closing(stream.read(0, stream.total_bytes)) as pieces:
        async for piece in pieces:
            data += piece
    return await to_thread.run_sync(_converted, data, accept)


def _converted(data: bytearray, accept: str | None) -> Converted | None:
    """The first of the value's other forms that the client takes."""
    value = value_from_bytes(data)
    others: list[str] = []
    for form in _forms(value):
        if accepts_anything(accept) or accepts(accept, form.content_type):
            return form
        others.append(form.content_type)
    if accepts_anything(accept):
        return None
    raise _not_acceptable(accept, VALUE_CONTENT_TYPE, *others)


def _forms(value: Any) -> Iterator[Converted]:
    """What a value can be sent as, besides as it is stored; the plainest first."""
    if isinstance(value, bytes):
        yield Converted(BYTES_CONTENT_TYPE, value)
    with suppress(TypeError):  # it holds tensors
        yield Converted(JSON_CONTENT_TYPE, json.dumps(to_plain(value), allow_nan=False).encode())


def _not_acceptable(accept: str | None, *forms: str) -> HTTPException:
    return HTTPException(406, f"the result is no {(accept or '')[:100]}; accept {' or '.join(forms)}")


@define
class ResultResponse:
    """Sends a span of the stored bytes; ``sent`` says, when it is over, whether all of it left."""

    stream: ResultStream
    span: Span | None
    headers: Mapping[str, str]
    sent: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send; ends early, without an error, if the client goes."""
        total = self.stream.total_bytes
        span = self.span or Span(0, total)
        headers = dict(self.headers) | {
            "Content-Type": self.stream.content_type,
            "Content-Length": str(span.end - span.start),
            "Accept-Ranges": "bytes",
        }
        if self.span is not None:
            headers["Content-Range"] = f"bytes {span.start}-{span.end - 1}/{total}"
        await send(
            {
                "type": "http.response.start",
                "status": 200 if self.span is None else 206,
                "headers": [
                    (name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()
                ],
            }
        )
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_watch_client, receive, tasks.cancel_scope)
            await self._send_body(span, send)
            tasks.cancel_scope.cancel()
        if self.sent:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_body(self, span: Span, send: Send) -> None:
        left = span.end - span.start
        async with closing(self.stream.read(span.start, left)) as pieces:
            async for piece in pieces:
                left -= len(piece)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        assert left == 0, f"the store gave {left} bytes less than it said"
        self.sent = True


async def _watch_client(receive: Receive, scope: anyio.CancelScope) -> None:
    await wait_gone(receive)
    scope.cancel()
