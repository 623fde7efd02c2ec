r"""What a node and the helper process of an isolated stage say to each other, and how.

::

    node                                  helper process
      |--- IsolatedStart ------------------->|   once
      |<-- IsolatedWaiting ------------------|   a rank of several: its module is imported
      |--- IsolatedGo ---------------------->|   it may run its setup
      |<-- IsolatedPass ---------------------|   if it has loaded, and joins the others before it is ready
      |<-- IsolatedReady, or IsolatedRefusal-|
      |--- IsolatedCall (arguments) -------->|   several at a time, as the stage's concurrency says
      |<-- IsolatedProgress -----------------|
      |--- IsolatedStop -------------------->|   cancelled, or late
      |<-- IsolatedReturn, IsolatedError ----|   one for each call, and the last word about it
      |--- IsolatedUnload ------------------>|   then it exits

A message is what ``codec.pack`` makes: a header of one of these classes, and values whose tensors are
raw bytes. It travels through a socket pair that keeps packets apart::

    0         8               16
    | kind    | body's length | body, or nothing with a file descriptor beside it |

A body of more than a packet's size is written to anonymous shared memory (memfd), whose descriptor
goes along instead. Nothing of it has a name, so nothing is left behind however the two processes end:
the kernel frees it with its last descriptor, those under way in the socket included. Copying large
bodies is done in threads: neither side's event loop ever waits for it.

Packets and descriptors are handed over whole or not at all. What does not fit into the socket's buffer
waits in a queue, bounded by its users: the calls at a time, and one report of progress for each.
"""

import array
import asyncio
import contextlib
import mmap
import os
import socket
import stat
import struct
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import numpy as np
from attrs import define, frozen

from onepiece.codec import Packed, Unpacked, pack, register, unpack
from onepiece.errors import CodecError
from onepiece.limits import ISOLATED_MESSAGE_BYTES_MAX, ISOLATED_PACKET_BYTES_MAX

_Result = TypeVar("_Result")

_PREFIX: Final = struct.Struct("<QQ")
_ONE_DESCRIPTOR: Final = socket.CMSG_SPACE(array.array("i").itemsize)


@register
@frozen
class IsolatedStart:
    """Whose helper the process is to be; ``signature`` is the schema that the node knows the stage by."""

    stage: str
    signature: str
    device: str
    node: str
    import_paths: tuple[str, ...]
    log_format: str
    log_level: str
    rank: int = 0
    world_size: int = 1
    meeting: int | None = None
    """The descriptor of the file by which the ranks find each other."""


@register
@frozen
class IsolatedReady:
    """The stage is loaded; ``memory_bytes`` is what it has taken of its device at most, 0: not known."""

    memory_bytes: int = 0


@register
@frozen
class IsolatedWaiting:
    """The rank is about to run its setup, and waits until it may."""


@register
@frozen
class IsolatedGo:
    """The rank may run its setup."""


@register
@frozen
class IsolatedPass:
    """The rank's setup has loaded what it loads: the next one may begin."""


@register
@frozen
class IsolatedRefusal:
    """The stage cannot be loaded: its module or its setup raised."""

    error: str
    traceback: str


@register
@frozen
class IsolatedCall:
    """Run the stage; the values are its arguments."""

    number: int
    uid: str
    stage: str
    """The graph node."""
    attempt: int
    deadline_at: float | None
    is_merge: bool = False
    """The arguments are what the ranks returned; the stage's merge is to be called with them."""


@register
@frozen
class IsolatedStop:
    """Interrupt a call; ``reason`` as of ``OnePieceError.to_wire``. It still ends with a last word."""

    number: int
    reason: Mapping[str, Any]


@register
@frozen
class IsolatedUnload:
    """Run the rest of the setup, and exit."""


@register
@frozen
class IsolatedProgress:
    """How far a call is: ``kind`` is an ``EventKind`` value, the value ``detail`` says the rest."""

    number: int
    kind: str


@register
@frozen
class IsolatedReturn:
    """A call has returned the value ``value``; ``memory_bytes`` as of ``IsolatedReady``."""

    number: int
    compute_seconds: float
    memory_bytes: int = 0


@register
@frozen
class IsolatedError:
    """A call has ended without a value; after a dirty one the process is not to be trusted with more."""

    number: int
    error: Mapping[str, Any]
    is_dirty: bool


