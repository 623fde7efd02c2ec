"""What is taken over when the device memory beside a region is given up for other memory.

Where a session cannot be revoked its region is retired: the owner copies the region's bytes to other memory
while writes go on landing in the old one, and ends all sessions. A copy may hold a commit word and not what
was written before it; of slots and heads the hashes tell. A payload in a device's memory has no hash. So the
copy is made in the one order in which it testifies for itself:

1. the region's bytes are copied; from here on it is that copy which is looked at, and it does not change;
2. for each slot that is committed in it, the seal is read in the *old* device memory;
3. only if it was there are payload and seal copied, into memory that was zeroed.

A session's puts land in their order, so whoever sees the seal knows that the payload is there; and nothing
lands in that stretch any more before it is released, since it belongs to this reservation alone. Read *after*
the payload was copied the seal says nothing: both may have landed in between. What was not sealed has no
seal in the new memory either, so it counts as not arrived; its session has ended, and its producer sends it
again.

Messages that were handed over are not taken over: who holds them reads the old memory on.
"""

from collections.abc import Callable

from transports.operations import Bytes, Load, Program
from transports.ring.layout import GRANULE_BITS, GRANULE_MASK, SEQUENCE_MASK, SLOT_BYTES, Geometry, Slot


def carry_over(
    geometry: Geometry,
    cursor: int,
    tail: int,
    read_slot: Callable[[Bytes, int], Slot | None],
    carry: Callable[[Slot, int], Program[None]],
) -> Program[None]:
    """Take over what is committed from the sequence ``cursor`` up to ``tail``.

    Args:
        geometry: of the inbox.
        cursor: the sequence that comes next.
        tail: the tail word.
        read_slot: says what is committed in a slot's image as a given sequence, if anything is.
        carry: takes over the payload of a slot that starts at a granule, if it is sealed.
    """
    last = tail >> GRANULE_BITS & SEQUENCE_MASK
    while cursor != last:
        image = yield Load(geometry.slot_offset(cursor), SLOT_BYTES)
        slot = read_slot(image, cursor)
        if slot is not None and 0 < slot.length <= geometry.message_bytes_max:
            start, _ = geometry.place(slot.predecessor & GRANULE_MASK, slot.length)
            yield from carry(slot, start)
        cursor = (cursor + 1) % geometry.sequence_modulus
