"""The producer's half of the ring: reserve with one swap, then write and commit without waiting.

Promises of this half:

* *Nobody waits for a lock holder.* A reservation is one compare-and-swap; who loses takes the word
  found as the new tail and tries again.
* *Never over another's bytes.* The swap takes place only if the tail is still the one for which the
  room was computed. The head may be older: it only moves forward, so an old one is pessimistic. It
  must not be so old that the counters have wrapped in between; therefore a snapshot is used for
  half a lease at most (``CompareAndSwap.not_after``).
* *Lost once at most, where the owner executes claims.* Who has lost a swap, or has waited for room, has the
  owner reserve (``Claim``), which nobody can win before it. So others cost a message one round trip at most,
  whatever their number. While they go on sending, the next messages are claimed at once: a claim is an
  answer away from its payload, but no payload is sent in vain.
* *Whole or not at all.* Payload, slot and commit word are posted as one ordered chain behind the
  swap. If the producer dies in between, the slot stays uncommitted and the consumer recovers it.

The head, the tail and this session's delivered word are fetched with one read, and only when the
last snapshot shows no room or has become old: in the steady state a message costs one round trip
for the swap, or, where the owner's processor executes the operations anyway, one ``Guarded``.

Where the payload ring lies apart, payload and seal are put first, then head, slot and commit word follow as a
chain; nothing relies on the puts landing before the chain. The payload is not hashed: it may lie on a device.

What it does not do: keep messages for sending again (the channel does, until ``delivered`` passes
them), choose the length of a wait (the driver does), or survive a fence (open a new session).
"""

from collections.abc import Iterator, Sequence
from typing import Final, cast

from xxhash import xxh3_64

from transports.errors import MessageTooLarge, ProtocolError, RingFull
from transports.operations import (
    EXPIRED,
    Bytes,
    Chain,
    Claim,
    Claimed,
    CompareAndSwap,
    Content,
    Guarded,
    Pause,
    PauseReason,
    Program,
    Put,
    Read,
    Write,
)
from transports.ring.layout import (
    BODY_END,
    BODY_START,
    BYTE_MAX,
    DELIVERED_OFFSET,
    GENERATION_MAX,
    GRANULE_BITS,
    GRANULE_MASK,
    HEAD_OFFSET,
    SEQUENCE_MASK,
    SLOT_BYTES,
    TAIL_OFFSET,
    WORD,
    Geometry,
    StaleSnapshot,
    encode_slot,
    hash_payload,
)

_NEVER: Final = float("-inf")
_HEAD_AT: Final = HEAD_OFFSET - TAIL_OFFSET
_DELIVERED_AT: Final = DELIVERED_OFFSET - TAIL_OFFSET


