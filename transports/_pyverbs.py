"""pyverbs: its import, open devices, and memory that they reach.

This module and ``_pyverbs_pair`` are the only ones that know it. It comes from the system, beside the
libibverbs that it belongs to (``docs/explanation/decisions/verbs-pyverbs.md``), so it is imported on first
use.
"""

import atexit
import ctypes
import logging
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import metadata
from typing import Any, Final, NamedTuple

from attrs import frozen

from transports.device_memory import DeviceError, DeviceMemory
from transports.operations import Bytes
from transports.process_memory import Pinned

_READS_MAX: Final = 16


class VerbsError(Exception):
    """A call of verbs failed; the message names device, port and gid, or the call."""


class VerbsMissingError(Exception):
    """There is no pyverbs, or none that can be used; the message says what to install."""


class _Pyverbs(NamedTuple):
    """The modules of pyverbs that are used here."""

    device: Any
    pd: Any
    mr: Any
    cq: Any
    qp: Any
    wr: Any
    addr: Any
    enums: Any
    error: type[Exception]


@cache
def load() -> _Pyverbs:
    """Pyverbs; raises ``VerbsMissingError``."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        from pyverbs import addr, cq, device, mr, pd, qp, wr
        from pyverbs.pyverbs_error import PyverbsError

        try:
            from pyverbs import enums
        except ImportError:
            from pyverbs import libibverbs_enums as enums  # its name in later versions
        return _Pyverbs(device, pd, mr, cq, qp, wr, addr, enums, PyverbsError)
    except ImportError as missing:
        raise VerbsMissingError(
            f"pyverbs cannot be imported ({missing}); it comes from the system, as Debian's package"
            " python3-pyverbs for Debian's version of Python: see `onepiece doctor`"
        ) from missing
    finally:
        # Importing pyverbs sets up logging for the whole process, which is not its business.
        root.handlers[:] = handlers
        root.setLevel(level)


@frozen
class Limits:
    """What an adapter can do."""

    queue: int
    """Work requests of one queue."""
    reads_served: int
    """Reads and atomics of one peer at once."""
    reads_asked: int
    has_atomics: bool


def version() -> str:
    """Of pyverbs, as far as its package says it."""
    try:
        return metadata.version("pyverbs")
    except metadata.PackageNotFoundError:  # Debian's says it to dpkg only
        asked = ["dpkg-query", "-W", "-f", "${Version}", "python3-pyverbs"]
        try:
            done = subprocess.run(asked, capture_output=True, text=True, check=True)  # noqa: S603  # no input
        except (OSError, subprocess.CalledProcessError):
            return "unknown"
        return done.stdout


class Adapter:
    """An open device."""

    def __init__(self, name: str) -> None:
        verbs = load()
        try:
            self.context: Final = verbs.device.Context(name=name)
            attributes = self.context.query_device()
        except verbs.error as error:
            raise VerbsError(
                f"the device {name} cannot be opened ({error}); may this process use /dev/infiniband?"
            ) from error
        self.limits: Final = Limits(
            queue=attributes.max_qp_wr,
            reads_served=min(attributes.max_qp_rd_atom, _READS_MAX),
            reads_asked=min(attributes.max_qp_init_rd_atom, _READS_MAX),
            has_atomics=attributes.atomic_caps != verbs.enums.IBV_ATOMIC_NONE,
        )
        # While there is an interpreter: pyverbs complains, without words, of what is open behind its end.
        atexit.register(self._close)

    def _close(self) -> None:
        with suppress(load().error):
            self.context.close()

    def mtu(self, port: int) -> int:
        """The number of the largest MTU that the port's network carries."""
        with named(f"the state of port {port} cannot be read"):
            return int(self.context.query_port(port).active_mtu)


@cache
def adapter(name: str) -> Adapter:
    """The device of this name, opened once for the process; raises ``VerbsError``, ``VerbsMissingError``."""
    return Adapter(name)


class Domain:
    """Queue pairs and the memory that their peers may reach; nothing of another domain."""

    def __init__(self, owner: Adapter) -> None:
        self.adapter: Final = owner
        with named("no protection domain"):
            self.handle: Final = load().pd.PD(owner.context)

    def close(self) -> None:
        """Give it back; its pairs and memory must be closed."""
        with named("the protection domain cannot be given back"):
            self.handle.close()


