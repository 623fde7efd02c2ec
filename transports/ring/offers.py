"""Large messages: what a slot says of bytes that the consumer fetches itself, and what is lent at a time.

A message that is *pulled* takes one slot and a few granules, whatever its length. Its payload in the ring
is an ``Offer``: how long it is, its hash, and the key under which its producer has *exported* it::

     0  u64  length     of the message
     8  u64  hash       xxh3-64 of the message
    16       key        as the producer's transport gave it; to the owner's transport it names one export
                        of this session, and never another one

The producer lends the bytes until ``delivered`` passes the message, which is after the consumer has pulled
all of them. So nothing is pulled from memory that was given back, as long as the session lives; and when
it has ended, the consumer pulls nothing of it any more.
"""

from collections import deque
from struct import Struct
from typing import Final

from attrs import frozen

from transports.operations import Bytes
from transports.ring.layout import Geometry

KEY_BYTES_MAX: Final = 240
OFFER_BYTES_MAX: Final = 256

_OFFER: Final = Struct("<QQ")

assert _OFFER.size + KEY_BYTES_MAX == OFFER_BYTES_MAX


@frozen
class Offer:
    """What a producer lends to the consumer."""

    length: int
    message_hash: int
    key: bytes

    def to_bytes(self) -> bytes:
        """As it lies in the ring."""
        assert 0 < len(self.key) <= KEY_BYTES_MAX, f"a key of {len(self.key)} bytes"
        return _OFFER.pack(self.length, self.message_hash) + self.key

    @classmethod
    def from_bytes(cls, data: Bytes) -> "Offer | None":
        """Read ``to_bytes``; ``None`` where that is no offer."""
        if not _OFFER.size < len(data) <= OFFER_BYTES_MAX:
            return None
        length, message_hash = _OFFER.unpack_from(data)
        return cls(length, message_hash, bytes(data[_OFFER.size :]))


def pulled_room(geometry: Geometry, length: int, pulled_bytes_max: int) -> int:
    """How many bytes of pulled messages may be held with one of this length.

    Where it fits into the ring no more than that holds: so memory is bounded by the ring if messages are
    pulled only because that costs less.
    """
    if length > geometry.message_bytes_max:
        return pulled_bytes_max
    return min(geometry.payload_bytes, pulled_bytes_max)


@frozen
class Lent:
    """One export, until its message is delivered."""

    number: int
    length: int
    key: bytes


class Exports:
    """What one session lends, oldest message first; knows no memory.

    Args:
        bytes_max: How much may be lent at a time.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lent: deque[Lent] = deque()
        self.bytes = 0

    def has_room(self, length: int) -> bool:
        """A message of this length may be lent now; alone it always may, its length was checked before."""
        return not self._lent or self.bytes + length <= self._bytes_max

    def lend(self, lent: Lent) -> None:
        """One more; its number is larger than the last one's."""
        assert not self._lent or self._lent[-1].number < lent.number
        self._lent.append(lent)
        self.bytes += lent.length

    def take_back(self, number: int) -> bytes:
        """The last one, of this number, was not sent; its key."""
        lent = self._lent.pop()
        assert lent.number == number, f"{lent!r} was lent last, not {number}"
        self.bytes -= lent.length
        return lent.key

    def delivered(self, delivered: int) -> tuple[bytes, ...]:
        """The keys of those that the consumer has had: every number smaller than ``delivered``."""
        free = []
        while self._lent and self._is_done(self._lent[0], delivered):
            lent = self._lent.popleft()
            self.bytes -= lent.length
            free.append(lent.key)
        return tuple(free)

    def _is_done(self, lent: Lent, delivered: int) -> bool:
        return lent.number < delivered
