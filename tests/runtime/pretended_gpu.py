"""Arrays on a GPU that is none: their bytes lie behind a faked driver, and torch takes no part.

What a node does with them it does through the project's own device: names, contexts, copies, waits. What only
torch could do is done here: an array over a span, its bytes, a copy on the device.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

from attrs import define

from onepiece import _torch
from onepiece.tensor import ITEM_BYTES
from tests.transports.fake_cuda import FakeDriver
from transports import DeviceSpan, _libcuda, cuda

GPUS: Final = ("cuda:0=4GiB",)
_PIECE_BYTES: Final = 1024


class CountingDriver(FakeDriver):
    """Tells what passes through the host's memory.

    What is shorter than a payload of these tests, a look at a seal for instance, does not count.
    """

    def __init__(self) -> None:
        super().__init__(memory_bytes=1 << 30)
        self.copied_to_host: list[int] = []
        """The length of each copy."""
        self.is_done = threading.Event()
        """The device has done all that it was given; while this is not set, whoever waits for that does."""
        self.is_done.set()
        self.is_awaited = threading.Event()
        """Somebody has begun to wait."""

    def _cuCtxSynchronize(self) -> int:  # noqa: N802 - named as the driver's
        self.is_awaited.set()
        self.is_done.wait()
        return super()._cuCtxSynchronize()

    def _cuMemcpyDtoHAsync(self, to: int, source: int, count: int, stream: int | None) -> int:  # noqa: N802 - the driver's
        if count >= _PIECE_BYTES:
            self.copied_to_host.append(count)
        return super()._cuMemcpyDtoHAsync(to, source, count, stream)


@define(eq=False)
class GpuArray:
    """What torch would call a tensor on ``cuda:0``, contiguous."""

    dtype: str
    shape: tuple[int, ...]
    span: DeviceSpan | None
    """None: it is empty."""

    @classmethod
    def of(cls, data: bytes, dtype: str = "uint8", shape: tuple[int, ...] | None = None) -> "GpuArray":
        """A copy of these bytes on the device, as a vector of bytes unless told otherwise."""
        shape = (len(data),) if shape is None else shape
        if not data:
            return cls(dtype, shape, None)
        memory = cuda.cuda_device(0).allocate(len(data))
        memory.put(0, (data,))
        return cls(dtype, shape, memory.span(0, len(data)))

    @property
    def device(self) -> Any:
        """Where it lies."""
        return SimpleNamespace(type="cuda")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        assert self.span is not None, "an empty one is not asked"
        shape = (len(self.span),)
        return {"data": (self.span.address, False), "shape": shape, "typestr": "|u1", "version": 2}

    def numel(self) -> int:
        """How many elements it has."""
        return 0 if self.span is None else len(self.span) // ITEM_BYTES[self.dtype]

    def content(self) -> bytes:
        """Its bytes, as whoever computes on the device sees them; nothing is copied to the host."""
        if self.span is None:
            return b""
        driver: Any = cuda.cuda_device(0)._library
        found = driver._symbols.find(self.span.address, len(self.span))
        assert found is not None, "its memory was given back"
        return bytes(found)


@contextmanager
def pretended_gpu(driver: CountingDriver | None = None) -> Iterator[CountingDriver]:
    """Let this process have GPUs, and arrays on them, until the block ends."""
    driver = driver or CountingDriver()
    library = _libcuda.Library(driver)
    library.call("cuInit", 0)
    cuda._DEVICES.clear()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(_libcuda, "load", return_value=library))
        for name, instead in _TORCH.items():
            stack.enter_context(mock.patch.object(_torch, name, instead))
        yield driver
    cuda._DEVICES.clear()


def _over_span(dtype: str, shape: tuple[int, ...], span: DeviceSpan, device: str) -> GpuArray:
    assert span.device.name == device
    return GpuArray(dtype, shape, span)


def _from_buffer(
    dtype: str, shape: tuple[int, ...], view: memoryview, device: str, *, is_own: bool
) -> GpuArray:
    return GpuArray.of(bytes(view), dtype, shape)


def _buffer(array: GpuArray) -> memoryview:
    return memoryview(b"" if array.span is None else array.span.to_host())


_TORCH: Final[dict[str, Any]] = {
    "is_imported": lambda: True,
    "is_tensor": lambda value: isinstance(value, GpuArray),
    "is_on_gpu": lambda array: array.span is not None,
    "has_dtype": lambda name: name in ITEM_BYTES,
    "wire_name": lambda array: array.dtype,
    "elements": lambda array: array,
    "buffer": _buffer,
    "over_span": _over_span,
    "from_buffer": _from_buffer,
    "cuda_use": lambda index: (0, 0),
    "cuda_forget": lambda index: None,
    "cuda_name": lambda index: "a pretended GPU",
}
"""What ``onepiece._torch`` asks of torch."""
