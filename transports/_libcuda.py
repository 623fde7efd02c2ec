"""The C interface of the CUDA driver, called through ctypes: the only file that knows its functions.

``libcuda.so.1`` comes with NVIDIA's driver, so there is nothing to install beside it; it is loaded by the
first call of ``load``. Functions whose arguments have changed over the years are asked for by the name that
carries the version (``cuMemAlloc_v2``), as ``cuda.h`` does. Each is looked up when it is called first, since
older drivers lack the youngest.

A *context* is what memory and work belong to; calls go to the one that is current in the calling thread.
"""

import ctypes
from ctypes import c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_void_p
from functools import cache
from typing import Any, Final

from transports.device_memory import DeviceError

_OK: Final = 0
INVALID_VALUE: Final = 1
OUT_OF_MEMORY: Final = 2
_FATAL: Final = {700, 702, *range(714, 720)}
"""Behind these, faults of a kernel for instance, every call of the process fails."""
CAPTURING: Final = 900
"""CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: some thread is recording a graph."""

# Attributes, flags and scopes, as cuda.h numbers them.
GPU_DIRECT_RDMA: Final = 116
"""CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED"""
FLUSH_OPTIONS: Final = 117
"""CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS"""
WRITES_ORDERING: Final = 118
"""CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING"""
DMA_BUF: Final = 124
"""CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED"""
FLUSH_BY_HOST: Final = 1 << 0
FLUSH_CURRENT_CONTEXT: Final = 0
FLUSH_TO_OWNER: Final = 100
"""A scope; an ordering that is not smaller needs no flush."""
SYNC_MEMOPS: Final = 6
"""CU_POINTER_ATTRIBUTE_SYNC_MEMOPS"""
DEVICE_ORDINAL: Final = 9
"""CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL"""
DMA_BUF_FD: Final = 1
"""CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD"""
STREAM_NON_BLOCKING: Final = 1
PER_THREAD_STREAM: Final = 2
"""CU_STREAM_PER_THREAD: another stream in each thread."""
CAPTURE_RELAXED: Final = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED: the thread has nothing to do with graphs that others record."""

_DEVICE: Final = c_int
_ADDRESS: Final = c_ulonglong
_CONTEXT: Final = c_void_p
_STREAM: Final = c_void_p
_REFERENCE: Final = c_void_p
_ENUM: Final = c_int

SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (_ENUM, _REFERENCE),
    "cuGetErrorString": (_ENUM, _REFERENCE),
    "cuDeviceGetCount": (_REFERENCE,),
    "cuDeviceGet": (_REFERENCE, c_int),
    "cuDeviceGetName": (c_char_p, c_int, _DEVICE),
    "cuDeviceGetAttribute": (_REFERENCE, _ENUM, _DEVICE),
    "cuDevicePrimaryCtxRetain": (_REFERENCE, _DEVICE),
    "cuCtxPushCurrent_v2": (_CONTEXT,),
    "cuCtxPopCurrent_v2": (_REFERENCE,),
    "cuCtxSynchronize": (),
    "cuThreadExchangeStreamCaptureMode": (_REFERENCE,),
    "cuStreamCreate": (_REFERENCE, c_uint),
    "cuStreamSynchronize": (_STREAM,),
    "cuMemAlloc_v2": (_REFERENCE, c_size_t),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemsetD8Async": (_ADDRESS, c_ubyte, c_size_t, _STREAM),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, c_void_p, c_size_t, _STREAM),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _ADDRESS, c_size_t, _STREAM),
    "cuMemcpyDtoDAsync_v2": (_ADDRESS, _ADDRESS, c_size_t, _STREAM),
    "cuPointerGetAttribute": (_REFERENCE, _ENUM, _ADDRESS),
    "cuPointerSetAttribute": (_REFERENCE, _ENUM, _ADDRESS),
    "cuMemGetHandleForAddressRange": (_REFERENCE, _ADDRESS, c_size_t, _ENUM, c_ulonglong),
    "cuFlushGPUDirectRDMAWrites": (_ENUM, _ENUM),
}
"""The arguments of each function; all return a ``CUresult``."""


class CudaError(DeviceError):
    """A call of the driver failed; the message names device, call, error and what the driver says of it."""

    def __init__(self, status: int, call: str, name: str, text: str) -> None:
        hint = "; this process can use CUDA no more: restart it" if status in _FATAL else ""
        super().__init__(f"{call} failed with {name} ({status}): {text}{hint}")
        self.status = status
        self._device = ""

    def on(self, device: str) -> None:
        """Name the device, unless it was named."""
        if not self._device:
            self._device = device
            self.args = (f"{device}: {self.args[0]}",)


class CudaMissingError(DeviceError):
    """There is no driver, or it lacks a function; the message says which."""


class Library:
    """The driver's functions.

    Args:
        symbols: Has each function as an attribute, as a ``ctypes.CDLL`` does.
    """

    def __init__(self, symbols: object) -> None:
        self._symbols = symbols
        self._functions: dict[str, Any] = {}

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function; raises ``CudaError``, or ``CudaMissingError`` if the driver does not have it."""
        status = self._function(name)(*arguments)
        if status != _OK:
            raise CudaError(status, name, self._said("cuGetErrorName", status), self._explained(status))

    def _explained(self, status: int) -> str:
        return self._said("cuGetErrorString", status)

    def _said(self, name: str, status: int) -> str:
        text = c_char_p()
        self._function(name)(status, ctypes.byref(text))
        return text.value.decode() if text.value else "an error that the driver does not know"

    def _function(self, name: str) -> Any:
        function = self._functions.get(name)
        if function is None:
            try:
                address = ctypes.cast(getattr(self._symbols, name), c_void_p).value
            except AttributeError as error:
                raise CudaMissingError(
                    f"NVIDIA's driver has no {name}: it is too old for this; install a newer one"
                ) from error
            assert address is not None, "a function that is there has an address"
            function = self._functions[name] = ctypes.CFUNCTYPE(c_int, *SIGNATURES[name])(address)
        return function


@cache
def load() -> Library:
    """The driver, ready to be used; raises ``CudaMissingError`` or ``CudaError``."""
    try:
        symbols = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaMissingError(
            f"there is no NVIDIA driver ({error}); in a container, start it with the GPUs (--gpus all)"
        ) from error
    library = Library(symbols)
    library.call("cuInit", 0)
    return library
