"""The owner's side of the ucx transport: memory that producers write to by themselves.

Such a session cannot be revoked: what its producer has mapped stays mapped, what its adapter has been
given goes on. So the *memory* is taken away instead. When a session is fenced, or ends in any other
way than by saying that everything has landed, the region gets other memory with the same bytes, and
every session ends: late writes go to memory that nobody reads any more, and producers that are well
open new sessions and send again what was not delivered.

A write that was landing while the bytes were copied is whole or is found out by its hash; its producer
sends it again. Memory of a device beside the region is not copied like that, since nobody hashes what lies
there: the layer above takes over what it knows to be whole (``Keeper``).
"""

import logging
import secrets
from collections.abc import Sequence
from typing import Final, Protocol

from transports import tcp_frames as frames
from transports._libucp import UcpError
from transports.device_memory import MARGIN_BYTES, DeviceError, DeviceMemory
from transports.errors import ChannelClosed, PeerLost, ProtocolError
from transports.memory import Accepted, Keeper
from transports.region_memory import RegionMemory
from transports.tcp_frames import Header, Kind
from transports.tcp_owner import House, OwnerSession, TcpRegion
from transports.ucx_devices import MappedDevice
from transports.ucx_link import (
    PROOF_BYTES,
    WIRE_BYTES_MAX,
    Offer,
    OfferBeside,
    Requirement,
    Wire,
    WireKind,
)
from transports.ucx_worker import DOORBELL_BYTES, SharedMemory

_LOG: Final = logging.getLogger(__name__)

_EXPECTS_ATTACH: Final[frames.Bounds] = {Kind.ATTACH: 0, Kind.BEAT: 0, Kind.LANDED: 0}
_EXPECTS_WIRE: Final[frames.Bounds] = {Kind.WIRE: WIRE_BYTES_MAX, Kind.BEAT: 0, Kind.LANDED: 0}
_EXPECTS_OPERATIONS: Final[frames.Bounds] = {**frames.OWNER_EXPECTS_OPERATIONS, Kind.LANDED: 0}
_EXPECTS_NOTHING_MORE: Final[frames.Bounds] = {Kind.BEAT: 0}


class LentMemory(RegionMemory):
    """A region's memory for which there is a key.

    Args:
        size_bytes: Of the region.
        device: Memory of a device beside it, for which there is to be one too.

    Raises:
        UcpError: UCX has none, or does not map the device's.
        DeviceError, DeviceUnreachable: The device's cannot be lent.
    """

    __slots__ = ("address", "beside", "key")

    def __init__(self, size_bytes: int, device: DeviceMemory | None = None) -> None:
        shared = SharedMemory(size_bytes)
        super().__init__(size_bytes, shared.view)
        self.address, self.key = shared.address, shared.key
        self.beside = None if device is None else MappedDevice(device)


def new_memory(size_bytes: int) -> RegionMemory:
    """Memory to lend; or, with a warning, memory that only this process can write to."""
    if size_bytes > 0:
        try:
            return LentMemory(size_bytes)
        except UcpError as error:
            _LOG.warning("no %d bytes to lend (%s): producers write over tcp", size_bytes, error)
    return RegionMemory(size_bytes)


class UcxHouse(House, Protocol):
    """What a session needs of its listener."""

    doorbells: dict[bytes, "UcxOwnerSession"]
    requirement: Requirement

    @property
    def worker_address(self) -> bytes:
        """By which producers make endpoints."""
        ...


class UcxRegion(TcpRegion):
    """Memory of this process that producers may write to, and the connections of those producers."""

    keeper: Keeper | None = None
    """Of memory of a device beside it."""
    _failure: DeviceError | None = None

    def offer(self, doorbell: bytes, worker_address: bytes, session: int) -> Offer:
        """What the producer of this session needs to write by itself."""
        memory = self.memory
        if isinstance(memory, LentMemory):
            beside = _offer_beside(memory.beside, session)
            return Offer(memory.address, memory.key, doorbell, worker_address, beside)
        return Offer(0, b"", doorbell, worker_address)

    def unproven(self, wire: Wire, offered: OfferBeside | None) -> str | None:
        """What is wrong with a producer's way into the device's memory; None: nothing, or there is none."""
        if offered is None:
            return None
        assert isinstance(self.memory, LentMemory)
        assert self.memory.beside is not None
        memory = self.memory.beside.memory
        if wire.kind is WireKind.TCP:
            return (
                f"this inbox lies in the memory of {memory.device.name}, and nothing gets there over {wire}"
            )
        try:
            seen = memory.peek_margin(offered.proof_at - memory.address - memory.size_bytes, PROOF_BYTES)
        except DeviceError as error:
            return str(error)
        if seen == offered.proof:
            return None
        return (
            f"what was put over {wire} has not come to the memory of {memory.device.name}: that takes a wire"
            " of UCX's that writes there by itself, such as an adapter that reaches the GPU (see `onepiece"
            " doctor`)"
        )

    async def fence(self, sessions: Sequence[int]) -> None:
        """Revoke sessions; with them all others, if one of them can write by itself.

        Raises:
            ChannelClosed: There is no other memory to be had, so writes may still land; the region is closed.
        """
        fenced = [self._sessions[number] for number in sessions if number in self._sessions]
        await super().fence(sessions)
        if any(session.writes_itself for session in fenced):
            self._replace_memory("a session was fenced")
        if self._failure is not None:
            raise ChannelClosed(str(self._failure)) from self._failure

    def shut(self) -> None:
        """Revoke all sessions, then take a device's memory away from adapters."""
        was_open = not self._closed
        super().shut()
        if was_open:
            _unmap_beside(self.memory)

    def leave(self, number: int, session: OwnerSession) -> None:
        """A session ended without a fence; nothing of it lands any more when the layer above is told."""
        if session.writes_itself and self._sessions.get(number) is session:
            del self._sessions[number]
            self._listening.discard(session)
            self._replace_memory(f"session {number} ended without saying that its writes have landed")
            self._on_session_lost(number)
        else:
            super().leave(number, session)

    def _replace_memory(self, why: str) -> None:
        _LOG.info("%s gets other memory: %s", self.address, why)
        try:
            self.memory = self._successor_of(self.memory)
        except (DeviceError, UcpError) as error:
            self._fail(DeviceError(f"{self.address} needs other memory, because {why}: {error}"))
            return
        sessions, self._sessions = self._sessions, {}
        self._listening.clear()
        for session in sessions.values():
            session.revoke(PeerLost(f"{self.address} got other memory, because {why}; open a new session"))
        for number in sessions:
            self._on_session_lost(number)

    def _successor_of(self, old: RegionMemory) -> RegionMemory:
        """Other memory with the same bytes, while writes go on landing in the old one."""
        if not isinstance(old, LentMemory) or old.beside is None:
            memory = new_memory(old.size_bytes)
            memory.view[:] = old.view
            return memory
        assert self.keeper is not None
        lent = LentMemory(old.size_bytes)
        lent.view[:] = old.view  # first: what is committed in it decides what is looked for on the device
        lent.beside = MappedDevice(self.keeper.renew(lent.view))
        _unmap_beside(old)
        return lent

    def _fail(self, error: DeviceError) -> None:
        _LOG.error("%s", error)
        self._failure = error
        self.shut()
        assert self.keeper is not None
        self.keeper.failed(error)


