"""The consumer's half of the ring: look, hand over, release; recovery is in ``recovery.py``.

Three positions, each never ahead of the next (modulo the counters)::

    head      everything before it may be reserved again
    cursor    everything before it has been handed over or dropped
    tail      everything before it is reserved

What it promises:

* **Exactly once, in order.** A committed slot is handed over only if its number is the next one
  expected from its *identity*, in whatever session it comes. A smaller number is a repeat after a
  reconnection. A larger one was sent behind a message that recovery has abandoned; its session is
  fenced and the message comes again. Both are dropped.
* **Whole.** Where a slot starts follows from what the consumer knows itself; hashes cover slot and
  payload. What does not match is looked at again until the lease ends, and is never handed over.
* **No loss behind an acknowledgement.** The delivered word is stored after the message was entered
  into ``held``: that is the hand-over.
* **No deadlock.** A slot that is reserved and not committed is recovered after one lease, counted
  from when the cursor came to it; at once if everybody who could have reserved it is gone.

Sessions. A session that ended (closed, lost, fenced) may have left committed slots behind, so its
number must go on meaning the same identity until the cursor has passed everything that it can have
reserved: the tail at any moment after its end. Then its delivered word is cleared and the number
may be given away again.

What it survives: any producer dying or stalling at any step. What it does not: its own death (the
region's generation dies with it), and producers that break the protocol on purpose.

Every method that is not a program only changes the consumer's own books. They may be called while
``poll`` rests at a ``Fence``, and at no other moment in the middle of it; one ``poll`` at a time.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from attrs import define, field, frozen

from transports.errors import TransportError
from transports.operations import WORD_BYTES, Bytes, Fence, Load, Program, Store
from transports.ring.layout import (
    EMPTY_WORD,
    GENERATION_MAX,
    GRANULE_BITS,
    GRANULE_BYTES,
    GRANULE_MASK,
    HEAD_OFFSET,
    SEQUENCE_MASK,
    SLOT_BYTES,
    TAIL_OFFSET,
    WORD,
    Geometry,
    Slot,
    decode_slot,
    hash_payload,
    pack_position,
    unpack_position,
)


class SessionsExhausted(TransportError):
    """Every session of the inbox is in use, or its end is not yet behind the cursor: try again."""

    retryable = True


@frozen
class Delivery:
    """A message that was handed over; its bytes stay where they are until it is released."""

    sequence: int
    session: int
    identity: str
    number: int
    kind: int
    flags: int
    offset: int
    """Where the payload starts in the region."""
    length: int


@define
class Identity:
    """A producer across its sessions."""

    name: str
    next_number: int = 0
    session: int | None = None
    """The open session, if there is one."""


@define
class Session:
    """One connection of an identity."""

    identity: Identity
    open: bool = True
    last_sequence: int | None = None
    """Once closed and the tail was seen: nothing of it is reserved at or after this sequence."""


@define
class Passed:
    """A stretch between head and cursor: one message, or what recovery has abandoned."""

    after: int
    """The position word behind it."""
    released: bool = field(default=False)


@frozen
class Boundary:
    """A position behind the cursor that is known for certain, with the session that reserved up to it."""

    session: int
    sequence: int
    end: int


class Consumer:
    """The one reader of an inbox.

    Args:
        geometry: of the inbox.
        generation: told apart from every earlier region of this inbox; 1 to 2**32 - 1.
        lease_seconds: how long a reserved slot may stay uncommitted before its producer is suspected.
        slowest_bytes_per_second: added to the lease is the time in which reserved bytes arrive at
            the slowest rate that is still tolerated.
        identities_max: how many producers without a session are remembered. One that returns after
            so many others were seen is a new producer.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        generation: int,
        lease_seconds: float,
        slowest_bytes_per_second: float,
        identities_max: int = 1 << 16,
    ) -> None:
        assert 0 < generation <= GENERATION_MAX
        assert lease_seconds > 0
        assert slowest_bytes_per_second > 0
        self.geometry: Final = geometry
        self.generation: Final = generation
        self._generation_bits = generation << 32
        self._lease_seconds = lease_seconds
        self._slowest_bytes_per_second = slowest_bytes_per_second
        self._identities_max = identities_max
        self._head = 0
        self._cursor_sequence = 0
        self._cursor_end = 0
        self._deadline: float | None = None
        self._passed: deque[Passed] = deque()
        self._held: dict[int, Passed] = {}
        self._identities: dict[str, Identity] = {}
        self._sessions: dict[int, Session] = {}
        self._closing: list[int] = []
        self._free_sessions: deque[int] = deque(range(1, geometry.session_count + 1))

    # What the layer above may ask.

    @property
    def held(self) -> int:
        """Messages handed over and not yet released."""
        return len(self._held)

    @property
    def free_bytes(self) -> int:
        """Payload bytes that are not between head and cursor (some may be reserved already)."""
        used = (self._cursor_end - (self._head & GRANULE_MASK)) % self.geometry.granule_modulus
        return max(0, self.geometry.granule_count - used) * GRANULE_BYTES

    def next_deadline(self) -> float | None:
        """When ``poll`` must be called even if nothing is notified; also call it after ``close_session``."""
        return self._deadline

    # Sessions.

    def session_of(self, identity: str) -> int | None:
        """The open session of ``identity``: fence and close it before another one is opened."""
        known = self._identities.get(identity)
        return known.session if known else None

    def open_session(self, identity: str) -> tuple[int, int]:
        """Give ``identity`` a session; returns its number and how many messages were handed over so far.

        Raises:
            SessionsExhausted: no session number is free. One becomes free when a session has ended,
                ``poll`` has passed the last slot that it can have reserved, and was called again.
        """
        assert self.session_of(identity) is None, f"{identity!r} still has an open session: fence it first"
        if not self._free_sessions:
            raise SessionsExhausted(
                f"all {self.geometry.session_count} sessions of this inbox are in use: try again later, "
                "or give the inbox a larger session_count"
            )
        number = self._free_sessions.popleft()
        # The order of this dictionary is the order of opening: who is forgotten first stands first.
        known = self._identities.pop(identity, None) or Identity(identity)
        self._forget_one()
        self._identities[identity] = known
        known.session = number
        self._sessions[number] = Session(known)
        return number, known.next_number

    def close_session(self, session: int) -> None:
        """The session has ended and nothing of it can land any more; unknown ones are no error."""
        record = self._sessions.get(session)
        if record is None or not record.open:
            return
        record.open = False
        record.identity.session = None
        self._closing.append(session)

    def _forget_one(self) -> None:
        if len(self._identities) < self._identities_max:
            return
        needed = {id(record.identity) for record in self._sessions.values()}
        for name, known in self._identities.items():
            if id(known) not in needed:
                del self._identities[name]
                return

    # Programs.

    def initialise(self) -> Program[None]:
        """Write the identity line into zeroed memory, before any producer may connect."""
        yield Store(0, self.geometry.identity_line(self.generation))

    def poll(self, now: float) -> Program[Delivery | None]:
        """Hand over the next message, if there is one; recover a slot whose lease is over.

        Args:
            now: the driver's monotonic clock.

        Returns:
            The next message, or ``None`` when the cursor has to wait (see ``next_deadline``).

        Yields only ``Load`` and ``Store``, and a ``Fence`` where producers are suspected.
        """
        geometry = self.geometry
        if self._closing:
            yield from self._retire_sessions()
        while True:
            sequence = self._cursor_sequence
            image = yield Load(geometry.slot_offset(sequence), SLOT_BYTES)
            slot = self._read_slot(image, sequence, self._cursor_end)
            if slot is not None:
                start, end = geometry.place(self._cursor_end, slot.length)
                offset = geometry.payload_offset(start)
                payload = (yield Load(offset, slot.length)) if slot.length else b""
                if self._hash_payload((payload,)) == slot.payload_hash:
                    delivery = yield from self._pass(slot, sequence, offset, end)
                    if delivery is not None:
                        return delivery
                    continue
            recovered = yield from self._recover(slot, now)
            if not recovered:
                return None

    def release(self, delivery: Delivery) -> Program[None]:
        """Give a message's slot and bytes back; in any order, once."""
        passed = self._held.pop(delivery.sequence, None)
        assert passed is not None, f"{delivery!r} is not held: it was released before"
        yield from self._give_back(delivery.sequence, passed)

    # One slot.

    def _read_slot(self, image: Bytes, sequence: int, end: int | None) -> Slot | None:
        """The slot in ``image`` if it is committed as ``sequence`` (and behind ``end``) and not damaged."""
        copy = bytes(image)
        (commit,) = WORD.unpack_from(copy)
        if commit != self._commit_word(sequence):
            return None
        slot = decode_slot(copy)
        if slot is None or slot.session not in self._sessions:
            return None
        if slot.predecessor >> GRANULE_BITS & SEQUENCE_MASK != sequence:
            return None
        if end is not None and slot.predecessor & GRANULE_MASK != end:
            return None
        return slot if slot.length <= self.geometry.message_bytes_max else None

    def _pass(self, slot: Slot, sequence: int, offset: int, end: int) -> Program[Delivery | None]:
        """Move the cursor over a whole message: hand it over, or drop it."""
        identity = self._sessions[slot.session].identity
        passed = self._advance((sequence + 1) % self.geometry.sequence_modulus, end)
        if self._is_expected(slot, identity):
            delivery = Delivery(
                sequence,
                slot.session,
                identity.name,
                slot.number,
                slot.kind,
                slot.flags,
                offset,
                slot.length,
            )
            yield from self._hand_over(delivery, identity, passed)
            return delivery
        yield from self._give_back(sequence, passed)
        return None

    def _is_expected(self, slot: Slot, identity: Identity) -> bool:
        return slot.number == identity.next_number

    def _hand_over(self, delivery: Delivery, identity: Identity, passed: Passed) -> Program[None]:
        self._enter(delivery, identity, passed)
        yield from self._acknowledge(identity)

    def _enter(self, delivery: Delivery, identity: Identity, passed: Passed) -> None:
        self._held[delivery.sequence] = passed
        identity.next_number = delivery.number + 1

    def _acknowledge(self, identity: Identity) -> Program[None]:
        # The message may come from an older session: whoever sends now is told.
        if identity.session is not None:
            offset = self.geometry.delivered_offset(identity.session)
            yield Store(offset, WORD.pack(identity.next_number))

    def _advance(self, sequence: int, end: int) -> Passed:
        self._cursor_sequence = sequence
        self._cursor_end = end
        self._deadline = None
        passed = Passed(pack_position(0, sequence, end))
        self._passed.append(passed)
        return passed

    def _give_back(self, sequence: int, passed: Passed) -> Program[None]:
        yield Store(self.geometry.slot_offset(sequence), EMPTY_WORD)
        passed.released = True
        yield from self._publish_head()

    def _publish_head(self) -> Program[None]:
        head = self._head
        while self._passed and self._passed[0].released:
            head = self._passed.popleft().after
        if head != self._head:
            self._head = head
            yield Store(HEAD_OFFSET, WORD.pack(head))

    # A slot that is not there yet.

    def _recover(self, slot: Slot | None, now: float) -> Program[bool]:
        """Deal with a cursor slot that cannot be handed over; True: look at the cursor again.

        Args:
            slot: the cursor's slot, where only its payload does not match.
            now: the driver's monotonic clock.
        """
        (tail,) = WORD.unpack(bytes((yield Load(TAIL_OFFSET, WORD_BYTES))))
        if tail >> GRANULE_BITS & SEQUENCE_MASK == self._cursor_sequence:
            self._deadline = None
            return False
        if self._deadline is None:
            granules = ((tail & GRANULE_MASK) - self._cursor_end) % self.geometry.granule_modulus
            tolerated = granules * GRANULE_BYTES / self._slowest_bytes_per_second
            self._deadline = now + self._lease_seconds + tolerated
        lease_over = now >= self._deadline
        if not lease_over and not self._closing:
            return False
        boundary = yield from self._find_boundary(slot, tail)
        suspects = self._suspects(boundary)
        if suspects:
            if not lease_over:
                return False
            yield from self._fence(suspects)
        # What was on its way has landed by now or never will: one more look decides.
        if not (yield from self._is_whole()):
            yield from self._abandon(boundary)
        return True

    def _find_boundary(self, slot: Slot | None, tail: int) -> Program[Boundary]:
        """The nearest position behind the cursor's slot of which end and reserver are known."""
        geometry = self.geometry
        if slot is not None:
            sequence = (self._cursor_sequence + 1) % geometry.sequence_modulus
            _, end = geometry.place(self._cursor_end, slot.length)
            return Boundary(slot.session, sequence, end)
        last = tail >> GRANULE_BITS & SEQUENCE_MASK
        sequence = (self._cursor_sequence + 1) % geometry.sequence_modulus
        while sequence != last:
            image = yield Load(geometry.slot_offset(sequence), SLOT_BYTES)
            witness = self._read_slot(image, sequence, None)
            if witness is not None:
                return Boundary(*unpack_position(witness.predecessor))
            sequence = (sequence + 1) % geometry.sequence_modulus
        return Boundary(*unpack_position(tail))

    def _suspects(self, boundary: Boundary) -> tuple[int, ...]:
        """Everybody who may still write into the slots from the cursor up to ``boundary``."""
        still_open = tuple(number for number, record in self._sessions.items() if record.open)
        if boundary.sequence == (self._cursor_sequence + 1) % self.geometry.sequence_modulus:
            return tuple(number for number in still_open if number == boundary.session)
        return still_open

    def _fence(self, suspects: tuple[int, ...]) -> Program[None]:
        yield Fence(suspects)
        for number in suspects:
            self.close_session(number)

    def _is_whole(self) -> Program[bool]:
        """Whether the cursor's slot could be passed now."""
        geometry = self.geometry
        sequence = self._cursor_sequence
        image = yield Load(geometry.slot_offset(sequence), SLOT_BYTES)
        slot = self._read_slot(image, sequence, self._cursor_end)
        if slot is None:
            return False
        if not slot.length:
            return self._hash_payload(()) == slot.payload_hash
        start, _ = geometry.place(self._cursor_end, slot.length)
        payload = yield Load(geometry.payload_offset(start), slot.length)
        return self._hash_payload((payload,)) == slot.payload_hash

    def _abandon(self, boundary: Boundary) -> Program[None]:
        """Give back everything from the cursor up to ``boundary``, committed or not."""
        sequence = self._cursor_sequence
        passed = self._advance(boundary.sequence, boundary.end)
        while sequence != boundary.sequence:
            yield Store(self.geometry.slot_offset(sequence), EMPTY_WORD)
            sequence = (sequence + 1) % self.geometry.sequence_modulus
        passed.released = True
        yield from self._publish_head()

    def _retire_sessions(self) -> Program[None]:
        """Make the numbers of ended sessions free again, once the cursor is past their last slot."""
        (tail,) = WORD.unpack(bytes((yield Load(TAIL_OFFSET, WORD_BYTES))))
        last = tail >> GRANULE_BITS & SEQUENCE_MASK
        for number in tuple(self._closing):
            record = self._sessions[number]
            if record.last_sequence is None:
                record.last_sequence = last
            ahead = (record.last_sequence - self._cursor_sequence) % self.geometry.sequence_modulus
            if 0 < ahead <= self.geometry.slot_count:
                continue
            yield Store(self.geometry.delivered_offset(number), EMPTY_WORD)
            self._closing.remove(number)
            del self._sessions[number]
            self._free_sessions.append(number)

    # What the wire format says.

    def _commit_word(self, sequence: int) -> int:
        return self._generation_bits | sequence + 1

    def _hash_payload(self, payload: Sequence[Bytes]) -> int:
        return hash_payload(payload)
