"""A ring's memory as the explorer sees it, and the operations on it.

Memory is a row of *cells*: the words, the slots' commit words and bodies, the payload granules. The
content of a cell is the number of a byte string in ``Cells.values``; 0 stands for zeroes. An operation of a
program becomes a *step* on cells.
"""

from collections.abc import Sequence
from typing import Final, TypeAlias, cast

from attrs import frozen

from transports import operations
from transports.operations import (
    Bytes,
    Chain,
    Claim,
    CompareAndSwap,
    Fence,
    Guarded,
    Load,
    Operation,
    Peek,
    Pull,
    Read,
    Store,
    Write,
)
from transports.ring import Geometry
from transports.ring.layout import BODY_END, BODY_START, GRANULE_BYTES, TAIL_OFFSET

GENERATION: Final = 7
LEASE_SECONDS: Final = 2.0
"""Snapshots may be used for half of it: one unit of the model's clock."""
LATE: Final = 1e9
"""A moment at which every lease is over."""

TAIL_CELL: Final = 0
HEAD_CELL: Final = 1

EXPORT_KEY_BYTES: Final = GRANULE_BYTES - 16
"""So long that an offer is one granule."""

Piece: TypeAlias = tuple[int, int]
"""A cell and its new content."""
Group: TypeAlias = tuple[Piece, ...]
"""The pieces of one write: they may land in any order."""


class SmallCounters(Geometry):
    """A geometry whose counters wrap early, so that a wrap is within reach of an exploration."""

    def with_moduli(self, sequence_modulus: int, granule_modulus: int) -> "SmallCounters":
        """This geometry with other moduli; each must be a multiple of its ring's length."""
        assert sequence_modulus % self.slot_count == 0
        assert granule_modulus % self.granule_count == 0
        self._derive("sequence_modulus", sequence_modulus)
        self._derive("granule_modulus", granule_modulus)
        return self


class Cells:
    """Which cell stands where, and which byte strings the numbers in cells mean.

    Behind the region's own cells stand those of what producers lend: a header and a granule for each place.
    """

    def __init__(self, geometry: Geometry, producers: int = 0, places: int = 0) -> None:
        self.geometry = geometry
        self.apart = geometry.region_bytes if geometry.is_apart else 0
        """Where the model puts what lies apart: behind the region."""
        self.values: list[bytes] = [b""]
        self._numbers: dict[bytes, int] = {}
        self._spans: list[tuple[int, int]] = [(TAIL_OFFSET, 8), (geometry.head_offset, 8)]
        for session in range(1, geometry.session_count + 1):
            self._spans.append((geometry.delivered_offset(session), 8))
        self.first_slot = len(self._spans)
        for slot in range(geometry.slot_count):
            offset = geometry.slot_offset(slot)
            self._spans.append((offset, BODY_START))
            self._spans.append((offset + BODY_START, BODY_END - BODY_START))
        self.first_granule = len(self._spans)
        for granule in range(geometry.granule_count):
            self._spans.append((self.apart + geometry.payload_offset(granule), GRANULE_BYTES))
        self._at = {offset: cell for cell, (offset, _) in enumerate(self._spans)}
        self.first_export = len(self._spans)
        self._places = places
        self.count = self.first_export + 2 * producers * places

    def export_cells(self, producer: int, index: int) -> tuple[int, int]:
        """Header and granule of a place in which ``producer`` lends."""
        header = self.first_export + 2 * (producer * self._places + index)
        return header, header + 1

    def number(self, value: Bytes) -> int:
        """The number of a byte string."""
        data = bytes(value)
        if not any(data):
            return 0
        known = self._numbers.get(data)
        if known is None:
            known = self._numbers[data] = len(self.values)
            self.values.append(data)
        return known

    def word(self, number: int) -> int:
        """The word that a cell's number means."""
        return int.from_bytes(self.values[number], "little")

    def in_range(self, offset: int, length: int) -> tuple[int, ...]:
        """The cells that a read of this range fetches."""
        end = offset + length
        return tuple(
            cell for cell, (start, size) in enumerate(self._spans) if start >= offset and start + size <= end
        )

    def image(self, offset: int, length: int, cells: Sequence[int], numbers: Sequence[int]) -> bytes:
        """The bytes of a range whose cells hold these numbers."""
        image = bytearray(length)
        for cell, number in zip(cells, numbers, strict=True):
            if number:
                start = self._spans[cell][0] - offset
                value = self.values[number]
                image[start : start + len(value)] = value
        return bytes(image[:length])

    def pieces(self, offset: int, data: bytes) -> Group:
        """The pieces in which a write lands."""
        if offset < self.payload_start:
            return ((self._at[offset], self.number(data)),)
        return tuple(
            (self._at[offset + start], self.number(data[start : start + GRANULE_BYTES]))
            for start in range(0, len(data), GRANULE_BYTES)
        )

    @property
    def payload_start(self) -> int:
        """Where the first payload granule stands, in the region or behind it."""
        return self.apart + self.geometry.payload_start

    def is_payload(self, group: Group) -> bool:
        """The group lands in the payload ring."""
        return group[0][0] >= self.first_granule

    def sealed(self, offset: int) -> int:
        """The cell of the granule that begins at this offset of what lies apart."""
        return self._at[self.apart + offset]

    def group(self, write: Write) -> Group:
        """A posted write as a group."""
        return self.pieces(write.offset, b"".join(write.buffers))

    def describe(self, cell: int) -> str:
        """The cell in words."""
        if cell == TAIL_CELL:
            return "tail"
        if cell == HEAD_CELL:
            return "head"
        if cell < self.first_slot:
            return f"delivered word of session {cell - HEAD_CELL}"
        if cell < self.first_granule:
            slot, body = divmod(cell - self.first_slot, 2)
            return f"{'body' if body else 'commit word'} of slot {slot}"
        if cell < self.first_export:
            return f"payload granule {cell - self.first_granule}"
        place, granule = divmod(cell - self.first_export, 2)
        return f"{'granule' if granule else 'header'} of export {place}"


