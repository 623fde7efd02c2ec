"""A producer's own way into memory of an owner on the same host: getting it, copying into it, letting go.

A copy of a MiB takes about as long as the event loop can spare. What is longer is copied by a thread, piece
after piece, while the loop hashes what comes behind; the thread and the loop never wait for each other
but for room in the queue.
"""

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Final

import numpy as np
from attrs import frozen

from transports.errors import ProtocolError
from transports.operations import Bytes
from transports.shared_memory import map_memory
from transports.shm_lender import NAME_BYTES_MAX, TOKEN_BYTES
from transports.tcp_wire import PENDING_BYTES_HIGH, PENDING_BYTES_LOW

OFFER_BYTES_MAX: Final = TOKEN_BYTES + NAME_BYTES_MAX

_HERE_BYTES_MAX: Final = 1 << 20
"""What is copied in one turn of the event loop; more goes to the thread."""
_REFUSED: Final = "the owner has none to lend, or runs as another user"
_BUSY_PAUSE_SECONDS: Final = 0.01
_THREADS: Final = 2
"""Of the process, for all links: memory is not faster with more."""


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


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="onepiece-copy")


class MemoryLink:
    """The owner's memory in this process; made by ``open_link``.

    Args:
        lifeline: Closed when nothing more is written.
        memory: Of the region, all of it.
        on_room: Called when a full queue has room again, and when it is empty.
    """

    def __init__(self, lifeline: socket.socket, memory: memoryview, on_room: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._lifeline = lifeline
        self._memory = np.frombuffer(memory, np.uint8)
        self._on_room = on_room
        self._queue: deque[tuple[int, Bytes]] = deque()
        self._copying = False
        self._here_bytes = 0
        self._closed = False
        self.pending_bytes = 0
        """Queued and not yet copied."""
        self.let_go: Final[asyncio.Future[None]] = self._loop.create_future()
        """Done when nothing is written any more, and the owner is told so."""

    def write(self, offset: int, buffers: Sequence[Bytes], length: int) -> None:
        """Copy buffers one behind the other, behind all that is queued; they lie within the region."""
        assert not self._closed
        if not self._copying and self._here_bytes + length <= _HERE_BYTES_MAX:
            if not self._here_bytes:
                self._loop.call_soon(self._new_turn)
            self._here_bytes += length
            for buffer in buffers:
                self._copy(offset, buffer)
                offset += len(buffer)
            return
        for buffer in buffers:
            for start in range(0, len(buffer), PENDING_BYTES_LOW):
                piece = memoryview(buffer)[start : start + PENDING_BYTES_LOW]
                self._queue.append((offset + start, piece))
            offset += len(buffer)
        self.pending_bytes += length
        if not self._copying:
            self._copying = True
            _threads().submit(self._copy_all)

    def _new_turn(self) -> None:
        self._here_bytes = 0

    def _copy(self, offset: int, buffer: Bytes) -> None:
        if len(buffer):
            np.copyto(self._memory[offset : offset + len(buffer)], np.frombuffer(buffer, np.uint8))

    # The thread.

    def _copy_all(self) -> None:
        """Copy until nothing is queued; the loop only ever adds."""
        while self._queue:
            offset, piece = self._queue.popleft()
            if not self._closed:
                self._copy(offset, piece)
            self._tell(self._copied, len(piece))
        self._tell(self._rested)

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the session
            self._loop.call_soon_threadsafe(callback, *arguments)

    # The loop again.

    def _copied(self, length: int) -> None:
        was_full = self.pending_bytes >= PENDING_BYTES_HIGH
        self.pending_bytes -= length
        if was_full or not self.pending_bytes:
            self._on_room()

    def _rested(self) -> None:
        self._copying = False
        if self._queue:  # added while the thread was about to rest
            self._copying = True
            _threads().submit(self._copy_all)
        elif self._closed:
            self._let_go()

    def close(self) -> None:
        """Write nothing more; the owner learns it when a copy that is under way has ended. Idempotent."""
        if not self._closed:
            self._closed = True
            if not self._copying:
                self._let_go()

    def _let_go(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._lifeline.close()
        self.let_go.set_result(None)


async def open_link(offer: Offer, size_bytes: int, on_room: Callable[[], None]) -> MemoryLink | str:
    """Take what the owner offers; why not, if that fails.

    Raises:
        ProtocolError: What the owner lends is not what it promised.
    """
    lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        lifeline.setblocking(False)
        await _visit(lifeline, offer.socket_name)
        lifeline.send(offer.token)
        _, descriptors, _, _ = await _answer(lifeline)
        if not descriptors:
            lifeline.close()
            return _REFUSED
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
        return f"its memory cannot be had: {error}"
    except BaseException:
        lifeline.close()
        raise
    return MemoryLink(lifeline, memory, on_room)


async def _visit(lifeline: socket.socket, name: str) -> None:
    while True:
        try:
            lifeline.connect(f"\0{name}")
        except BlockingIOError:  # many visitors; the session's own patience bounds this
            await asyncio.sleep(_BUSY_PAUSE_SECONDS)
        else:
            return


async def _answer(lifeline: socket.socket) -> tuple[bytes, list[int], int, object]:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def note() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(lifeline.fileno(), note)
    try:
        await readable
    finally:
        loop.remove_reader(lifeline.fileno())
    return socket.recv_fds(lifeline, 1, 1)
