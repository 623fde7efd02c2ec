"""What the machine has for the transports, what is missing, and the command that would fix it.

Each finding looks at one thing and fails alone: what cannot be looked at is said to be so. Nothing is
changed, and nothing is sent but to this process itself.
"""

import asyncio
import enum
import os
import platform
import re
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from attrs import frozen

from transports import _libucp, _pyverbs, cuda, ucx_devices
from transports.address import Address
from transports.device_memory import DeviceError
from transports.errors import TransportError
from transports.memory import Accepted, Options
from transports.process_memory import OtherMemory, address_of
from transports.ucx import UcxTransport
from transports.ucx_worker import Role
from transports.verbs_devices import Device, devices_of

DEBIAN_PYVERBS: Final = "usr/lib/python3/dist-packages/pyverbs"
_SHARED_BYTES_WANTED: Final = 1 << 30
_MEMLOCK_BYTES_WANTED: Final = 1 << 30
_CAP_IPC_LOCK: Final = 14
_CAP_SYS_PTRACE: Final = 19


class State(enum.Enum):
    """How a finding is to be taken."""

    THERE = "there"
    MISSING = "missing"
    """What needs it cannot be used; everything else can."""


@frozen
class Finding:
    """One thing that was looked at."""

    subject: str
    state: State
    text: str
    fix: str = ""
    """A command, or what to do, if something is missing."""


def diagnose(root: Path = Path("/")) -> tuple[Finding, ...]:
    """Look at everything.

    Args:
        root: Of the file system that is looked at.
    """
    looks: tuple[Callable[[Path], Iterator[Finding]], ...] = (
        _system,
        _devices,
        _device_files,
        _locked_memory,
        _verbs_library,
        _ucx_library,
        _ucx_memory,
        _gpu_direct,
        _shared_memory,
        _process_memory,
    )
    return tuple(finding for look in looks for finding in _found(look, root))


def _found(look: Callable[[Path], Iterator[Finding]], root: Path) -> list[Finding]:
    try:
        return list(look(root))
    except Exception as error:  # noqa: BLE001  # whatever one look meets, the others still have something to say
        what = look.__name__.strip("_").replace("_", " ")
        why = str(error) if isinstance(error, OSError) else repr(error)
        return [Finding(what, State.MISSING, f"cannot be looked at: {why}")]


def _system(_root: Path) -> Iterator[Finding]:
    text = (
        f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}"
    )
    yield Finding("system", State.THERE, text)


def _devices(root: Path) -> Iterator[Finding]:
    devices = devices_of(root / "sys/class/infiniband")
    if not (root / "sys/class").is_dir():
        fix = "mount -t sysfs sysfs /sys; in a container: do not mask /sys"
        yield Finding("RDMA devices", State.MISSING, "cannot be looked at: /sys is not mounted", fix)
    elif not devices:
        yield Finding(
            "RDMA devices",
            State.MISSING,
            "the kernel knows none: there is no adapter, or its driver is not loaded",
            "modprobe mlx5_ib (or the adapter's driver); Soft-RoCE on a network card: modprobe rdma_rxe &&"
            " rdma link add rxe0 type rxe netdev eth0; for tests only: make test-rdma",
        )
    for device in devices:
        active = any(port.is_active and port.gids for port in device.ports)
        yield Finding(
            "RDMA device",
            State.THERE if active else State.MISSING,
            str(device),
            "" if active else _awaken(device),
        )


def _awaken(device: Device) -> str:
    if any(port.is_active for port in device.ports):
        return "give the port's network interface an address: ip addr add ADDRESS dev INTERFACE"
    return f"ip link set INTERFACE up, for the interface that `rdma link` shows for {device.name}"


def _device_files(root: Path) -> Iterator[Finding]:
    folder = root / "dev/infiniband"
    files = sorted(folder.glob("uverbs*"))
    usable = [path for path in files if os.access(path, os.R_OK | os.W_OK)]
    if not files:
        fix = "modprobe ib_uverbs; in a container: --device /dev/infiniband"
        yield Finding("device files", State.MISSING, "/dev/infiniband has no uverbs*", fix)
    elif len(usable) < len(files):
        names = ", ".join(str(path) for path in files if path not in usable)
        yield Finding("device files", State.MISSING, f"may not be opened: {names}", f"chmod a+rw {names}")
    else:
        yield Finding("device files", State.THERE, ", ".join(path.name for path in files))


