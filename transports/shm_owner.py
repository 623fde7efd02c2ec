"""The owner's side of memory that is shared within a host: sessions that write by themselves, and their ends.

What a producer has mapped stays mapped, so such a session cannot be revoked by force. When it is fenced
or lost, its producer is told, and the end of its lifeline (``shm_lender``) says that it has let go: at
once where the producer has died, within a turn of its event loop where it is well. Only one that is
stopped does not answer. Then the *memory* is taken away: the region goes on in other memory with the
same bytes, and the sessions that had mapped the old one end. Their producers open new ones and send
again what was not delivered; those that write over their connections notice nothing.

Until then nobody above is told that the session is over: to the ring *lost* means the same as *fenced*.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final, Protocol

from transports import tcp_frames as frames
from transports.errors import PeerLost, ProtocolError
from transports.memory import Accepted
from transports.process_memory import parse_located
from transports.region_memory import RegionMemory
from transports.shared_memory import LentMemory, new_memory
from transports.shm_lender import Lender, Visit
from transports.tcp_frames import Header, Kind
from transports.tcp_owner import House, OwnerSession, TcpRegion

_LOG: Final = logging.getLogger(__name__)

LET_GO_SECONDS: Final = 0.25
"""How long a producer has to let go of memory before the memory is taken away from it."""

_EXPECTS: Final[frames.Bounds] = {**frames.OWNER_EXPECTS_OPERATIONS, Kind.ATTACH: 0}


class LendingHouse(House, Protocol):
    """What a session needs of its listener."""

    @property
    def lender(self) -> Lender | None:
        """Gives memory away; None if nothing is lent."""
        ...


class LendingRegion(TcpRegion):
    """Memory of this process that producers of the same host may map, and the connections of all."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._loop = asyncio.get_running_loop()
        self._writers: dict[int, LendingSession] = {}
        """By number: sessions, also ended ones, that may write to the memory there is now."""
        self._leaving: set[LendingSession] = set()
        """Those of them that the layer above is still to be told of as lost."""

    def lend(self, number: int, session: "LendingSession") -> int:
        """The memory's descriptor, for this session; raises ``ProtocolError``."""
        if not isinstance(self.memory, LentMemory) or self._sessions.get(number) is not session:
            raise ProtocolError("there is nothing to lend")
        self._writers[number] = session
        return self.memory.descriptor

    def let_go(self, number: int, session: "LendingSession") -> None:
        """Nothing of this session can land any more but what its connection carries."""
        if self._writers.get(number) is session:
            del self._writers[number]
        if session in self._leaving:
            self._leaving.discard(session)
            self._on_session_lost(number)

    async def fence(self, sessions: Sequence[int]) -> None:
        """Revoke sessions; with them all that have the memory mapped, if one of them does not let go."""
        writers = [self._writers[number] for number in sessions if number in self._writers]
        self._leaving.difference_update(writers)
        await super().fence(sessions)
        if writers:
            await asyncio.wait([writer.gone for writer in writers], timeout=LET_GO_SECONDS)
        if not all(writer.gone.done() for writer in writers):
            self._replace_memory("a fenced session did not let go of it")

    def leave(self, number: int, session: OwnerSession) -> None:
        """A session ended without a fence; the layer above is told when nothing of it can land."""
        if self._writers.get(number) is not session or self._sessions.get(number) is not session:
            super().leave(number, session)
            return
        assert isinstance(session, LendingSession)
        self._listening.discard(session)
        del self._sessions[number]
        self._leaving.add(session)
        self._loop.call_later(LET_GO_SECONDS, self._give_up, number, session)

    def _give_up(self, number: int, session: "LendingSession") -> None:
        if session in self._leaving:
            self._replace_memory(f"session {number} ended and did not let go of it")

    def shut(self) -> None:
        """Revoke all sessions and stop serving the name."""
        super().shut()
        self._leaving.clear()
        for session in list(self._writers.values()):
            session.let_go()

    def _replace_memory(self, why: str) -> None:
        _LOG.warning("%s goes on in other memory: %s", self.address, why)
        self.memory = _moved(self.memory)
        writers, self._writers = self._writers, {}
        ended = []
        for number, session in list(self._sessions.items()):
            if number not in writers:
                session.use(self.memory)
                continue
            del self._sessions[number]
            self._listening.discard(session)
            session.revoke(PeerLost(f"{self.address} got other memory, because {why}; open a new session"))
            ended.append(number)
        # All is in order from here on: what is told now may look at the region again.
        for session in writers.values():
            session.let_go()
        for number in ended:
            self._on_session_lost(number)


