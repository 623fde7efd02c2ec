"""CUDA devices: their memory for inboxes, and arrays of any library as bytes to be sent.

A device's *primary context* is used, which is the one that torch and all of the CUDA runtime use: addresses
and streams of theirs mean the same here. It is retained by the first use of the device and stays for the life
of the process; each call makes it current in its thread, and leaves that thread as it was.

All copies go through one stream of our own, which waits for no other, and are done when they return. What a
tensor still has to be computed for is waited for once, in ``span_of``.

None of this has run on a device yet (``docs/reference/transports.md``).
"""

import ctypes
import logging
import math
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_int, c_uint, c_ulonglong, c_void_p
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import frozen

from transports import _libcuda as cuda
from transports.device_calls import in_thread
from transports.device_frees import frees
from transports.device_memory import Device, DeviceError, DeviceSpan
from transports.operations import Bytes

_LOG: Final = logging.getLogger(__name__)

_GRAIN_BYTES: Final = 2 << 20
"""Memory is taken in multiples of this: so it begins at a page of the host, and shares none with others."""
_PAGE_BYTES: Final = 4096
_NAME_BYTES: Final = 256
_PEER_MODULE: Final = Path("/sys/module/nvidia_peermem")
_NAME: Final = re.compile(r"cuda:(\d{1,4})")
_ITEM: Final = re.compile(r"[<>|=][a-su-zA-TV-Z](\d+)")
"""Of texts (``U``) and fields of bits (``t``) the number counts no bytes."""
_RECORDING_SECONDS: Final = 60.0
"""How long somebody may record a graph while the device is waited for."""
_RECORDING_PAUSE_SECONDS: Final = 0.02
_OPENING: Final = threading.Lock()
_NEW_BYTES: Final = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)


@frozen
class Gpu:
    """What the driver says of a device, without making use of it."""

    ordinal: int
    model: str
    takes_peers: bool
    """Adapters may be given its addresses (GPU_DIRECT_RDMA_SUPPORTED), with nvidia_peermem."""
    exports_dmabuf: bool
    """The kernel may be given its memory (DMA_BUF_SUPPORTED)."""
    orders_writes: bool
    """What an adapter has written is visible in the order in which it was written (WRITES_ORDERING)."""
    flushes_writes: bool
    """The host can make visible what adapters have written (FLUSH_WRITES_OPTIONS)."""

    @classmethod
    def of(cls, library: cuda.Library, ordinal: int, device: int) -> "Gpu":
        """Ask the driver; raises ``DeviceError``."""

        def attribute(number: int) -> int:
            value = c_int()
            try:
                library.call("cuDeviceGetAttribute", byref(value), number, device)
            except cuda.CudaError as error:
                if error.status != cuda.INVALID_VALUE:
                    raise
                return 0  # a driver that is older than the attribute has not got what it tells of
            return value.value

        name = ctypes.create_string_buffer(_NAME_BYTES)
        library.call("cuDeviceGetName", name, _NAME_BYTES, device)
        return cls(
            ordinal,
            name.value.decode(errors="replace"),
            takes_peers=attribute(cuda.GPU_DIRECT_RDMA) != 0,
            exports_dmabuf=attribute(cuda.DMA_BUF) != 0,
            orders_writes=attribute(cuda.WRITES_ORDERING) >= cuda.FLUSH_TO_OWNER,
            flushes_writes=attribute(cuda.FLUSH_OPTIONS) & cuda.FLUSH_BY_HOST != 0,
        )