def _locked_memory(root: Path) -> Iterator[Finding]:
    if (root / "proc/self/status").exists() and _has_capability(root, _CAP_IPC_LOCK):
        yield Finding("locked memory", State.THERE, "no limit: this process has the capability CAP_IPC_LOCK")
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    fix = "ulimit -l unlimited; LimitMEMLOCK=infinity in a systemd unit; --ulimit memlock=-1 for a container"
    enough = soft == resource.RLIM_INFINITY or soft >= _MEMLOCK_BYTES_WANTED
    text = f"limit {_bytes(soft)}, may be raised to {_bytes(hard)}; inboxes over verbs are locked"
    yield Finding("locked memory", State.THERE if enough else State.MISSING, text, "" if enough else fix)


def _verbs_library(root: Path) -> Iterator[Finding]:
    try:
        library = _pyverbs.load()
    except _pyverbs.VerbsMissingError as error:
        yield Finding("pyverbs", State.MISSING, _here(error), _pyverbs_fix(root))
    else:
        yield Finding(
            "pyverbs", State.THERE, f"version {_pyverbs.version()} at {Path(library.device.__file__).parent}"
        )


def _here(error: Exception) -> str:
    """An error's words, less what sends their reader here."""
    return re.sub(r"[:;] see `onepiece doctor`", "", str(error))


def _pyverbs_fix(root: Path) -> str:
    site = next((path for path in sys.path if path.endswith("site-packages")), "SITE-PACKAGES")
    link = f"ln -s /{DEBIAN_PYVERBS} {site}/pyverbs"
    installed = root / DEBIAN_PYVERBS
    if not installed.exists():
        return f"apt-get install -y python3-pyverbs ibverbs-providers && {link}"
    if not list(installed.glob(f"*.{sys.implementation.cache_tag}-*.so")):
        return f"run a Python of the version that /{DEBIAN_PYVERBS} was built for; then: {link}"
    return link


def _ucx_library(_root: Path) -> Iterator[Finding]:
    try:
        library = _libucp.load()
    except _libucp.UcpMissingError as error:
        yield Finding("UCX", State.MISSING, str(error), _ucx_fix())
        return
    yield Finding("UCX", State.THERE, f"version {library.version} at {library.path}")
    wire = asyncio.run(_ucx_wire())
    at_once = wire.startswith(("shm", "rdma"))
    state = State.THERE if at_once else State.MISSING
    yield Finding("UCX's wire in this machine", state, wire, "" if at_once else _wire_fix(wire))


def _wire_fix(wire: str) -> str:
    if "ulimit -n" in wire:
        return "ulimit -n 4096; LimitNOFILE=4096 in a systemd unit; --ulimit nofile=4096 for a container"
    return "look at UCX_TLS, and whether /dev/shm can be written to and has room"


def _ucx_fix() -> str:
    install = "pip install 'onepiece[ucx]'"
    named = _libucp.LIBRARY_VARIABLE
    return (
        f"unset {named}, which goes before any other, or let it name a libucp; {install}"
        if os.environ.get(named)
        else install
    )


async def _ucx_wire() -> str:
    """What carries the bytes of a session of this process with itself."""
    transport, options = UcxTransport(), Options(secret=os.urandom(16))

    async def accept(_hello: bytes) -> Accepted:
        return Accepted(1, b"")

    try:
        async with transport.listen(Address("ucx", "127.0.0.1"), options) as listener:
            region = await listener.register(
                "doctor", 4096, accept=accept, on_notify=lambda: None, on_session_lost=lambda _: None
            )
            memory = await transport.connect(region.address, b"", options)
            wire = memory.capabilities.wire
            await memory.close()
            return wire
    except TransportError as error:
        return f"none: {_here(error)}"


def _ucx_memory(root: Path) -> Iterator[Finding]:
    """What memory UCX reads and writes; without a GPU there is none that it would lack."""
    try:
        types = ucx_devices.memory_types(Role.OWNER)
    except _libucp.UcpMissingError:
        return
    text = f"it handles memory of: {ucx_devices.names_of(types)}"
    if _libucp.MemoryType.CUDA in types or not _has_nvidia_driver(root):
        yield Finding("UCX's memory types", State.THERE, text)
        return
    fix = (
        "take a libucp with its module for CUDA: pip install 'onepiece[ucx]', or name another one in"
        f" {_libucp.LIBRARY_VARIABLE}; UCX_TLS must not leave CUDA out; the GPUs must be seen (--gpus all)"
    )
    yield Finding("UCX's memory types", State.MISSING, f"{text}; not of this machine's GPUs", fix)


def _has_nvidia_driver(root: Path) -> bool:
    return (root / "proc/driver/nvidia/version").exists()


