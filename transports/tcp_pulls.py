"""Both ends of a pull over a connection: the owner asks for parts of an export, the producer sends them.

The owner asks for several parts at a time, so that the connection never rests between two. A part that nobody
waits for any more (the pull was cancelled) is dropped when it comes. The producer answers in the order of the
questions, for as long as the connection takes it, and with GONE for what it does not export (any more).
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final

from attrs import define, field, frozen

from transports import tcp_frames as frames
from transports.errors import ExportGone, ProtocolError, TransportError
from transports.operations import Bytes
from transports.tcp_frames import Header, Kind

_ASKED_MAX: Final = 64
"""Questions that a producer keeps while its connection is full; an owner has far fewer open."""


@define(eq=False)
class _Part:
    """What was asked for and has not come."""

    length: int
    into: memoryview | None
    """``None``: nobody waits for it any more."""
    came: asyncio.Future[None]


class Pulls:
    """The owner's end.

    Args:
        send: Puts frames on the connection.
    """

    def __init__(self, send: Callable[[Sequence[Bytes]], None]) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._parts: dict[int, _Part] = {}
        self._tags = count()

    async def pull(self, key: bytes, into: memoryview) -> None:
        """Fetch an export; raises as ``Region.pull``."""
        await self._fetch(key, into, len(into))

    async def look(self, key: bytes, into: memoryview) -> None:
        """Fetch the first byte of an export, which so stands: raises as ``Region.pull``."""
        await self._fetch(key, into, 1)

    async def _fetch(self, key: bytes, into: memoryview, length_wanted: int) -> None:
        """Fetch the first so many bytes."""
        export, length = frames.parse_export_key(key)
        if length != len(into):
            raise ExportGone(f"an export of {length} bytes was asked for as {len(into)}")
        wanted = into[:length_wanted]
        asked: deque[int] = deque()
        try:
            for start in range(0, len(wanted), frames.PULL_BYTES_MAX):
                if len(asked) >= frames.PULLS_OPEN_MAX:
                    await self._come(asked)
                asked.append(self._ask(export, start, wanted[start : start + frames.PULL_BYTES_MAX]))
            while asked:
                await self._come(asked)
        finally:
            for tag in asked:
                self._abandon(tag)

    def _ask(self, export: int, start: int, into: memoryview) -> int:
        tag = next(self._tags) % (1 << 32)
        self._parts[tag] = _Part(len(into), into, self._loop.create_future())
        self._send([frames.frame(Kind.PULL, tag=tag, a=export, b=start, c=len(into))])
        return tag

    async def _come(self, asked: deque[int]) -> None:
        part = self._parts[asked[0]]
        await part.came
        del self._parts[asked.popleft()]

    def _abandon(self, tag: int) -> None:
        part = self._parts.get(tag)
        if part is None:
            return  # its answer came between the cancellation and now
        part.into = None
        if part.came.done() and not part.came.cancelled():
            part.came.exception()
            del self._parts[tag]  # its answer is there already
        part.came.cancel()

    def place(self, header: Header) -> memoryview | None:
        """Where the body of a PULLED frame belongs; raises ``ProtocolError`` if it was not asked for."""
        part = self._parts.get(header.tag)
        if part is None or part.length != header.body:
            raise ProtocolError(f"{header.body} bytes with tag {header.tag}, which were not asked for")
        return part.into

    def answered(self, header: Header) -> None:
        """A PULLED or GONE frame is complete."""
        part = self._parts.get(header.tag)
        if part is None:
            raise ProtocolError(f"an answer with tag {header.tag}, for which nobody has asked")
        if part.came.cancelled():
            del self._parts[header.tag]
        elif part.came.done():
            raise ProtocolError(f"a second answer with tag {header.tag}")
        elif header.kind == Kind.GONE:
            part.came.set_exception(ExportGone("the producer does not export this (any more)"))
        else:
            part.came.set_result(None)

    def fail(self, error: TransportError) -> None:
        """The session has ended."""
        for part in self._parts.values():
            part.into = None
            if not part.came.done():
                part.came.set_exception(error)
                part.came.exception()  # perhaps it waits behind another part, which has the same


@frozen
class _Asked:
    """A question that waits for room on the connection."""

    tag: int
    export: int
    start: int
    length: int


@define(eq=False)
class Lending:
    """The producer's end.

    Args:
        send: Puts frames on the connection.
        has_room: The connection takes more.
    """

    _send: Callable[[Sequence[Bytes]], None]
    _has_room: Callable[[], bool]
    _lent: dict[int, tuple[memoryview, ...]] = field(factory=dict)
    _numbers: "count[int]" = field(factory=count)
    _asked: deque[_Asked] = field(factory=deque)

    def export(self, buffers: Sequence[Bytes]) -> bytes:
        """Lend the concatenation of ``buffers``; its key. No number is given twice in a session."""
        number = next(self._numbers)
        self._lent[number] = tuple(map(memoryview, buffers))
        return frames.export_key(number, sum(map(len, buffers)))

    def withdraw(self, key: bytes) -> None:
        """Lend it no longer."""
        number, _ = frames.parse_export_key(key)
        self._lent.pop(number, None)

    def asked(self, header: Header) -> None:
        """The owner asks for a part; raises ``ProtocolError`` if it asks for too much."""
        if header.c > frames.PULL_BYTES_MAX or len(self._asked) >= _ASKED_MAX:
            raise ProtocolError(f"a pull of {header.c} bytes, beside {len(self._asked)} others")
        self._asked.append(_Asked(header.tag, header.a, header.b, header.c))
        self.answer()

    def answer(self) -> None:
        """Send what was asked for, while the connection takes it."""
        while self._asked and self._has_room():
            asked = self._asked.popleft()
            parts = frames.cut(self._lent.get(asked.export, ()), asked.start, asked.length)
            if asked.length and sum(map(len, parts)) == asked.length:
                self._send([frames.frame(Kind.PULLED, tag=asked.tag, body=asked.length), *parts])
            else:
                self._send([frames.frame(Kind.GONE, tag=asked.tag)])

    def end(self) -> None:
        """Lend nothing any more."""
        self._lent.clear()
        self._asked.clear()