class Producer:
    """One session's way of sending into one inbox.

    Args:
        geometry: of the inbox, from the welcome.
        session: the number that the consumer gave to this session.
        generation: of the inbox.
        first_number: how many of this identity's messages the consumer has had already.
        lease_seconds: after which the consumer may suspect a producer that does not commit.
        guarded_bytes_max: largest chain that may ride behind a swap; 0 where that is not supported.
        claims: the owner executes claims.
    """

    hash_after_post_bytes: int = 1 << 16
    """From this length on the payload is hashed while it is already on its way."""
    piece_bytes: int = 2 << 20
    """A longer payload is posted and hashed by pieces of this length, so that the wire never waits for
    the hash of more than one."""
    quiet_claims: int = 4
    """So many claims in a row that find the tail as this producer left it end the claiming: its swaps would
    have won."""

    def __init__(
        self,
        geometry: Geometry,
        *,
        session: int,
        generation: int,
        first_number: int,
        lease_seconds: float,
        guarded_bytes_max: int = 0,
        claims: bool = False,
    ) -> None:
        assert lease_seconds > 0
        assert 0 < generation <= GENERATION_MAX
        self._geometry = geometry
        self._session = session
        self._generation_bits = generation << 32
        self._snapshot_seconds = lease_seconds / 2
        self._guarded_bytes_max = guarded_bytes_max
        self._claims = claims
        self._claims_due = 0
        """How many reservations more are claimed, unless others are seen to send."""
        self._snapshot = Read(TAIL_OFFSET, geometry.delivered_offset(session) + 8 - TAIL_OFFSET)
        self._session_delivered_at = _DELIVERED_AT + (session - 1) * 8
        self._tail = 0
        self._head = 0
        self._usable_until = _NEVER
        self._in_doubt = False
        self.next_number = first_number
        self.delivered = first_number

    @property
    def in_doubt(self) -> bool:
        """A send was abandoned at or behind its swap: nothing more can be sent in this session."""
        return self._in_doubt

    def send(
        self,
        payload: Sequence[Content],
        *,
        kind: int,
        flags: int = 0,
        now: float,
        wait: bool = True,
        pull: bool = False,
        head: Bytes = b"",
    ) -> Program[int]:
        """Reserve, write and commit one message; several may be in flight, one ``send`` at a time.

        Args:
            payload: buffers that are sent one behind the other; unchanged until delivered.
            kind: 0 to 255, handed to the receiver as it is.
            flags: 0 to 255, as ``kind``.
            now: the driver's monotonic clock.
            wait: wait while the ring is full, instead of raising ``RingFull``.
            pull: ``payload`` is an ``Offer`` of what the message is.
            head: what is kept beside the slot; only where the payload ring lies apart.

        Returns:
            The message's number. It is delivered when ``delivered`` is larger.

        Raises:
            MessageTooLarge: it can never fit; raised before anything is yielded.
            RingFull: no room, and ``wait`` is false.

        Closing the program while it rests at a ``Read`` or a ``Pause`` leaves nothing behind. Closing
        it at a swap, a claim or a chain leaves the session ``in_doubt``: open a new one.
        """
        message = self._prepare(tuple(payload), kind, flags, pull=pull, head=head)
        tail = yield from self._reserve(message, now, wait=wait)
        if not message.guarded:
            yield from self._post(message, tail)
        self._in_doubt = False
        self.next_number = message.number + 1
        return message.number

    def _reserve(self, message: "Message", now: float, *, wait: bool) -> Program[int]:
        """The tail that was replaced; what is ``guarded`` has been posted behind it."""
        contended = 0
        while True:
            room = None
            if not self._claims_due:
                tail, room, now = yield from self._find_room(message.length, now, wait=wait)
            if room is None:
                message.guarded = False
                tail, self._tail = yield from self._claim(message.length, now, wait=wait)
                return tail
            swap = CompareAndSwap(TAIL_OFFSET, tail, room, self._usable_until)
            self._in_doubt = True
            if message.guarded:
                found = yield Guarded(swap, Chain(self._writes(message, tail)))
            else:
                found = yield swap
            if found == tail:
                self._tail = room
                return tail
            self._in_doubt = False
            contended += 1
            if found is EXPIRED:
                self._usable_until = _NEVER
            else:
                self._tail = found
                self._claim_next(self.quiet_claims)
            now = yield Pause(PauseReason.CONTENDED, contended)

    def _prepare(
        self, payload: tuple[Content, ...], kind: int, flags: int, *, pull: bool, head: Bytes
    ) -> "Message":
        length = sum(map(len, payload))
        if len(head) > self._geometry.head_bytes:
            raise MessageTooLarge(
                f"a head of {len(head)} bytes can never fit an inbox that has room for"
                f" {self._geometry.head_bytes}: make it smaller, or give the inbox a larger head_bytes"
            )
        if length > self._geometry.message_bytes_max:
            raise MessageTooLarge(
                f"a message of {length} bytes can never fit an inbox whose payload ring holds "
                f"{self._geometry.message_bytes_max}: make it smaller, or give the inbox a larger ring"
            )
        assert 0 <= kind <= BYTE_MAX, f"kind {kind} does not fit a byte"
        assert 0 <= flags <= BYTE_MAX, f"flags {flags} do not fit a byte"
        assert not self._in_doubt, "a send was abandoned behind its swap: open a new session"
        message = Message(payload, length, kind, flags, self.next_number, int(pull), head)
        if self._geometry.is_apart:
            assert not pull, "an offer is read by the consumer's processor"
            message.hashed = (head,)
            message.payload_hash = self._hash_payload(message.hashed)
            return message
        message.guarded = not self._claims_due and length + SLOT_BYTES <= self._guarded_bytes_max
        if message.guarded or length < self.hash_after_post_bytes:
            message.payload_hash = self._hash_payload(message.hashed)
        return message

    def refresh(self, now: float) -> Program[int]:
        """Read head and delivered; returns ``delivered``: every smaller number was handed over."""
        yield from self._read(now)
        return self.delivered

    def _find_room(self, length: int, now: float, *, wait: bool) -> Program[tuple[int, int | None, float]]:
        """The tail to replace, what to replace it by, and the time; by ``None``: there was no room, claim."""
        full = torn = 0
        fresh = False
        while True:
            if not fresh and now >= self._usable_until:
                yield from self._read(now)
                fresh = True
            tail = self._tail
            try:
                reserved = self._room(tail, length)
            except StaleSnapshot:
                # The consumer went on between the tail and the head of one read.
                torn += 1
                self._usable_until = _NEVER
                now = yield Pause(PauseReason.CONTENDED, torn)
                fresh = False
                continue
            if reserved is not None:
                return tail, reserved, now
            if fresh:
                full += 1
                now = yield from self._wait_for_room(length, full, wait=wait)
                if self._claims_due:
                    return tail, None, now
            self._usable_until = _NEVER
            fresh = False

    def _wait_for_room(self, length: int, attempt: int, *, wait: bool) -> Program[float]:
        if not wait:
            raise RingFull(
                f"no room for {length} bytes in an inbox of {self._geometry.slot_count} slots and "
                f"{self._geometry.payload_bytes} bytes: wait, or refuse work upstream"
            )
        # All who wait are woken together: who claims has no need to look again first, nor anything to lose.
        self._claim_next(1)
        now: float = yield Pause(PauseReason.FULL, attempt)
        return now

    def _claim_next(self, count: int) -> None:
        if self._claims:
            self._claims_due = max(self._claims_due, count)

    def _claim(self, length: int, now: float, *, wait: bool) -> Program[tuple[int, int]]:
        """The tail that was replaced, and by what."""
        full = 0
        while True:
            self._in_doubt = True
            claimed: Claimed = yield Claim(length)
            quiet = claimed.tail == self._tail
            self._tail, self._head = claimed.tail, claimed.head
            self.delivered = max(self.delivered, claimed.delivered)
            self._usable_until = self._usable(now)
            if claimed.taken:
                self._claims_due = self._claims_due - 1 if quiet else self.quiet_claims
                return claimed.tail, self._taken(claimed, length)
            self._in_doubt = False
            full += 1
            now = yield from self._wait_for_room(length, full, wait=wait)

    def _taken(self, claimed: Claimed, length: int) -> int:
        """The tail behind a claim that took place."""
        try:
            reserved = self._geometry.reserve(claimed.tail, claimed.head, length, self._session)
        except StaleSnapshot:
            reserved = None
        if reserved is None:
            raise ProtocolError(
                f"the inbox says that it has reserved {length} bytes where there is no room for them"
            )
        return reserved

    def _room(self, tail: int, length: int) -> int | None:
        return self._geometry.reserve(tail, self._head, length, self._session)

    def _read(self, now: float) -> Program[None]:
        image = yield self._snapshot
        (self._tail,) = WORD.unpack_from(image, 0)
        (self._head,) = WORD.unpack_from(image, _HEAD_AT)
        (delivered,) = WORD.unpack_from(image, self._session_delivered_at)
        # The word is 0 until the first hand-over in this session.
        self.delivered = max(self.delivered, delivered)
        self._usable_until = self._usable(now)

    def _usable(self, now: float) -> float:
        # ``now`` is a moment before the read was posted, so the head is not older than it.
        return now + self._snapshot_seconds

    def _post(self, message: "Message", tail: int) -> Program[None]:
        if self._geometry.is_apart:
            yield from self._puts(message, tail)
        elif message.payload_hash is None:
            message.payload_hash = yield from self._post_payload(message, tail)
            yield Chain(self._writes_of_slot(message, tail))
            return
        yield Chain(self._writes(message, tail))

    def _puts(self, message: "Message", tail: int) -> tuple[Put, ...]:
        """Payload, then seal, into the ring that lies apart."""
        if not message.length:
            return ()
        geometry = self._geometry
        start, _ = geometry.place(tail & GRANULE_MASK, message.length)
        seal = WORD.pack(self._commit_word(tail >> GRANULE_BITS & SEQUENCE_MASK))
        return (
            Put(geometry.payload_offset(start), message.payload),
            Put(geometry.seal_offset(start, message.length), (seal,)),
        )

    def _post_payload(self, message: "Message", tail: int) -> Program[int]:
        """Post the payload, and hash what is on its way; returns the hash."""
        writes = self._writes_of_payload(message, tail)
        if message.length <= self.piece_bytes:
            yield Chain(writes, notify=False)
            return self._hash_payload(message.hashed)
        state = xxh3_64()
        for write in writes:
            for offset, piece in _pieces(write, self.piece_bytes):
                yield Chain((Write(offset, (piece,)),), notify=False)
                state.update(piece)
        return state.intdigest()

    def _writes(self, message: "Message", tail: int) -> tuple[Write, ...]:
        if self._geometry.is_apart:
            return self._writes_of_head(message, tail) + self._writes_of_slot(message, tail)
        return self._writes_of_payload(message, tail) + self._writes_of_slot(message, tail)

    def _writes_of_payload(self, message: "Message", tail: int) -> tuple[Write, ...]:
        if not message.length:
            return ()
        start, _ = self._geometry.place(tail & GRANULE_MASK, message.length)
        return (Write(self._geometry.payload_offset(start), message.hashed),)

    def _writes_of_head(self, message: "Message", tail: int) -> tuple[Write, ...]:
        if not message.head:
            return ()
        sequence = tail >> GRANULE_BITS & SEQUENCE_MASK
        return (Write(self._geometry.head_slot_offset(sequence), (message.head,)),)

    def _writes_of_slot(self, message: "Message", tail: int) -> tuple[Write, ...]:
        assert message.payload_hash is not None
        sequence = tail >> GRANULE_BITS & SEQUENCE_MASK
        image = encode_slot(
            self._commit_word(sequence),
            tail,
            message.length,
            self._session,
            message.kind,
            message.flags,
            message.number,
            message.payload_hash,
            message.pull,
            len(message.head),
        )
        offset = self._geometry.slot_offset(sequence)
        body = Write(offset + BODY_START, (image[BODY_START:BODY_END],))
        commit = Write(offset, (image[:BODY_START],))
        return body, commit

    def _commit_word(self, sequence: int) -> int:
        return self._generation_bits | sequence + 1

    def _hash_payload(self, payload: Sequence[Bytes]) -> int:
        return hash_payload(payload)


def _pieces(write: Write, piece_bytes: int) -> Iterator[tuple[int, memoryview]]:
    """The buffers of a write, cut where they are longer than a piece, and where each part goes."""
    offset = write.offset
    for buffer in write.buffers:
        whole = memoryview(buffer)
        for start in range(0, len(whole), piece_bytes):
            piece = whole[start : start + piece_bytes]
            yield offset, piece
            offset += len(piece)


class Message:
    """What one ``send`` is about to write; the hash may come after the payload was posted."""

    __slots__ = (
        "flags",
        "guarded",
        "hashed",
        "head",
        "kind",
        "length",
        "number",
        "payload",
        "payload_hash",
        "pull",
    )

    def __init__(
        self,
        payload: tuple[Content, ...],
        length: int,
        kind: int,
        flags: int,
        number: int,
        pull: int,
        head: Bytes,
    ) -> None:
        self.payload = payload
        self.length = length
        self.kind = kind
        self.flags = flags
        self.number = number
        self.pull = pull
        self.head = head
        # Where the ring lies in the region, whoever sends brings nothing from a device.
        self.hashed = cast("tuple[Bytes, ...]", payload)
        self.payload_hash: int | None = None
        self.guarded = False
