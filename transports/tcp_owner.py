"""The owner's side of the tcp transport: regions, and one ``OwnerSession`` per connection.

A session goes through these states; the bounds of the frame reader change with them::

    hello --HELLO--> proof --PROOF--> admitting --accepted--> open
      |                |                  |                     |
      +----------------+---- refused -----+                     | fence, close, protocol error, silence
                                |                               |
                                +-----------> ended <-----------+

*Ended* is immediate: from that call on nothing the connection carries reaches the region. What is
still in the socket goes into a waste buffer for a short while, so that the connection closes in
good order and the producer reads why, instead of finding it reset.
"""

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Protocol

from transports import tcp_frames as frames
from transports.address import Address
from transports.errors import (
    AuthenticationFailed,
    HandshakeRefused,
    PeerLost,
    ProtocolError,
    SessionFenced,
    TransportError,
    UnknownRegion,
)
from transports.memory import Accept, Accepted, Claimant, Options, Region
from transports.operations import Bytes
from transports.region_memory import RegionMemory
from transports.sessions import Ending
from transports.tcp_frames import FrameReader, Header, Kind
from transports.tcp_pulls import Pulls
from transports.tcp_pulse import Pulse
from transports.tcp_reasons import reason_frame
from transports.tcp_wire import Wire

_LOG: Final = logging.getLogger(__name__)

_ANSWER_BYTES_MAX: Final = 2 << 20
"""Answers collected before they are sent; a producer that does not take them is not read either."""
_LINGER_SECONDS: Final = 2.0
"""How long an ended connection is kept, for the producer to read why it ended."""
_WASTE: Final = memoryview(bytearray(64 << 10))
"""Where the bytes of ended sessions go; nobody reads it, so all share it."""


class House(Protocol):
    """What a session needs of its listener."""

    options: Options

    def find(self, name: str) -> "TcpRegion":
        """The region of this name; raises ``UnknownRegion``."""
        ...

    def start(self, work: Coroutine[Any, Any, None]) -> object:
        """Run something in the listener's background."""
        ...

    def forget(self, session: "OwnerSession") -> None:
        """The session's connection is closed."""
        ...


class TcpRegion(Region):
    """Memory of this process and the connections that act on it."""

    def __init__(
        self,
        address: Address,
        memory: RegionMemory,
        *,
        accept: Accept,
        on_notify: Callable[[], None],
        on_session_lost: Callable[[int], None],
        on_closed: Callable[[], object],
        claimant: Claimant | None = None,
    ) -> None:
        self.memory = memory
        self.claimant = claimant
        self.accept = accept
        self.notify = on_notify
        self.nudges = 0
        self._address = address
        self._on_session_lost = on_session_lost
        self._on_closed = on_closed
        self._sessions: dict[int, OwnerSession] = {}
        self._listening: set[OwnerSession] = set()
        self._closed = False

    @property
    def view(self) -> memoryview:
        """The memory itself."""
        return self.memory.view

    @property
    def address(self) -> Address:
        """Where producers connect to."""
        return self._address

    def enter(self, number: int, session: "OwnerSession") -> None:
        """Let an accepted session act; raises ``UnknownRegion`` if the region closed meanwhile."""
        if self._closed:
            raise UnknownRegion(f"{self._address} was closed while the session was opened")
        assert number not in self._sessions, f"session {number} is open"
        self._sessions[number] = session

    def leave(self, number: int, session: "OwnerSession") -> None:
        """A session ended without a fence."""
        self._listening.discard(session)
        if self._sessions.get(number) is session:
            del self._sessions[number]
            self._on_session_lost(number)

    def abandoned(self, number: int) -> None:
        """A session was accepted, and its producer was gone before it could enter."""
        if not self._closed:
            self._on_session_lost(number)

    def listen(self, session: "OwnerSession", seen: int) -> None:
        """Nudge this session at the next nudge, or at once if there was one since ``seen``."""
        if self.nudges != seen:
            session.nudge(self.nudges)
        else:
            self._listening.add(session)

    async def pull(self, session: int, key: bytes, into: memoryview) -> int | None:
        """Fetch an export over the session's connection."""
        found = self._sessions.get(session)
        if found is None:
            raise PeerLost(f"session {session} of {self._address} is over")
        return await found.pull(key, into)

    async def fence(self, sessions: Sequence[int]) -> None:
        """Revoke sessions; the bytes of an ended session never reach the region, so this is at once."""
        for number in sessions:
            session = self._sessions.pop(number, None)
            if session is not None:
                self._listening.discard(session)
                session.revoke(SessionFenced(f"{self._address} fenced session {number}; open a new one"))

    def nudge(self) -> None:
        """Wake the producers that wait for room."""
        self.nudges += 1
        if self._listening:
            listening, self._listening = self._listening, set()
            for session in listening:
                session.nudge(self.nudges)

    async def close(self) -> None:
        """Revoke all sessions and stop serving the name."""
        self.shut()

    def shut(self) -> None:
        """Like ``close``, which never has to wait here."""
        if self._closed:
            return
        self._closed = True
        self._on_closed()
        sessions, self._sessions = self._sessions, {}
        self._listening.clear()
        for session in sessions.values():
            session.revoke(PeerLost(f"{self._address} was closed by its owner"))


