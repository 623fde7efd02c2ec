"""A device's memory as libucp knows it: what it can do with which, and memory that peers put into by a key.

Which types of memory a libucp can handle is settled when a context is made: a module of UCX has to be there
for each (``libuct_cuda.so`` for CUDA), with the driver that it needs.
"""

import logging
import weakref
from ctypes import byref, c_void_p
from functools import cache
from typing import Final

from transports import _libucp as ucp
from transports._libucp import MemoryType
from transports.device_memory import MARGIN_BYTES, Device, DeviceError, DeviceMemory
from transports.errors import DeviceUnreachable
from transports.ucx_worker import Role, context_of, packed_key

_LOG: Final = logging.getLogger(__name__)

_TYPES: Final = {"cuda": MemoryType.CUDA}
"""By the kind of a device."""


@cache
def memory_types(role: Role) -> frozenset[MemoryType]:
    """What the contexts of this role can handle; raises ``UcpError``."""
    return ucp.load().memory_types(context_of(role))


def names_of(types: frozenset[MemoryType]) -> str:
    """For people: ``host, cuda``."""
    return ", ".join(kind.name.lower().replace("_", "-") for kind in sorted(types))


def type_of(device: Device, role: Role) -> MemoryType:
    """What libucp calls this device's memory.

    Raises:
        DeviceUnreachable: It knows no such device, or this libucp cannot handle it; says what to install.
        UcpError: There is no context.
    """
    kind = _TYPES.get(device.kind)
    if kind is None:
        raise DeviceUnreachable(
            f"UCX is used here for memory of CUDA devices, and {device.name} is none; use verbs://, or memory"
            " of the host"
        )
    types = memory_types(role)
    if kind not in types:
        library = ucp.load()
        raise DeviceUnreachable(
            f"the libucp at {library.path} ({library.version}) handles memory of {names_of(types)}, and none"
            f" of {device.name}: it takes NVIDIA's driver, and a UCX with its module for CUDA, libuct_cuda.so"
            f" (`pip install 'onepiece[ucx]'` brings one, {ucp.LIBRARY_VARIABLE} names another); UCX_TLS must"
            " not leave CUDA out"
        )
    return kind


class MappedDevice:
    """A device's memory, and its margin, that peers with the key may put into.

    Args:
        memory: It stays for as long as it is mapped.

    Raises:
        DeviceUnreachable: libucp cannot handle it.
        DeviceError: What is put there could not be made visible.
        UcpError: It cannot be mapped.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        device = memory.device
        device.check_remote_writes()
        library, context, handle = ucp.load(), context_of(Role.OWNER), c_void_p()
        params = ucp.MemoryParams(
            field_mask=ucp.MEMORY_ADDRESS | ucp.MEMORY_LENGTH | ucp.MEMORY_TYPE,
            address=memory.address,
            length=memory.size_bytes + MARGIN_BYTES,
            memory_type=type_of(device, Role.OWNER),
        )
        self.memory: Final = memory
        with device.current():
            library.call("mem_map", context, byref(params), byref(handle))
            self._unmap = weakref.finalize(self, library.function("mem_unmap"), context, handle)
            # Not at the interpreter's exit: the driver may be gone by then.
            self._unmap.atexit = False
            self.key: Final = packed_key(library, context, handle)

    def close(self) -> None:
        """Take it away from adapters; spans stay valid. Idempotent."""
        try:
            with self.memory.device.current():
                self._unmap()
        except DeviceError as error:
            _LOG.warning("memory of %s may stay mapped: %s", self.memory.device.name, error)
