"""A CUDA driver that is none: the functions of ``libcuda.so.1`` behind C pointers, with its rules and errors.

The prototypes are written down here once more, from NVIDIA's reference of the driver interface and not from
what is tested: a function called with other types would be handed other values. Work in a stream takes place
when the stream is waited for and not before, so whoever forgets to wait sees that nothing happened.
"""

import ctypes
import gc
import mmap
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

PROTOTYPES = """
CUresult cuInit(unsigned int Flags)
CUresult cuGetErrorName(CUresult error, const char **pStr)
CUresult cuGetErrorString(CUresult error, const char **pStr)
CUresult cuDeviceGetCount(int *count)
CUresult cuDeviceGet(CUdevice *device, int ordinal)
CUresult cuDeviceGetName(char *name, int len, CUdevice dev)
CUresult cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev)
CUresult cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
CUresult cuCtxPushCurrent_v2(CUcontext ctx)
CUresult cuCtxPopCurrent_v2(CUcontext *pctx)
CUresult cuCtxSynchronize(void)
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
CUresult cuStreamCreate(CUstream *phStream, unsigned int Flags)
CUresult cuStreamSynchronize(CUstream hStream)
CUresult cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
CUresult cuMemFree_v2(CUdeviceptr dptr)
CUresult cuMemsetD8Async(CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream)
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream)
CUresult cuMemcpyDtoHAsync_v2(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream)
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream)
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr ptr)
CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr dptr, size_t size, CUmemRangeHandleType handleType, unsigned long long flags)
CUresult cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget target, CUflushGPUDirectRDMAWritesScope scope)
"""  # noqa: E501 - one line each, as they are looked up

_TYPES: dict[str, Any] = {
    "int": ctypes.c_int32,
    "unsigned int": ctypes.c_uint32,
    "unsigned char": ctypes.c_uint8,
    "unsigned long long": ctypes.c_uint64,
    "size_t": ctypes.c_uint64,
    "CUdevice": ctypes.c_int32,
    "CUdeviceptr": ctypes.c_uint64,
    "CUcontext": ctypes.c_void_p,
    "CUstream": ctypes.c_void_p,
}
_ERRORS = {
    1: ("CUDA_ERROR_INVALID_VALUE", "invalid argument"),
    2: ("CUDA_ERROR_OUT_OF_MEMORY", "out of memory"),
    3: ("CUDA_ERROR_NOT_INITIALIZED", "initialization error"),
    101: ("CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"),
    201: ("CUDA_ERROR_INVALID_CONTEXT", "invalid device context"),
    400: ("CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"),
    900: ("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"),
    700: ("CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"),
    801: ("CUDA_ERROR_NOT_SUPPORTED", "operation not supported"),
}
_PAGE = 4096
_CONTEXT = 0xC0DE_0000


def types_of(prototype: str) -> tuple[str, tuple[Any, ...]]:
    """A function's name and the ctypes of its arguments."""
    found = re.fullmatch(r"CUresult (\w+)\((.*)\)", prototype)
    assert found is not None, prototype
    arguments = [] if found[2] == "void" else found[2].split(", ")
    return found[1], tuple(_type_of(argument) for argument in arguments)


def _type_of(argument: str) -> Any:
    if "*" in argument:
        return ctypes.c_void_p
    named = argument.rpartition(" ")[0]
    return _TYPES.get(named, ctypes.c_int32)  # what is left are enumerations


def _put(address: int, kind: Any, value: int) -> None:
    kind.from_address(address).value = value


def assert_given_back(driver: "FakeDriver", seconds: float = 20.0) -> None:
    """All memory of the devices is given back, which takes a thread, once nobody refers to it any more."""
    give_up_at = time.monotonic() + seconds
    while driver.memory and time.monotonic() < give_up_at:
        gc.collect()
        time.sleep(0.01)
    assert not driver.memory, f"{len(driver.memory)} pieces of the device's memory are in use"


