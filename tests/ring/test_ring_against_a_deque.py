"""The ring against a plain deque: whatever is done in whatever order, the same comes out."""

from collections import deque
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from tests.ring.region import LEASE_SECONDS, Blocked, Inbox, Session
from transports.operations import Pause, Program
from transports.ring import Delivery, Geometry
from transports.ring.invariants import broken

NAMES = ("A", "B", "C")


class RingAgainstDeque(RuleBasedStateMachine):
    """Producers send, stall, reconnect; the consumer polls and releases out of order.

    The model is one deque in the order of the swaps. What is handed over stands at its front, behind
    nothing but repeats and what was lost with a session (and is sent again in the next one).
    """

    held: ClassVar[Bundle[Delivery]] = Bundle("held")

    @initialize(
        slots=st.integers(1, 5),
        granules=st.integers(1, 9),
        guarded=st.booleans(),
        start=st.integers(0, 6),
        apart=st.booleans(),
        claims=st.booleans(),
    )
    def open(self, slots: int, granules: int, guarded: bool, start: int, apart: bool, claims: bool) -> None:
        """Any small ring, also one whose counters are about to wrap, or whose payload lies apart."""
        payload_bytes = max(granules, 2 if apart else 1) * 64
        geometry = Geometry(slots, payload_bytes, len(NAMES) + 2, 64 if apart else 0)
        self.inbox = Inbox(geometry, guarded=guarded, claims=claims)
        sequence = -start % geometry.sequence_modulus
        end = -start % geometry.granule_modulus
        self._start_at(sequence << 28 | end)
        self.sessions: dict[str, Session] = {name: self.inbox.connect(name) for name in NAMES}
        self.sent: dict[str, list[bytes]] = {name: [] for name in NAMES}
        self.handed: dict[str, int] = dict.fromkeys(NAMES, 0)
        self.order: deque[tuple[str, int, Session]] = deque()
        self.kept: dict[int, bytes] = {}

    def _start_at(self, position: int) -> None:
        word = position.to_bytes(8, "little")
        self.inbox.memory[64:72] = word
        self.inbox.memory[128:136] = word
        self.inbox.consumer._head = self.inbox.consumer._cursor = position

    @rule(name=st.sampled_from(NAMES), length=st.integers(0, 9 * 64), cut=st.integers(0, 600))
    def send(self, name: str, length: int, cut: int) -> None:
        """One message, in two buffers, if there is room."""
        length = min(length, self.inbox.geometry.message_bytes_max)
        number = len(self.sent[name])
        self._send(name, bytes([number % 251, ord(name)] * (length // 2 + 1))[:length], cut)

    def _send(self, name: str, payload: bytes, cut: int) -> bool:
        """Send the next message: one that must be sent again, or else this one."""
        session = self.sessions[name]
        if session.held_back or session.revoked:
            return False
        number = session.producer.next_number
        again = number < len(self.sent[name])
        if again:
            payload = self.sent[name][number]
        try:
            sent = self.inbox.send(session, payload[:cut], payload[cut:], head=self._head(name, number))
        except Blocked:
            return False
        assert sent == number
        if not again:
            self.sent[name].append(payload)
        self.order.append((name, number, session))
        return True

    def _head(self, name: str, number: int) -> bytes:
        return f"{name}.{number}".encode() if self.inbox.geometry.is_apart else b""

    @rule(name=st.sampled_from(NAMES))
    def stall(self, name: str) -> None:
        """From here on nothing of this session lands."""
        self.sessions[name].held_back = True

    @rule(name=st.sampled_from(NAMES), length=st.integers(0, 128))
    def reserve_only(self, name: str, length: int) -> None:
        """A stalled producer wins a swap, and no more comes of it."""
        session = self.sessions[name]
        if not session.held_back or session.revoked:
            return
        payload = bytes(min(length, self.inbox.geometry.message_bytes_max))
        if session.producer.next_number < len(self.sent[name]):
            return
        head = self._head(name, len(self.sent[name]))
        program: Program[int] = session.producer.send((payload,), kind=1, now=self.inbox.now, head=head)
        operation = next(program)
        while not isinstance(operation, Pause):
            try:
                operation = program.send(self.inbox.carry_out(session, operation))
            except StopIteration:
                self.sent[name].append(payload)
                return
        program.close()

    @rule(name=st.sampled_from(NAMES), lost=st.booleans())
    def reconnect(self, name: str, lost: bool) -> None:
        """A session that was fenced, or whose connection is lost, is followed by another one."""
        session = self.sessions[name]
        if not session.revoked:
            if not lost:
                return
            self.inbox.revoke(session.number)
            self.inbox.consumer.close_session(session.number)
        if not self.inbox.consumer._table.free:
            return
        again = self.sessions[name] = self.inbox.connect(name)
        assert again.producer.next_number == self.handed[name]
        self._send_again(name)

    def _send_again(self, name: str) -> None:
        producer = self.sessions[name].producer
        while producer.next_number < len(self.sent[name]) and self._send(name, b"", 0):
            pass

    @rule()
    def lease_ends(self) -> None:
        """Time passes."""
        self.inbox.now += LEASE_SECONDS + 1

    @rule(target=held)
    def poll(self) -> MultipleResults[Delivery] | Delivery:
        """What is handed over is the next message of its producer, whole."""
        delivery = self.inbox.poll()
        if delivery is None:
            return multiple()
        name = delivery.identity
        assert delivery.number == self.handed[name]
        payload = self.inbox.bytes_of(delivery)
        assert payload == self.sent[name][delivery.number]
        assert delivery.head == self._head(name, delivery.number)
        while (front := self.order.popleft())[:2] != (name, delivery.number):
            assert front[1] < self.handed[front[0]] or front[2].revoked
        self.handed[name] += 1
        self.kept[delivery.sequence] = payload
        return delivery

    @rule(delivery=consumes(held))
    def release(self, delivery: Delivery) -> None:
        """Any message that is held may be given back."""
        assert self.inbox.bytes_of(delivery) == self.kept.pop(delivery.sequence)
        self.inbox.release(delivery)

    @rule(name=st.sampled_from(NAMES))
    def refresh(self, name: str) -> None:
        """Nothing is acknowledged that was not handed over."""
        session = self.sessions[name]
        if not session.revoked:
            assert self.inbox.refresh(session) <= self.handed[name]

    @invariant()
    def holds_together(self) -> None:
        """Memory and books agree."""
        if hasattr(self, "inbox"):
            assert list(broken(self.inbox.consumer, self.inbox.memory)) == []

    def teardown(self) -> None:
        """At the end everybody connects again, and everything arrives."""
        if not hasattr(self, "inbox"):
            return
        for _ in range(200):
            if all(self.handed[name] == len(self.sent[name]) for name in NAMES):
                return
            for sequence in list(self.kept):
                self.kept.pop(sequence)
                self.inbox.own(self._release_by_sequence(sequence))
            self.lease_ends()
            while self._taken_at_the_end():
                pass
            for name in NAMES:
                self.reconnect(name, lost=True)
        raise AssertionError("something never arrived")

    def _release_by_sequence(self, sequence: int) -> Program[None]:
        return self.inbox.consumer.release(Delivery(sequence, 0, "", 0, 0, 0, 0, 0))

    def _taken_at_the_end(self) -> bool:
        delivery = self.inbox.poll()
        if delivery is None:
            return False
        assert self.inbox.bytes_of(delivery) == self.sent[delivery.identity][delivery.number]
        assert delivery.number == self.handed[delivery.identity]
        self.handed[delivery.identity] += 1
        self.inbox.release(delivery)
        return True


RingAgainstDeque.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
test_ring_against_a_deque = RingAgainstDeque.TestCase
