"""What producers lend, in the explored world: memory that their consumer pulls from, one cell at a time.

Each producer has a row of *places*, each a header and one granule. To lend is to put the message and then a
generation that was never used before; to withdraw is to clear both, and the next message may go there.
The consumer reads the granule and, in a later transition, the header; anything may happen in between.
What it has read counts only if the header still has the generation that the offer names. The reading knows
nothing of sessions and fences: it is the most careless wire that keeps to the contract of ``Region.pull``.

Which places are free, and when, is said by the product's own ``Exports``.
"""

from collections.abc import Sequence
from typing import NamedTuple

from simulations.ring_cells import EXPORT_KEY_BYTES, Cells, Piece
from transports.ring.layout import GRANULE_BYTES
from transports.ring.offers import Exports, Lent, Offer


class Place(NamedTuple):
    """What a key means here."""

    producer: int
    at: int
    generation: int

    def to_key(self) -> bytes:
        """The key of an offer; as long as makes the offer one granule."""
        return bytes(self).ljust(EXPORT_KEY_BYTES, b"\xff")

    @classmethod
    def from_key(cls, key: bytes) -> "Place":
        """Read ``to_key``."""
        return cls(*key[:3])


class EarlyExports(Exports):
    """A mutant: what was lent counts as delivered at once."""

    def _is_done(self, lent: Lent, delivered: int) -> bool:
        return True


def books_of(kind: type[Exports], places: int, lent: Sequence[Lent]) -> Exports:
    """The product's books of a session that lends ``lent``."""
    exports = kind(places * GRANULE_BYTES)
    for each in lent:
        exports.lend(each)
    return exports


def free_place(places: int, lent: Sequence[Lent]) -> int:
    """The first place in which nothing is lent."""
    taken = {Place.from_key(each.key).at for each in lent}
    return min(set(range(places)) - taken)


def lending(cells: Cells, place: Place, content: bytes) -> tuple[Piece, ...]:
    """What lending puts where."""
    header, granule = cells.export_cells(place.producer, place.at)
    return ((header, cells.number(bytes([place.generation]))), (granule, cells.number(content)))


def withdrawing(cells: Cells, producer: int, index: int) -> tuple[Piece, ...]:
    """What withdrawing clears."""
    return tuple((cell, 0) for cell in cells.export_cells(producer, index))


def offer_of(content: bytes, message_hash: int, place: Place) -> bytes:
    """What goes into the ring."""
    return Offer(len(content), message_hash, place.to_key()).to_bytes()