class Registered:
    """Memory that the adapter reads and writes by itself, pinned until ``close``.

    Args:
        domain: Of the queue pairs that may use it.
        view: The memory; kept alive.
        for_peers: Peers may read, write and swap; otherwise only our own work requests use it.
    """

    def __init__(self, domain: Domain, view: memoryview, *, for_peers: bool) -> None:
        verbs, enums = load(), load().enums
        access = enums.IBV_ACCESS_LOCAL_WRITE | (peers_may(enums) if for_peers else 0)
        self._kept = ctypes.c_char.from_buffer(view)
        self.address: Final = ctypes.addressof(self._kept)
        try:
            self._handle = verbs.mr.MR(domain.handle, len(view), access, address=self.address)
        except verbs.error as error:
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            allowed = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
            hint = "; raise it (ulimit -l, LimitMEMLOCK=)" if limit != resource.RLIM_INFINITY else ""
            raise VerbsError(
                f"{len(view)} bytes cannot be registered ({error}); the limit of locked memory is"
                f" {allowed}{hint}"
            ) from error
        self.local_key: Final[int] = self._handle.lkey
        self.remote_key: Final[int] = self._handle.rkey

    def close(self) -> None:
        """Take it away from the adapter; no pair may use it any more."""
        with named("memory cannot be taken from the adapter"):
            self._handle.close()


class RegisteredDevice:
    """Memory of a device that the adapter reads or writes by itself, until ``close``.

    There are two ways to it: a dmabuf, by which the kernel hands the device's pages to the adapter's driver,
    and, where that is not to be had, the device's own address, which nvidia_peermem understands.

    Args:
        domain: Of the queue pairs that may use it.
        memory: Kept until ``close``.
        for_peers: Peers may write, and do nothing else; otherwise only our own work requests read it.

    Raises:
        VerbsError: Neither way is there; the message names what both lack.
    """

    def __init__(self, domain: Domain, memory: DeviceMemory, *, for_peers: bool) -> None:
        enums, device = load().enums, memory.device
        access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE if for_peers else 0
        try:
            if for_peers:
                device.check_remote_writes()
            self.address, self._handle = self._register(domain, memory, access)
        except DeviceError as error:
            raise VerbsError(
                f"{memory.size_bytes} bytes of {device.name} cannot be registered: {error}"
            ) from error
        self._memory: DeviceMemory | None = memory
        self.size_bytes: Final = memory.size_bytes
        self.local_key: Final[int] = self._handle.lkey
        self.remote_key: Final[int] = self._handle.rkey

    def _register(self, domain: Domain, memory: DeviceMemory, access: int) -> tuple[int, Any]:
        """Where the memory begins as the key counts, and the handle; raises ``DeviceError``."""
        verbs, device = load(), memory.device
        try:
            descriptor = device.dmabuf(memory.address, memory.size_bytes)
            try:
                # The kernel keeps the memory from here on; the key counts from the dmabuf's beginning.
                return 0, verbs.mr.DmaBufMR(domain.handle, memory.size_bytes, access, dmabuf=descriptor)
            finally:
                os.close(descriptor)
        except (DeviceError, verbs.error) as error:
            by_dmabuf = f"by dmabuf: {error}"
        except (AttributeError, TypeError) as error:  # as it was before it took descriptors
            by_dmabuf = f"by dmabuf: this pyverbs takes none that it has not made itself ({error})"
        try:
            device.check_peer_access()
            handle = verbs.mr.MR(domain.handle, memory.size_bytes, access, address=memory.address)
        except (DeviceError, verbs.error) as error:
            raise DeviceError(f"{by_dmabuf}; by its own address: {error}; see `onepiece doctor`") from error
        return memory.address, handle

    def close(self) -> None:
        """Take it away from the adapter, and then let go of it; no pair may use it any more."""
        with named("a device's memory cannot be taken from the adapter"):
            self._handle.close()
        self._memory = None


class Readable:
    """Bytes that peers may read and nobody writes to, pinned until ``close``.

    Args:
        domain: Of the queue pairs whose peers may read them.
        buffer: The bytes, also of read-only memory; kept alive.
    """

    def __init__(self, domain: Domain, buffer: Bytes) -> None:
        verbs = load()
        self._pinned = Pinned(buffer)
        self.address: Final = self._pinned.address
        self.length: Final = self._pinned.length
        access = verbs.enums.IBV_ACCESS_REMOTE_READ
        try:
            self._handle = verbs.mr.MR(domain.handle, self.length, access, address=self.address)
        except verbs.error as error:
            self._pinned.release()
            raise VerbsError(f"{self.length} bytes cannot be registered to be read: {error}") from error
        self.key: Final[int] = self._handle.rkey

    def close(self) -> None:
        """Take them away from the adapter: what reads them then ends its pair."""
        with named("lent memory cannot be taken from the adapter"):
            self._handle.close()
        self._pinned.release()


def peers_may(enums: Any) -> int:
    access: int = (
        enums.IBV_ACCESS_REMOTE_WRITE | enums.IBV_ACCESS_REMOTE_READ | enums.IBV_ACCESS_REMOTE_ATOMIC
    )
    return access


@contextmanager
def named(what: str) -> Iterator[None]:
    try:
        yield
    except load().error as error:
        raise VerbsError(f"{what}: {error}") from error
