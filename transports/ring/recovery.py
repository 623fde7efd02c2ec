"""Whom to suspect when a slot was reserved and does not get committed, and where to go on.

The consumer stands before a reserved slot whose lease is over. It does not know who reserved it, nor
how many bytes with it: that is written in the slot that never came. But every reservation leaves
testimony in the one behind it::

         cursor                    boundary
           |                          |
      ... [?] [?] [?] ........ [?] [committed: predecessor = session, sequence, end]
                                      |
                                      or the tail word itself, if nothing behind is committed

The first committed slot behind the cursor carries the tail word that it replaced. That word names the
session of the reservation just before it, and the position at which that one ended; so the *boundary*
is known for certain, whatever lies between.

* If the boundary is the very next slot, the session named there reserved the cursor's slot: it alone
  is the suspect.
* Otherwise nobody testifies for the slots in between but the last of them: everybody is a suspect.
* If the cursor's slot itself is committed and only its payload does not match, it names its own
  session and end.

Suspects are fenced before anything is given back: when the fence returns, nothing of theirs can land
any more, so memory behind it cannot be hit by a stalled write. Only sessions that are open now can be
meant. One that is opened later reserves behind the tail that was read, which is at or behind the
boundary; one that has ended cannot write (its end was a fence, or the loss of its connection). That is also
why a slot all of whose suspects have ended needs no lease at all.

The price of the second rule: producers that did nothing wrong are fenced with the one that stalls.
They open a new session and send again what was not delivered; nothing is lost and nothing comes
twice.
"""

from collections.abc import Callable, Sequence

from attrs import frozen

from transports.operations import Bytes, Load, Program
from transports.ring.layout import (
    GRANULE_BITS,
    SEQUENCE_MASK,
    SLOT_BYTES,
    Geometry,
    Slot,
    unpack_position,
)


@frozen
class Boundary:
    """A position behind the cursor that is known for certain, and the session that reserved up to it."""

    session: int
    sequence: int
    end: int


def find_boundary(
    geometry: Geometry, cursor: int, tail: int, read_slot: Callable[[Bytes, int], Slot | None]
) -> Program[Boundary]:
    """The nearest boundary behind the slot of sequence ``cursor``.

    Args:
        geometry: of the inbox.
        cursor: a sequence that is reserved, so that the tail is ahead of it.
        tail: the tail word.
        read_slot: says what is committed in a slot's image as a given sequence, if anything is.
    """
    last = tail >> GRANULE_BITS & SEQUENCE_MASK
    sequence = (cursor + 1) % geometry.sequence_modulus
    while sequence != last:
        image = yield Load(geometry.slot_offset(sequence), SLOT_BYTES)
        witness = read_slot(image, sequence)
        if witness is not None:
            return Boundary(*unpack_position(witness.predecessor))
        sequence = (sequence + 1) % geometry.sequence_modulus
    return Boundary(*unpack_position(tail))


def suspects(
    geometry: Geometry, cursor: int, boundary: Boundary, open_sessions: Sequence[int]
) -> tuple[int, ...]:
    """The open sessions that may have reserved a slot from ``cursor`` up to ``boundary``."""
    if boundary.sequence == (cursor + 1) % geometry.sequence_modulus:
        return tuple(session for session in open_sessions if session == boundary.session)
    return tuple(open_sessions)
