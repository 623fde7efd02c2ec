"""The producer's side of the tcp transport: one connection, one session.

Questions (reads, swaps, flushes) carry a tag; the answer with that tag completes them. Writes have no
answer. Everything is put on the wire in the order of the calls, in one piece per call, so calls of
many tasks never mix within a frame.
"""

import asyncio
import hmac
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from attrs import define, evolve

from transports import tcp_frames as frames
from transports.address import Address
from transports.errors import (
    AuthenticationFailed,
    ChannelClosed,
    ConnectFailed,
    OperationTimeout,
    PeerLost,
    ProtocolError,
    TransportError,
)
from transports.memory import Atomics, Capabilities, Options, RemoteMemory
from transports.operations import EXPIRED, Bytes, Chain, Claim, Claimed, CompareAndSwap, Expired, Guarded
from transports.sessions import Ending
from transports.tcp_frames import FrameReader, Header, Kind
from transports.tcp_pulls import Lending
from transports.tcp_pulse import Pulse
from transports.tcp_reasons import parse_reason
from transports.tcp_wire import Wire

CAPABILITIES: Final = Capabilities(
    atomics=Atomics.OWNER,
    one_sided=False,
    fences_sessions=True,
    guarded_bytes_max=frames.GUARDED_BYTES_MAX,
    zero_copy_send=True,
    pull_share=1.0,
    wire="tcp",
)

_TAGS: Final = 1 << 32
_Answer: TypeAlias = Bytes | int | Claimed


@define(eq=False)
class _Question:
    """An operation that waits for its answer."""

    answer: asyncio.Future[_Answer]
    deadline: float
    kind: Kind
    """Of the frame that answers it."""
    data: bytearray | None = None
    """Where a read's bytes go."""


