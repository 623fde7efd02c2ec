"""The owner's side of the ucx transport: memory that producers write to by themselves.

Such a session cannot be revoked: what its producer has mapped stays mapped, what its adapter has been
given goes on. So the *memory* is taken away instead. When a session is fenced, or ends in any other
way than by saying that everything has landed, the region gets other memory with the same bytes, and
every session ends: late writes go to memory that nobody reads any more, and producers that are well
open new sessions and send again what was not delivered.

A write that was landing while the bytes were copied is whole or is found out by its hash; its producer
sends it again.
"""

import logging
import secrets
from collections.abc import Sequence
from typing import Final, Protocol

from transports import tcp_frames as frames
from transports._libucp import UcpError
from transports.errors import PeerLost, ProtocolError
from transports.memory import Accepted
from transports.region_memory import RegionMemory
from transports.tcp_frames import Header, Kind
from transports.tcp_owner import House, OwnerSession, TcpRegion
from transports.ucx_link import WIRE_BYTES_MAX, Offer, Requirement, Wire, WireKind
from transports.ucx_worker import DOORBELL_BYTES, SharedMemory

_LOG: Final = logging.getLogger(__name__)

_EXPECTS_ATTACH: Final[frames.Bounds] = {Kind.ATTACH: 0, Kind.BEAT: 0, Kind.LANDED: 0}
_EXPECTS_WIRE: Final[frames.Bounds] = {Kind.WIRE: WIRE_BYTES_MAX, Kind.BEAT: 0, Kind.LANDED: 0}
_EXPECTS_OPERATIONS: Final[frames.Bounds] = {**frames.OWNER_EXPECTS_OPERATIONS, Kind.LANDED: 0}
_EXPECTS_NOTHING_MORE: Final[frames.Bounds] = {Kind.BEAT: 0}


class LentMemory(RegionMemory):
    """A region's memory for which there is a key."""

    __slots__ = ("address", "key")

    def __init__(self, size_bytes: int) -> None:
        shared = SharedMemory(size_bytes)
        super().__init__(size_bytes, shared.view)
        self.address, self.key = shared.address, shared.key


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

    def offer(self, doorbell: bytes, worker_address: bytes) -> Offer:
        """What a producer needs to write by itself."""
        memory = self.memory
        if isinstance(memory, LentMemory):
            return Offer(memory.address, memory.key, doorbell, worker_address)
        return Offer(0, b"", doorbell, worker_address)

    async def fence(self, sessions: Sequence[int]) -> None:
        """Revoke sessions; with them all others, if one of them can write by itself."""
        fenced = [self._sessions[number] for number in sessions if number in self._sessions]
        await super().fence(sessions)
        if any(session.writes_itself for session in fenced):
            self._replace_memory("a session was fenced")

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
        old = self.memory
        self.memory = new_memory(old.size_bytes)
        self.memory.view[:] = old.view
        sessions, self._sessions = self._sessions, {}
        self._listening.clear()
        for session in sessions.values():
            session.revoke(PeerLost(f"{self.address} got other memory, because {why}; open a new session"))
        for number in sessions:
            self._on_session_lost(number)


class UcxOwnerSession(OwnerSession):
    """A connection whose producer may write beside it."""

    def __init__(self, house: UcxHouse, peer: str) -> None:
        super().__init__(house, peer)
        self._lender = house
        self._doorbell = secrets.token_bytes(DOORBELL_BYTES)

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
        offer = self._region.offer(self._doorbell, self._lender.worker_address)
        self.writes_itself = bool(offer.key)
        self._lender.doorbells[self._doorbell] = self
        body_bytes = offer.to_bytes()
        attached = frames.frame(Kind.ATTACHED, body=len(body_bytes), a=offer.memory, b=len(offer.key))
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
        if (unmet := self._lender.requirement.unmet(wire)) is not None:
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