class FakeDriver:
    """Two devices, each with its attributes; an attribute of this object is a C function, as in a library.

    Args:
        attributes: Of all devices, by number; what is left out is 0.
        memory_bytes: Of each device.
        without: Functions that an older driver would not have.
        newest_attribute: The last one that it knows; it refuses to be asked for later ones.
    """

    def __init__(
        self,
        attributes: dict[int, int] | None = None,
        *,
        memory_bytes: int = 64 << 20,
        without: tuple[str, ...] = (),
        newest_attribute: int = 124,
    ) -> None:
        self.attributes = {116: 1, 117: 1, 118: 0, 124: 1} if attributes is None else attributes
        self.memory: dict[int, bytearray | mmap.mmap] = {}
        self.owner: dict[int, int] = {}
        self.sync_memops: set[int] = set()
        self.flushes: list[tuple[int, int]] = []
        self.synchronised: list[int | None] = []
        self.exported: list[tuple[int, int]] = []
        self.is_recording = False
        """Some thread records a graph, which others spoil by what they do."""
        self.spoilt = 0
        """How often they have."""
        self._modes: dict[int, int] = defaultdict(int)
        self.fails: dict[str, int] = {}
        """Errors that functions are to return."""
        self._memory_bytes = memory_bytes
        self._newest_attribute = newest_attribute
        self._is_ready = False
        self._contexts: dict[int, list[int]] = defaultdict(list)
        self._streams = {0: 0, 1: 0, 2: 0}
        self._work: dict[int, list[Callable[[], None]]] = defaultdict(list)
        self._next = 0x7000_0000_0000
        self._lock = threading.Lock()
        self._texts = {code: tuple(text.encode() for text in both) for code, both in _ERRORS.items()}
        self._buffers: list[Any] = []
        for line in PROTOTYPES.strip().splitlines():
            name, types = types_of(line)
            if name not in without:
                body = self._checked(name, getattr(self, f"_{name.removesuffix('_v2')}"))
                setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int32, *types)(body))

    def _checked(self, name: str, body: Callable[..., int]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name in self.fails:
                return self.fails[name]
            if not self._is_ready and name not in {"cuInit", "cuGetErrorName", "cuGetErrorString"}:
                return 3
            return body(*arguments)

        return call

    # The library and its devices.

    def _cuInit(self, flags: int) -> int:  # noqa: N802 - named as the driver's
        self._is_ready = flags == 0
        return 0 if self._is_ready else 1

    def _cuGetErrorName(self, error: int, into: int) -> int:  # noqa: N802 - named as the driver's
        return self._text(error, into, 0)

    def _cuGetErrorString(self, error: int, into: int) -> int:  # noqa: N802 - named as the driver's
        return self._text(error, into, 1)

    def _text(self, error: int, into: int, which: int) -> int:
        if error not in self._texts:
            _put(into, ctypes.c_uint64, 0)
            return 1
        buffer = ctypes.create_string_buffer(self._texts[error][which])
        self._buffers.append(buffer)
        _put(into, ctypes.c_uint64, ctypes.addressof(buffer))
        return 0

    def _cuDeviceGetCount(self, into: int) -> int:  # noqa: N802 - named as the driver's
        _put(into, ctypes.c_int32, 2)
        return 0

    def _cuDeviceGet(self, into: int, ordinal: int) -> int:  # noqa: N802 - named as the driver's
        if not 0 <= ordinal < 2:
            return 101
        _put(into, ctypes.c_int32, ordinal + 10)
        return 0

    def _cuDeviceGetName(self, into: int, length: int, device: int) -> int:  # noqa: N802 - the driver's
        name = b"Fake %d" % (device - 10) + b"\0"
        ctypes.memmove(into, name[:length], min(len(name), length))
        return 0

    def _cuDeviceGetAttribute(self, into: int, attribute: int, device: int) -> int:  # noqa: N802 - the driver's
        if device not in {10, 11}:
            return 101
        if attribute > self._newest_attribute:
            return 1
        _put(into, ctypes.c_int32, self.attributes.get(attribute, 0))
        return 0

    # Contexts and streams.

    def _cuDevicePrimaryCtxRetain(self, into: int, device: int) -> int:  # noqa: N802 - named as the driver's
        if device not in {10, 11}:
            return 101
        _put(into, ctypes.c_uint64, _CONTEXT + device)
        return 0

    @property
    def stack(self) -> list[int]:
        """The contexts of this thread, the current one last."""
        return self._contexts[threading.get_ident()]

    @property
    def _device(self) -> int | None:
        return self.stack[-1] - _CONTEXT if self.stack else None

    def _cuCtxPushCurrent(self, context: int) -> int:  # noqa: N802 - named as the driver's
        if context not in {_CONTEXT + 10, _CONTEXT + 11}:
            return 201
        self.stack.append(context)
        return 0

    def _cuCtxPopCurrent(self, into: int) -> int:  # noqa: N802 - named as the driver's
        if not self.stack:
            return 201
        _put(into, ctypes.c_uint64, self.stack.pop())
        return 0

    def _cuThreadExchangeStreamCaptureMode(self, mode: int) -> int:  # noqa: N802 - named as the driver's
        thread, given = threading.get_ident(), ctypes.c_int32.from_address(mode)
        self._modes[thread], given.value = given.value, self._modes[thread]
        return 0

    def _spoils(self) -> bool:
        """What is done now in this thread spoils a graph that another one records."""
        self.spoilt += self.is_recording and not self._modes[threading.get_ident()]
        return self.is_recording and not self._modes[threading.get_ident()]

    def _cuCtxSynchronize(self) -> int:  # noqa: N802 - named as the driver's
        if self._device is None:
            return 201
        if self.is_recording:
            self.spoilt += 1
            return 900
        self.synchronised.append(None)
        return 0

    def _cuStreamCreate(self, into: int, flags: int) -> int:  # noqa: N802 - named as the driver's
        if self._device is None:
            return 201
        if flags not in {0, 1}:
            return 1
        stream = 0x5000 + len(self._streams)
        self._streams[stream] = self._device
        _put(into, ctypes.c_uint64, stream)
        return 0

    def _cuStreamSynchronize(self, stream: int | None) -> int:  # noqa: N802 - named as the driver's
        number = stream or 0
        if self._device is None:
            return 201
        if number not in self._streams:
            return 400
        self.synchronised.append(number)
        with self._lock:  # copies that two threads have asked for are done when either of them has waited
            work, self._work[number] = self._work[number], []
            for item in work:
                item()
        return 0

    # Memory.

    def _cuMemAlloc(self, into: int, size: int) -> int:  # noqa: N802 - named as the driver's
        if self._device is None:
            return 201
        if self._spoils():
            return 900
        if size == 0:
            return 1
        if sum(map(len, self.memory.values())) + size > self._memory_bytes:
            return 2
        address, self._next = self._next, self._next + size + (-size) % (2 << 20)
        self.memory[address] = bytearray(b"\xa5") * size
        self.owner[address] = self._device - 10
        _put(into, ctypes.c_uint64, address)
        return 0

    def _cuMemFree(self, address: int) -> int:  # noqa: N802 - named as the driver's
        if self._device is None:
            return 201
        if self._spoils():
            return 900
        return 0 if self.memory.pop(address, None) is not None else 1

    def find(self, address: int, length: int) -> memoryview | None:
        """The device's bytes at an address, if all of them are there."""
        for start, memory in self.memory.items():
            if start <= address <= address + length <= start + len(memory):
                return memoryview(memory)[address - start : address - start + length]
        return None

    def _later(self, stream: int | None, work: Callable[[], None]) -> int:
        if self._device is None:
            return 201
        if self._streams.get(stream or 0) not in {0, self._device}:
            return 400
        with self._lock:
            self._work[stream or 0].append(work)
        return 0

    def _cuMemsetD8Async(self, to: int, value: int, count: int, stream: int | None) -> int:  # noqa: N802 - the driver's
        target = self.find(to, count)
        if target is None:
            return 1

        def work() -> None:
            target[:] = bytes([value]) * count

        return self._later(stream, work)

    def _cuMemcpyHtoDAsync(self, to: int, source: int, count: int, stream: int | None) -> int:  # noqa: N802 - the driver's
        target = self.find(to, count)
        if target is None:
            return 1

        def work() -> None:
            target[:] = ctypes.string_at(source, count)

        return self._later(stream, work)

    def _cuMemcpyDtoHAsync(self, to: int, source: int, count: int, stream: int | None) -> int:  # noqa: N802 - the driver's
        found = self.find(source, count)
        if found is None:
            return 1

        def work() -> None:
            ctypes.memmove(to, bytes(found), count)

        return self._later(stream, work)

    def _cuMemcpyDtoDAsync(self, to: int, source: int, count: int, stream: int | None) -> int:  # noqa: N802 - the driver's
        target, found = self.find(to, count), self.find(source, count)
        if target is None or found is None:
            return 1

        def work() -> None:
            target[:] = bytes(found)

        return self._later(stream, work)

    def _cuPointerGetAttribute(self, into: int, attribute: int, address: int) -> int:  # noqa: N802 - the driver's
        for start, memory in self.memory.items():
            if start <= address < start + len(memory) and attribute == 9:
                _put(into, ctypes.c_int32, self.owner[start])
                return 0
        return 1

    def _cuPointerSetAttribute(self, value: int, attribute: int, address: int) -> int:  # noqa: N802 - the driver's
        if self._device is None:
            return 201
        if attribute != 6 or ctypes.c_uint32.from_address(value).value != 1 or address not in self.memory:
            return 1
        self.sync_memops.add(address)
        return 0

    # For adapters.

    def _cuMemGetHandleForAddressRange(  # noqa: N802 - named as the driver's
        self, into: int, address: int, size: int, kind: int, flags: int
    ) -> int:
        if not self.attributes.get(124):
            return 801
        if address % _PAGE or size % _PAGE or kind != 1 or flags or self.find(address, size) is None:
            return 1
        self.exported.append((address, size))
        _put(into, ctypes.c_int32, os.memfd_create("fake dmabuf"))
        return 0

    def _cuFlushGPUDirectRDMAWrites(self, target: int, scope: int) -> int:  # noqa: N802 - the driver's
        if self._device is None:
            return 201
        if target != 0 or scope not in {100, 200}:
            return 1
        if not self.attributes.get(117, 0) & 1:
            return 801
        self.flushes.append((target, scope))
        return 0
