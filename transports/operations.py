"""The operations a program may yield, and what it gets back.

The ring is written as *programs*: generators that yield operations and are sent the outcomes. A
program never touches a socket, an adapter, a clock or a random source, so the same code runs over
every transport (``driver.py``), and over a model of memory in which every interleaving is explored
(``simulations/explore.py``).

============== ============================================ =====================================
operation      meaning                                      outcome
============== ============================================ =====================================
Read           fetch bytes of the peer's region             bytes-like
CompareAndSwap swap a word of the peer's region             the word found; ``EXPIRED`` if too late
FetchAndAdd    add to a word of the peer's region           the word found
Claim          have the peer's owner reserve                ``Claimed``
Chain          post writes in order, do not wait            None, when posted
Put            post bytes into the peer's device memory     None, when posted
Guarded        swap, and only if it took place the chain    the word found; ``EXPIRED`` if too late
Load, Store    look at / change the *own* region            bytes-like, None
Peek           copy bytes out of the own device memory      bytes-like
Carry          take bytes over into other device memory     None, when they are there
Fence          revoke sessions of the own region            None, when nothing of theirs can land
Pull           fetch what a session of it has exported      bytes-like, None if it cannot be had
Pause          wait for a change, or a moment with jitter   now, in seconds of a monotonic clock
============== ============================================ =====================================

All words are unsigned 64-bit little-endian and 8-byte aligned. Offsets count from the start of the
region; those of ``Put``, ``Peek`` and ``Carry`` from the start of the device memory beside it. Writes of one
session land in the order in which they were posted, and so do its puts; between a write and a put there is no
order.
"""

import enum
from collections.abc import Generator
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from attrs import field, frozen

Bytes: TypeAlias = bytes | bytearray | memoryview
"""Contiguous bytes; a memoryview has format ``B`` and one dimension."""

WORD_BYTES: Final = 8


class OnDevice(Protocol):
    """Bytes in a device's memory: this process's processor cannot look at them."""

    def __len__(self) -> int:
        """How many."""
        ...


Content: TypeAlias = Bytes | OnDevice
"""What a payload may be made of where the payload ring lies apart."""


def as_bytes(buffer: Bytes) -> Bytes:
    """The buffer itself where it is one of ``Bytes``, else a view of its bytes, which are not copied.

    Raises:
        TypeError: It is no buffer.
        ValueError: Its bytes do not lie one behind the other, or its elements have no plain format.
    """
    if isinstance(buffer, bytes | bytearray):
        return buffer
    view = buffer if isinstance(buffer, memoryview) else memoryview(buffer)
    if view.format == "B" and view.ndim == 1 and view.c_contiguous:
        return view
    if not view.nbytes:
        return b""
    try:
        return view.cast("B")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a buffer of {view.nbytes} bytes (format {view.format!r}, shape {view.shape}) is not one piece"
            f" of plain bytes ({error}); copy it, as bytes(...) does"
        ) from error


class Expired(enum.Enum):
    """The outcome of a swap that was not attempted because its ``not_after`` had passed."""

    EXPIRED = "expired"


EXPIRED: Final = Expired.EXPIRED


@frozen
class Read:
    """Fetch ``length`` bytes at ``offset`` of the peer's region."""

    offset: int
    length: int


@frozen
class Write:
    """Put the concatenation of ``buffers`` at ``offset`` of the peer's region.

    The buffers are not copied by whoever carries it out; they must stay unchanged until the message
    they belong to is counted as delivered, or the session is closed.
    """

    offset: int
    buffers: tuple[Bytes, ...]
    length: int = field(init=False, eq=False, repr=False)
    """Bytes written in all; counted once, as whoever carries it out asks several times."""

    @length.default
    def _length(self) -> int:
        return sum(map(len, self.buffers))


@frozen
class CompareAndSwap:
    """Replace the word at ``offset`` by ``desired`` if it is ``expected``.

    ``not_after`` is a moment on the driver's monotonic clock, in seconds: past it the swap must not
    be posted any more, and the outcome is ``EXPIRED``.
    """

    offset: int
    expected: int
    desired: int
    not_after: float = field(default=float("inf"))


@frozen
class FetchAndAdd:
    """Add ``addend`` to the word at ``offset``, modulo 2**64."""

    offset: int
    addend: int


@frozen
class Chain:
    """Writes that land in this order; ``notify`` wakes the region's owner after the last one.

    Each ``Write`` lands word by word in the order of its addresses at best; nothing but the order
    *between* the writes is promised. The outcome comes when the chain is posted, not when it landed.
    """

    writes: tuple[Write, ...]
    notify: bool = True


@frozen
class Put:
    """Put the concatenation of ``buffers`` at ``offset`` of the device memory beside the peer's region.

    As for ``Write``, they are not copied, and must stay unchanged. Nobody is notified.
    """

    offset: int
    buffers: tuple[Content, ...]


@frozen
class Guarded:
    """A swap, and directly behind it a chain that takes place only if the swap did.

    One round trip instead of two where the owner's processor executes the operations anyway
    (``Capabilities.guarded_bytes_max``); never more than a swap followed at once by the chain.
    """

    swap: CompareAndSwap
    chain: Chain


@frozen
class Claim:
    """Have the region's owner reserve ``length`` bytes of payload for this session, in one step.

    To everybody else it is a ``Read`` of tail and head and a ``CompareAndSwap`` of the tail with nothing in
    between, so no other producer can win in between. Only where the owner's processor executes the operations
    anyway (``Capabilities.claims``).
    """

    length: int


@frozen
class Claimed:
    """What the owner found, and whether there was room: then the tail has been replaced."""

    tail: int
    head: int
    delivered: int
    """The session's own word."""
    taken: bool


@frozen
class Load:
    """Look at ``length`` bytes at ``offset`` of the own region; the view may change under the reader."""

    offset: int
    length: int


@frozen
class Peek:
    """Copy ``length`` bytes at ``offset`` out of the device memory beside the own region.

    What the copy shows, whatever reads that memory afterwards sees too, and all that was put there before it.
    """

    offset: int
    length: int


@frozen
class Carry:
    """Copy ``length`` bytes at ``offset`` from device memory that is given up to what follows it."""

    offset: int
    length: int


@frozen
class Store:
    """Put ``data`` at ``offset`` of the own region; a word is stored in one piece."""

    offset: int
    data: Bytes


@frozen
class Fence:
    """Revoke ``sessions``: when the outcome comes, no write of theirs can land any more."""

    sessions: tuple[int, ...]


@frozen
class Pull:
    """Fetch all of what ``session`` has exported under ``key``, into memory outside the region."""

    session: int
    key: bytes
    length: int


class PauseReason(enum.Enum):
    """Why a program waits; drivers choose the length of the wait by it."""

    FULL = "full"
    """No room in the ring: wait until the consumer has advanced, looking again now and then."""
    CONTENDED = "contended"
    """Another producer won the swap: try again after a short random time."""


@frozen
class Pause:
    """Wait, then go on; ``attempt`` counts from 1 the waits in a row for this reason."""

    reason: PauseReason
    attempt: int


Operation: TypeAlias = (
    Read
    | CompareAndSwap
    | FetchAndAdd
    | Claim
    | Chain
    | Put
    | Guarded
    | Load
    | Peek
    | Carry
    | Store
    | Fence
    | Pull
    | Pause
)

_Result = TypeVar("_Result")

Program: TypeAlias = Generator[Operation, Any, _Result]
"""Yields operations, is sent their outcomes, returns the result."""