class CudaDevice(Device):
    """One GPU.

    Args:
        library: The driver.
        ordinal: Which of the devices that this process sees.
        peer_module: Is there while the kernel has nvidia_peermem.

    Raises:
        DeviceError: There is no such device, or it cannot be used.
    """

    kind = "cuda"

    def __init__(self, library: cuda.Library, ordinal: int, peer_module: Path = _PEER_MODULE) -> None:
        self.name = f"cuda:{ordinal}"
        self._library = library
        self._peer_module = peer_module
        count, device, context, stream = c_int(), c_int(), c_void_p(), c_void_p()
        library.call("cuDeviceGetCount", byref(count))
        if ordinal >= count.value:
            raise DeviceError(
                f"there is no {self.name}: this process sees {count.value} CUDA devices"
                " (CUDA_VISIBLE_DEVICES)"
            )
        library.call("cuDeviceGet", byref(device), ordinal)
        self._device = device.value
        self.gpu = Gpu.of(library, ordinal, device.value)
        library.call("cuDevicePrimaryCtxRetain", byref(context), self._device)
        self._context = context
        with self.current():
            library.call("cuStreamCreate", byref(stream), cuda.STREAM_NON_BLOCKING)
        self._stream = stream
        self._frees = frees()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Its context is this thread's meanwhile; that of before is back then."""
        before = c_void_p()
        try:
            self._library.call("cuCtxPushCurrent_v2", self._context)
            try:
                yield
            finally:
                self._library.call("cuCtxPopCurrent_v2", byref(before))
        except cuda.CudaError as error:
            error.on(self.name)
            raise

    @contextmanager
    def _apart_from_graphs(self) -> Iterator[None]:
        """As ``current``; what is done here spoils no graph that another thread records meanwhile."""
        mode = c_int(cuda.CAPTURE_RELAXED)
        with self.current():
            self._library.call("cuThreadExchangeStreamCaptureMode", byref(mode))
            try:
                yield
            finally:
                self._library.call("cuThreadExchangeStreamCaptureMode", byref(mode))

    def _do(self, name: str, *arguments: Any) -> None:
        """Ask for something in our stream, and wait until it is done."""
        with self.current():
            self._library.call(name, *arguments, self._stream)
            self._library.call("cuStreamSynchronize", self._stream)

    # Memory.

    def _take(self, size_bytes: int) -> int:
        size = _in_grains(size_bytes)
        try:
            address = self._allocated(size)
        except cuda.CudaError as error:
            if error.status != cuda.OUT_OF_MEMORY:
                raise
            self._frees.wait()
            address = self._allocated(size)
        try:
            if address.value % _PAGE_BYTES:
                raise DeviceError(f"{self.name} gave memory at {address.value:#x}, which begins no page")
            with self.current():
                # Copies that return when they are done are to mean it, also where adapters write.
                always = c_uint(1)
                self._library.call("cuPointerSetAttribute", byref(always), cuda.SYNC_MEMOPS, address)
            self._do("cuMemsetD8Async", address, 0, size)
        except DeviceError:
            self.give_back(address.value)
            raise
        return address.value

    def _allocated(self, size: int) -> c_ulonglong:
        address = c_ulonglong()
        with self._apart_from_graphs():
            self._library.call("cuMemAlloc_v2", byref(address), size)
        return address

    def give_back(self, address: int) -> None:
        """Free memory, soon: the driver waits for what the device is doing."""
        self._frees.later(partial(self._free, address))

    def _free(self, address: int) -> None:
        try:
            with self._apart_from_graphs():
                self._library.call("cuMemFree_v2", address)
        except DeviceError as error:
            _LOG.warning("memory cannot be given back: %s", error)

    def write(self, address: int, data: Bytes) -> None:
        """Copy from the host."""
        if len(data):
            source = np.frombuffer(data, np.uint8)
            self._do("cuMemcpyHtoDAsync_v2", address, source.ctypes.data, len(source))

    def read(self, address: int, length: int) -> bytes:
        """Copy to the host."""
        if not length:
            return b""
        into = _unset_bytes(length)
        self._do("cuMemcpyDtoHAsync_v2", ctypes.c_char_p(into), address, length)
        return into

    def copy(self, to: int, address: int, length: int) -> None:
        """Copy within the device."""
        if length:
            self._do("cuMemcpyDtoDAsync_v2", to, address, length)

    def flush(self) -> None:
        """Make visible what adapters have written, where the device does not do so by itself."""
        if not self.gpu.orders_writes and self.gpu.flushes_writes:
            with self.current():
                self._library.call(
                    "cuFlushGPUDirectRDMAWrites", cuda.FLUSH_CURRENT_CONTEXT, cuda.FLUSH_TO_OWNER
                )

    def wait(self, stream: int | None) -> None:
        """Return when the work in this stream, or in the whole context, is done."""
        with self.current():
            # The stream of each thread is meant by whoever asks in its own; in this thread it is another one.
            if stream is None or stream == cuda.PER_THREAD_STREAM:
                self._wait_for_all()
            else:
                self._library.call("cuStreamSynchronize", stream)

    def _wait_for_all(self) -> None:
        """Wait for the whole context, behind the graphs that are being recorded in it."""
        give_up_at = time.monotonic() + _RECORDING_SECONDS
        while True:
            try:
                self._library.call("cuCtxSynchronize")
            except cuda.CudaError as error:
                if error.status != cuda.CAPTURING or time.monotonic() >= give_up_at:
                    raise
            else:
                return
            time.sleep(_RECORDING_PAUSE_SECONDS)

    # For adapters.

    def check_remote_writes(self) -> None:
        """Raise ``DeviceError`` unless it can be known when adapters' writes are visible."""
        if not self.gpu.orders_writes and not self.gpu.flushes_writes:
            raise DeviceError(
                f"{self.name} neither orders what adapters write nor lets the host flush it (its attributes"
                " WRITES_ORDERING and FLUSH_WRITES_OPTIONS are 0), so nobody knows when it is there"
            )

    def dmabuf(self, address: int, size_bytes: int) -> int:
        """A descriptor of the memory."""
        if not self.gpu.exports_dmabuf:
            raise DeviceError(
                f"the driver gives out no dmabuf of {self.name} (DMA_BUF_SUPPORTED is 0): that takes NVIDIA's"
                " open kernel modules and Linux 5.12"
            )
        descriptor = c_int(-1)
        with self.current():
            self._library.call(
                "cuMemGetHandleForAddressRange",
                byref(descriptor),
                address,
                _in_grains(size_bytes),
                cuda.DMA_BUF_FD,
                0,
            )
        return descriptor.value

    def check_peer_access(self) -> None:
        """Raise ``DeviceError`` unless the kernel lets adapters use the device's addresses."""
        if not self.gpu.takes_peers:
            raise DeviceError(f"{self.name} cannot be reached by adapters (GPU_DIRECT_RDMA_SUPPORTED is 0)")
        if not self._peer_module.exists():
            raise DeviceError("nvidia_peermem is not loaded (modprobe nvidia_peermem)")

    # For other libraries.

    def array_interface(self, address: int, length: int) -> dict[str, Any] | None:
        """The bytes as an array of ``uint8`` that nothing has to be waited for."""
        return {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address if length else 0, False),
            "strides": None,
            "version": 3,
            "stream": None,
        }


