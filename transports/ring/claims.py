"""The owner's half of a claim: a whole reservation, executed where the ring lies.

Where the owner's processor executes the producers' swaps anyway, it may execute all that a producer does for
a reservation: look at tail and head, compute what the tail becomes, replace it. Promises of this half:

* *Nothing new happens to the ring.* A claim that takes place is a read of tail and head and a swap with no
  step of anybody else in between; one that does not is the read alone. So to every other party it is
  something that the plain operations could have done too, and whatever is shown of those holds for it.
* *It cannot be lost to others.* Between the look and the replacement nobody comes, so one question is
  enough, whatever the number of producers.
* *The same arithmetic.* Whether there is room, and what the tail becomes, is said by ``Geometry.reserve`` on
  both sides; the answer tells tail and head as found, and the producer computes its place from them itself.
* *Nothing of a claim is trusted.* The length is bounded here; the session is that of the connection that the
  claim came over, never one that the claim names.

What it does not promise: room (a full ring is an answer, and the producer waits as ever), nor that a claim is
followed by a message. A producer that dies behind its claim leaves what one leaves that dies behind its swap:
a slot that is not committed, which the consumer recovers. Nor is it for a ring whose tail adapters swap:
their atomics need not be atomic with the owner's processor.
"""

from typing import Final

from transports.errors import ProtocolError
from transports.operations import Claimed
from transports.ring.layout import HEAD_OFFSET, TAIL_OFFSET, WORD, Geometry, StaleSnapshot


class Claims:
    """Executes claims in the memory of one inbox.

    Args:
        geometry: of the inbox.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._geometry: Final = geometry

    def __call__(self, view: memoryview | bytearray, session: int, length: int) -> Claimed:
        """Reserve ``length`` bytes for ``session`` if there is room; the words as they were found.

        Raises:
            ProtocolError: no ring of this geometry ever holds so much; nothing was changed.
        """
        if not 0 <= length <= self._geometry.message_bytes_max:
            raise ProtocolError(
                f"session {session} claims {length} bytes of a ring that holds"
                f" {self._geometry.message_bytes_max} at most"
            )
        (tail,) = WORD.unpack_from(view, TAIL_OFFSET)
        (head,) = WORD.unpack_from(view, HEAD_OFFSET)
        (delivered,) = WORD.unpack_from(view, self._geometry.delivered_offset(session))
        reserved = self._reserve(tail, head, length, session)
        if reserved is not None:
            WORD.pack_into(view, TAIL_OFFSET, reserved)
        return Claimed(tail, head, delivered, reserved is not None)

    def _reserve(self, tail: int, head: int, length: int, session: int) -> int | None:
        try:
            return self._geometry.reserve(tail, head, length, session)
        except StaleSnapshot:
            # Both words were read in one step, so somebody has written over one of them.
            return None