# What a local state is about to do.


@frozen
class Fetch:
    """``Read`` or ``Load``: the outcome is the numbers in these cells."""

    cells: tuple[int, ...]
    offset: int
    length: int


@frozen
class Swap:
    """``CompareAndSwap`` of the tail, with the groups that follow it in a ``Guarded``."""

    expected: int
    desired: int
    not_after: float
    groups: tuple[Group, ...]


@frozen
class Reserve:
    """``Claim``."""

    length: int


@frozen
class Post:
    """``Chain``."""

    groups: tuple[Group, ...]


@frozen
class Put:
    """``Store``."""

    piece: Piece


@frozen
class Revoke:
    """``Fence``."""

    sessions: tuple[int, ...]


@frozen
class Take:
    """``Pull``: the granule is read first, then the header."""

    key: bytes
    seen: int | None = None
    """The number in the granule, once it was read."""


@frozen
class Lend:
    """A producer lends its next message."""


Step: TypeAlias = Fetch | Swap | Reserve | Post | Put | Revoke | Take | Lend


def as_step(operation: Operation, cells: Cells) -> Step:
    """An operation of a program in terms of cells."""
    match operation:
        case Read(offset, length) | Load(offset, length):
            return Fetch(cells.in_range(offset, length), offset, length)
        case CompareAndSwap():
            return _as_swap(operation, (), cells)
        case Guarded(swap, chain):
            return _as_swap(swap, chain.writes, cells)
        case Claim(length):
            return Reserve(length)
        case Chain(writes):
            return Post(tuple(cells.group(write) for write in writes))
        case operations.Put(offset, buffers):
            return Post((cells.pieces(cells.apart + offset, b"".join(cast("tuple[Bytes, ...]", buffers))),))
        case Peek(offset, length):
            return Fetch((cells.sealed(offset),), cells.apart + offset, length)
        case Store(offset, data):
            ((cell, number),) = cells.pieces(offset, bytes(data))
            return Put((cell, number))
        case Fence(sessions):
            return Revoke(sessions)
        case Pull(_, key, _):
            return Take(key)
        case _:
            raise AssertionError(f"the ring's programs do not use {operation!r}")


def _as_swap(swap: CompareAndSwap, writes: Sequence[Write], cells: Cells) -> Swap:
    assert swap.offset == TAIL_OFFSET
    return Swap(
        cells.number(swap.expected.to_bytes(8, "little")),
        cells.number(swap.desired.to_bytes(8, "little")),
        swap.not_after,
        tuple(cells.group(write) for write in writes),
    )
