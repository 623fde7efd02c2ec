"""A producer's own way into memory of an owner on the same host: getting it, copying into it, letting go.

The event loop copies, piece by piece, and turns to others in between. A thread would leave the loop free,
but took up to half as much processor time again: two threads that hand each other pieces of a millisecond
wait for the interpreter's lock, and what is hashed behind its copy is still in the cache.
"""

import asyncio
import socket
from collections.abc import Sequence
from typing import Final

from attrs import frozen

from transports.errors import ProtocolError
from transports.operations import Bytes
from transports.process_memory import address_of
from transports.shared_memory import map_memory
from transports.shm_lender import LENT_AND_READ, NAME_BYTES_MAX, TOKEN, TOKEN_BYTES
from transports.tcp_wire import hang_up

OFFER_BYTES_MAX: Final = TOKEN_BYTES + NAME_BYTES_MAX

_PIECE_BYTES: Final = 2 << 20
_TURN_BYTES_MAX: Final = 2 << 20
"""What one session copies in a turn of the event loop, before others have theirs."""
_REFUSED: Final = "the owner has none to lend, or runs as another user"
_NO_ROOM: Final = "this process has no file descriptor free for it"
_BUSY_PAUSE_SECONDS: Final = 0.01
_BUSY_PAUSES_MAX: Final = 100


@frozen
class Offer:
    """Where the memory can be had, and by what."""

    token: bytes
    socket_name: str

    @classmethod
    def parse(cls, body: memoryview) -> "Offer":
        """Read the body of an ATTACHED frame; raises ``ProtocolError``."""
        name = bytes(body[TOKEN_BYTES:])
        if not name.replace(b"-", b"").isalnum():
            raise ProtocolError(f"an offer of {len(body)} bytes names no socket")
        return cls(bytes(body[:TOKEN_BYTES]), name.decode("ascii"))


class MemoryLink:
    """The owner's memory in this process; made by ``open_link``.

    Args:
        lifeline: Closed when nothing more is written.
        memory: Of the region, all of it.
        is_read: The owner can read this process's memory.
    """

    def __init__(self, lifeline: socket.socket, memory: memoryview, *, is_read: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self.is_read: Final = is_read
        self._lifeline = lifeline
        self._memory = memory
        self._turn_bytes = 0
        self.closed = False

    async def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        """Copy buffers, which lie within the region, one behind the other; stops where the link is closed."""
        for buffer in buffers:
            whole = memoryview(buffer)
            for start in range(0, len(whole), _PIECE_BYTES):
                piece = whole[start : start + _PIECE_BYTES]
                if self._turn_bytes >= _TURN_BYTES_MAX:
                    await asyncio.sleep(0)
                if self.closed:
                    return
                self._copy(offset + start, piece)
            offset += len(whole)

    def _copy(self, offset: int, piece: memoryview) -> None:
        if not self._turn_bytes:
            self._loop.call_soon(self._new_turn)
        self._turn_bytes += len(piece)
        # With the interpreter's lock held: to get it back, beside a thread that computes, takes longer.
        self._memory[offset : offset + len(piece)] = piece

    def _new_turn(self) -> None:
        self._turn_bytes = 0

    def close(self) -> None:
        """Write nothing more, and let the owner know. Idempotent."""
        if not self.closed:
            self.closed = True
            self._memory = memoryview(b"")
            hang_up(self._lifeline)  # a forked child may have a copy, but not the memory


async def open_link(
    offer: Offer, size_bytes: int, timeout_seconds: float, *, may_be_read: bool
) -> MemoryLink | str:
    """Take what the owner offers; why not, if that fails.

    Args:
        offer: The owner's.
        size_bytes: Of the region.
        timeout_seconds: For the owner's answer.
        may_be_read: Let the owner try whether it can read this process's memory.

    Raises:
        ProtocolError: What the owner lends is not what it promised.
    """
    try:
        lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        return _cannot_be_had(error)
    try:
        lifeline.setblocking(False)
        await _visit(lifeline, offer.socket_name)
        token = memoryview(offer.token)
        lifeline.send(TOKEN.pack(offer.token, address_of(token) if may_be_read else 0))
        said, descriptors, _, _ = await _answer(lifeline, timeout_seconds)
        if not descriptors:
            lifeline.close()
            return _NO_ROOM if said else _REFUSED
        try:
            memory = memoryview(map_memory(descriptors[0], size_bytes))
        finally:
            for descriptor in descriptors:
                socket.close(descriptor)
    except (ConnectionResetError, BrokenPipeError):
        lifeline.close()
        return _REFUSED
    except OSError as error:
        lifeline.close()
        return _cannot_be_had(error)
    except BaseException:
        lifeline.close()
        raise
    return MemoryLink(lifeline, memory, is_read=said == LENT_AND_READ)


def _cannot_be_had(error: OSError) -> str:
    return f"its memory cannot be had: {error}"


async def _visit(lifeline: socket.socket, name: str) -> None:
    for _ in range(_BUSY_PAUSES_MAX):
        try:
            lifeline.connect(f"\0{name}")
        except BlockingIOError:  # many visitors
            await asyncio.sleep(_BUSY_PAUSE_SECONDS)
        else:
            return
    raise BlockingIOError("too many visitors")


async def _answer(lifeline: socket.socket, timeout_seconds: float) -> tuple[bytes, list[int], int, object]:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def note() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(lifeline.fileno(), note)
    try:
        await asyncio.wait([readable], timeout=timeout_seconds)
    finally:
        loop.remove_reader(lifeline.fileno())
    if not readable.done():
        raise TimeoutError(f"no answer within {timeout_seconds} s")
    return socket.recv_fds(lifeline, 1, 1)
