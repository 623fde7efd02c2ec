"""Where bytes wait for the adapter: places in registered memory, of the host and of devices."""

from collections.abc import Iterator, Sequence
from typing import Final

from transports._pyverbs import Domain, RegisteredDevice
from transports.device_memory import Device, DeviceSpan
from transports.operations import Bytes

DESK_BYTES: Final = 8 << 20
"""Registered memory of a link on each device whose bytes it sends."""
SPAN_BYTES: Final = 1 << 20
"""Largest write of a device's bytes; longer ones are cut. Each costs a copy within the device."""
_LINE: Final = 64


class Staging:
    """Places in a ring of bytes, given back in the order in which they were taken (pure).

    Args:
        size_bytes: Of the ring; no place is longer.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size = size_bytes
        self._begin = 0
        self._end = 0

    def take(self, length: int) -> tuple[int, int] | None:
        """A place of ``length`` bytes: its offset, and its end for ``give_back``; None without room."""
        if self._begin == self._end:
            self._begin = self._end = 0  # empty: the longest place begins at the start
        start = self._end
        if start % self._size + length > self._size:
            start += self._size - start % self._size
        end = start + max(_LINE, length + -length % _LINE)  # never nothing: ends tell places apart
        if end - self._begin > self._size:
            return None
        self._end = end
        return start % self._size, end

    def give_back(self, end: int) -> None:
        """All places up to this end are free."""
        self._begin = end


class Desk:
    """Registered memory on a device, which its bytes pass through; raises ``DeviceError`` or ``VerbsError``.

    Args:
        domain: Of the pair that sends them.
        device: Where the bytes are.
    """

    def __init__(self, domain: Domain, device: Device) -> None:
        self._memory = device.allocate(DESK_BYTES)
        self._registered = RegisteredDevice(domain, self._memory, for_peers=False)
        self.staging: Final = Staging(DESK_BYTES)
        self.address: Final = self._registered.address
        self.local_key: Final = self._registered.local_key

    def bring(self, span: DeviceSpan) -> tuple[int, int] | None:
        """Copy bytes of the device to where the adapter reads: offset and end of the place; None: no room."""
        found = self.staging.take(len(span))
        if found is not None:
            self._memory.put(found[0], (span,))
        return found

    def close(self) -> None:
        """Take it away from the adapter; no pair may use it any more."""
        self._registered.close()


def spans(span: DeviceSpan) -> Iterator[DeviceSpan]:
    """Cut bytes of a device into pieces of at most ``SPAN_BYTES``."""
    for start in range(0, len(span), SPAN_BYTES):
        yield span[start : start + SPAN_BYTES]


def pieces(buffers: Sequence[Bytes], piece_bytes: int) -> Iterator[tuple[int, list[Bytes]]]:
    """Cut buffers into pieces of at most ``piece_bytes``, without copying: length and parts of each."""
    length, parts = 0, list[Bytes]()
    for buffer in buffers:
        rest = memoryview(buffer)
        while rest:
            part = rest[: piece_bytes - length]
            parts.append(part)
            length += len(part)
            rest = rest[len(part) :]
            if length == piece_bytes:
                yield length, parts
                length, parts = 0, []
    if length:
        yield length, parts