class OwnerSession:
    """One connection, from its first byte; an ``Endpoint``."""

    wire: Wire
    writes_itself = False
    """The producer can write to the region's memory without this process."""
    welcome_flags = 0
    executes = True
    """This processor carries out the session's operations, and so claims too."""

    def __init__(self, house: House, peer: str) -> None:
        self._house = house
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._ending = Ending()
        self._reader = FrameReader(frames.OWNER_EXPECTS_HELLO, self._place)
        self._nonce = secrets.token_bytes(frames.NONCE_BYTES)
        self._handle: Callable[[Header, memoryview], None] = self._hello
        self._introduction = frames.Introduction(b"", "", b"")
        self._region: TcpRegion | None = None
        self._memory: RegionMemory | None = None
        self._number = 0
        self.pulls: Final = Pulls(self._send)
        self._answers: list[Bytes] = []
        self._answer_bytes = 0
        self._notify = False
        self._writes_to_drop = 0
        self._idle = True
        self._timer = self._loop.call_later(house.options.connect_timeout_seconds, self._too_slow)
        self._pulse = Pulse(house.options.silence_seconds, on_check=self._beat, on_silence=self._silent)

    # The wire's endpoint.

    def next_buffer(self) -> memoryview:
        """Where the next bytes belong: once ended, nowhere."""
        return _WASTE if self._ending.over() else self._reader.next_buffer()

    def received(self, count: int) -> None:
        """Carry out the frames completed by these bytes."""
        if self._ending.over():
            return
        self._pulse.heard()
        self._reader.received(count)
        self._carry_out()

    def has_room(self) -> None:
        """The producer reads its answers again."""
        if not self._ending.over():
            self._carry_out()
        if self.wire.has_room:
            self.wire.resume_receiving()

    def _carry_out(self) -> None:
        """Carry out the frames received, for as long as the producer takes the answers."""
        finished = False
        while not finished and not self._ending.over():
            finished = self._carry_out_some()
            if not self.wire.has_room:
                self.wire.pause_receiving()
                return

    def _carry_out_some(self) -> bool:
        """One notification and one send for many frames; False if there are more."""
        finished = True
        try:
            for header, body in self._reader.frames():
                self._handle(header, body)
                if self._ending.over():
                    break
                if self._answer_bytes > _ANSWER_BYTES_MAX:
                    finished = False
                    break
        except (ProtocolError, HandshakeRefused) as error:
            self._end(error)
        if self._notify:
            self._notify = False
            assert self._region is not None
            self._region.notify()
        if self._answers and not self._ending.over():
            answers, self._answers, self._answer_bytes = self._answers, [], 0
            self._send(answers)
        return finished

    def progressed(self) -> None:
        """The producer takes bytes, so it is there."""
        self._pulse.heard()

    def lost(self, error: OSError | None) -> None:
        """The connection is gone."""
        how = "in the middle of a frame" if self._reader.in_frame else "between two frames"
        why = f"reset ({error})" if error is not None else "closed by the producer"
        if self._reach(PeerLost(f"{self._peer} was lost: {why}, {how}")):
            if error is not None or self._reader.in_frame:
                _LOG.warning("%s", self._ending.error())
            self._leave()
        self.close()

    async def pull(self, key: bytes, into: memoryview) -> int | None:
        """Fetch one of the producer's exports; raises as ``Region.pull``."""
        self._ending.check()  # nobody would answer
        await self.pulls.pull(key, into)
        return None

    # How it ends.

    def revoke(self, error: TransportError) -> None:
        """End by the region's will, which knows of it."""
        if self._reach(error):
            self._tell(Kind.ENDED, error)

    def use(self, memory: RegionMemory) -> None:
        """The region's bytes have moved to other memory: go on there, in the middle of a body too."""
        self._memory = memory
        self._reader.place_again()

    def close(self) -> None:
        """Close the connection at once. Idempotent."""
        self._reach(PeerLost(f"{self._peer}: the listener was closed"))
        self._timer.cancel()
        self._pulse.stop()
        self.wire.close()
        self._house.forget(self)

    def _end(self, error: TransportError) -> None:
        """End because of the producer."""
        opened = self._region is not None
        if self._reach(error):
            _LOG.warning("closing the connection of %s: %s", self._peer, error)
            self._tell(Kind.ENDED if opened else Kind.REFUSED, error)
            self._leave()

    def _reach(self, reason: TransportError) -> bool:
        """From here on nothing of this session counts; False if it was so before."""
        first = self._ending.reach(reason)
        if first:
            self.pulls.fail(self._ending.error())
        return first

    def _tell(self, kind: Kind, error: TransportError) -> None:
        self._timer.cancel()
        self._pulse.stop()
        self.wire.send([reason_frame(kind, error)])
        self.wire.finish_sending()
        self.wire.resume_receiving()
        self._timer = self._loop.call_later(_LINGER_SECONDS, self.close)

    def _leave(self) -> None:
        if self._region is not None:
            self._region.leave(self._number, self)

    def _too_slow(self) -> None:
        limit = self._house.options.connect_timeout_seconds
        self._end(HandshakeRefused(f"the handshake was not finished within {limit} s"))

    def _silent(self) -> None:
        seconds = self._house.options.silence_seconds
        self._end(PeerLost(f"the owner heard nothing from {self._peer} for {seconds} s"))

    def _beat(self) -> None:
        idle, self._idle = self._idle, True
        if idle and self._region is not None and not self.wire.pending_bytes:
            self.wire.send([frames.frame(Kind.BEAT)])

    # The handshake.

    def _hello(self, header: Header, body: memoryview) -> None:
        self._introduction = frames.parse_hello(header, body)
        ours, theirs = self._house.options.secret is not None, bool(header.flags & frames.SECRET)
        if ours and not theirs:
            raise AuthenticationFailed(
                "the owner asks for the cluster secret, and the producer has none; give both sides the same"
            )
        flags = frames.SECRET if ours else 0
        self._send([frames.frame(Kind.CHALLENGE, flags=flags, body=len(self._nonce)) + self._nonce])
        self._expect(frames.OWNER_EXPECTS_PROOF, self._proof)

    def _proof(self, header: Header, body: memoryview) -> None:
        proofs = frames.Proofs(self._house.options.secret, self._introduction, self._nonce)
        if not hmac.compare_digest(proofs.producer, body):
            raise AuthenticationFailed("the producer has another cluster secret; give both sides the same")
        self._expect(frames.OWNER_EXPECTS_NOTHING, self._nothing)
        self._house.start(self._admit(proofs))

    def _nothing(self, header: Header, body: memoryview) -> None:
        raise AssertionError(f"{header} came through bounds that allow nothing")

    async def _admit(self, proofs: frames.Proofs) -> None:
        """Ask the layer above, and open the session or refuse it."""
        try:
            region = self._house.find(self._introduction.region)
            accepted = await region.accept(self._introduction.hello)
        except HandshakeRefused as error:
            self._end(error)
            return
        except TransportError as error:
            self._end(HandshakeRefused(str(error)))
            return
        except Exception:
            self._end(HandshakeRefused("the owner failed while it opened the session; its log says why"))
            raise
        try:
            self._ending.check()
            region.enter(accepted.session, self)
        except TransportError as error:
            region.abandoned(accepted.session)
            self._end(error)
            return
        self._open(region, accepted, proofs)

    def _open(self, region: TcpRegion, accepted: Accepted, proofs: frames.Proofs) -> None:
        self._timer.cancel()
        self._region, self._memory, self._number = region, region.memory, accepted.session
        self._expect(frames.OWNER_EXPECTS_OPERATIONS, self._operation)
        claims = frames.CLAIMS if self.executes and region.claimant is not None else 0
        body = proofs.owner + accepted.welcome
        header = frames.frame(
            Kind.WELCOME,
            flags=self.welcome_flags | claims,
            body=len(body),
            a=accepted.session,
            b=region.memory.size_bytes,
            c=frames.GUARDED_BYTES_MAX,
        )
        self._send([header + body])

    def _expect(self, bounds: frames.Bounds, handle: Callable[[Header, memoryview], None]) -> None:
        self._reader.bounds = bounds
        self._handle = handle

    # Operations.

    def _place(self, header: Header) -> memoryview | None:
        assert self._memory is not None
        if header.kind == Kind.PULLED:
            return self.pulls.place(header)
        span = self._memory.span(header.a, header.body)
        return None if self._writes_to_drop else span

    def _operation(self, header: Header, body: memoryview) -> None:
        assert self._memory is not None
        memory = self._memory
        kind = header.kind
        if kind == Kind.WRITE:
            if self._writes_to_drop:
                self._writes_to_drop -= 1
            elif header.flags & frames.NOTIFY:
                self._notify = True
        elif kind in {Kind.PULLED, Kind.GONE}:
            self.pulls.answered(header)
        elif kind == Kind.GUARDED:
            self._guarded(header, body, memory)
        elif kind == Kind.GUARD:
            self._guard(header, body, memory)
        elif kind == Kind.READ:
            self._read(header, memory)
        elif kind == Kind.SWAP:
            self._answer(header, memory.compare_and_swap(header.a, header.b, header.c))
        elif kind == Kind.ADD:
            self._answer(header, memory.fetch_and_add(header.a, header.b))
        elif kind == Kind.CLAIM:
            self._claim(header, memory)
        elif kind == Kind.FLUSH:
            self._answer(header, 0)
        elif kind == Kind.LISTEN:
            assert self._region is not None
            self._region.listen(self, header.a)
        else:
            assert kind == Kind.BEAT, f"no operation for {header}"

    def _guarded(self, header: Header, body: memoryview, memory: RegionMemory) -> None:
        writes = frames.parse_chain(header.writes, body)
        spans = [memory.span(offset, len(data)) for offset, data in writes]
        found = memory.compare_and_swap(header.a, header.b, header.c)
        if found == header.b:
            for span, (_, data) in zip(spans, writes, strict=True):
                span[:] = data
            if header.flags & frames.NOTIFY:
                self._notify = True
        self._answer(header, found)

    def _guard(self, header: Header, body: memoryview, memory: RegionMemory) -> None:
        for offset, length in frames.parse_places(header.writes, body):
            memory.span(offset, length)
        found = memory.compare_and_swap(header.a, header.b, header.c)
        if found != header.b:
            self._writes_to_drop = header.writes
        self._answer(header, found)

    def _read(self, header: Header, memory: RegionMemory) -> None:
        if header.b > frames.READ_BYTES_MAX:
            raise ProtocolError(f"a read of {header.b} bytes; at most {frames.READ_BYTES_MAX} are allowed")
        data = memory.read(header.a, header.b)
        answer = frames.frame(Kind.DATA, tag=header.tag, body=len(data), b=self._nudges)
        self._answers.append(answer)
        self._answers.append(data)
        self._answer_bytes += len(data)

    def _claim(self, header: Header, memory: RegionMemory) -> None:
        assert self._region is not None
        if self._region.claimant is None:
            raise ProtocolError("a claim where the owner has not said that it executes any")
        claimed = self._region.claimant(memory.view, self._number, header.a)
        self._answers.append(frames.claimed_frame(header.tag, claimed, self._nudges))

    def _answer(self, header: Header, word: int) -> None:
        self._answers.append(frames.frame(Kind.WORD, tag=header.tag, a=word, b=self._nudges))

    def nudge(self, nudges: int) -> None:
        """Tell the producer that the ring has moved."""
        if not self._ending.over():
            self._send([frames.frame(Kind.NUDGE, b=nudges)])

    @property
    def _nudges(self) -> int:
        return self._region.nudges if self._region is not None else 0

    def _send(self, buffers: Sequence[Bytes]) -> None:
        self._idle = False
        self.wire.send(buffers)