def _offer_beside(mapped: MappedDevice | None, session: int) -> OfferBeside | None:
    if mapped is None:
        return None
    memory = mapped.memory
    # Each session proves its way at a place of its own, as far as there are any.
    proof_at = memory.address + memory.size_bytes + session * PROOF_BYTES % MARGIN_BYTES
    return OfferBeside(
        memory.address, memory.size_bytes, proof_at, secrets.token_bytes(PROOF_BYTES), mapped.key
    )


def _unmap_beside(memory: RegionMemory) -> None:
    if isinstance(memory, LentMemory) and memory.beside is not None:
        memory.beside.close()


class UcxOwnerSession(OwnerSession):
    """A connection whose producer may write beside it."""

    def __init__(self, house: UcxHouse, peer: str) -> None:
        super().__init__(house, peer)
        self._lender = house
        self._doorbell = secrets.token_bytes(DOORBELL_BYTES)
        self._offered: OfferBeside | None = None

    def ring(self) -> None:
        """The producer's writes have landed, and it wants the owner to know."""
        if self._region is not None and not self._ending.over():
            self._pulse.heard()
            self._region.notify()

    def close(self) -> None:
        """Close the connection at once."""
        self._lender.doorbells.pop(self._doorbell, None)
        super().close()

    def _open(self, region: TcpRegion, accepted: Accepted, proofs: frames.Proofs) -> None:
        super()._open(region, accepted, proofs)
        self._expect(_EXPECTS_ATTACH, self._attach)

    def _attach(self, header: Header, body: memoryview) -> None:
        if header.kind != Kind.ATTACH:
            self._beside(header)
            return
        assert isinstance(self._region, UcxRegion)
        offer = self._region.offer(self._doorbell, self._lender.worker_address, self._number)
        self._offered = offer.beside
        self.writes_itself = bool(offer.key)
        self._lender.doorbells[self._doorbell] = self
        body_bytes = offer.to_bytes()
        attached = frames.frame(
            Kind.ATTACHED,
            body=len(body_bytes),
            a=offer.memory,
            b=len(offer.key),
            c=offer.beside_bytes,
        )
        self._send([attached + body_bytes])
        self._expect(_EXPECTS_WIRE, self._told_wire)

    def _told_wire(self, header: Header, body: memoryview) -> None:
        if header.kind != Kind.WIRE:
            self._beside(header)
            return
        try:
            wire = Wire.parse(str(body, "utf-8"))
        except UnicodeDecodeError as error:
            raise ProtocolError(f"a wire's name is no UTF-8: {error}") from error
        self.writes_itself = self.writes_itself and wire.kind is not WireKind.TCP
        _LOG.info("session %d of %s writes over %s", self._number, self._peer, wire)
        assert isinstance(self._region, UcxRegion)
        unmet = self._lender.requirement.unmet(wire) or self._region.unproven(wire, self._offered)
        if unmet is not None:
            self.writes_itself = False  # before our answer producers write nothing
            self._end(PeerLost(f"the owner refuses: {unmet}"))
            return
        self._expect(_EXPECTS_OPERATIONS, self._operation)
        self._answer(header, 0)

    def _operation(self, header: Header, body: memoryview) -> None:
        if header.kind == Kind.LANDED:
            self._beside(header)
        else:
            super()._operation(header, body)

    def _beside(self, header: Header) -> None:
        if header.kind == Kind.LANDED:
            self.writes_itself = False
            self._expect(_EXPECTS_NOTHING_MORE, lambda _header, _body: None)
