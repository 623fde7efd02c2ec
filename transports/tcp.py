"""The tcp transport: one-sided access emulated over a connection per session.

``tcp://host:port/name``. The owner's process carries out every operation, in the order of the
frames (``tcp_frames``); payloads are received straight into the region and sent straight from the
producer's buffers (``tcp_wire``). Sessions prove the cluster secret in both directions, and are
encrypted where certificates are given.

Between processes of one host payloads take a shorter way, without being asked: the producer maps the
owner's memory and copies into it (``shm_producer``, ``shm_owner``). ``?shm=off`` in the address of
either side leaves that out; with ``?shm=required`` a producer takes no other way.

What it survives: a peer that dies, stalls or goes silent at any point; anything a stranger sends
to the port. What it does not: a member of the cluster who writes to the wrong place inside a
region, which no transport can tell from the right one.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

from attrs import evolve

from transports.address import Address
from transports.background import Background
from transports.device_memory import DeviceMemory
from transports.errors import (
    ConnectFailed,
    DeviceUnreachable,
    ListenFailed,
    OperationTimeout,
    UnknownRegion,
)
from transports.memory import Accept, Claimant, Keeper, Listener, Options, Region, RemoteMemory, Transport
from transports.region_memory import RegionMemory, wanted_for
from transports.shared_memory import Bypass, new_memory
from transports.shm_lender import Lender
from transports.shm_owner import LendingRegion, LendingSession
from transports.shm_producer import SharingMemory
from transports.tcp_owner import OwnerSession, TcpRegion
from transports.tcp_producer import TcpMemory
from transports.tcp_wire import SocketWire, TlsWire

_LOG: Final = logging.getLogger(__name__)

_BACKLOG: Final = 128
_CONNECTIONS_MAX: Final = 4096
"""Connections of one listener, sessions and strangers together."""
_TLS_HINT: Final = "do both sides have certificates, each of an authority that the other one trusts?"
_ACCEPT_PAUSE_SECONDS: Final = 0.1
"""How long to leave new connections alone when the process has run out of file descriptors."""


class TcpTransport(Transport):
    """Serves and reaches regions over TCP."""

    scheme = "tcp"

    def check(self, address: Address) -> None:
        """Raise ``AddressError`` for options that mean nothing."""
        Bypass.of(address)

    def listen(self, address: Address, options: Options) -> AbstractAsyncContextManager[Listener]:
        """Bind host and port (0: a free one); raises ``ListenFailed``."""
        self.check(address)
        return self._listening(address, options)

    @asynccontextmanager
    async def _listening(self, address: Address, options: Options) -> AsyncIterator[Listener]:
        context = _owner_tls(address, options)
        server = await _bind(address)
        port = server.getsockname()[1]
        try:
            listener = self._new_listener(server, evolve(address, port=port, name=""), options, context)
        except BaseException:
            server.close()
            raise
        try:
            yield listener
        finally:
            await listener.close()

    # What a transport that builds on this one makes in another way.

    def _new_listener(
        self, server: socket.socket, address: Address, options: Options, context: ssl.SSLContext | None
    ) -> "TcpListener":
        return TcpListener(server, address, options, context, _lender(address))

    def _new_memory(self, address: Address, hello: bytes, options: Options, *, encrypted: bool) -> TcpMemory:
        return SharingMemory(address, hello, options, encrypted=encrypted)

    async def connect(self, address: Address, hello: bytes, options: Options) -> RemoteMemory:
        """Open a session on the region that ``address`` names."""
        self.check(address)
        context = _producer_tls(address, options)
        try:
            async with asyncio.timeout(options.connect_timeout_seconds):
                connection = await _connect_socket(address)
                memory = self._new_memory(address, hello, options, encrypted=context is not None)
                return await _open_session(connection, memory, address, options, context)
        except TimeoutError:
            raise OperationTimeout(
                f"{address} did not open a session within {options.connect_timeout_seconds} s"
            ) from None
        except OSError as error:
            hint = _TLS_HINT if isinstance(error, ssl.SSLError) else "is the node up, and its address right?"
            raise ConnectFailed(f"cannot connect to {address}: {error}; {hint}") from error


async def _open_session(
    connection: socket.socket,
    memory: TcpMemory,
    address: Address,
    options: Options,
    context: ssl.SSLContext | None,
) -> TcpMemory:
    try:
        if context is None:
            memory.wire = SocketWire(connection, memory)
        else:
            memory.wire = wire = TlsWire(memory)
            await wire.shake_hands(
                connection,
                context,
                server_hostname=address.host,
                timeout_seconds=options.connect_timeout_seconds,
            )
        await memory.open()
    except BaseException:
        await memory.close()
        raise
    return memory


class TcpListener(Listener):
    """A bound port and everything that is connected to it."""

    def __init__(
        self,
        server: socket.socket,
        address: Address,
        options: Options,
        context: ssl.SSLContext | None,
        lender: Lender | None = None,
    ) -> None:
        self.options = options
        self.lender = lender
        self._server = server
        self._address = address
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._background = Background(self._failed)
        self._regions: dict[str, TcpRegion] = {}
        self._sessions: set[OwnerSession] = set()
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(server.fileno(), self._acceptable)

    @property
    def address(self) -> Address:
        """The address really bound."""
        return self._address

    async def register(
        self,
        name: str,
        size_bytes: int,
        *,
        accept: Accept,
        on_notify: Callable[[], None],
        on_session_lost: Callable[[int], None],
        device: DeviceMemory | None = None,
        keeper: Keeper | None = None,
        claimant: Claimant | None = None,
    ) -> Region:
        """Serve zeroed memory under ``name``; raises ``ValueError`` if the name is taken."""
        if name in self._regions:
            raise ValueError(f"{self._address.region(name)} serves a region of this name already")
        place = self._address.region(name)
        with wanted_for(place, size_bytes):
            memory = (
                self._new_memory(size_bytes) if device is None else self._memory_beside(size_bytes, device)
            )
        region = self._new_region(
            place,
            memory,
            accept=accept,
            on_notify=on_notify,
            on_session_lost=on_session_lost,
            on_closed=lambda: self._regions.pop(name),
            claimant=claimant,
        )
        self._regions[name] = region
        return region

    # What a transport that builds on this one makes in another way.

    _new_region: Callable[..., TcpRegion] = LendingRegion

    def _new_memory(self, size_bytes: int) -> RegionMemory:
        return RegionMemory(size_bytes) if self.lender is None else new_memory(size_bytes)

    def _memory_beside(self, size_bytes: int, device: DeviceMemory) -> RegionMemory:
        raise DeviceUnreachable(
            f"{self._address} cannot serve memory of {device.device.name}: {self._address.scheme} does not"
            " reach devices; listen on verbs:// or ucx://, where all is in one process on local://here, or"
            " leave the inbox in the host's memory"
        )

    def _new_session(self, peer: str) -> OwnerSession:
        return LendingSession(self, peer)

    async def close(self) -> None:
        """Close the port, every region and every connection."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._server.fileno())
        self._server.close()
        await self._background.stop()
        for region in list(self._regions.values()):
            region.shut()
        for session in list(self._sessions):
            session.close()
        if self.lender is not None:
            self.lender.close()

    # What sessions need; see ``tcp_owner.House``.

    def find(self, name: str) -> TcpRegion:
        """The region of this name; raises ``UnknownRegion``."""
        region = self._regions.get(name)
        if region is None:
            raise UnknownRegion(f"{self._address} serves no region {name!r}")
        return region

    def start(self, work: Coroutine[Any, Any, None]) -> object:
        """Run something until it ends or the listener is closed."""
        return self._background.start(work)

    def forget(self, session: OwnerSession) -> None:
        """The session's connection is closed."""
        self._sessions.discard(session)

    def _acceptable(self) -> None:
        for _ in range(_BACKLOG):
            try:
                connection, peer = self._server.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors, as a rule; the connection stays in the backlog meanwhile.
                _LOG.warning("%s cannot accept a connection: %s", self._address, error)
                self._loop.remove_reader(self._server.fileno())
                self._timer = self._loop.call_later(_ACCEPT_PAUSE_SECONDS, self._accept_again)
                return
            if len(self._sessions) >= _CONNECTIONS_MAX:
                _LOG.warning(
                    "%s has %d connections; %s is turned away", self._address, _CONNECTIONS_MAX, peer
                )
                connection.close()
                continue
            self._receive(connection, f"{peer[0]}:{peer[1]}")

    def _accept_again(self) -> None:
        self._timer = None
        self._loop.add_reader(self._server.fileno(), self._acceptable)

    def _receive(self, connection: socket.socket, peer: str) -> None:
        session = self._new_session(peer)
        self._sessions.add(session)
        if self._context is None:
            session.wire = SocketWire(connection, session)
            return
        connection.setblocking(False)
        session.wire = wire = TlsWire(session)
        self.start(self._encrypt(session, wire, connection, self._context))

    async def _encrypt(
        self, session: OwnerSession, wire: TlsWire, connection: socket.socket, context: ssl.SSLContext
    ) -> None:
        try:
            await wire.shake_hands(
                connection,
                context,
                server_hostname=None,
                timeout_seconds=self.options.connect_timeout_seconds,
            )
        except OSError as error:
            session.lost(error)

    def _failed(self, error: BaseException) -> None:
        _LOG.error("%s failed while it opened a session", self._address, exc_info=error)