def _unset_bytes(length: int) -> bytes:
    """Bytes that are to be written once, before anybody sees them: neither zeroed first nor copied behind.

    An output that is retained, or waits for its siblings, may have gigabytes.
    """
    made: bytes = _NEW_BYTES(None, length)
    return made


def _in_grains(size_bytes: int) -> int:
    return -(-size_bytes // _GRAIN_BYTES) * _GRAIN_BYTES


def device_named(name: str) -> Device:
    """The device ``cuda:0`` and its like.

    Raises:
        ValueError: No device is named like this.
        DeviceError: There is no driver, or no such device.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"no memory is named {name!r}: expected 'host', or a device such as 'cuda:0'")
    return cuda_device(int(found[1]))


_DEVICES: Final[dict[int, CudaDevice]] = {}


def cuda_device(ordinal: int) -> CudaDevice:
    """A device, opened once for the process, in whatever thread asks first; raises ``DeviceError``."""
    device = _DEVICES.get(ordinal)
    if device is not None:
        return device
    with _OPENING:  # opening takes seconds, and who asks meanwhile is to get the same object
        if ordinal not in _DEVICES:
            _DEVICES[ordinal] = CudaDevice(cuda.load(), ordinal)
        return _DEVICES[ordinal]


def gpus() -> tuple[Gpu, ...]:
    """The devices that this process sees; no context is made on them. Raises ``DeviceError``."""
    library, count, device = cuda.load(), c_int(), c_int()
    library.call("cuDeviceGetCount", byref(count))
    found = []
    for ordinal in range(count.value):
        library.call("cuDeviceGet", byref(device), ordinal)
        found.append(Gpu.of(library, ordinal, device.value))
    return tuple(found)


async def span_of(array: Any, *, stream: int | None = None) -> DeviceSpan:
    """The bytes of an array on a CUDA device, ready to be sent; they are not copied, and must not change.

    Args:
        array: Has a ``__cuda_array_interface__``: a tensor of torch, an array of CuPy or Numba. Contiguous.
        stream: In which it is computed (``torch.cuda.current_stream().cuda_stream``). Left out: the one that
            the array names; if it names none, all that the device has been given so far is waited for.

    Raises:
        ValueError: It is on no CUDA device, empty, or not contiguous.
        DeviceError: The driver refuses.

    Cancellation: the wait goes on in its thread, and changes nothing.
    """
    span, stream = _span_and_stream(array, stream)
    await in_thread(span.device.wait, stream)
    return span


def wait_for_span(array: Any) -> DeviceSpan:
    """As ``span_of``, but this thread waits: for whoever is on one that may block."""
    span, stream = _span_and_stream(array, None)
    span.device.wait(stream)
    return span


def _span_and_stream(array: Any, stream: int | None) -> tuple[DeviceSpan, int | None]:
    try:
        interface = getattr(array, "__cuda_array_interface__", None)
    except (LookupError, RuntimeError, TypeError) as error:  # torch's, of dtypes that the interface has not
        raise ValueError(
            f"this {type(array).__name__} does not say where it lies ({error!r}); give its bytes, as"
            " tensor.detach().contiguous().view(torch.uint8) does"
        ) from error
    if interface is None:
        raise ValueError(f"{type(array).__name__} is no array on a CUDA device: send its bytes as they are")
    length = _contiguous_bytes(interface)
    address = int(interface["data"][0])
    if not length:
        raise ValueError("an empty array lies on no device: send b'' instead")
    device = cuda_device(_ordinal_of(cuda.load(), address))
    if stream is None:
        stream = interface.get("stream")
    return DeviceSpan(device, address, length, array), stream


def _contiguous_bytes(interface: dict[str, Any]) -> int:
    shape: Sequence[int] = interface["shape"]
    if interface.get("mask") is not None:
        raise ValueError("a masked array is two: send its data and its mask")
    item = _ITEM.fullmatch(interface["typestr"])
    if item is None:
        raise ValueError(f"an array of {interface['typestr']!r} has no plain elements")
    item_bytes = int(item[1])
    strides: Sequence[int] | None = interface.get("strides")
    length = math.prod(shape) * item_bytes
    if strides is not None and length:
        expected = item_bytes
        for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
            if extent != 1 and stride != expected:
                raise ValueError(
                    f"an array of shape {tuple(shape)} with strides {tuple(strides)} is not contiguous: copy"
                    " it on its device first"
                )
            expected *= extent
    return length


def _ordinal_of(library: cuda.Library, address: int) -> int:
    ordinal = c_int(-1)
    library.call("cuPointerGetAttribute", byref(ordinal), cuda.DEVICE_ORDINAL, address)
    return ordinal.value
