"""A connected stream, driven by callbacks: bytes straight into memory, buffers straight out of it.

``SocketWire`` works on the socket itself. asyncio's own transports would copy whatever the socket
does not take at once into a buffer of their own (up to Python 3.11), which for bulk data costs more
than the sending does; here the queue holds views and ``sendmsg`` gathers them. ``TlsWire`` has to
encrypt, so it copies anyway and is built on asyncio's transport.

The other end of a wire is an ``Endpoint``. Nothing of it is called from within ``send``.
"""

import asyncio
import socket
import ssl
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol, cast

from transports.operations import Bytes

PENDING_BYTES_HIGH: Final = 4 << 20
"""Queued bytes from which on whoever adds more has to wait."""
PENDING_BYTES_LOW: Final = 1 << 20
"""Queued bytes from which on they may go on."""

_CONGESTION_ON_ONE_MACHINE: Final = b"reno"
"""Part of every Linux kernel, open to every user, and without pacing."""
_BUFFERS_PER_CALL: Final = 64
_RECEIVED_BYTES_PER_TURN: Final = 8 << 20
"""After so many bytes of one connection the event loop turns to others."""


def _is_within_host(connection: socket.socket) -> bool:
    try:
        return bool(connection.getsockname()[0] == connection.getpeername()[0])
    except OSError:  # the peer is gone already
        return False


