"""A ring in plain memory, for tests: operations are carried out at once, or held back on purpose."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, field

from transports.errors import SessionFenced
from transports.operations import (
    EXPIRED,
    Bytes,
    Chain,
    Claim,
    CompareAndSwap,
    Expired,
    Fence,
    Guarded,
    Load,
    Operation,
    Pause,
    Peek,
    Program,
    Pull,
    Put,
    Read,
    Store,
    Write,
)
from transports.ring import Claims, Consumer, Delivery, Geometry, Producer
from transports.ring.invariants import broken

LEASE_SECONDS = 10.0
GENERATION = 3


class Blocked(Exception):  # noqa: N818  # not an error: the program waits
    """A program pauses where the test does not let time pass."""


@define
class Session:
    """One producer's session on the region."""

    producer: Producer
    number: int
    revoked: bool = False
    held_back: bool = False
    """Writes are posted and do not land."""
    posted: deque[Write | Put] = field(factory=deque)


class Inbox:
    """A consumer, its region and everybody who is connected to it."""

    def __init__(self, geometry: Geometry, *, guarded: bool = False, claims: bool = False) -> None:
        self.geometry = geometry
        self.memory = bytearray(geometry.region_bytes)
        self.view = memoryview(self.memory)
        self.beside = memoryview(bytearray(geometry.payload_bytes if geometry.is_apart else 0))
        """Where the payload ring lies, if it lies apart."""
        self.consumer = Consumer(
            geometry,
            generation=GENERATION,
            lease_seconds=LEASE_SECONDS,
            slowest_bytes_per_second=1e9,
        )
        self.sessions: dict[int, Session] = {}
        self.fenced: list[tuple[int, ...]] = []
        self.at_fence: Callable[[], None] = lambda: None
        """Called when the consumer asks for a fence, before it takes hold."""
        self.exported: dict[tuple[int, bytes], bytes] = {}
        """What may be pulled: by session and key."""
        self.pulled: list[int] = []
        """The sessions of which something was pulled."""
        self.at_pull: Callable[[], None] = lambda: None
        """Called when something was pulled, before the consumer gets it."""
        self.now = 0.0
        self._guarded = guarded
        self._claims = claims
        self.own(self.consumer.initialise())

    # The consumer's side.

    def own(self, program: Program[Any]) -> Any:
        """Run one of the consumer's programs to its end."""
        try:
            operation = next(program)
            while True:
                operation = program.send(self._own_operation(operation))
        except StopIteration as stop:
            return stop.value

    def _own_operation(self, operation: Operation) -> Any:
        match operation:
            case Load(offset, length):
                return self.view[offset : offset + length]
            case Peek(offset, length):
                return bytes(self.beside[offset : offset + length])
            case Store(offset, data):
                self.view[offset : offset + len(data)] = data
            case Fence(sessions):
                self.at_fence()
                self.fenced.append(sessions)
                for number in sessions:
                    self.revoke(number)
            case Pull(session, key, _):
                self.pulled.append(session)
                self.at_pull()
                return self.exported.get((session, key))
            case _:
                raise AssertionError(f"a consumer does not use {operation!r}")
        return None

    def revoke(self, number: int) -> None:
        """Nothing of this session lands any more."""
        session = self.sessions[number]
        session.revoked = True
        session.posted.clear()

    def poll(self) -> Delivery | None:
        """One message, or ``None``."""
        delivery: Delivery | None = self.own(self.consumer.poll(self.now))
        assert list(broken(self.consumer, self.memory)) == []
        return delivery

    def release(self, delivery: Delivery) -> None:
        """Give a message back."""
        self.own(self.consumer.release(delivery))
        assert list(broken(self.consumer, self.memory)) == []

    def bytes_of(self, delivery: Delivery) -> bytes:
        """The payload of a message that is held."""
        memory = self.beside if self.geometry.is_apart else self.view
        return bytes(memory[delivery.offset : delivery.offset + delivery.length])

    def take(self) -> bytes | None:
        """Poll, copy and release one message."""
        delivery = self.poll()
        if delivery is None:
            return None
        payload = self.bytes_of(delivery)
        self.release(delivery)
        return payload

    # A producer's side.

    def connect(self, identity: str) -> Session:
        """Open a session; an earlier one of this identity must have ended."""
        number, first_number = self.consumer.open_session(identity)
        producer = Producer(
            self.geometry,
            session=number,
            generation=GENERATION,
            first_number=first_number,
            lease_seconds=LEASE_SECONDS,
            guarded_bytes_max=1 << 20 if self._guarded else 0,
            claims=self._claims,
        )
        session = self.sessions[number] = Session(producer, number)
        return session

    def send(
        self,
        session: Session,
        *payload: Bytes,
        kind: int = 1,
        flags: int = 0,
        wait: bool = True,
        head: bytes = b"",
    ) -> int:
        """Send one message to its end; raises ``Blocked`` where it would wait."""
        program = session.producer.send(payload, kind=kind, flags=flags, now=self.now, wait=wait, head=head)
        number: int = self.run(session, program)
        return number

    def refresh(self, session: Session) -> int:
        """What the producer knows to be delivered."""
        delivered: int = self.run(session, session.producer.refresh(self.now))
        return delivered

    def run(self, session: Session, program: Program[Any], operation: Operation | None = None) -> Any:
        """Run one of a producer's programs to its end, from the operation that it rests at."""
        try:
            operation = operation or next(program)
            while True:
                operation = program.send(self.carry_out(session, operation))
        except StopIteration as stop:
            return stop.value
        finally:
            program.close()

    def carry_out(self, session: Session, operation: Operation) -> Any:
        """One operation of a producer."""
        if session.revoked:
            raise SessionFenced("this session was fenced")
        match operation:
            case Read(offset, length):
                return bytes(self.view[offset : offset + length])
            case CompareAndSwap():
                return self._swap(operation)
            case Guarded(swap, chain):
                found = self._swap(swap)
                if found == swap.expected:
                    self._post(session, chain.writes)
                return found
            case Claim(length):
                return Claims(self.geometry)(self.view, session.number, length)
            case Chain(writes):
                return self._post(session, writes)
            case Put():
                return self._post(session, (operation,))
            case Pause():
                raise Blocked
            case _:
                raise AssertionError(f"a producer does not use {operation!r}")

    def _swap(self, swap: CompareAndSwap) -> int | Expired:
        if self.now > swap.not_after:
            return EXPIRED
        word = self.view[swap.offset : swap.offset + 8]
        found = int.from_bytes(word, "little")
        if found == swap.expected:
            word[:] = swap.desired.to_bytes(8, "little")
        return found

    def _post(self, session: Session, writes: Sequence[Write | Put]) -> None:
        session.posted.extend(writes)
        if not session.held_back:
            self.land(session)

    def land(self, session: Session, count: int | None = None) -> None:
        """Let posted writes land, all or the first few."""
        for _ in range(len(session.posted) if count is None else count):
            write = session.posted.popleft()
            offset, memory = write.offset, self.beside if isinstance(write, Put) else self.view
            for buffer in write.buffers:
                assert isinstance(buffer, bytes | bytearray | memoryview)
                memory[offset : offset + len(buffer)] = buffer
                offset += len(buffer)


def drain(inbox: Inbox) -> Sequence[bytes]:
    """Everything that can be taken now."""
    taken = []
    while (payload := inbox.take()) is not None:
        taken.append(payload)
    return taken
