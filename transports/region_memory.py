"""The owner's memory, and the checked ways to touch it on behalf of a peer.

Transports whose operations are carried out by the owner's processor share this: every offset and
length comes from outside, so each is checked before a byte is read or written.
"""

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from transports.address import Address
from transports.errors import ListenFailed, ProtocolError
from transports.operations import WORD_BYTES, Bytes

HUGE_PAGE_BYTES: Final = 2 << 20
_WORD: Final = struct.Struct("<Q")
_WORD_MASK: Final = (1 << 64) - 1


class RegionMemory:
    """Zeroed, page-aligned bytes with bounds-checked access.

    Args:
        size_bytes: How many.
        view: Memory of this size that is there already; otherwise it is taken from the system.
    """

    __slots__ = ("size_bytes", "view")

    def __init__(self, size_bytes: int, view: memoryview | None = None) -> None:
        if size_bytes < WORD_BYTES:
            raise ValueError(f"a region needs at least {WORD_BYTES} bytes, not {size_bytes}")
        self.view = fresh_memory(size_bytes) if view is None else view
        self.size_bytes = size_bytes

    def span(self, offset: int, length: int) -> memoryview:
        """The bytes at ``offset``; raises ``ProtocolError`` unless all of them lie in the region."""
        check_span(offset, length, self.size_bytes)
        return self.view[offset : offset + length]

    def read(self, offset: int, length: int) -> bytes:
        """A copy of the bytes at ``offset``."""
        return bytes(self.span(offset, length))

    def write(self, offset: int, data: Bytes) -> None:
        """Put ``data`` at ``offset``."""
        self.span(offset, len(data))[:] = data

    def compare_and_swap(self, offset: int, expected: int, desired: int) -> int:
        """Swap the word at ``offset`` if it is ``expected``; the word found."""
        check_word(offset, self.size_bytes)
        (found,) = _WORD.unpack_from(self.view, offset)
        if found == expected:
            _WORD.pack_into(self.view, offset, desired)
        return int(found)

    def fetch_and_add(self, offset: int, addend: int) -> int:
        """Add to the word at ``offset`` modulo 2**64; the word found."""
        check_word(offset, self.size_bytes)
        (found,) = _WORD.unpack_from(self.view, offset)
        _WORD.pack_into(self.view, offset, (found + addend) & _WORD_MASK)
        return int(found)


def check_span(offset: int, length: int, size_bytes: int) -> None:
    """Raise ``ProtocolError`` unless these bytes lie in a region of this size."""
    if not 0 <= offset <= offset + length <= size_bytes:
        raise ProtocolError(f"bytes {offset}..{offset + length} lie outside the region of {size_bytes} bytes")


def check_word(offset: int, size_bytes: int) -> None:
    """Raise ``ProtocolError`` unless an aligned word of a region of this size is there."""
    if offset % WORD_BYTES or not 0 <= offset <= size_bytes - WORD_BYTES:
        raise ProtocolError(f"offset {offset} is no aligned word of the region of {size_bytes} bytes")


@contextmanager
def wanted_for(place: Address, size_bytes: int) -> Iterator[None]:
    """Name the region that there is no memory for; raises ``ListenFailed``."""
    try:
        yield
    except OSError as error:
        raise ListenFailed(
            f"there are no {size_bytes} bytes of memory for {place}: {error}; make it smaller, or look at the"
            " limits of this process (ulimit -v)"
        ) from error


def fresh_memory(size_bytes: int) -> memoryview:
    """Zeroed, page-aligned bytes from the system; given back with the last view of them."""
    if not size_bytes:
        return memoryview(bytearray())
    # Private and anonymous: zero pages come on first use, so a large ring costs what it carries.
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= HUGE_PAGE_BYTES:
        with suppress(OSError):  # a kernel without huge pages is only slower
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