def hang_up(connection: socket.socket) -> None:
    """Close a socket so that its peer hears of it, though a forked child may have a copy of it open."""
    with suppress(OSError):  # it may have ended already
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _tune(connection: socket.socket, *, within_host: bool) -> None:
    """Set what suits small questions beside bulk data."""
    # Either may fail: the peer may be gone already, other systems have other names.
    with suppress(OSError, AttributeError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if within_host:
            # Between processes of one machine there is no path to be probed. A control that paces (bbr) takes
            # the pauses between our messages for a slow path, and then sends at a third of the rate.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _CONGESTION_ON_ONE_MACHINE)


class Endpoint(Protocol):
    """What a wire feeds."""

    def next_buffer(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        ...

    def received(self, count: int) -> None:
        """``count`` bytes were put into ``next_buffer``."""
        ...

    def has_room(self) -> None:
        """The queue has fallen below ``PENDING_BYTES_LOW``."""
        ...

    def progressed(self) -> None:
        """The peer has taken bytes."""
        ...

    def lost(self, error: OSError | None) -> None:
        """The stream has ended: None says that the peer ended it in good order. Called once at most."""
        ...


class Wire(ABC):
    """A connected stream and its queue of bytes to be sent."""

    is_within_host = False
    """Both ends have the same address, so no packet leaves the host."""

    @property
    @abstractmethod
    def pending_bytes(self) -> int:
        """Bytes queued and not yet taken by the system."""

    @property
    def has_room(self) -> bool:
        """More may be sent without waiting."""
        return self.pending_bytes < PENDING_BYTES_HIGH

    @abstractmethod
    def send(self, buffers: Sequence[Bytes]) -> None:
        """Send buffers one after the other, without copying them where the wire allows."""

    @abstractmethod
    def pause_receiving(self) -> None:
        """Leave what comes in to the system's buffer."""

    @abstractmethod
    def resume_receiving(self) -> None:
        """Go on."""

    @abstractmethod
    def finish_sending(self) -> None:
        """Tell the peer, behind what is queued, that nothing more comes."""

    @abstractmethod
    def close(self) -> None:
        """End the stream at once; ``Endpoint.lost`` is not called any more. Idempotent."""


class SocketWire(Wire):
    """A plain socket."""

    def __init__(self, connection: socket.socket, endpoint: Endpoint) -> None:
        connection.setblocking(False)
        self.is_within_host = _is_within_host(connection)
        _tune(connection, within_host=self.is_within_host)
        self._socket = connection
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._queue: deque[memoryview] = deque()
        self._pending_bytes = 0
        self._finishing = False
        self._closed = False
        self._receiving = False
        self.resume_receiving()

    @property
    def pending_bytes(self) -> int:
        """Bytes queued and not yet taken by the system."""
        return self._pending_bytes

    @property
    def local_host(self) -> str:
        """This side's own address on the way to the peer."""
        host: str = self._socket.getsockname()[0]
        return host

    def send(self, buffers: Sequence[Bytes]) -> None:
        """Send at once what the system takes, and queue views of the rest."""
        if self._closed or self._finishing:
            return
        if self._queue:
            self._enqueue(buffers, 0)
            return
        try:
            sent = self._socket.sendmsg(buffers[:_BUFFERS_PER_CALL])
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._loop.call_soon(self._broken, error)
            return
        self._enqueue(buffers, sent)
        if self._queue:
            self._loop.add_writer(self._socket.fileno(), self._writable)

    def _enqueue(self, buffers: Sequence[Bytes], sent: int) -> None:
        for buffer in buffers:
            length = len(buffer)
            if sent >= length:
                sent -= length
                continue
            self._queue.append(memoryview(buffer)[sent:])
            self._pending_bytes += length - sent
            sent = 0

    def _writable(self) -> None:
        had_room = self._pending_bytes <= PENDING_BYTES_LOW
        try:
            while self._queue:
                sent = self._socket.sendmsg([*self._first()])
                self._sent(sent)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._broken(error)
            return
        self._endpoint.progressed()
        if not self._queue:
            self._loop.remove_writer(self._socket.fileno())
            if self._finishing:
                self._shut()
        if not had_room and self._pending_bytes <= PENDING_BYTES_LOW:
            self._endpoint.has_room()

    def _first(self) -> list[memoryview]:
        count = min(len(self._queue), _BUFFERS_PER_CALL)
        return [self._queue[index] for index in range(count)]

    def _sent(self, count: int) -> None:
        self._pending_bytes -= count
        while count:
            first = self._queue[0]
            if count < len(first):
                self._queue[0] = first[count:]
                return
            count -= len(first)
            self._queue.popleft()

    def _readable(self) -> None:
        budget = _RECEIVED_BYTES_PER_TURN
        while budget > 0 and self._receiving:
            buffer = self._endpoint.next_buffer()
            try:
                count = self._socket.recv_into(buffer)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._lost(error)
                return
            if count == 0:
                self._lost(None)
                return
            self._endpoint.received(count)
            if count < len(buffer):
                return  # that was all there is
            budget -= count

    def _broken(self, error: OSError) -> None:
        """Sending failed; what the peer said before it closed may still be there, so that goes first."""
        for _ in range(16):
            if self._closed:
                return
            self._receiving = True
            self._readable()
        self._lost(error)

    def _lost(self, error: OSError | None) -> None:
        if not self._closed:
            self.close()
            self._endpoint.lost(error)

    def pause_receiving(self) -> None:
        """Leave what comes in to the system's buffer."""
        if self._receiving:
            self._receiving = False
            self._loop.remove_reader(self._socket.fileno())

    def resume_receiving(self) -> None:
        """Go on."""
        if not self._receiving and not self._closed:
            self._receiving = True
            self._loop.add_reader(self._socket.fileno(), self._readable)

    def finish_sending(self) -> None:
        """Close the sending half once the queue is empty."""
        if not self._finishing and not self._closed:
            self._finishing = True
            if not self._queue:
                self._shut()

    def _shut(self) -> None:
        with suppress(OSError):  # the peer may have closed already
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket and forget what was queued."""
        if self._closed:
            return
        self._closed = True
        self._receiving = False
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._queue.clear()
        self._pending_bytes = 0
        hang_up(self._socket)


class TlsWire(Wire, asyncio.BufferedProtocol):
    """An encrypted stream; asyncio's transport does the work. ``shake_hands`` comes first."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._transport: asyncio.Transport | None = None
        self._full = False
        self._closed = False

    async def shake_hands(
        self,
        connection: socket.socket,
        context: ssl.SSLContext,
        *,
        server_hostname: str | None,
        timeout_seconds: float,
    ) -> None:
        """Do the TLS handshake on a connected socket; as the server if ``server_hostname`` is None.

        Raises:
            OSError: It failed (``ssl.SSLError`` and its kinds among others); the socket is closed.
        """
        loop = asyncio.get_running_loop()
        self.is_within_host = _is_within_host(connection)
        if server_hostname is None:
            await loop.connect_accepted_socket(
                lambda: self, connection, ssl=context, ssl_handshake_timeout=timeout_seconds
            )
        else:
            await loop.create_connection(
                lambda: self,
                sock=connection,
                ssl=context,
                server_hostname=server_hostname,
                ssl_handshake_timeout=timeout_seconds,
            )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio has finished the TLS handshake."""
        # Not asserted: uvloop's transports do not descend from asyncio's, they only do the same.
        self._transport = transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(high=PENDING_BYTES_HIGH, low=PENDING_BYTES_LOW)
        if self._closed:
            transport.abort()

    def get_buffer(self, _: int) -> memoryview:
        """Where asyncio puts the next bytes."""
        return self._endpoint.next_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Asyncio has put them there."""
        if not self._closed:
            self._endpoint.received(nbytes)

    def eof_received(self) -> bool:
        """The peer sends nothing more."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Asyncio has closed the connection."""
        if not self._closed:
            self._closed = True
            if exc is not None and not (isinstance(exc, OSError) and str(exc)):
                exc = OSError(str(exc) or type(exc).__name__)  # asyncio makes some without a word
            self._endpoint.lost(exc)

    def pause_writing(self) -> None:
        """Asyncio's buffer is full."""
        self._full = True

    def resume_writing(self) -> None:
        """Asyncio's buffer has room."""
        self._full = False
        self._endpoint.progressed()
        self._endpoint.has_room()

    @property
    def pending_bytes(self) -> int:
        """Bytes that asyncio holds."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    @property
    def has_room(self) -> bool:
        """More may be sent without waiting."""
        return not self._full

    def send(self, buffers: Sequence[Bytes]) -> None:
        """Encrypt and send."""
        if self._closed or self._transport is None:
            return
        for buffer in buffers:
            if len(buffer):
                self._transport.write(buffer)

    def pause_receiving(self) -> None:
        """Leave what comes in to the system's buffer."""
        if self._transport is not None and not self._closed:
            self._transport.pause_reading()

    def resume_receiving(self) -> None:
        """Go on."""
        if self._transport is not None and not self._closed:
            self._transport.resume_reading()

    def finish_sending(self) -> None:
        """TLS has no half that could be closed alone; the peer learns it from the last frame."""

    def close(self) -> None:
        """End the connection at once."""
        if not self._closed:
            self._closed = True
            if self._transport is not None:
                self._transport.abort()
