"""The verbs transport: one-sided access by RDMA adapters, over InfiniBand or RoCE.

``verbs://host:port/name``. The port is a connection as of ``tcp``: it proves the cluster secret, carries
what the two ends need to know of each other, nudges and reasons, and its end is the session's end. Reads,
writes, swaps and additions are the adapters' work; the owner's processor hears notifications only.

``?device=mlx5_0&port=1&gid=3`` chooses where packets leave; left out, the choice follows from what there is
(``verbs_devices``). An address that a listener gives away carries no such options: the names are this
machine's. ``ONEPIECE_VERBS=device=mlx5_0&spin=20`` sets them for all sessions of a process.

What it survives: whatever tcp survives, and a producer that goes on writing after its session has
ended. What it does not: a member of the cluster that means harm. It can write anywhere in the regions that
it has a session on.
"""

import os
import socket
import ssl
from contextlib import AbstractAsyncContextManager
from typing import Final

from attrs import evolve

from transports._pyverbs import VerbsError, VerbsMissingError, adapter, load
from transports.address import Address
from transports.device_memory import DeviceMemory
from transports.errors import ConnectFailed, DeviceUnreachable, ListenFailed, UnknownScheme
from transports.memory import Listener, Options, RemoteMemory
from transports.region_memory import RegionMemory
from transports.tcp import TcpListener, TcpTransport
from transports.tcp_producer import TcpMemory
from transports.verbs_devices import SETTINGS_VARIABLE, NoPlaceError, Wanted, choose, devices_of
from transports.verbs_owner import PinnedMemory, VerbsOwnerSession, VerbsRegion
from transports.verbs_producer import VerbsMemory

_NO_TLS: Final = "adapters do not encrypt what they write; use tcp with certificates"


class VerbsTransport(TcpTransport):
    """Serves and reaches regions over verbs; raises ``UnknownScheme`` where there is no pyverbs."""

    scheme = "verbs"

    def __init__(self) -> None:
        try:
            load()
        except VerbsMissingError as error:
            raise UnknownScheme(f"verbs:// cannot be used: {error}") from error

    def check(self, address: Address) -> None:
        """Raise ``AddressError`` for options that mean nothing, here or in the environment."""
        _wanted(address)

    def listen(self, address: Address, options: Options) -> AbstractAsyncContextManager[Listener]:
        """Bind host and port (0: a free one) and open a device; raises ``ListenFailed``."""
        if _wants_tls(options):
            raise ListenFailed(f"cannot listen on {address}: {_NO_TLS}")
        return super().listen(address, options)

    async def connect(self, address: Address, hello: bytes, options: Options) -> RemoteMemory:
        """Open a session on the region that ``address`` names."""
        if _wants_tls(options):
            raise ConnectFailed(f"cannot connect to {address}: {_NO_TLS}")
        return await super().connect(address, hello, options)

    def _new_listener(
        self, server: socket.socket, address: Address, options: Options, context: ssl.SSLContext | None
    ) -> TcpListener:
        assert context is None
        try:
            return VerbsListener(server, address, options)
        except (NoPlaceError, VerbsError) as error:
            raise ListenFailed(f"cannot listen on {address}: {error}") from error

    def _new_memory(self, address: Address, hello: bytes, options: Options, *, encrypted: bool) -> TcpMemory:
        assert not encrypted
        return VerbsMemory(address, hello, options)


def _wanted(address: Address) -> Wanted:
    return Wanted.of(address, os.environ.get(SETTINGS_VARIABLE, ""))


def _wants_tls(options: Options) -> bool:
    return options.tls_certificate is not None or options.tls_authority is not None


class VerbsListener(TcpListener):
    """A bound port, and the device whose memory producers reach beside it."""

    _new_region = VerbsRegion

    def __init__(self, server: socket.socket, address: Address, options: Options) -> None:
        self.place = choose(devices_of(), _wanted(address), near=server.getsockname()[0])
        self._adapter = adapter(self.place.device)
        if not self._adapter.limits.has_atomics:
            raise VerbsError(
                f"{self.place} has no atomics, which reservations in a ring need; use another device"
            )
        super().__init__(server, evolve(address, options={}), options, None)

    def _new_memory(self, size_bytes: int) -> RegionMemory:
        try:
            return PinnedMemory(size_bytes, self._adapter)
        except VerbsError as error:
            raise ListenFailed(f"{self._address} cannot serve a region on {self.place}: {error}") from error

    def _memory_beside(self, size_bytes: int, device: DeviceMemory) -> RegionMemory:
        try:
            return PinnedMemory(size_bytes, self._adapter, device)
        except VerbsError as error:
            raise DeviceUnreachable(
                f"{self._address} cannot serve memory of {device.device.name} through {self.place}: {error}"
            ) from error

    def _new_session(self, peer: str) -> VerbsOwnerSession:
        return VerbsOwnerSession(self, peer)