_HEADERS: Final[tuple[type, ...]] = (
    IsolatedStart,
    IsolatedReady,
    IsolatedRefusal,
    IsolatedCall,
    IsolatedStop,
    IsolatedUnload,
    IsolatedProgress,
    IsolatedReturn,
    IsolatedError,
    IsolatedWaiting,
    IsolatedGo,
    IsolatedPass,
)


class EndOfIsolated(Exception):  # noqa: N818 - an end, not an error
    """The other side has closed its end, or is gone."""


async def run_in_thread(function: Callable[[], _Result]) -> _Result:
    """Run blocking work in a thread, to its end even if the caller is cancelled meanwhile.

    So memory that the work reads may be given back when this has returned or raised.
    """
    future = asyncio.get_running_loop().run_in_executor(None, function)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # seen, so that the loop does not complain about it
        raise


class _SharedMemory:
    """Anonymous memory with a descriptor; freed when nobody holds this, nor has mapped or received it."""

    def __init__(self, packed: Packed) -> None:
        self.descriptor = os.memfd_create("onepiece", os.MFD_CLOEXEC)
        for part in packed.parts:
            rest = memoryview(part).cast("B")
            while rest.nbytes:
                rest = rest[os.write(self.descriptor, rest) :]

    def __del__(self) -> None:
        descriptor = getattr(self, "descriptor", None)
        if descriptor is not None:
            os.close(descriptor)


@frozen(eq=False)
class Outgoing:
    """A message that is ready to be sent, to one peer or to several."""

    packet: bytes
    memory: _SharedMemory | None = None


@frozen(eq=False)
class Received:
    """A message; its values lie in ``body``."""

    header: object
    values: Mapping[str, Any]
    body: memoryview


@define(eq=False)
class _Incoming:
    """A packet as it was received; owns its descriptor until somebody takes it."""

    header: type
    length: int
    body: memoryview
    descriptor: int | None

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def read_out(descriptor: int, length: int) -> memoryview:
    """Copy shared memory into memory of this process's own: for messages that live on here."""
    body = np.empty(length, np.uint8).data
    filled = 0
    while filled < length:
        count = os.preadv(descriptor, [body[filled:]], filled)
        if count == 0:
            raise CodecError(f"shared memory of {length} bytes ends at {filled}")
        filled += count
    return body


def map_in(descriptor: int, length: int) -> memoryview:
    """Map shared memory: for messages that are copied out soon. A map keeps a descriptor open."""
    return memoryview(mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY))


