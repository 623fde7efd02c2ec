"""The owner's side of the simulated transport: a region, and the sessions that act on it."""

import asyncio
from collections.abc import Callable, Sequence

from attrs import frozen

from simulations.loop import Process
from simulations.sim_network import Network, Wire
from transports.address import Address
from transports.errors import ExportGone, PeerLost, ProtocolError, SessionFenced, TransportError
from transports.memory import Accept, Claimant, Region
from transports.region_memory import RegionMemory


@frozen(eq=False)
class Hooks:
    """What the layer above wants to be told."""

    accept: Accept
    on_notify: Callable[[], None]
    on_session_lost: Callable[[int], None]
    on_closed: Callable[[], object]
    claimant: Claimant | None


class SimSession:
    """The owner's side of a session."""

    def __init__(self, region: "SimRegion", number: int, wire: Wire, hello: bytes) -> None:
        self.region = region
        self.number = number
        self.wire = wire
        self.hello = hello
        self.is_over = False
        self.lends: Callable[[bytes], bytes | None] = lambda _: None
        """What the producer exports under a key, as it goes on the wire."""
        self._pulls: set[asyncio.Future[bytes | None]] = set()
        self._was_nudged = False
        """Since the producer's latest look."""
        self._waits: Callable[[], None] | None = None
        """Tells the producer, which waits for a nudge."""
        wire.tell_far = self._lost

    def carry_out(self, step: Callable[[], None]) -> None:
        """An operation has arrived."""
        region = self.region
        if region.network.weather.one_sided:
            self._run(step)
        else:
            region.process.call_soon(self._run, step)

    def _run(self, step: Callable[[], None]) -> None:
        if self.is_over:
            return
        try:
            step()
        except ProtocolError as error:
            self.wire.refuse(error)
            self._lost()

    def write(self, offset: int, data: bytes) -> None:
        """A part of what the producer has posted lands."""
        self.region.network.on_write(self.region.process, self.hello)
        self.region.memory.write(offset, data)

    def look(self) -> None:
        """The producer sees the region as it is now: earlier nudges are no news."""
        self._was_nudged = False

    def nudge(self) -> None:
        """The ring has moved."""
        self._was_nudged = True
        if self._waits is not None:
            waits, self._waits = self._waits, None
            self.wire.back.send(waits)

    def wait(self, tell: Callable[[], None]) -> None:
        """The producer waits for a nudge; one that came since its latest look counts."""
        self._waits = tell
        if self._was_nudged:
            self.nudge()

    async def pull(self, key: bytes, into: memoryview) -> None:
        """Fetch an export: it is looked up when the question has reached the producer."""
        answer: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

        def settle(data: bytes | None) -> None:
            if not answer.done():
                answer.set_result(data)

        def ask() -> None:
            data = self.lends(key)
            self.wire.out.send(lambda: self.carry_out(lambda: settle(data)))

        self._pulls.add(answer)
        self.wire.back.send(ask)
        try:
            data = await answer
        finally:
            self._pulls.discard(answer)
        if data is None or len(data) != len(into):
            raise ExportGone("the producer does not export this (any more)")
        into[:] = data

    def end(self, error: TransportError) -> None:
        """From here on nothing of it counts."""
        self.is_over = True
        for answer in self._pulls:
            if not answer.done():
                answer.set_exception(error)

    def _lost(self) -> None:
        if not self.is_over:
            self.region.process.call_soon(self.region.leave, self)


class SimRegion(Region):
    """Memory of a process, and the sessions that act on it."""

    def __init__(
        self, network: Network, process: Process, address: Address, size_bytes: int, hooks: Hooks
    ) -> None:
        self.network = network
        self.process = process
        self.memory = RegionMemory(size_bytes)
        self.hooks = hooks
        self.is_closed = False
        self._address = address
        self._sessions: dict[int, SimSession] = {}
        self._is_notified = False

    @property
    def view(self) -> memoryview:
        """The memory itself."""
        return self.memory.view

    @property
    def address(self) -> Address:
        """Where producers connect to."""
        return self._address

    def enter(self, session: SimSession) -> None:
        """Let a session act that was accepted; one whose producer is gone meanwhile is lost at once."""
        assert session.number not in self._sessions, f"session {session.number} is open"
        self._sessions[session.number] = session
        if session.wire.is_far_told:
            self.process.call_soon(self.leave, session)

    def leave(self, session: SimSession) -> None:
        """A session has ended, and not by us."""
        if not session.is_over:
            session.end(PeerLost(f"session {session.number} of {self._address} was lost"))
            del self._sessions[session.number]
            self.hooks.on_session_lost(session.number)

    async def fence(self, sessions: Sequence[int]) -> None:
        """Revoke sessions; until this returns, what they have posted may land."""
        found = [self._sessions[number] for number in sessions if number in self._sessions]
        if not found:
            return
        await asyncio.sleep(self.network.rng.random() * self.network.weather.fence_seconds)
        for session in found:
            if not session.is_over:
                error = SessionFenced(f"{self._address} fenced session {session.number}")
                session.end(error)
                del self._sessions[session.number]
                session.wire.refuse(error)

    async def pull(self, session: int, key: bytes, into: memoryview) -> None:
        """Fetch an export over the session's wire."""
        found = self._sessions.get(session)
        if found is None:
            raise PeerLost(f"session {session} of {self._address} is over")
        await found.pull(key, into)

    def nudge(self) -> None:
        """Wake producers that wait for room."""
        for session in self._sessions.values():
            session.nudge()

    def notify(self) -> None:
        """A chain has landed; several before the owner's next step are told as one."""
        if not self._is_notified:
            self._is_notified = True
            self.process.call_soon(self._notify)

    def _notify(self) -> None:
        self._is_notified = False
        if not self.is_closed:
            self.hooks.on_notify()

    async def close(self) -> None:
        """Revoke all sessions and stop serving the name."""
        self.shut()

    def shut(self) -> None:
        """Like ``close``, which never has to wait here."""
        if self.is_closed:
            return
        self.is_closed = True
        self.hooks.on_closed()
        for session in self._sessions.values():
            error = PeerLost(f"{self._address} was closed by its owner")
            session.end(error)
            session.wire.refuse(error)
        self._sessions.clear()
