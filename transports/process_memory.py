"""Reading the memory of another process of this host: one copy, to where its bytes are wanted.

Linux lets a process read another one's memory as it would let a debugger (process_vm_readv(2), ptrace(2)):
both of one user, in sight of each other's process numbers, and, where Yama restricts it, with the capability
CAP_SYS_PTRACE. Nobody can be asked whether it may be done but the system, by doing it: who lends memory says
where a secret lies in it that both know, and who reads it there has the right process and may read it.

*Spans* say where bytes lie: pairs of an address and a length, one behind the other in an array of 64-bit
words which itself lies in the memory of the process that lends. Behind them stands a *seal*, which no other
array has: who knows a place whose loan has ended reads nothing of what lies there now.
"""

import asyncio
import ctypes
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from transports.operations import Bytes
from transports.ring.layout import hash_payload

SPANS_MAX: Final = 4096
"""Buffers of one message that are described by spans."""

_LOCATION: Final = struct.Struct("<QIQ")
_READ_HERE_BYTES: Final = 2 << 20
"""Up to this length a read takes some tenths of a millisecond, which a thread's turn would take too."""
_CALL_SPANS_MAX: Final = 1024
"""IOV_MAX."""
_CALL_BYTES_MAX: Final = 16 << 20
"""Each call costs as much as a copy of a megabyte; the system takes up to 2 GiB at once."""


class _Span(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("address", ctypes.c_uint64), ("length", ctypes.c_uint64))


assert ctypes.sizeof(ctypes.c_void_p) == 8, "spans are two words of 64 bits"

_SPAN_BYTES: Final = ctypes.sizeof(_Span)


class _Buffer(ctypes.Structure):
    """``Py_buffer`` of the stable ABI (since 3.11): the way to the address of memory that is read-only."""

    _fields_ = (
        ("buf", ctypes.c_void_p), ("obj", ctypes.py_object), ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t), ("readonly", ctypes.c_int), ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
    )  # fmt: skip


class Pinned:
    """A contiguous buffer, also of read-only memory, that stays where it is until ``release``."""

    def __init__(self, buffer: Bytes) -> None:
        self._buffer = _Buffer()
        ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(buffer), ctypes.byref(self._buffer), 0)
        self.address: Final[int] = self._buffer.buf or 0
        self.length: Final[int] = self._buffer.len

    def release(self) -> None:
        """Let it move, or go; the address means nothing any more."""
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(self._buffer))


class Place(NamedTuple):
    """Where an array of spans lies, and what stands behind them."""

    address: int
    spans: int
    """How many."""
    seal: int


class Spans:
    """Where buffers lie, as another process can read it; they stay there until ``end``.

    Args:
        buffers: At most ``SPANS_MAX``.
    """

    def __init__(self, buffers: Sequence[Bytes]) -> None:
        assert len(buffers) <= SPANS_MAX, f"{len(buffers)} buffers"
        self._views = tuple(memoryview(buffer) for buffer in buffers)
        seal = secrets.randbits(64)
        self._table = _spans([*((address_of(view), view.nbytes) for view in self._views), (seal, 0)])
        self.place: Final = Place(ctypes.addressof(self._table), len(buffers), seal)

    def end(self) -> None:
        """Nothing is to be read any more: whoever knows the place finds no seal there."""
        ctypes.memset(self.place.address, 0, ctypes.sizeof(self._table))
        self._views = ()


def located(key: bytes, spans: Spans) -> bytes:
    """An export's key that also says where its bytes lie, for an owner of the same host."""
    return key + _LOCATION.pack(*spans.place)


def parse_located(key: bytes, key_bytes: int) -> tuple[bytes, Place | None]:
    """The key of this length, and where the spans lie, if that is told."""
    if len(key) != key_bytes + _LOCATION.size:
        return key, None
    return key[:key_bytes], Place(*_LOCATION.unpack_from(key, key_bytes))


def address_of(view: memoryview) -> int:
    """Where a view's bytes lie, for as long as the view is not released."""
    pinned = Pinned(view)
    pinned.release()
    return pinned.address


class OtherMemory:
    """The memory of one process.

    Args:
        process_id: As it is called here.
    """

    def __init__(self, process_id: int) -> None:
        self._process_id = process_id
        self._libc: Any = ctypes.CDLL(None, use_errno=True)
        self._libc.process_vm_readv.restype = ctypes.c_ssize_t

    def holds(self, secret: bytes, address: int) -> bool:
        """Whether these bytes lie at that address: so it is the right process, and may be read."""
        found = bytearray(len(secret))
        try:
            self._read_into(memoryview(found), [(address, len(secret))])
        except OSError:
            return False
        return bytes(found) == secret

    async def fetch(self, place: Place, into: memoryview) -> int:
        """Copy what the spans there say, all of ``into``; in a thread if that is much.

        Returns:
            The xxh3-64 of it, computed in the same turn.

        Raises:
            OSError: The process is gone or may not be read any more, or the spans are not of that length.

        Cancellation: ``into`` may still be written to.
        """
        if len(into) > _READ_HERE_BYTES:
            try:
                return await asyncio.to_thread(self._fetch, place, into)
            except RuntimeError:  # no thread can be had (ulimit -u, a container's bound)
                pass
        return self._fetch(place, into)

    def _fetch(self, place: Place, into: memoryview) -> int:
        if place.spans > SPANS_MAX:
            raise OSError(f"{place.spans} spans, of which {SPANS_MAX} are allowed")
        spans = self._spans_at(place)
        if sum(length for _, length in spans) != len(into):
            raise OSError(f"{place.spans} spans that do not hold {len(into)} bytes")
        self._read_into(into, spans)
        self._spans_at(place)  # still lent: nothing else was read
        return hash_payload((into,))

    def _spans_at(self, place: Place) -> list[tuple[int, int]]:
        table = memoryview(bytearray((place.spans + 1) * _SPAN_BYTES))
        self._read_into(table, [(place.address, len(table))])
        words = table.cast("Q").tolist()
        spans = list(zip(words[::2], words[1::2], strict=True))
        if spans.pop() != (place.seal, 0):
            raise OSError("it is not lent any more")
        return spans

    def _read_into(self, into: memoryview, spans: Sequence[tuple[int, int]]) -> None:
        """One behind the other; raises ``OSError`` unless all of it could be read."""
        done = 0
        for some in _calls(spans):
            piece = into[done : done + sum(length for _, length in some)]
            self._call(piece, some)
            done += len(piece)

    def _call(self, into: memoryview, spans: Sequence[tuple[int, int]]) -> None:
        local = _Span(address_of(into), len(into))
        read = self._libc.process_vm_readv(
            self._process_id,
            ctypes.byref(local),
            ctypes.c_ulong(1),
            _spans(spans),
            ctypes.c_ulong(len(spans)),
            ctypes.c_ulong(0),
        )
        if read < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        if read != len(into):
            raise OSError(f"{read} of {len(into)} bytes of process {self._process_id} could be read")


def _spans(places: Sequence[tuple[int, int]]) -> ctypes.Array[_Span]:
    return (_Span * len(places))(*(_Span(*place) for place in places))


def _calls(spans: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """The same spans in parts that the system takes at once, longer ones cut; none of no length."""
    some: list[tuple[int, int]] = []
    room = _CALL_BYTES_MAX
    for address, length in spans:
        end = address + length
        while address < end:
            part = min(end - address, room)
            some.append((address, part))
            address += part
            room -= part
            if not room or len(some) == _CALL_SPANS_MAX:
                yield some
                some, room = [], _CALL_BYTES_MAX
    if some:
        yield some
