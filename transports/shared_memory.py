"""Memory of a region that processes of the same host can map, and the address option that forbids it.

It is anonymous (memfd): it has no name that could be left behind, takes nothing of ``/dev/shm``, and is
given back by the kernel with the last process that has it mapped, however that process ends. It is
sealed, so that no peer can take pages away from beneath another one's feet.
"""

import enum
import fcntl
import logging
import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from transports.address import Address
from transports.errors import AddressError, ProtocolError
from transports.region_memory import HUGE_PAGE_BYTES, RegionMemory

_LOG: Final = logging.getLogger(__name__)

LENT_BYTES_MAX: Final = 32 << 30
"""What all regions of a process may lend at once, memory that was replaced and is still in use included."""

_OPTION: Final = "shm"
_OVERCOMMIT: Final = Path("/proc/sys/vm/overcommit_memory")
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Bypass(enum.Enum):
    """What an address says of memory shared within a host: ``tcp://host:port?shm=off``."""

    AUTO = "auto"
    """Where it is possible."""
    OFF = "off"
    REQUIRED = "required"
    """A session that cannot have it is refused."""
    COPY = "copy"
    """Where it is possible, and owners do not read the memory of their senders."""

    @classmethod
    def of(cls, address: Address) -> "Bypass":
        """Read an address's options; raises ``AddressError`` for those that mean nothing."""
        text = address.options.get(_OPTION, cls.AUTO.value)
        known = [value.value for value in cls]
        if address.options.keys() - {_OPTION} or text not in known:
            raise AddressError(f"{address}: the only option of tcp is {_OPTION}={'|'.join(known)}")
        return cls(text)


class LentMemory(RegionMemory):
    """Zeroed memory whose ``descriptor`` may be given to other processes; raises ``OSError``.

    The descriptor is closed with this object; the pages go with the last view of them.
    """

    __slots__ = ("__weakref__", "descriptor")

    def __init__(self, size_bytes: int) -> None:
        descriptor = os.memfd_create("onepiece-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, size_bytes)
        if _counts_strictly():
            # Otherwise the first touch of a page that there is none for ends the process that touches it.
            os.posix_fallocate(descriptor, 0, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        mapped = mmap.mmap(descriptor, size_bytes)
        if size_bytes >= HUGE_PAGE_BYTES:
            with suppress(OSError):  # a kernel without huge pages for shared memory is only slower
                mapped.madvise(mmap.MADV_HUGEPAGE)
        _lent.add(mapped)
        super().__init__(size_bytes, memoryview(mapped))
        self.descriptor: Final = descriptor

    def used(self) -> Iterator[tuple[int, int]]:
        """Start and end of each part that has been touched; all else is zero."""
        end = 0
        while True:
            try:
                start = os.lseek(self.descriptor, end, os.SEEK_DATA)
            except OSError:  # nothing behind
                return
            end = os.lseek(self.descriptor, start, os.SEEK_HOLE)
            yield start, end


def _counts_strictly() -> bool:
    """The kernel gives no memory that it does not have; that of this kind it counts at the first touch."""
    try:
        return _OVERCOMMIT.read_text().strip() == "2"
    except OSError:  # no /proc: not known
        return False


_lent: Final[weakref.WeakSet[mmap.mmap]] = weakref.WeakSet()


def new_memory(size_bytes: int) -> RegionMemory:
    """Memory to lend; or, with a warning, memory that only this process can write to."""
    lent_bytes = sum(map(len, _lent))
    if size_bytes > 0 and lent_bytes + size_bytes <= LENT_BYTES_MAX:
        try:
            return LentMemory(size_bytes)
        except OSError as error:
            _LOG.warning("no %d bytes to lend (%s): senders of this host write over tcp", size_bytes, error)
    elif size_bytes > 0:
        _LOG.warning(
            "%d bytes are lent, and %d more are above the bound of %d: senders of this host write over tcp",
            lent_bytes,
            size_bytes,
            LENT_BYTES_MAX,
        )
    return RegionMemory(size_bytes)


def map_memory(descriptor: int, size_bytes: int) -> mmap.mmap:
    """Map what an owner lends.

    Raises:
        ProtocolError: It is not what the owner promised: an access could end this process.
        OSError: It cannot be mapped.
    """
    found = os.fstat(descriptor).st_size
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if found != size_bytes or not seals & fcntl.F_SEAL_SHRINK:
        raise ProtocolError(f"the owner lends {found} bytes that may shrink, not {size_bytes} sealed ones")
    mapped = mmap.mmap(descriptor, size_bytes)
    mapped.madvise(mmap.MADV_DONTFORK)  # a forked child would hold it, and could write to it
    return mapped