class IsolatedChannel:
    """One end of the socket pair.

    Args:
        end: The socket; this owns it from now on.
        take: Makes of a descriptor and a length the bytes in it; called in a thread.
    """

    def __init__(self, end: socket.socket, take: Callable[[int, int], memoryview]) -> None:
        end.setblocking(False)
        self._socket = end
        self._take = take
        # The kernel keeps a packet whole only within its buffer, which a host may have made small.
        self._packet_bytes_max = min(
            ISOLATED_PACKET_BYTES_MAX, end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 4
        )
        self._queue: deque[Outgoing] = deque()
        self._sent: asyncio.Future[None] | None = None
        self._readable: asyncio.Future[None] | None = None
        self._peer_is_gone = False
        self._loop = asyncio.get_running_loop()

    # --- sending -------------------------------------------------------------------------------

    def prepare(self, header: object, values: Mapping[str, Any] | None = None) -> Outgoing:
        """Lay out a message, copying its values; callable from any thread.

        Raises ``CodecError`` if it has no form on the wire, is too large, or the system has no room.
        """
        packed = pack(header, values or {})
        kind = _HEADERS.index(type(header))
        prefix = _PREFIX.pack(kind, packed.length)
        if packed.length <= self._packet_bytes_max:
            return Outgoing(b"".join((prefix, *packed.parts)))
        if packed.length > ISOLATED_MESSAGE_BYTES_MAX:
            raise CodecError(
                f"values of {packed.length} bytes; between a node and a helper process at most"
                f" {ISOLATED_MESSAGE_BYTES_MAX} travel at once"
            )
        try:
            return Outgoing(prefix, _SharedMemory(packed))
        except OSError as error:
            raise CodecError(f"no shared memory for values of {packed.length} bytes: {error}") from error

    async def prepare_in_thread(self, header: object, values: Mapping[str, Any], size: int) -> Outgoing:
        """The same, in a thread if the values are of more than a packet's ``size``."""
        if size <= self._packet_bytes_max:
            return self.prepare(header, values)
        return await run_in_thread(lambda: self.prepare(header, values))

    def send(self, outgoing: Outgoing) -> None:
        """Send, or queue, a prepared message; to a peer that is gone it is dropped."""
        self._queue.append(outgoing)
        if len(self._queue) == 1:
            self._flush()

    async def flushed(self) -> None:
        """Return when all that was sent is in the peer's hands, or the peer is gone."""
        while self._queue:
            self._sent = self._loop.create_future()
            await self._sent

    def _flush(self) -> None:
        while self._queue:
            outgoing = self._queue[0]
            beside = []
            if outgoing.memory is not None:
                descriptors = array.array("i", [outgoing.memory.descriptor])
                beside.append((socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors))
            try:
                self._socket.sendmsg([outgoing.packet], beside)
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._flush)
                return
            except OSError:  # it is gone; whoever waits for its answers learns so by its exit
                self._queue.clear()
                break
            self._queue.popleft()
        if self._socket.fileno() >= 0:
            self._loop.remove_writer(self._socket)
        if self._sent is not None and not self._sent.done():
            self._sent.set_result(None)

    # --- receiving -----------------------------------------------------------------------------

    async def receive(self) -> Received:
        """The next message, in the order they were sent.

        Raises ``EndOfIsolated`` behind the last one, ``CodecError`` if what came is no message. Of a
        message that is being taken when the caller is cancelled nothing is left.
        """
        incoming = await self._next_packet()
        try:
            body = incoming.body
            descriptor, length = incoming.descriptor, incoming.length
            if descriptor is not None:
                body = await run_in_thread(lambda: self._take(descriptor, length))
        finally:
            incoming.close()
        unpacked: Unpacked[object] = unpack(body, incoming.header)
        return Received(unpacked.header, unpacked.values, body)

    def peer_is_gone(self) -> None:
        """The other process has ended: what it sent is still received, then the channel is at its end.

        A process that it has started may hold its end open, so that the socket alone does not say so.
        """
        self._peer_is_gone = True
        self._wake()

    async def _next_packet(self) -> _Incoming:
        while True:
            try:
                data, beside, flags, _ = self._socket.recvmsg(
                    _PREFIX.size + ISOLATED_PACKET_BYTES_MAX, _ONE_DESCRIPTOR, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                if self._peer_is_gone:
                    raise EndOfIsolated from None
                await self._until_readable()
                continue
            except OSError as error:
                raise EndOfIsolated from error
            descriptors = array.array("i")
            for _level, _kind, content in beside:
                descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
            if not data and not descriptors:
                raise EndOfIsolated
            return _incoming(data, flags, list(descriptors))

    async def _until_readable(self) -> None:
        self._readable = self._loop.create_future()
        self._loop.add_reader(self._socket, self._wake)
        try:
            await self._readable
        finally:
            if self._socket.fileno() >= 0:
                self._loop.remove_reader(self._socket)
            self._readable = None

    def _wake(self) -> None:
        if self._readable is not None and not self._readable.done():
            self._readable.set_result(None)

    def close(self) -> None:
        """Close this end; what is queued is dropped."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self._queue.clear()
        self._socket.close()
        self._wake()


def _incoming(data: bytes, flags: int, descriptors: list[int]) -> _Incoming:
    """Check a packet: nothing is allocated for a length that is not there."""
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(data) < _PREFIX.size:
            raise CodecError(f"a packet of {len(data)} bytes that was cut")
        kind, length = _PREFIX.unpack_from(data)
        if kind >= len(_HEADERS):
            raise CodecError(f"a packet of the unknown kind {kind}")
        body = memoryview(data)[_PREFIX.size :]
        if not descriptors:
            if body.nbytes != length:
                raise CodecError(f"a packet with {body.nbytes} bytes that says it has {length}")
            return _Incoming(_HEADERS[kind], length, body, None)
        state = os.fstat(descriptors[0])
        if body.nbytes or not stat.S_ISREG(state.st_mode) or state.st_size != length:
            raise CodecError(f"a descriptor of {state.st_size} bytes beside a packet that says {length}")
        if length > ISOLATED_MESSAGE_BYTES_MAX:
            raise CodecError(f"a message of {length} bytes; {ISOLATED_MESSAGE_BYTES_MAX} at most")
        return _Incoming(_HEADERS[kind], length, body, descriptors.pop())
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