def _moved(old: RegionMemory) -> RegionMemory:
    """Other memory with the same bytes."""
    new = new_memory(old.size_bytes)
    assert isinstance(old, LentMemory), "somebody has mapped it"
    for start, end in old.used():
        new.view[start:end] = old.view[start:end]
    return new


class LendingSession(OwnerSession):
    """A connection whose producer may map the region's memory."""

    def __init__(self, house: LendingHouse, peer: str) -> None:
        super().__init__(house, peer)
        self._lender = house.lender
        self._token: bytes | None = None
        self._visit: Visit | None = None
        self.gone: Final[asyncio.Future[None]] = self._loop.create_future()
        """Done when nothing lands any more that the producer writes by itself."""

    def close(self) -> None:
        """Close the connection at once."""
        if self._token is not None and self._lender is not None:
            self._lender.withdraw(self._token)
        super().close()

    def _open(self, region: TcpRegion, accepted: Accepted, proofs: frames.Proofs) -> None:
        if self._lender is not None and isinstance(region.memory, LentMemory):
            self.welcome_flags = frames.LENDS
        super()._open(region, accepted, proofs)
        if self.welcome_flags:
            self._expect(_EXPECTS, self._operation)

    async def pull(self, key: bytes, into: memoryview) -> int | None:
        """Fetch an export: from the producer's memory where that can be read, else over the connection."""
        key, place = parse_located(key, frames.EXPORT_KEY_BYTES)
        if self._visit is None or self._visit.memory is None or place is None:
            return await super().pull(key, into)
        computed = None
        try:
            computed = await self._visit.memory.fetch(place, into)
        except OSError as error:
            # The producer may have ended, or dropped what allowed it: its connection knows.
            _LOG.info("session %d of %s is not read in place: %s", self._number, self._peer, error)
            await super().pull(key, into)
        self._ending.check()
        return computed

    def _operation(self, header: Header, body: memoryview) -> None:
        if header.kind == Kind.ATTACH:
            self._offer()
        else:
            super()._operation(header, body)

    def _offer(self) -> None:
        assert self._lender is not None
        if self._token is not None:
            raise ProtocolError("memory is offered once in a session")
        self._token = self._lender.expect(self)
        body = self._token + self._lender.name.encode()
        self._send([frames.frame(Kind.ATTACHED, body=len(body)) + body])

    # What its visit says; see ``shm_lender.Borrower``.

    def borrow(self, visit: Visit) -> int:
        """The descriptor to be given away."""
        if self._ending.over() or not isinstance(self._region, LendingRegion):
            raise ProtocolError("the session is over")
        descriptor = self._region.lend(self._number, self)
        self._visit = visit
        self.writes_itself = True
        _LOG.info("session %d of %s writes to shared memory", self._number, self._peer)
        return descriptor

    def let_go(self) -> None:
        """Nothing that the producer writes by itself can land any more. Idempotent."""
        if self.gone.done():
            return
        self.gone.set_result(None)
        self.writes_itself = False
        if self._visit is not None:
            self._visit.close()
        if isinstance(self._region, LendingRegion):
            self._region.let_go(self._number, self)

    def misbehaved(self, error: ProtocolError) -> None:
        """End because of the producer, which may go on writing."""
        self._end(error)