def _gpu_direct(root: Path) -> Iterator[Finding]:
    if not _has_nvidia_driver(root):
        yield Finding("GPU-direct", State.MISSING, "there is no NVIDIA driver, so no GPU to reach")
        return
    try:
        found = cuda.gpus()
    except DeviceError as error:
        fix = "install the driver's libcuda.so.1; in a container: start it with the GPUs (--gpus all)"
        text = f"there is an NVIDIA driver, and it cannot be used: {error}"
        yield Finding("GPU-direct", State.MISSING, text, fix)
        return
    if not found:
        fix = "look at CUDA_VISIBLE_DEVICES; in a container: start it with the GPUs (--gpus all)"
        yield Finding("GPU-direct", State.MISSING, "the NVIDIA driver shows no GPU to this process", fix)
    for gpu in found:
        yield _gpu(gpu, has_peermem=(root / "sys/module/nvidia_peermem").exists())


def _gpu(gpu: cuda.Gpu, *, has_peermem: bool) -> Finding:
    """Whether adapters reach a device's memory, and how it is known what they have written."""
    subject, fix = f"GPU-direct cuda:{gpu.ordinal}", ""
    ways = ["by dmabuf, if their driver takes it"] if gpu.exports_dmabuf else []
    ways += ["by nvidia_peermem"] if gpu.takes_peers and has_peermem else []
    if not ways:
        lacks = "it gives out no dmabuf"
        lacks += ", and nvidia_peermem is not loaded" if gpu.takes_peers else ", and is closed to peers"
        if gpu.takes_peers:
            fix = "modprobe nvidia_peermem; or NVIDIA's open kernel modules, which give out dmabufs"
        text = f"{gpu.model}: adapters cannot reach its memory: {lacks}"
        return Finding(subject, State.MISSING, text, fix or "use another GPU")
    if not gpu.orders_writes and not gpu.flushes_writes:
        text = f"{gpu.model}: it holds no inbox, since what adapters write there cannot be made visible"
        return Finding(subject, State.MISSING, text, "a newer driver may be able to flush")
    seen = "ordered by the device" if gpu.orders_writes else "flushed by the host"
    text = f"{gpu.model}: adapters reach its memory {' and '.join(ways)}; their writes are {seen}"
    return Finding(subject, State.THERE, text)


def _shared_memory(root: Path) -> Iterator[Finding]:
    folder = root / "dev/shm"
    place = os.statvfs(folder)
    if place.f_flag & os.ST_RDONLY or not os.access(folder, os.W_OK | os.X_OK):
        yield Finding(
            "shared memory",
            State.MISSING,
            "it cannot be written to by this user; ucx needs it, tcp does not",
            "mount -o remount,rw,mode=1777 /dev/shm; --tmpfs /dev/shm:rw,size=8g for a container",
        )
        return
    size, free = place.f_frsize * place.f_blocks, place.f_frsize * place.f_bavail
    enough = free >= _SHARED_BYTES_WANTED
    fix = "" if enough else "mount -o remount,size=8G /dev/shm; --shm-size=8g for a container"
    text = f"it has {_bytes(size)}, {_bytes(free)} of them free"
    yield Finding("shared memory", State.THERE if enough else State.MISSING, text, fix)


def _process_memory(root: Path) -> Iterator[Finding]:
    """Whether processes of a host read each other's large payloads where they lie."""
    subject = "reading in place"
    mine = os.urandom(16)
    if not OtherMemory(os.getpid()).holds(mine, address_of(memoryview(mine))):
        text = "the system refuses process_vm_readv: large payloads within a host are copied once more"
        yield Finding(subject, State.MISSING, text, "a container's seccomp profile has to allow it")
        return
    scope = root / "proc/sys/kernel/yama/ptrace_scope"
    restricts = scope.exists() and scope.read_text().strip() != "0"
    if restricts and not _has_capability(root, _CAP_SYS_PTRACE):
        text = "Yama lets no process read another one's memory: large payloads are copied once more"
        fix = "sysctl kernel.yama.ptrace_scope=0; or give nodes the capability CAP_SYS_PTRACE"
        yield Finding(subject, State.MISSING, text, fix)
        return
    yield Finding(subject, State.THERE, "receivers of this host read large payloads where they lie")


def _has_capability(root: Path, number: int) -> bool:
    status = (root / "proc/self/status").read_text()
    effective = next((line for line in status.splitlines() if line.startswith("CapEff:")), "CapEff: 0")
    return bool(int(effective.split()[1], 16) >> number & 1)


def _bytes(count: int) -> str:
    if count == resource.RLIM_INFINITY:
        return "unlimited"
    return f"{count >> 20} MiB" if count >> 20 else f"{count >> 10} KiB"
