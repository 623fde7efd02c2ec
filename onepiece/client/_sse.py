"""Server-sent events, parsed line by line; bounded, and without I/O."""

from collections.abc import Iterator
from typing import Final

from attrs import define, field, frozen

from onepiece.errors import OnePieceError

BLOCK_BYTES_MAX: Final = 32 << 20
"""The largest event; previews are the large ones."""


@frozen
class ServerSentEvent:
    """One event: the data of its block, and its id if it had one."""

    data: str
    id: str | None = None


@define
class EventParser:
    """Takes a stream's bytes as they come and gives its events; comments are passed over."""

    _rest: bytearray = field(factory=bytearray, init=False)
    _data: list[str] = field(factory=list, init=False)
    _id: str | None = field(default=None, init=False)
    _block_bytes: int = field(default=0, init=False)

    def feed(self, piece: bytes) -> Iterator[ServerSentEvent]:
        """The events that these bytes complete.

        Raises:
            OnePieceError: An event is larger than any proxy sends.
        """
        self._rest += piece
        if b"\n" in piece:
            lines = self._rest.split(b"\n")
            self._rest = lines.pop()
            for line in lines:
                event = self._take(line.removesuffix(b"\r"))
                if event is not None:
                    yield event
        if self._block_bytes + len(self._rest) > BLOCK_BYTES_MAX:
            raise OnePieceError(f"an event of more than {BLOCK_BYTES_MAX} bytes came: is this a proxy?")

    def _take(self, line: bytearray) -> ServerSentEvent | None:
        if not line:
            event = ServerSentEvent("\n".join(self._data), self._id) if self._data else None
            self._data, self._id, self._block_bytes = [], None, 0
            return event
        self._block_bytes += len(line)
        name, _, value = line.decode("utf-8", "replace").partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "id":
            self._id = value
        return None
