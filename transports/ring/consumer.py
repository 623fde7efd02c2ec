"""The consumer's half of the ring: look, hand over, release, recover.

Three positions, none ever ahead of the next::

    head      everything before it may be reserved again
    cursor    everything before it has been handed over or dropped
    tail      everything before it is reserved

What it promises:

* **Exactly once, in order.** A committed slot is handed over only if its number is the next one
  expected from its *identity*, in whatever session it comes. A smaller number is a repeat after a
  reconnection. A larger one was sent behind a message that recovery has abandoned; its session was
  fenced then, and the message comes again. Both are dropped.
* **Whole.** Where a message starts follows from what the consumer knows itself; hashes cover slot and
  payload. What does not match is looked at again until the lease ends, and is never handed over.
  Where the payload ring lies apart, the hash is the head's, and the seal behind the payload is looked at
  instead: who sees it knows that the payload landed. A byte that was damaged on the way shows in neither.
* **No loss behind an acknowledgement.** The delivered word is stored after the message was entered
  into the books as held: that is the hand-over.
* **No deadlock.** A slot that is reserved and not committed is recovered after one lease, counted
  from when the cursor came to it (see ``recovery``); at once if everybody who could have reserved
  it is gone.

A slot may hold an *offer* instead of a message (``offers``). The consumer then pulls the message from its
producer, into memory outside the region, before it hands it over and counts it. What cannot be pulled, or
is not what was offered, will not be better at another look: its session is fenced, so that the producer
sends it again.

A slot's commit word is cleared before the head passes it, so the next lap begins with empty slots; and
it carries the sequence, so that a ring in which everything is handed over and nothing is released
does not begin again at its own start.

What it survives: any producer dying or stalling at any step. What it does not: its own death (the
region's generation dies with it), and producers that break the protocol on purpose.

Methods that are no programs only change the books. They, and ``release``, may be used while ``poll`` rests
at a ``Fence`` or a ``Pull``, and at no other moment in the middle of it. One ``poll`` runs at a time.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from attrs import define, frozen

from transports.operations import WORD_BYTES, Bytes, Carry, Fence, Load, Peek, Program, Pull, Store
from transports.ring.layout import (
    EMPTY_WORD,
    GENERATION_MAX,
    GRANULE_BITS,
    GRANULE_BYTES,
    GRANULE_MASK,
    HEAD_OFFSET,
    POSITION_MASK,
    SEQUENCE_MASK,
    SLOT_BYTES,
    TAIL_OFFSET,
    WORD,
    Geometry,
    Slot,
    decode_slot,
    hash_payload,
    pack_position,
)
from transports.ring.offers import Offer, pulled_room
from transports.ring.recovery import Boundary, find_boundary, suspects
from transports.ring.retirement import carry_over
from transports.ring.sessions import Identity, SessionTable


@frozen
class Delivery:
    """A message that was handed over; its bytes stay where they are until it is released."""

    sequence: int
    """Names the delivery among those that are held."""
    session: int
    identity: str
    number: int
    kind: int
    flags: int
    offset: int
    """Where the payload starts in the region, or in the memory apart from it; unless it was pulled."""
    length: int
    content: Bytes | None = None
    """The payload, if it was pulled: memory outside the region."""
    head: bytes = b""
    """The head, where the payload ring lies apart."""


@define
class Passed:
    """A stretch between head and cursor: one message, or what recovery has abandoned."""

    after: int
    """The position word behind it."""
    released: bool = False


class Consumer:
    """The one reader of an inbox.

    Args:
        geometry: of the inbox.
        generation: told apart from every earlier region of this inbox; 1 to 2**32 - 1.
        lease_seconds: how long a reserved slot may stay uncommitted before its producer is suspected.
        slowest_bytes_per_second: added to the lease is the time in which reserved bytes arrive at
            the slowest rate that is still tolerated.
        pulled_bytes_max: how many bytes of pulled messages may be held at a time, and be offered at once.
        identities_max: how many producers without a session are remembered. One that returns after
            so many others were seen is taken for a new producer.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        generation: int,
        lease_seconds: float,
        slowest_bytes_per_second: float,
        pulled_bytes_max: int = 0,
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
        self._pulled_bytes_max = pulled_bytes_max
        self._pulled_bytes = 0
        self.waits_for_release = False
        """An offer is at the cursor, and too much of what was pulled is held: ``poll`` after a release."""
        self.waits_for_seal = False
        """A message at the cursor is there but for its seal: ``poll`` again soon, nobody will tell."""
        self._head = 0
        self._cursor = 0
        self._deadline: float | None = None
        self._passed: deque[Passed] = deque()
        self._held: dict[int, Passed] = {}
        self._table = SessionTable(geometry, identities_max)

    # What the layer above may ask.

    @property
    def head(self) -> int:
        """The position word that was published last."""
        return self._head

    @property
    def cursor(self) -> int:
        """The position word before which everything was handed over or dropped."""
        return self._cursor

    @property
    def held(self) -> int:
        """Messages handed over and not yet released."""
        return len(self._held)

    @property
    def pulled_bytes(self) -> int:
        """Bytes of pulled messages that are held."""
        return self._pulled_bytes

    @property
    def free_bytes(self) -> int:
        """Payload bytes that are not between head and cursor (some may be reserved already)."""
        used = ((self._cursor & GRANULE_MASK) - (self._head & GRANULE_MASK)) % self.geometry.granule_modulus
        return max(0, self.geometry.granule_count - used) * GRANULE_BYTES

    def next_deadline(self) -> float | None:
        """When to ``poll`` though nobody notifies; also after ``close_session``: who is gone has no lease."""
        return self._deadline

    def session_of(self, identity: str) -> int | None:
        """The open session of ``identity``: fence and close it before another one is opened."""
        return self._table.session_of(identity)

    def sessions_below(self, identity: str) -> tuple[int, ...]:
        """The open sessions of ``identity``, and of those whose names go on behind it with a slash."""
        return self._table.sessions_below(identity)

    def open_session(self, identity: str) -> tuple[int, int]:
        """Give ``identity`` a session; returns its number and how many messages were handed over so far.

        Raises:
            SessionsExhausted: no session number is free. A closed session's number becomes free in
                the ``poll`` that finds the cursor behind everything the session can have reserved.
        """
        return self._table.open(identity)

    def close_session(self, session: int) -> None:
        """A session has ended and nothing of it can land any more; unknown ones are no error."""
        self._table.close(session)

    # Programs; ``carry_over`` changes no books either, and may run wherever those above may be used.

    def initialise(self) -> Program[None]:
        """Write the identity line into zeroed memory, before any producer may connect."""
        yield Store(0, self.geometry.identity_line(self.generation))

    def poll(self, now: float) -> Program[Delivery | None]:
        """Hand over the next message, if there is one; recover a slot whose lease is over.

        Args:
            now: the driver's monotonic clock.

        Returns:
            The next message, or ``None`` when the cursor has to wait (see ``next_deadline``).

        Yields ``Load`` and ``Store``, a ``Pull`` for an offer, and a ``Fence`` where producers are suspected.
        """
        self.waits_for_release = self.waits_for_seal = False
        if self._table.closing:
            yield from self._retire_sessions()
        while True:
            cursor = self._cursor
            sequence = cursor >> GRANULE_BITS
            image = yield Load(self.geometry.slot_offset(sequence), SLOT_BYTES)
            slot = self._read_slot(image, sequence)
            if slot is not None and not self._is_next(slot, cursor):
                slot = None
            if slot is not None:
                start, end = self.geometry.place(cursor & GRANULE_MASK, slot.length)
                offset, head = self.geometry.payload_offset(start), b""
                if self.geometry.is_apart:
                    head, is_whole = yield from self._whole_apart(slot, sequence, start)
                else:
                    payload = (yield Load(offset, slot.length)) if slot.length else b""
                    is_whole = self._hash_payload((payload,)) == slot.payload_hash
                if is_whole:
                    if slot.pull and self._is_wanted(slot):
                        delivery = yield from self._take(slot, Offer.from_bytes(payload), sequence, end)
                    else:
                        delivery = yield from self._pass(slot, sequence, offset, end, head)
                    if delivery is not None or self.waits_for_release:
                        return delivery
                    continue
            worth_another_look = yield from self._recover(slot, now)
            if not worth_another_look:
                return None

    def release(self, delivery: Delivery) -> Program[None]:
        """Give a message's slot and bytes back; in any order, each once."""
        passed = self._held.pop(delivery.sequence, None)
        assert passed is not None, f"{delivery!r} is not held: was it released before?"
        if delivery.content is not None:
            self._pulled_bytes -= delivery.length
        yield from self._give_back(delivery.sequence, passed)

    def carry_over(self) -> Program[None]:
        """Take over into other device memory, zeroed, what is whole in the old one; see ``retirement``."""
        tail = yield from self._load_tail()
        cursor = self._cursor >> GRANULE_BITS
        yield from carry_over(self.geometry, cursor, tail, self._read_slot, self._carry)

    def _carry(self, slot: Slot, start: int) -> Program[None]:
        if (yield from self._has_seal(slot, start)):
            yield Carry(self.geometry.payload_offset(start), self.geometry.sealed_bytes(slot.length))

    # One slot.

    def _read_slot(self, image: Bytes, sequence: int) -> Slot | None:
        """What is committed as ``sequence`` in a slot's image, if its hash is right."""
        copy = bytes(image)
        (commit,) = WORD.unpack_from(copy)
        if commit != self._commit_word(sequence):
            return None
        slot = decode_slot(copy)
        return slot if slot is not None and self._follows(slot.predecessor, sequence) else None

    def _follows(self, predecessor: int, sequence: int) -> bool:
        return predecessor >> GRANULE_BITS & SEQUENCE_MASK == sequence

    def _is_next(self, slot: Slot, cursor: int) -> bool:
        """Whether the slot fits what the consumer knows itself; its session too must be known."""
        return (
            slot.predecessor & POSITION_MASK == cursor
            and slot.length <= self.geometry.message_bytes_max
            and slot.head_length <= self.geometry.head_bytes
            and slot.session in self._table.sessions
        )

    def _whole_apart(self, slot: Slot, sequence: int, start: int) -> Program[tuple[bytes, bool]]:
        """The head, and whether it is what was sent and the payload there, in a ring that lies apart."""
        offset = self.geometry.head_slot_offset(sequence)
        head = bytes((yield Load(offset, slot.head_length)) if slot.head_length else b"")
        if self._hash_payload((head,)) != slot.payload_hash:
            return head, False
        return head, (yield from self._is_sealed(slot, start))

    def _is_sealed(self, slot: Slot, start: int) -> Program[bool]:
        """Whether the payload has landed in the ring that lies apart."""
        is_sealed = not slot.length or (yield from self._has_seal(slot, start))
        self.waits_for_seal = not is_sealed
        return is_sealed

    def _has_seal(self, slot: Slot, start: int) -> Program[bool]:
        seal = yield Peek(self.geometry.seal_offset(start, slot.length), WORD_BYTES)
        return bytes(seal) == WORD.pack(slot.commit)

    def _pass(
        self, slot: Slot, sequence: int, offset: int, end: int, head: bytes
    ) -> Program[Delivery | None]:
        """Move the cursor over a whole message: hand it over, or drop it."""
        identity = self._table.sessions[slot.session].identity
        passed = self._advance((sequence + 1) % self.geometry.sequence_modulus, end)
        if slot.pull or not self._is_expected(slot, identity):
            yield from self._give_back(sequence, passed)
            return None
        delivery = _delivery_of(slot, sequence, identity, offset, slot.length, head=head)
        yield from self._hand_over(delivery, identity, passed)
        return delivery

    def _is_wanted(self, slot: Slot) -> bool:
        """Whether what the slot offers is the next message of a producer that is still there."""
        session = self._table.sessions[slot.session]
        return session.open and self._is_expected(slot, session.identity)

    def _take(self, slot: Slot, offer: Offer | None, sequence: int, end: int) -> Program[Delivery | None]:
        """Pull what is offered and hand it over; or get rid of a session whose offer cannot be had."""
        content = None
        if offer is not None and offer.length <= self._pulled_bytes_max:
            room = pulled_room(self.geometry, offer.length, self._pulled_bytes_max)
            if self._pulled_bytes and self._pulled_bytes + offer.length > room:
                self.waits_for_release = True
                self._deadline = None
                return None
            content = yield from self._pull(slot, offer)
        if content is None:
            yield from self._refuse(slot)
        passed = self._advance((sequence + 1) % self.geometry.sequence_modulus, end)
        if content is None:
            yield from self._give_back(sequence, passed)
            return None
        identity = self._table.sessions[slot.session].identity
        delivery = _delivery_of(slot, sequence, identity, 0, len(content), content)
        self._pulled_bytes += delivery.length
        yield from self._hand_over(delivery, identity, passed)
        return delivery

    def _pull(self, slot: Slot, offer: Offer) -> Program[Bytes | None]:
        """What is offered, whole; ``None`` if it cannot be had any more, or is not what was offered."""
        content: Bytes | None = yield Pull(slot.session, offer.key, offer.length)
        if content is None or len(content) != offer.length:
            return None
        return content if self._hash_payload((content,)) == offer.message_hash else None

    def _refuse(self, slot: Slot) -> Program[None]:
        """End the session of an offer that cannot be had; perhaps that is why, and it has ended already."""
        if self._table.sessions[slot.session].open:
            yield from self._fence((slot.session,))

    def _is_expected(self, slot: Slot, identity: Identity) -> bool:
        return slot.number == identity.next_number

    def _hand_over(self, delivery: Delivery, identity: Identity, passed: Passed) -> Program[None]:
        self._enter(delivery, identity, passed)
        if identity.session is not None:
            # The message may have come in an earlier session: whoever sends now is told.
            yield self._acknowledgement(identity.session, identity.next_number)

    def _enter(self, delivery: Delivery, identity: Identity, passed: Passed) -> None:
        self._held[delivery.sequence] = passed
        identity.next_number = delivery.number + 1

    def _acknowledgement(self, session: int, delivered: int) -> Store:
        return Store(self.geometry.delivered_offset(session), WORD.pack(delivered))

    def _advance(self, sequence: int, end: int) -> Passed:
        self._cursor = pack_position(0, sequence, end)
        self._deadline = None
        passed = Passed(self._cursor)
        self._passed.append(passed)
        return passed

    def _give_back(self, sequence: int, passed: Passed) -> Program[None]:
        yield from self._clear(sequence)
        passed.released = True
        yield from self._publish_head()

    def _clear(self, sequence: int) -> Program[None]:
        yield Store(self.geometry.slot_offset(sequence), EMPTY_WORD)

    def _publish_head(self) -> Program[None]:
        head = self._head
        while self._passed and self._passed[0].released:
            head = self._passed.popleft().after
        if head != self._head:
            self._head = head
            yield Store(HEAD_OFFSET, WORD.pack(head))

    # A slot that is not there yet.

    def _recover(self, slot: Slot | None, now: float) -> Program[bool]:
        """Deal with a cursor slot that cannot be handed over; true: look at the cursor again.

        Args:
            slot: the cursor's slot, where only its payload does not match.
            now: the driver's monotonic clock.
        """
        tail = yield from self._load_tail()
        if tail & POSITION_MASK == self._cursor:
            self._deadline = None
            return False
        if self._deadline is None:
            self._deadline = now + self._lease_seconds + self._tolerated_seconds(tail)
        lease_over = now >= self._deadline
        if not lease_over and not self._table.closing:
            return False
        boundary = yield from self._find_boundary(slot, tail)
        suspected = self._suspects(boundary)
        if suspected:
            if not lease_over:
                return False
            yield from self._fence(suspected)
        # What was on its way has landed by now or never will: one more look decides.
        if not (yield from self._is_whole()):
            yield from self._abandon(boundary)
        return True

    def _load_tail(self) -> Program[int]:
        return int.from_bytes((yield Load(TAIL_OFFSET, WORD_BYTES)), "little")

    def _tolerated_seconds(self, tail: int) -> float:
        """How long what is reserved now may take on the slowest wire."""
        granules = ((tail & GRANULE_MASK) - (self._cursor & GRANULE_MASK)) % self.geometry.granule_modulus
        return granules * GRANULE_BYTES / self._slowest_bytes_per_second

    def _find_boundary(self, slot: Slot | None, tail: int) -> Program[Boundary]:
        sequence = self._cursor >> GRANULE_BITS
        if slot is not None:
            _, end = self.geometry.place(self._cursor & GRANULE_MASK, slot.length)
            return Boundary(slot.session, (sequence + 1) % self.geometry.sequence_modulus, end)
        return (yield from find_boundary(self.geometry, sequence, tail, self._read_slot))

    def _suspects(self, boundary: Boundary) -> tuple[int, ...]:
        return suspects(self.geometry, self._cursor >> GRANULE_BITS, boundary, self._table.open_numbers())

    def _fence(self, suspected: tuple[int, ...]) -> Program[None]:
        yield Fence(suspected)
        for session in suspected:
            self._table.close(session)

    def _is_whole(self) -> Program[bool]:
        """Whether the cursor's slot could be passed now."""
        cursor = self._cursor
        sequence = cursor >> GRANULE_BITS
        image = yield Load(self.geometry.slot_offset(sequence), SLOT_BYTES)
        slot = self._read_slot(image, sequence)
        if slot is None or not self._is_next(slot, cursor):
            return False
        start, _ = self.geometry.place(cursor & GRANULE_MASK, slot.length)
        if self.geometry.is_apart:
            return (yield from self._whole_apart(slot, sequence, start))[1]
        offset = self.geometry.payload_offset(start)
        payload = (yield Load(offset, slot.length)) if slot.length else b""
        return self._hash_payload((payload,)) == slot.payload_hash

    def _abandon(self, boundary: Boundary) -> Program[None]:
        """Give back everything from the cursor up to ``boundary``, committed or not."""
        sequence = self._cursor >> GRANULE_BITS
        passed = self._advance(boundary.sequence, boundary.end)
        while sequence != boundary.sequence:
            yield from self._clear(sequence)
            sequence = (sequence + 1) % self.geometry.sequence_modulus
        passed.released = True
        yield from self._publish_head()

    def _retire_sessions(self) -> Program[None]:
        """Make the numbers of ended sessions free again, once the cursor is past their last slot."""
        tail = yield from self._load_tail()
        sequence = self._cursor >> GRANULE_BITS
        for number in self._table.passed(tail >> GRANULE_BITS & SEQUENCE_MASK, sequence):
            yield Store(self.geometry.delivered_offset(number), EMPTY_WORD)
            self._table.make_free(number)

    # What the wire format says.

    def _commit_word(self, sequence: int) -> int:
        return self._generation_bits | sequence + 1

    def _hash_payload(self, payload: Sequence[Bytes]) -> int:
        return hash_payload(payload)


def _delivery_of(
    slot: Slot,
    sequence: int,
    identity: Identity,
    offset: int,
    length: int,
    content: Bytes | None = None,
    head: bytes = b"",
) -> Delivery:
    whose = (sequence, slot.session, identity.name, slot.number, slot.kind, slot.flags)
    return Delivery(*whose, offset, length, content, head)