class TcpMemory(RemoteMemory):
    """A session over one connection; an ``Endpoint``."""

    wire: Wire

    def __init__(self, address: Address, hello: bytes, options: Options, *, encrypted: bool) -> None:
        self._address = address
        self._options = options
        self._capabilities = CAPABILITIES
        if encrypted:
            self._capabilities = evolve(CAPABILITIES, zero_copy_send=False, wire="tls")
        self._loop = asyncio.get_running_loop()
        self._ending = Ending()
        self._reader = FrameReader(frames.PRODUCER_EXPECTS_CHALLENGE, self._place)
        self._handle: Callable[[Header, memoryview], None] = self._challenge
        self._introduction = frames.Introduction(secrets.token_bytes(frames.NONCE_BYTES), address.name, hello)
        self._proofs: frames.Proofs | None = None
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._session = 0
        self._welcome = b""
        self._questions: dict[int, _Question] = {}
        self._next_tag = 0
        self._nudges_seen = 0
        self._nudges_known = 0
        self._listens = False
        self._nudged: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._lending = Lending(self._send, lambda: self.wire.has_room)
        self._idle = True
        self._pulse = Pulse(options.silence_seconds, on_check=self._check, on_silence=self._silent)

    @property
    def capabilities(self) -> Capabilities:
        """The owner's processor carries out everything."""
        return self._capabilities

    @property
    def session(self) -> int:
        """The number the owner gave this session."""
        return self._session

    @property
    def welcome(self) -> bytes:
        """What the owner answered to our hello."""
        return self._welcome

    async def open(self) -> None:
        """Shake hands; called once, when ``wire`` is connected."""
        has_secret = self._options.secret is not None
        self._send([frames.hello_frame(self._introduction, has_secret=has_secret)])
        await self._opened

    # Operations.

    async def read(self, offset: int, length: int) -> Bytes:
        """Fetch bytes of the region, in pieces where there are many."""
        if length <= frames.READ_BYTES_MAX:
            return await self._read(offset, length)
        parts = [
            await self._read(start, min(frames.READ_BYTES_MAX, offset + length - start))
            for start in range(offset, offset + length, frames.READ_BYTES_MAX)
        ]
        return b"".join(parts)

    async def _read(self, offset: int, length: int) -> Bytes:
        await self._wait_for_room()
        data = bytearray(length)
        await self._ask(Kind.DATA, lambda tag: [frames.frame(Kind.READ, tag=tag, a=offset, b=length)], data)
        return data

    async def compare_and_swap(self, swap: CompareAndSwap) -> int | Expired:
        """Swap a word; the word found is the outcome."""
        await self._wait_for_room()
        if time.monotonic() > swap.not_after:
            return EXPIRED
        return await self._ask_word(
            lambda tag: [frames.frame(Kind.SWAP, tag=tag, a=swap.offset, b=swap.expected, c=swap.desired)]
        )

    async def fetch_and_add(self, offset: int, addend: int) -> int:
        """Add to a word, modulo 2**64; the word found."""
        await self._wait_for_room()
        return await self._ask_word(lambda tag: [frames.frame(Kind.ADD, tag=tag, a=offset, b=addend)])

    async def claim(self, claim: Claim) -> Claimed:
        """Have the owner reserve; it knows for which session by the connection."""
        await self._wait_for_room()
        claimed = await self._ask(
            Kind.CLAIMED, lambda tag: [frames.frame(Kind.CLAIM, tag=tag, a=claim.length)]
        )
        assert isinstance(claimed, Claimed)
        return claimed

    async def post(self, chain: Chain) -> None:
        """Queue the writes in order; waits first while the queue is full."""
        await self._wait_for_room()
        self._send(frames.chain_frames(chain))

    async def guarded(self, guarded: Guarded) -> int | Expired:
        """Swap and, if it took place, the chain: sent in one go, without waiting for the swap's outcome."""
        await self._wait_for_room()
        if time.monotonic() > guarded.swap.not_after:
            return EXPIRED
        return await self._ask_word(lambda tag: frames.guarded_frames(tag, guarded))

    async def flush(self) -> None:
        """Return when all that was posted before has landed."""
        await self._wait_for_room()
        await self._ask_word(lambda tag: [frames.frame(Kind.FLUSH, tag=tag)])

    async def wait_notified(self, timeout_seconds: float) -> bool:
        """Wait for a nudge from the owner."""
        self._ending.check()
        if self._nudges_known != self._nudges_seen:
            return True
        if not self._listens:
            self._listens = True
            self._send([frames.frame(Kind.LISTEN, a=self._nudges_seen)])
        if self._nudged is None:
            self._nudged = self._loop.create_future()
        await asyncio.wait([self._nudged], timeout=timeout_seconds)
        self._ending.check()
        return self._nudges_known != self._nudges_seen

    async def close(self) -> None:
        """End the session."""
        self._end(ChannelClosed(f"the session on {self._address} was closed by us"))

    def export(self, buffers: Sequence[Bytes]) -> bytes:
        """Let the owner pull these bytes over the connection."""
        self._ending.check()
        return self._lending.export(buffers)

    def withdraw(self, key: bytes) -> None:
        """End an export."""
        self._lending.withdraw(key)

    async def _ask_word(self, build: Callable[[int], Sequence[Bytes]]) -> int:
        word = await self._ask(Kind.WORD, build)
        assert isinstance(word, int)
        return word

    def _ask(
        self, kind: Kind, build: Callable[[int], Sequence[Bytes]], data: bytearray | None = None
    ) -> asyncio.Future[_Answer]:
        tag = self._next_tag
        self._next_tag = (tag + 1) % _TAGS
        assert tag not in self._questions
        answer: asyncio.Future[_Answer] = self._loop.create_future()
        deadline = self._loop.time() + self._options.operation_timeout_seconds
        self._questions[tag] = _Question(answer, deadline, kind, data)
        self._send(build(tag))
        return answer

    async def _wait_for_room(self) -> None:
        self._ending.check()
        while not self.wire.has_room:
            if self._room is None:
                self._room = self._loop.create_future()
            # A wait is shared by all who wait, so none may cancel it for the others.
            await asyncio.shield(self._room)
            self._ending.check()

    def _send(self, buffers: Sequence[Bytes]) -> None:
        self._idle = False
        self.wire.send(buffers)

    # The wire's endpoint.

    def next_buffer(self) -> memoryview:
        """Where the next bytes belong."""
        return self._reader.next_buffer()

    def received(self, count: int) -> None:
        """Take the answers completed by these bytes."""
        self._pulse.heard()
        try:
            self._reader.received(count)
            for header, body in self._reader.frames():
                self._handle(header, body)
                if self._ending.over():
                    return
        except TransportError as error:
            self._end(error)

    def has_room(self) -> None:
        """Whoever waits to send may go on."""
        self._lending.answer()
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def progressed(self) -> None:
        """The owner takes bytes, so it is there."""
        self._pulse.heard()

    def lost(self, error: OSError | None) -> None:
        """The connection is gone."""
        where = " in the middle of a frame" if self._reader.in_frame else ""
        how = f"reset ({error})" if error is not None else "closed by its owner"
        self._end(PeerLost(f"the connection to {self._address} was {how}{where}"))

    # How it ends.

    def _end(self, error: TransportError) -> None:
        if not self._ending.reach(error):
            return
        self._pulse.stop()
        self._lending.end()
        self._hang_up()
        if not self._opened.done():
            self._opened.set_exception(self._not_opened(error))
            self._opened.exception()  # perhaps nobody waits for it yet, or any more
        questions, self._questions = self._questions, {}
        for question in questions.values():
            if not question.answer.done():
                question.answer.set_exception(self._ending.error())
                question.answer.exception()  # perhaps who has asked has gone
        self.has_room()
        self._wake()

    def _hang_up(self) -> None:
        self.wire.close()

    def _not_opened(self, error: TransportError) -> TransportError:
        if isinstance(error, PeerLost):
            hint = "is it another service, does it want TLS, or is it overloaded?"
            return ConnectFailed(f"{error} before it had answered; {hint}")
        return error

    def _silent(self) -> None:
        self._end(PeerLost(f"nothing heard from {self._address} for {self._options.silence_seconds} s"))

    def _check(self) -> None:
        idle, self._idle = self._idle, True
        if idle and self._opened.done() and not self.wire.pending_bytes:
            self.wire.send([frames.frame(Kind.BEAT)])
        now = self._loop.time()
        for question in self._questions.values():
            if question.deadline > now:
                break  # they stand in the order in which they were asked
            if not question.answer.done():
                seconds = self._options.operation_timeout_seconds
                question.answer.set_exception(
                    OperationTimeout(f"{self._address} gave no answer within {seconds} s")
                )

    # The handshake.

    def _challenge(self, header: Header, body: memoryview) -> None:
        self._refused(header, body)
        if len(body) != frames.NONCE_BYTES:
            raise ProtocolError(f"a challenge of {len(body)} bytes")
        secret = self._options.secret
        if (secret is not None) != bool(header.flags & frames.SECRET):
            raise AuthenticationFailed(
                f"{self._address} has no cluster secret and we have one; give both sides the same"
                if secret is not None
                else f"{self._address} asks for a cluster secret and we have none; give both sides the same"
            )
        proofs = self._proofs = frames.Proofs(secret, self._introduction, bytes(body))
        self._send([frames.frame(Kind.PROOF, body=len(proofs.producer)) + proofs.producer])
        self._expect(frames.PRODUCER_EXPECTS_WELCOME, self._welcomed)

    def _welcomed(self, header: Header, body: memoryview) -> None:
        self._refused(header, body)
        assert self._proofs is not None
        if not hmac.compare_digest(self._proofs.owner, body[: frames.PROOF_BYTES]):
            raise AuthenticationFailed(f"{self._address} could not prove that it knows the cluster secret")
        self._session = header.a
        self._welcome = bytes(body[frames.PROOF_BYTES :])
        guarded_bytes_max = min(header.c, frames.GUARDED_BYTES_MAX)
        self._capabilities = evolve(
            self._capabilities,
            guarded_bytes_max=guarded_bytes_max,
            claims=bool(header.flags & frames.CLAIMS),
        )
        self._expect(frames.PRODUCER_EXPECTS_ANSWERS, self._answered)
        if not self._opened.done():  # else who opened it has given up, and is about to close it
            self._opened.set_result(None)

    def _refused(self, header: Header, body: memoryview) -> None:
        if header.kind == Kind.REFUSED:
            raise parse_reason(header, body)

    def _expect(self, bounds: frames.Bounds, handle: Callable[[Header, memoryview], None]) -> None:
        self._reader.bounds = bounds
        self._handle = handle

    # Answers.

    def _answered(self, header: Header, body: memoryview) -> None:
        kind = header.kind
        if kind == Kind.WORD:
            self._complete(header, header.a)
        elif kind == Kind.DATA:
            self._complete(header, b"")
        elif kind == Kind.CLAIMED:
            self._complete(header, frames.parse_claimed(header, body))
        elif kind == Kind.NUDGE:
            self._nudges_known = max(self._nudges_known, header.b)
            self._listens = False
            self._wake()
        elif kind == Kind.PULL:
            self._lending.asked(header)
        elif kind == Kind.ENDED:
            raise parse_reason(header, body)
        else:
            assert kind == Kind.BEAT, f"no answer is {header}"

    def _complete(self, header: Header, answer: _Answer) -> None:
        question = self._questions.pop(header.tag, None)
        if question is None or question.kind != header.kind:
            raise ProtocolError(f"an answer with tag {header.tag}, to which no such question is open")
        self._nudges_seen = header.b
        self._nudges_known = max(self._nudges_known, header.b)
        if not question.answer.done():
            question.answer.set_result(answer)

    def _place(self, header: Header) -> memoryview:
        question = self._questions.get(header.tag)
        if question is None or question.data is None or len(question.data) != header.body:
            raise ProtocolError(f"{header.body} bytes with tag {header.tag}, for which nobody has asked")
        return memoryview(question.data)

    def _wake(self) -> None:
        nudged, self._nudged = self._nudged, None
        if nudged is not None and not nudged.done():
            nudged.set_result(None)
