"""Memory of a device, which the processor cannot look at: taken, copied, lent to adapters, given back.

A ``Device`` is one processor with memory of its own. What a ring's payload lies in is a ``DeviceMemory``:
taken from the device, and given back when nobody refers to it any more, be it an inbox, an adapter's
registration or a span that somebody computes with. A ``DeviceSpan`` is some bytes of it, or of memory that
belongs to somebody else, a tensor for instance. Nothing here knows how a device is made (``cuda``).

All calls wait for their own copy only, so that transports make them on the event loop; ``Device.wait`` takes
as long as the device computes, and is called in a thread. Any thread may make any call.
"""

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from attrs import field, frozen

from transports.errors import DeviceUnreachable
from transports.operations import Bytes, Content
from transports.region_memory import check_span

_LOG: Final = logging.getLogger(__name__)

MARGIN_BYTES: Final = 4096
"""Behind what may be used of each memory, for a transport to try out whether writes get there."""


class DeviceError(Exception):
    """A call of a device failed; the message names the device, the call and the reason."""


class Device(ABC):
    """A processor with memory of its own."""

    name: str
    """``cuda:0``."""
    kind: str = ""
    """What other libraries call such memory (``cuda``), if they know any like it."""

    def allocate(self, size_bytes: int) -> "DeviceMemory":
        """Zeroed memory, given back with the last that refers to it; raises ``DeviceError``."""
        return DeviceMemory(self, self._take(size_bytes + MARGIN_BYTES), size_bytes)

    def current(self) -> AbstractContextManager[None]:
        """Within it, other libraries that are called in this thread act on this device."""
        return nullcontext()

    # What a device does. All raise ``DeviceError``.

    @abstractmethod
    def _take(self, size_bytes: int) -> int:
        """The address of that many zeroed bytes, at the beginning of a page of the host."""

    @abstractmethod
    def give_back(self, address: int) -> None:
        """Free what ``_take`` returned, at once or soon; may be called by the garbage collector."""

    @abstractmethod
    def write(self, address: int, data: Bytes) -> None:
        """Copy from the host; done when it returns."""

    @abstractmethod
    def read(self, address: int, length: int) -> bytes:
        """Copy to the host."""

    @abstractmethod
    def copy(self, to: int, address: int, length: int) -> None:
        """Copy within the device; done when it returns."""

    @abstractmethod
    def flush(self) -> None:
        """What adapters have written is visible to all that reads the memory from now on."""

    @abstractmethod
    def wait(self, stream: int | None) -> None:
        """Return when the work in this stream is done; None: in all of them. Blocks: call it in a thread."""

    # How adapters reach its memory; one of the last two is enough.

    @abstractmethod
    def check_remote_writes(self) -> None:
        """Raise ``DeviceError`` unless ``flush`` can make visible what adapters have written."""

    @abstractmethod
    def dmabuf(self, address: int, size_bytes: int) -> int:
        """A descriptor of the memory for the kernel, which the caller closes."""

    @abstractmethod
    def check_peer_access(self) -> None:
        """Raise ``DeviceError`` unless adapters can be given addresses of the device as they are."""

    def array_interface(self, address: int, length: int) -> dict[str, Any] | None:
        """The memory as ``__cuda_array_interface__`` tells it; None where that means nothing."""
        return None


class DeviceMemory:
    """Zeroed memory of a device.

    Args:
        device: Whose it is.
        address: Where it begins, as the device counts.
        size_bytes: How much of it may be used.
    """

    def __init__(self, device: Device, address: int, size_bytes: int) -> None:
        self.device: Final = device
        self.address: Final = address
        self.size_bytes: Final = size_bytes
        # Not at the interpreter's exit: the driver is gone by then, and has taken everything back.
        weakref.finalize(self, _give_back, device, address).atexit = False

    def span(self, offset: int, length: int) -> "DeviceSpan":
        """Some bytes of it; raises ``ProtocolError`` unless they lie in it."""
        check_span(offset, length, self.size_bytes)
        return DeviceSpan(self.device, self.address + offset, length, self)

    def peek(self, offset: int, length: int) -> bytes:
        """A copy of bytes that adapters may have written; all that they wrote before is visible then too."""
        check_span(offset, length, self.size_bytes)
        return self._peek(offset, length)

    def peek_margin(self, offset: int, length: int) -> bytes:
        """The same of the margin behind it."""
        check_span(offset, length, MARGIN_BYTES)
        return self._peek(self.size_bytes + offset, length)

    def _peek(self, offset: int, length: int) -> bytes:
        self.device.flush()
        seen = self.device.read(self.address + offset, length)
        self.device.flush()  # what came behind the first one and was seen is visible to everybody now
        return seen

    def put(self, offset: int, buffers: Iterable[Content]) -> None:
        """Copy the concatenation of ``buffers`` to ``offset``.

        Raises:
            ProtocolError: It does not lie in the memory; some of it may have been copied.
            DeviceUnreachable: A buffer lies on another device.
        """
        for buffer in buffers:
            check_span(offset, len(buffer), self.size_bytes)
            if isinstance(buffer, DeviceSpan):
                check_same(self.device, buffer.device)
                self.device.copy(self.address + offset, buffer.address, len(buffer))
            else:
                assert isinstance(buffer, bytes | bytearray | memoryview)
                self.device.write(self.address + offset, buffer)
            offset += len(buffer)


@frozen(eq=False)
class DeviceSpan:
    """Bytes in a device's memory; the memory stays for as long as the span is referred to."""

    device: Device
    address: int
    length: int
    _keep: object = field(repr=False)
    """What the memory belongs to."""

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> "DeviceSpan":
        start, stop, step = part.indices(self.length)
        if step != 1:
            raise ValueError("bytes on a device are cut into contiguous parts only")
        return DeviceSpan(self.device, self.address + start, max(0, stop - start), self._keep)

    def to_host(self) -> bytes:
        """A copy of the bytes in the host's memory; raises ``DeviceError``."""
        return self.device.read(self.address, self.length)

    def kept_by(self, keeper: object) -> "DeviceSpan":
        """The same bytes; whoever refers to them, or to a part of them, refers to ``keeper`` too."""
        return DeviceSpan(self.device, self.address, self.length, (keeper, self._keep))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The bytes as ``uint8``, for ``torch.as_tensor(span, device=...)`` and its like; not a copy.

        Nothing has to be waited for before they are read. ``AttributeError`` where it is no CUDA device.
        """
        interface = self.device.array_interface(self.address, self.length)
        if interface is None:
            raise AttributeError(f"{self.device.name} is no CUDA device")
        return interface


def check_same(here: Device, there: Device) -> None:
    """Raise ``DeviceUnreachable`` unless these are one device."""
    if here is not there:
        raise DeviceUnreachable(
            f"bytes on {there.name} cannot be sent into memory of {here.name} within this process; copy them"
            f" to {here.name} first"
        )


def _give_back(device: Device, address: int) -> None:
    try:
        device.give_back(address)
    except DeviceError as error:
        _LOG.warning("memory of %s cannot be given back: %s", device.name, error)
