"""The memory of one inbox: where each word stands and what its bits mean.

One region, owned by the consumer. Words are unsigned 64-bit little-endian and 8-byte aligned;
blocks start on 64-byte lines, which are also the *granules* in which payload is counted::

    line 0      identity   magic, version, slot_count, session_count, payload_bytes, generation, head_bytes
    line 1      tail       changed ONLY by the producers' compare-and-swap
    line 2      head       changed ONLY by the consumer
    line 3..    delivered  one word per session, changed ONLY by the consumer
                slot ring  slot_count x 64 bytes
                heads      slot_count x head_bytes, where the payload ring lies apart
                payload ring

Each word has one kind of writer, so it does not matter whether an adapter's atomics are atomic with
the owner's processor.

**tail** and **head** are one packed *position* each; one swap of the tail reserves a slot and the
payload bytes that go with it::

    bits 63..48  session that made the last reservation (head: 0)
    bits 47..28  slot sequence                           slot index    = sequence mod slot_count
    bits 27..0   end of the payload, in granules         granule index = end mod granule_count

Both counters wrap at the largest multiple of their ring's length that their bits can hold
(``sequence_modulus``, ``granule_modulus``), so that the index stays right across the wrap for a
ring of any length. At most ``slot_count`` slots and less than two rings of granules lie between
head and tail (see ``place``); the moduli are at least four and three rings, so a difference is never
ambiguous.

**slot**::

     0  u64  commit        generation in the high half, sequence + 1 in the low half; 0: empty
     8  u64  predecessor   the tail word that this reservation replaced
    16  u32  length        payload bytes
    20  u16  session
    22  u8   kind
    23  u8   flags
    24  u64  number        the producer's own running number, going on across its sessions
    32  u64  payload hash  xxh3-64
    40  u32  pull          0; 1: the payload is an ``Offer`` of bytes that the consumer pulls
    44  u32  head length   bytes of the head; 0 where there are no heads
    48  u64  slot hash     xxh3-64 of bytes 0..48, the commit word included
    56       not used

Where the payload starts is not stored: ``place(predecessor.end, length)`` says it, and the consumer
computes it from what it knows itself.

**A payload ring that lies apart** (``head_bytes`` > 0) is in a device's memory, which no processor on the
way can look at; its offsets count from the start of that memory. Each slot then has a *head* in the region:
the part of the message that its receiver's processor reads. The payload hash covers the head alone. Behind
the payload, in a granule of its own, stands the *seal*: the slot's commit word once more. Writes into one
memory land in their order, into two of them perhaps not; who sees the seal knows that the payload is there.
A message without payload has no seal.
"""

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, Final, NamedTuple

from attrs import Attribute, field, frozen
from xxhash import xxh3_64, xxh3_64_intdigest

from transports.errors import LayoutMismatch
from transports.operations import WORD_BYTES, Bytes

LAYOUT_VERSION: Final = 3
LINE_BYTES: Final = 64
GRANULE_BYTES: Final = 64
SLOT_BYTES: Final = 64

SEQUENCE_BITS: Final = 20
GRANULE_BITS: Final = 28
SEQUENCE_MASK: Final = (1 << SEQUENCE_BITS) - 1
GRANULE_MASK: Final = (1 << GRANULE_BITS) - 1
SESSION_SHIFT: Final = SEQUENCE_BITS + GRANULE_BITS
POSITION_MASK: Final = (1 << SESSION_SHIFT) - 1
"""Sequence and end, without the session."""

SLOT_COUNT_MAX: Final = 1 << 18
PAYLOAD_BYTES_MAX: Final = 1 << 32
SESSION_COUNT_MAX: Final = (1 << 16) - 1
GENERATION_MAX: Final = (1 << 32) - 1
LENGTH_MAX: Final = (1 << 32) - 1
HEAD_BYTES_MAX: Final = 1 << 16
BYTE_MAX: Final = 255

