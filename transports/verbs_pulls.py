"""Pulls by the adapter: the owner reads what a producer lends, and no processor of the producer's helps.

::

    producer: export --registers the buffers--> key: number and length, then address, key and length of each
    owner:    pull   --asks for the first byte over the connection--> it is lent, and stays so until delivered
                     --reads the rest, window by window, into the memory where it belongs--> done

The first byte over the connection is how an export that has ended is told from one that stands: an adapter
that is sent to memory which is not registered any more ends the whole session. Where buffers cannot be
registered, or are too many for a key, the connection carries all of the export, as it does over ``tcp``.

A read that nobody waits for any more goes on: its memory stays registered until the adapter has done with it.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import count
from struct import Struct
from typing import Final

from attrs import define, field, frozen

from transports import tcp_frames as frames
from transports._pyverbs import Domain, Readable, Registered, VerbsError
from transports._pyverbs_pair import Pair, Verb, Work
from transports.errors import ExportGone, TransportError
from transports.operations import Bytes
from transports.ring.offers import KEY_BYTES_MAX

READS_MAX: Final = 64
"""Reads of one session that are under way at a time."""

_PIECE_BYTES: Final = 256 << 10
_PINNED_BYTES_MAX: Final = 256 << 20
"""What a session registers for its peer; registering takes the event loop 0.1 ms for each MiB or so."""
_PART: Final = Struct("<QQI")
_ADDRESSES: Final = 1 << 64
_PLAIN_BYTES: Final = len(frames.export_key(0, 0))
_PARTS_MAX: Final = (KEY_BYTES_MAX - _PLAIN_BYTES) // _PART.size
_LOG: Final = logging.getLogger(__name__)


class NotPinnedError(VerbsError):
    """Memory to read into cannot be registered."""


@frozen
class Part:
    """A piece of the producer's memory that the owner's adapter may read."""

    address: int
    length: int
    key: int


def long_key(plain: bytes, parts: Sequence[Part]) -> bytes:
    """The key of an export that adapters can read."""
    return plain + b"".join(_PART.pack(part.address, part.length, part.key) for part in parts)


def plain_key(key: bytes) -> bytes:
    """The key by which the connection knows an export."""
    return key[:_PLAIN_BYTES]


def parts_of(key: bytes, length: int) -> list[Part]:
    """Where an export of this length lies; nothing where only the connection has it.

    Raises:
        ExportGone: The parts are not ``length`` bytes together: no key of ours.
    """
    rest = key[_PLAIN_BYTES:]
    if not rest:
        return []
    if len(rest) % _PART.size:
        raise ExportGone(f"an export's key of {len(key)} bytes is none of this transport's")
    parts = [Part(*each) for each in _PART.iter_unpack(rest)]
    if sum(part.length for part in parts) != length or not all(map(_can_be, parts)):
        raise ExportGone(f"an export whose parts are not the {length} bytes that were asked for")
    return parts


def _can_be(part: Part) -> bool:
    """It has bytes, and none beyond the largest address."""
    return 0 < part.length <= _ADDRESSES - part.address


def windows_of(parts: Sequence[Part], piece_bytes: int, pieces_max: int) -> list[list[Part]]:
    """Cut parts into pieces of at most ``piece_bytes``, and those into windows of at most ``pieces_max``."""
    pieces = [
        Part(part.address + done, min(piece_bytes, part.length - done), part.key)
        for part in parts
        for done in range(0, part.length, piece_bytes)
    ]
    return [pieces[start : start + pieces_max] for start in range(0, len(pieces), pieces_max)]


# The producer's end.


@define(eq=False)
class Readables:
    """What the exports of one session have registered."""

    _domain: Domain
    _held: dict[bytes, list[Readable]] = field(factory=dict)
    _pinned_bytes: int = 0
    _has_complained: bool = False

    def export(self, plain: bytes, buffers: Sequence[Bytes]) -> bytes:
        """The key of an export, whose bytes the peer may read from now on, if they can be registered."""
        filled = [buffer for buffer in buffers if len(buffer)]
        length = sum(map(len, filled))
        if not filled or len(filled) > _PARTS_MAX or self._pinned_bytes + length > _PINNED_BYTES_MAX:
            return plain
        held: list[Readable] = []
        try:
            for buffer in filled:
                held.append(Readable(self._domain, buffer))  # noqa: PERF401  # what is there must be closed
        except VerbsError as error:
            for each in held:
                each.close()
            self._complain(error)
            return plain
        self._pinned_bytes += length
        self._held[plain] = held
        return long_key(plain, [Part(each.address, each.length, each.key) for each in held])

    def _complain(self, error: VerbsError) -> None:
        if not self._has_complained:
            self._has_complained = True
            _LOG.warning("large messages of this session take its connection: %s", error)

    def withdraw(self, plain: bytes) -> None:
        """The peer may read it no longer."""
        for each in self._held.pop(plain, ()):
            self._pinned_bytes -= each.length
            each.close()

    def close(self) -> None:
        """The peer may read nothing; its packets are refused already."""
        for plain in list(self._held):
            self.withdraw(plain)


# The owner's end.


@define(eq=False)
class _Window:
    """Reads under way, and the memory that they go to."""

    memory: Registered
    last: int
    done: asyncio.Future[None]


class Reads:
    """Reads of one session's exports.

    Args:
        pair: The session's.
        domain: Of that pair; what is read into is registered there, and not for peers.
        ended: Raises why the session is over, if it is.
    """

    def __init__(self, pair: Pair, domain: Domain, ended: Callable[[], None]) -> None:
        self._pair = pair
        self._domain = domain
        self._ended = ended
        self._reads_max = min(READS_MAX, domain.adapter.limits.queue)
        self._ids = count(1)
        self._window: _Window | None = None

    async def read(self, parts: Sequence[Part], into: memoryview) -> None:
        """Fetch what lies in ``parts``; cancelled, it may still be written into ``into`` for a while.

        Raises:
            PeerLost, SessionFenced: The session ended before the last byte was read.
            NotPinnedError: The memory to read into cannot be registered; the session goes on.
            VerbsError: Nothing can be posted any more.
        """
        start = 0
        for window in windows_of(parts, _PIECE_BYTES, self._reads_max):
            length = sum(part.length for part in window)
            await self._read_window(window, into[start : start + length])
            start += length

    async def _read_window(self, parts: Sequence[Part], into: memoryview) -> None:
        while self._window is not None:  # of another pull, or of one that was cancelled
            await asyncio.wait([self._window.done])
        self._ended()
        try:
            memory = Registered(self._domain, into, for_peers=False)
        except VerbsError as error:
            raise NotPinnedError(str(error)) from error
        works, place = [], memory.address
        for part in parts:
            works.append(
                Work(
                    id=next(self._ids),
                    verb=Verb.READ,
                    local=place,
                    length=part.length,
                    remote=part.address,
                    remote_key=part.key,
                    signalled=False,
                )
            )
            place += part.length
        works[-1].signalled = True
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._window = _Window(memory, works[-1].id, done)
        self._pair.post(works, memory.local_key)
        await asyncio.wait([done])
        done.result()

    def completed(self, id_: int) -> None:
        """The adapter has carried out this read, and all before it."""
        window = self._window
        if window is not None and id_ == window.last:
            self._end_window(window)
            window.done.set_result(None)

    def end(self, error: TransportError) -> None:
        """The session is over, and its pair closed: the adapter writes nothing any more."""
        window = self._window
        if window is not None:
            self._end_window(window)
            window.done.set_exception(error)
            window.done.exception()  # perhaps nobody waits for it any more

    def _end_window(self, window: _Window) -> None:
        self._window = None
        window.memory.close()
