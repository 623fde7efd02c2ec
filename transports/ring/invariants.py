"""What holds in a ring's memory and books between any two operations.

Used by the explorer, by the tests of the ring and of the transports, and by whoever looks for a fault in
a running inbox: ``broken`` reads, and changes nothing.

1. head, cursor and tail follow each other, and no more than ``slot_count`` slots lie between the
   outer two; where two of them are at the same sequence, they are at the same granule.
2. Less than two payload rings lie between head and tail.
3. The head in memory is the one in the books.
4. Outside of head to tail every commit word is clear, so that a slot that is reserved next is empty.
5. A slot between cursor and tail that is committed was reserved for the place in which it stands.
6. Held messages lie between head and cursor.
"""

from collections.abc import Iterator

from transports.operations import Bytes
from transports.ring.consumer import Consumer
from transports.ring.layout import (
    EMPTY_WORD,
    GRANULE_BITS,
    GRANULE_MASK,
    HEAD_OFFSET,
    POSITION_MASK,
    SEQUENCE_MASK,
    SLOT_BYTES,
    TAIL_OFFSET,
    WORD,
    Geometry,
    decode_slot,
)


def broken_positions(geometry: Geometry, head: int, cursor: int, tail: int) -> Iterator[str]:
    """Which of rules 1 and 2 these three position words break."""
    looked_at = _slots_between(geometry, head, cursor)
    reserved = _slots_between(geometry, head, tail)
    if reserved > geometry.slot_count:
        yield f"{reserved} slots lie between head and tail, the ring has {geometry.slot_count}"
    if looked_at > reserved:
        yield f"the cursor is {looked_at} slots behind the head, the tail {reserved}"
    granules = ((tail & GRANULE_MASK) - (head & GRANULE_MASK)) % geometry.granule_modulus
    if granules >= 2 * geometry.granule_count:
        yield f"{granules} granules lie between head and tail, the ring has {geometry.granule_count}"
    for name, word, slots in (("cursor", cursor, looked_at), ("tail", tail, reserved)):
        if not slots and (word ^ head) & GRANULE_MASK:
            yield f"head and {name} are at the same slot and at different granules"


def broken(consumer: Consumer, memory: Bytes) -> Iterator[str]:
    """Which rules do not hold, in words; nothing if all do.

    Args:
        consumer: between two calls, or at a ``Fence``.
        memory: its region.
    """
    geometry = consumer.geometry
    (tail,) = WORD.unpack_from(memory, TAIL_OFFSET)
    (head,) = WORD.unpack_from(memory, HEAD_OFFSET)
    yield from broken_positions(geometry, head, consumer.cursor, tail & POSITION_MASK)
    if head != consumer.head:
        yield f"the head in memory is {head:#x}, in the books {consumer.head:#x}"
    first = head >> GRANULE_BITS & SEQUENCE_MASK
    looked_at = _slots_between(geometry, head, consumer.cursor)
    reserved = _slots_between(geometry, head, tail)
    if consumer.held > looked_at:
        yield f"{consumer.held} messages are held, and {looked_at} slots lie between head and cursor"
    for ahead in range(geometry.slot_count):
        sequence = (first + ahead) % geometry.sequence_modulus
        offset = geometry.slot_offset(sequence)
        image = bytes(memory[offset : offset + SLOT_BYTES])
        if image[: len(EMPTY_WORD)] == EMPTY_WORD:
            continue
        if ahead >= reserved:
            yield f"slot {sequence % geometry.slot_count} is not reserved, and its commit word is set"
        elif ahead >= looked_at:
            slot = decode_slot(image)
            if slot is not None and slot.predecessor >> GRANULE_BITS & SEQUENCE_MASK != sequence:
                yield f"slot {sequence % geometry.slot_count} holds what was reserved for another lap"


def _slots_between(geometry: Geometry, behind: int, ahead: int) -> int:
    sequences = (ahead >> GRANULE_BITS & SEQUENCE_MASK) - (behind >> GRANULE_BITS & SEQUENCE_MASK)
    return sequences % geometry.sequence_modulus