TAIL_OFFSET: Final = 1 * LINE_BYTES
HEAD_OFFSET: Final = 2 * LINE_BYTES
DELIVERED_OFFSET: Final = 3 * LINE_BYTES

SLOT: Final = Struct("<QQIHBBQQIIQ8x")
SLOT_HASHED_BYTES: Final = 48
"""The slot's hash covers everything before it, the commit word included."""
BODY_START: Final = WORD_BYTES
BODY_END: Final = 56
"""The body is the slot without its commit word and without the unused rest."""

WORD: Final = Struct("<Q")
EMPTY_WORD: Final = bytes(WORD_BYTES)

_MAGIC: Final = b"1PCERING"
_IDENTITY: Final = Struct("<8sIIIQII28x")
_GEOMETRY: Final = Struct("<IIQII")

assert SLOT.size == SLOT_BYTES
assert _IDENTITY.size == LINE_BYTES
assert SLOT_COUNT_MAX * 4 <= 1 << SEQUENCE_BITS
assert PAYLOAD_BYTES_MAX // GRANULE_BYTES * 4 <= 1 << GRANULE_BITS


def pack_position(session: int, sequence: int, end: int) -> int:
    """The word that says: ``session`` reserved last, up to ``sequence`` slots and granule ``end``."""
    return session << SESSION_SHIFT | sequence << GRANULE_BITS | end


def unpack_position(word: int) -> tuple[int, int, int]:
    """Session, sequence and end of a position word."""
    return word >> SESSION_SHIFT, word >> GRANULE_BITS & SEQUENCE_MASK, word & GRANULE_MASK


PayloadHasher: Final = xxh3_64
"""``hash_payload`` of what comes in parts: ``update`` and ``intdigest``."""


def hash_payload(buffers: Sequence[Bytes]) -> int:
    """xxh3-64 over the concatenation of ``buffers``, without concatenating them."""
    if len(buffers) == 1:
        return xxh3_64_intdigest(buffers[0])
    state = xxh3_64()
    for buffer in buffers:
        state.update(buffer)
    return state.intdigest()


class Slot(NamedTuple):
    """A slot's fields, in the order of their addresses."""

    commit: int
    predecessor: int
    length: int
    session: int
    kind: int
    flags: int
    number: int
    payload_hash: int
    pull: int
    head_length: int
    slot_hash: int


def encode_slot(
    commit: int,
    predecessor: int,
    length: int,
    session: int,
    kind: int,
    flags: int,
    number: int,
    payload_hash: int,
    pull: int = 0,
    head_length: int = 0,
) -> bytes:
    """The 64 bytes of a slot, hashed and ready to be written body first, commit word last."""
    image = SLOT.pack(
        commit, predecessor, length, session, kind, flags, number, payload_hash, pull, head_length, 0
    )
    slot_hash = xxh3_64_intdigest(image[:SLOT_HASHED_BYTES])
    return image[:SLOT_HASHED_BYTES] + WORD.pack(slot_hash) + image[BODY_END:]


def decode_slot(image: bytes) -> Slot | None:
    """The fields of a slot's 64 bytes; ``None`` where its hash says that they are not what was written.

    Args:
        image: a *copy* of the slot; the slot itself may change between the check and the use.
    """
    slot = Slot._make(SLOT.unpack(image))
    if slot.slot_hash != xxh3_64_intdigest(image[:SLOT_HASHED_BYTES]):
        return None
    return slot


def _checked_range(low: int, high: int) -> Callable[[Any, "Attribute[int]", int], None]:
    def check(_instance: object, attribute: "Attribute[int]", value: int) -> None:
        if not low <= value <= high:
            raise ValueError(f"{attribute.name} must lie between {low} and {high}, not be {value!r}")

    return check