def _lender(address: Address) -> Lender | None:
    bypass = Bypass.of(address)
    if bypass is Bypass.OFF:
        return None
    try:
        return Lender(reads=bypass is not Bypass.COPY)
    except OSError as error:
        if bypass is Bypass.REQUIRED:
            raise ListenFailed(f"{address} asks for shared memory, and none can be lent: {error}") from error
        _LOG.warning("%s lends no memory to processes of this host: %s", address, error)
        return None


async def _bind(address: Address) -> socket.socket:
    try:
        family, kind, protocol, place = (await _resolve(address, socket.AI_PASSIVE))[0]
        server = socket.socket(family, kind, protocol)
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.setblocking(False)
            server.bind(place)
            server.listen(_BACKLOG)
        except BaseException:
            server.close()
            raise
    except OSError as error:
        raise ListenFailed(
            f"cannot listen on {address}: {error}; choose another port (0 takes a free one) or a host of"
            " this machine"
        ) from error
    return server


async def _resolve(address: Address, flags: int = 0) -> list[tuple[int, int, int, Any]]:
    """Family, kind, protocol and place of each of the host's addresses; raises ``OSError``."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags)
    except ValueError as error:  # no name at all: an empty label, one of more than 63 letters, a NUL
        raise OSError(f"{address.host!r} is no host's name ({error})") from error
    except RuntimeError as error:  # no thread to ask the resolver in (ulimit -u, a container's bound)
        raise OSError(f"{address.host!r} cannot be looked up ({error})") from error
    return [(family, kind, protocol, place) for family, kind, protocol, _, place in found]


async def _connect_socket(address: Address) -> socket.socket:
    """Connect to the first of the host's addresses that answers."""
    loop = asyncio.get_running_loop()
    failure = OSError(f"{address.host} has no address")
    for family, kind, protocol, place in await _resolve(address):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setblocking(False)
            await loop.sock_connect(connection, place)
        except OSError as error:
            connection.close()
            failure = error
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise failure


def _owner_tls(address: Address, options: Options) -> ssl.SSLContext | None:
    if options.tls_certificate is None:
        return None
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=options.tls_authority)
        context.load_cert_chain(options.tls_certificate, options.tls_key)
    except OSError as error:
        raise ListenFailed(
            f"cannot listen on {address}: the certificate {options.tls_certificate!r}, its key"
            f" {options.tls_key!r} or the authority {options.tls_authority!r} cannot be used: {error}"
        ) from error
    if options.tls_authority is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _producer_tls(address: Address, options: Options) -> ssl.SSLContext | None:
    if options.tls_authority is None and options.tls_certificate is None:
        return None
    try:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=options.tls_authority)
        if options.tls_certificate is not None:
            context.load_cert_chain(options.tls_certificate, options.tls_key)
    except OSError as error:
        raise ConnectFailed(
            f"cannot connect to {address}: the certificate {options.tls_certificate!r}, its key"
            f" {options.tls_key!r} or the authority {options.tls_authority!r} cannot be used: {error}"
        ) from error
    return context
