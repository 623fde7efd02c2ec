"""A device whose memory UCX has mapped, and a libucp that takes it for CUDA's.

The library is the real one. Where it would be told of memory of CUDA it is told of the host's, which is what
this device is made of; what was said is kept. So keys, puts, their order and their ends are those of UCX,
over shared memory; CUDA, its copies and GPU-direct take no part.
"""

import ctypes
from collections import Counter
from collections.abc import Callable
from ctypes import byref, c_ubyte, c_void_p
from typing import Any

import pytest

from transports import _libucp as ucp
from transports import ucx_devices
from transports._libucp import Library, MemoryType
from transports.device_memory import DeviceError
from transports.testing import FakeDevice
from transports.ucx_worker import Role, context_of

CUDA, HOST = MemoryType.CUDA, MemoryType.HOST


class PretendedDevice(FakeDevice):
    """A device of kind ``cuda`` in memory that UCX has allocated and this process can look at.

    Args:
        memory_bytes: How much there is.
    """

    kind = "cuda"

    def __init__(self, memory_bytes: int = 1 << 30) -> None:
        super().__init__("cuda:0")
        self.left = memory_bytes
        self.handles: dict[int, c_void_p] = {}
        self._views: dict[int, memoryview] = {}

    @property
    def allocations(self) -> int:
        """How much memory was taken and not given back, in pieces."""
        return len(self._views)

    def _take(self, size_bytes: int) -> int:
        if size_bytes > self.left:
            raise DeviceError(f"{self.name}: out of memory")
        self.left -= size_bytes
        library, handle = ucp.load(), c_void_p()
        params = ucp.MemoryParams(
            field_mask=ucp.MEMORY_LENGTH | ucp.MEMORY_FLAGS, length=size_bytes, flags=ucp.MEMORY_ALLOCATE
        )
        library.call("mem_map", context_of(Role.OWNER), byref(params), byref(handle))
        attributes = ucp.MemoryAttributes(field_mask=ucp.MEMORY_ADDRESS)
        library.call("mem_query", handle, byref(attributes))
        address: int = attributes.address
        self.handles[address] = handle
        self._views[address] = memoryview((c_ubyte * size_bytes).from_address(address)).cast("B")
        return address

    def give_back(self, address: int) -> None:
        """Free memory."""
        self.left += len(self._views.pop(address))
        ucp.load().function("mem_unmap")(context_of(Role.OWNER), self.handles.pop(address))

    def _find(self, address: int, length: int) -> tuple[memoryview, int]:  # type: ignore[override]  # as good
        for start, view in self._views.copy().items():  # the garbage collector gives memory back at any time
            if start <= address <= address + length <= start + len(view):
                return view, address - start
        raise DeviceError(f"{self.name} has no {length} bytes at {address:#x}")


class Pretence:
    """What libucp was told about memory of CUDA, and what becomes of its puts."""

    def __init__(self, device: PretendedDevice, patch: pytest.MonkeyPatch) -> None:
        self.device = device
        self.mapped: list[tuple[int, int]] = []
        """Address and length of what was mapped as CUDA's."""
        self.put_types: list[int] = []
        """The memory type of each put that names one."""
        self.lost: Callable[[int], bool] = lambda _address: False
        """Puts to which addresses never land, and are said to be done."""
        self._open: Counter[int] = Counter()
        self._call, self._function = Library.call, Library.function
        ucx_devices.memory_types.cache_clear()
        patch.setattr(Library, "memory_types", lambda *_: frozenset({HOST, CUDA}))
        patch.setattr(Library, "call", lambda library, name, *arguments: self._do(library, name, arguments))
        patch.setattr(Library, "function", lambda library, name: self._find(library, name))  # noqa: PLW0108  # a method

    def _do(self, library: Library, name: str, arguments: tuple[Any, ...]) -> None:
        params = arguments[1]._obj if name == "mem_map" else None
        if params is None or not params.field_mask & ucp.MEMORY_TYPE:
            self._call(library, name, *arguments)
            return
        assert params.field_mask == ucp.MEMORY_ADDRESS | ucp.MEMORY_LENGTH | ucp.MEMORY_TYPE
        assert params.memory_type == CUDA
        handle = self.device.handles[params.address]
        self.mapped.append((params.address, params.length))
        assert handle.value is not None
        self._open[handle.value] += 1
        arguments[2]._obj.value = handle.value

    def _find(self, library: Library, name: str) -> Callable[..., Any]:
        function = self._function(library, name)
        if name == "mem_unmap":
            return lambda context, handle: self._unmap(function, context, handle)
        if name == "put_nbx":
            return lambda *arguments: self._put(function, *arguments)
        return function

    def _unmap(self, function: Callable[..., Any], context: int, handle: c_void_p) -> int:
        if handle.value is not None and self._open[handle.value]:
            self._open[handle.value] -= 1
            return 0
        return int(function(context, handle))

    def _put(
        self,
        function: Callable[..., Any],
        endpoint: int,
        place: int,
        length: int,
        address: int,
        key: c_void_p,
        params: Any,
    ) -> Any:
        if self.lost(address):
            return None
        if params._obj.field_mask & ucp.OPERATION_MEMORY_TYPE:
            self.put_types.append(params._obj.memory_type)
            assert self.device.read(place, length) is not None  # it lies on the device
            params = byref(ucp.OperationParams(field_mask=ucp.OPERATION_MEMORY_TYPE, memory_type=HOST))
        return function(endpoint, place, length, address, key, params)

    @property
    def open_maps(self) -> int:
        """Maps of CUDA's memory that were not given back."""
        return sum(self._open.values())


def garbage(address: int, length: int) -> None:
    """Write over memory, as one would whose session has ended."""
    ctypes.memset(address, 0xEE, length)