@frozen
class Geometry:
    """The lengths of one inbox's rings, and where everything stands in its region.

    Raises:
        ValueError: a length is out of bounds, or no multiple of a granule where it must be one.
    """

    slot_count: int = field(validator=_checked_range(1, SLOT_COUNT_MAX))
    payload_bytes: int = field(validator=_checked_range(GRANULE_BYTES, PAYLOAD_BYTES_MAX))
    session_count: int = field(validator=_checked_range(1, SESSION_COUNT_MAX))
    head_bytes: int = field(default=0, validator=_checked_range(0, HEAD_BYTES_MAX))
    """Not 0: the payload ring lies apart, and each slot has room for a head of so many bytes."""
    is_apart: bool = field(init=False, eq=False, repr=False)
    """The payload ring lies in a device's memory; ``region_bytes`` does not count it."""
    granule_count: int = field(init=False, eq=False, repr=False)
    sequence_modulus: int = field(init=False, eq=False, repr=False)
    granule_modulus: int = field(init=False, eq=False, repr=False)
    slots_start: int = field(init=False, eq=False, repr=False)
    heads_start: int = field(init=False, eq=False, repr=False)
    payload_start: int = field(init=False, eq=False, repr=False)
    region_bytes: int = field(init=False, eq=False, repr=False)
    message_bytes_max: int = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        for name in ("payload_bytes", "head_bytes"):
            if getattr(self, name) % GRANULE_BYTES:
                raise ValueError(
                    f"{name} must be a multiple of {GRANULE_BYTES}, not be {getattr(self, name)!r}"
                )
        self._derive("is_apart", self.head_bytes > 0)
        if self.is_apart and self.payload_bytes <= GRANULE_BYTES:
            raise ValueError(
                f"a payload ring that lies apart needs more than {GRANULE_BYTES} bytes: one seal"
            )
        granule_count = self.payload_bytes // GRANULE_BYTES
        delivered_bytes = -(-self.session_count * WORD_BYTES // LINE_BYTES) * LINE_BYTES
        slots_start = DELIVERED_OFFSET + delivered_bytes
        heads_start = slots_start + self.slot_count * SLOT_BYTES
        heads_end = heads_start + self.slot_count * self.head_bytes
        self._derive("granule_count", granule_count)
        self._derive("sequence_modulus", _largest_multiple(self.slot_count, 1 << SEQUENCE_BITS))
        self._derive("granule_modulus", _largest_multiple(granule_count, 1 << GRANULE_BITS))
        self._derive("slots_start", slots_start)
        self._derive("heads_start", heads_start)
        self._derive("payload_start", 0 if self.is_apart else heads_end)
        self._derive("region_bytes", heads_end if self.is_apart else heads_end + self.payload_bytes)
        seal_bytes = GRANULE_BYTES if self.is_apart else 0
        self._derive("message_bytes_max", min(self.payload_bytes - seal_bytes, LENGTH_MAX))

    def _derive(self, name: str, value: int) -> None:
        object.__setattr__(self, name, value)

    @property
    def tail_offset(self) -> int:
        """Where the tail word stands."""
        return TAIL_OFFSET

    @property
    def head_offset(self) -> int:
        """Where the head word stands."""
        return HEAD_OFFSET

    def delivered_offset(self, session: int) -> int:
        """Where the delivered word of ``session`` (1 to ``session_count``) stands."""
        assert 1 <= session <= self.session_count, f"session {session} is not one of this ring's"
        return DELIVERED_OFFSET + (session - 1) * WORD_BYTES

    def slot_offset(self, sequence: int) -> int:
        """Where the slot of ``sequence`` stands."""
        return self.slots_start + sequence % self.slot_count * SLOT_BYTES

    def head_slot_offset(self, sequence: int) -> int:
        """Where the head of the slot of ``sequence`` stands."""
        return self.heads_start + sequence % self.slot_count * self.head_bytes

    def payload_offset(self, granule: int) -> int:
        """Where payload granule ``granule`` (a counter, not an index) stands: in the region, or apart."""
        return self.payload_start + granule % self.granule_count * GRANULE_BYTES

    def seal_offset(self, granule: int, length: int) -> int:
        """Where the seal of a payload of ``length`` bytes stands that starts at ``granule``; apart."""
        return self.payload_offset(granule) + (length + GRANULE_BYTES - 1) // GRANULE_BYTES * GRANULE_BYTES

    def sealed_bytes(self, length: int) -> int:
        """How many bytes a payload of ``length`` takes with its seal; apart."""
        return self.seal_offset(0, length) + GRANULE_BYTES

    def place(self, end: int, length: int) -> tuple[int, int]:
        """Start and end of a message of ``length`` bytes that is reserved behind ``end``.

        A message is contiguous: one that would cross the end of the ring starts at its beginning,
        and the granules skipped count as used until the message is released. Only an empty ring
        takes a message for which skipped and used granules together exceed the ring; so less than
        two rings ever lie between head and tail.
        """
        granules = (length + GRANULE_BYTES - 1) // GRANULE_BYTES
        if self.is_apart and length:
            granules += 1  # the seal
        index = end % self.granule_count
        start = end if index + granules <= self.granule_count else end + self.granule_count - index
        return start % self.granule_modulus, (start + granules) % self.granule_modulus

    def reserve(self, tail: int, head: int, length: int, session: int) -> int | None:
        """The tail word after a reservation by ``session``; ``None`` where there is no room.

        Args:
            tail: the tail word that the reservation will replace.
            head: a head word that is not older than the tail's last wrap; an old one is only pessimistic.
            length: payload bytes, at most ``message_bytes_max``.
            session: who reserves.

        Raises:
            StaleSnapshot: ``head`` is ahead of ``tail``, so the tail is older: read both again.
        """
        sequence = tail >> GRANULE_BITS & SEQUENCE_MASK
        used_slots = (sequence - (head >> GRANULE_BITS & SEQUENCE_MASK)) % self.sequence_modulus
        if used_slots >= self.slot_count:
            if used_slots > self.slot_count:
                raise StaleSnapshot
            return None
        tail_end = tail & GRANULE_MASK
        _, end = self.place(tail_end, length)
        if used_slots:
            used_granules = (tail_end - (head & GRANULE_MASK)) % self.granule_modulus
            used_granules += (end - tail_end) % self.granule_modulus
            if used_granules > self.granule_count:
                return None
        # An empty ring holds any message: what is skipped in it belongs to nobody.
        return pack_position(session, (sequence + 1) % self.sequence_modulus, end)

    def to_bytes(self) -> bytes:
        """The geometry as it goes into a welcome."""
        return _GEOMETRY.pack(
            LAYOUT_VERSION, self.slot_count, self.payload_bytes, self.session_count, self.head_bytes
        )

    @classmethod
    def from_bytes(cls, data: Bytes) -> "Geometry":
        """Read ``to_bytes``.

        Raises:
            LayoutMismatch: another version or length, or lengths that no ring can have.
        """
        if len(data) != _GEOMETRY.size:
            raise LayoutMismatch(
                f"a ring geometry has {_GEOMETRY.size} bytes, the peer sent {len(data)}: "
                "run the same version on both sides"
            )
        version, slot_count, payload_bytes, session_count, head_bytes = _GEOMETRY.unpack(data)
        if version != LAYOUT_VERSION:
            raise LayoutMismatch(
                f"the peer's ring has layout version {version}, this side speaks {LAYOUT_VERSION}: "
                "run the same version on both sides"
            )
        try:
            return cls(slot_count, payload_bytes, session_count, head_bytes)
        except ValueError as error:
            raise LayoutMismatch(f"the peer's ring geometry is impossible: {error}") from error

    def identity_line(self, generation: int) -> bytes:
        """The first line of a region: enough to tell a foreign or outdated region from ours."""
        return _IDENTITY.pack(
            _MAGIC,
            LAYOUT_VERSION,
            self.slot_count,
            self.session_count,
            self.payload_bytes,
            generation,
            self.head_bytes,
        )


class StaleSnapshot(Exception):  # noqa: N818  # a state of affairs inside the producer, never seen by callers
    """The head that was read is ahead of the tail that was read."""


def _largest_multiple(unit: int, limit: int) -> int:
    return limit // unit * unit
