"""The ucx transport: tcp's sessions, and writes that need no processor of the owner's.

``ucx://host:port/name``. The port is a connection as of ``tcp``: it proves the cluster secret, carries
questions, answers, beats and reasons, and its end is the session's end. Beside it UCX finds a wire
into the owner's memory: shared memory between processes of a host, or RDMA. Where there is none the
session goes on over its connection alone; ``?require=one-sided`` (or ``shm``, ``rdma``) makes that
an error, and ``RemoteMemory.capabilities.wire`` says what is in use.

A region may have memory of a CUDA device beside it, if libucp handles such memory and a session's puts get
there by themselves; otherwise the inbox, or the session, is refused.

What it survives: whatever tcp survives, and a producer that goes on writing after its session has
ended. What it does not: a member of the cluster that means harm. It can write anywhere in the
regions that it has a session on.
"""

import socket
import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Final

from transports._libucp import UcpError, UcpMissingError, load
from transports.address import Address
from transports.device_memory import DeviceError, DeviceMemory
from transports.errors import ConnectFailed, DeviceUnreachable, ListenFailed, UnknownScheme
from transports.memory import Accept, Claimant, Keeper, Listener, Options, Region, RemoteMemory
from transports.region_memory import RegionMemory
from transports.tcp import TcpListener, TcpTransport
from transports.tcp_producer import TcpMemory
from transports.ucx_link import Requirement
from transports.ucx_owner import LentMemory, UcxOwnerSession, UcxRegion, new_memory
from transports.ucx_producer import UcxMemory
from transports.ucx_worker import Role, Worker

_NO_TLS: Final = "ucx does not encrypt what is written beside the connection; use tcp with certificates"


class UcxTransport(TcpTransport):
    """Serves and reaches regions over UCX; raises ``UnknownScheme`` where there is no libucp."""

    scheme = "ucx"

    def __init__(self) -> None:
        try:
            load()
        except UcpMissingError as error:
            raise UnknownScheme(f"ucx:// cannot be used: {error}") from error

    def check(self, address: Address) -> None:
        """Raise ``AddressError`` for options that mean nothing."""
        Requirement.of(address)

    def listen(self, address: Address, options: Options) -> AbstractAsyncContextManager[Listener]:
        """Bind host and port (0: a free one); raises ``ListenFailed``."""
        if _wants_tls(options):
            raise ListenFailed(f"cannot listen on {address}: {_NO_TLS}")
        return super().listen(address, options)

    async def connect(self, address: Address, hello: bytes, options: Options) -> RemoteMemory:
        """Open a session on the region that ``address`` names."""
        if _wants_tls(options):
            raise ConnectFailed(f"cannot connect to {address}: {_NO_TLS}")
        try:
            return await super().connect(address, hello, options)
        except UcpError as error:
            raise ConnectFailed(f"cannot connect to {address}: {error}") from error

    def _new_listener(
        self, server: socket.socket, address: Address, options: Options, context: ssl.SSLContext | None
    ) -> TcpListener:
        assert context is None
        try:
            return UcxListener(server, address, options)
        except UcpError as error:
            raise ListenFailed(f"cannot listen on {address}: {error}; see `onepiece doctor`") from error

    def _new_memory(self, address: Address, hello: bytes, options: Options, *, encrypted: bool) -> TcpMemory:
        assert not encrypted
        return UcxMemory(address, hello, options)


def _wants_tls(options: Options) -> bool:
    return options.tls_certificate is not None or options.tls_authority is not None


class UcxListener(TcpListener):
    """A bound port, and the worker that producers reach beside it."""

    _new_region = UcxRegion

    def __init__(self, server: socket.socket, address: Address, options: Options) -> None:
        self.requirement = Requirement.of(address)
        self.doorbells: dict[bytes, UcxOwnerSession] = {}
        self._worker = Worker(Role.OWNER, self._rung)
        super().__init__(server, address, options, None)

    @property
    def worker_address(self) -> bytes:
        """By which producers make endpoints."""
        return self._worker.address

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
        if device is not None and keeper is None:
            raise ValueError(
                "ucx retires regions: who gives it memory of a device has to say what is whole in it"
            )
        region = await super().register(
            name,
            size_bytes,
            accept=accept,
            on_notify=on_notify,
            on_session_lost=on_session_lost,
            device=device,
            claimant=claimant,
        )
        assert isinstance(region, UcxRegion)
        region.keeper = keeper
        return region

    async def close(self) -> None:
        """Close the port, every region and every connection."""
        await super().close()
        self._worker.close()

    def _rung(self, key: bytes) -> None:
        session = self.doorbells.get(key)
        if session is not None:
            session.ring()

    def _new_memory(self, size_bytes: int) -> RegionMemory:
        return new_memory(size_bytes)

    def _memory_beside(self, size_bytes: int, device: DeviceMemory) -> RegionMemory:
        if self.requirement is Requirement.TCP:
            raise DeviceUnreachable(
                f"{self._address} cannot serve memory of {device.device.name}: nothing gets there over tcp;"
                " leave out require=tcp, or the inbox in the host's memory"
            )
        try:
            return LentMemory(size_bytes, device)
        except (DeviceError, DeviceUnreachable, UcpError) as error:
            raise DeviceUnreachable(
                f"{self._address} cannot serve memory of {device.device.name}: {error}"
            ) from error

    def _new_session(self, peer: str) -> UcxOwnerSession:
        return UcxOwnerSession(self, peer)
