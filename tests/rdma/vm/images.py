"""What the machine boots: Debian's kernel and an initramfs, made once from the packages that are named here.

Nothing is installed but the packages of ``PACKAGES``; the kernel's package is downloaded and unpacked.
"""

import io
import json
import lzma
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onepiece-rdma-vm"
PYTHON_PATH: Final = CACHE / "python"
"""Holds nothing but a link to Debian's pyverbs: the rest of Debian's Python packages stays out."""

PACKAGES: Final = {
    "qemu-system-x86": "the emulator",
    "busybox-static": "all programs of the initramfs",
    "iproute2": "ip and rdma",
    "python3-pyverbs": "pyverbs and libibverbs",
    "ibverbs-providers": "the user-space side of Soft-RoCE",
    "perftest": "ib_write_bw and ib_write_lat, to measure beside",
}
_KERNEL: Final = "linux-image-amd64"
_MODULES: Final = {
    "files": ("crc32c_generic", "virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay"),
    "rdma": ("crc32_generic", "veth", "sch_netem", "ib_uverbs", "rdma_rxe"),
}
"""What is loaded before and behind the mounting of the host's files; without dependencies."""
_STAMP: Final = CACHE / "made-of.json"
_FORMAT: Final = 2
"""To be raised when the initramfs changes: older images are then made again."""


class NotPossibleError(Exception):
    """This machine cannot do it; the message says what would help."""


def say(text: str) -> None:
    """Tell whoever waits, beside the command's own output."""
    sys.stderr.write(f"rdma vm: {text}\n")
    sys.stderr.flush()


def set_up() -> None:
    """Install packages and make images, where they are missing; raises ``NotPossibleError``."""
    missing = _missing_packages()
    if missing:
        _install(missing)
    if not is_made():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            _make(_download(Path(folder)))
    PYTHON_PATH.mkdir(parents=True, exist_ok=True)
    link = PYTHON_PATH / "pyverbs"
    if not link.is_symlink():
        link.symlink_to("/usr/lib/python3/dist-packages/pyverbs")


def is_made() -> bool:
    """The images are there, in the form that this program makes."""
    try:
        return bool(json.loads(_STAMP.read_text())["format"] == _FORMAT)
    except (OSError, ValueError, KeyError):
        return False


def _missing_packages() -> list[str]:
    if shutil.which("dpkg-query") is None:
        raise NotPossibleError(
            "this is no Debian or derivative: its kernel and packages are what the VM is made of"
        )
    asked = ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *PACKAGES]
    known = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines()
    return [name for name in PACKAGES if f"{name} installed" not in known]


def _install(packages: list[str]) -> None:
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    if os.geteuid() != 0:
        raise NotPossibleError(f"packages are missing and only root may install them: {' '.join(command)}")
    say(f"installing {' '.join(packages)}")
    _apt("update")
    _apt(*command[1:])


def _apt(*arguments: str, folder: Path | None = None) -> None:
    # The sandbox user could not write into a folder of root's.
    command = ["apt-get", "-qq", "-o", "Dpkg::Use-Pty=0", "-o", "APT::Sandbox::User=root", *arguments]
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPossibleError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def _download(folder: Path) -> Path:
    """The kernel's package."""
    asked = ["apt-cache", "depends", "--important", _KERNEL]
    found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    name = re.search(r"Depends: (linux-image-\S+)", found)
    if name is None:
        raise NotPossibleError(
            f"apt knows no {_KERNEL}: run apt-get update; Debian's sources must be configured"
        )
    say(f"downloading {name[1]}")
    _apt("download", name[1], folder=folder)
    return next(folder.glob("*.deb"))


def _make(package: Path) -> None:
    say("making kernel and initramfs")
    kernel, modules = _unpack(package)
    archive = Archive()
    for folder in ("bin", "modules", "job", "dev"):
        archive.folder(folder)
    archive.file("bin/busybox", Path("/bin/busybox").read_bytes(), executable=True)
    archive.file("init", (HERE / "first.sh").read_bytes(), executable=True)
    loaded: list[str] = []
    for stage, wanted in _MODULES.items():
        names = [name for name in in_order(wanted, modules) if name not in loaded]
        loaded += names
        archive.file(f"modules/{stage}", "".join(f"{name}\n" for name in names).encode())
        for name in names:
            archive.file(f"modules/{name}.ko", modules[name])
    (CACHE / "kernel").write_bytes(uncompressed(kernel))
    (CACHE / "initramfs").write_bytes(archive.finish())
    _STAMP.write_text(json.dumps({"format": _FORMAT, "kernel": package.name}))


def _unpack(package: Path) -> tuple[bytes, dict[str, bytes]]:
    """The kernel, and all modules by name."""
    kernel, modules = b"", {}
    with (
        subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as unpacking,
        tarfile.open(fileobj=unpacking.stdout, mode="r|") as tar,
    ):
        for member, name in _files(tar):
            if name.startswith("vmlinuz-"):
                kernel = _content(tar, member)
            elif name.endswith(".ko") and re.search(_WANTED_FOLDERS, member.name):
                modules[name.removesuffix(".ko").replace("-", "_")] = _content(tar, member)
    if not kernel:
        raise NotPossibleError(f"{package.name} holds no kernel")
    return kernel, modules


_WANTED_FOLDERS: Final = (
    r"/(infiniband/(core|sw)|virtio|char|9p|netfs|fscache|overlayfs|crypto|configfs|lib|drivers/net|sched"
    r"|ipv[46])/"
)
"""Where the modules may be that are wanted, and those that they need: the others are not worth reading."""


def _files(tar: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, str]]:
    return ((member, member.name.rpartition("/")[2]) for member in tar if member.isfile())


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None
    return file.read()


def in_order(wanted: Iterable[str], modules: Mapping[str, bytes]) -> list[str]:
    """The names of wanted modules and of all they need, each behind what it needs.

    A module names what it needs in itself.
    """
    order: list[str] = []

    def add(name: str) -> None:
        if name in order:
            return
        if name not in modules:
            raise NotPossibleError(f"the kernel's package has no module {name}")
        named = re.search(rb"\0depends=([^\0]*)\0", modules[name])
        for needed in named[1].decode().split(",") if named else []:
            if needed:
                add(needed.replace("-", "_"))
        order.append(name)

    for name in wanted:
        add(name)
    return order


def uncompressed(image: bytes) -> bytes:
    """The kernel inside a compressed one, which would take long to unpack under emulation; else the image."""
    setup_sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = (1 + setup_sectors) * 512 + offset
    try:
        kernel = lzma.LZMADecompressor().decompress(image[start : start + length])
    except lzma.LZMAError:
        kernel = b""
    return kernel if kernel.startswith(b"\x7fELF") else image


class Archive:
    """An archive of the form that kernels take as initramfs (cpio, newc); several may stand in one file."""

    _FOLDER = 0o040755
    _ALIGNMENT = 4

    def __init__(self) -> None:
        self._out = io.BytesIO()
        self._count = 0

    def folder(self, name: str) -> None:
        """Add an empty folder."""
        self._add(name, b"", self._FOLDER)

    def file(self, name: str, content: bytes, *, executable: bool = False) -> None:
        """Add a file."""
        self._add(name, content, 0o100755 if executable else 0o100644)

    def finish(self) -> bytes:
        """The archive's bytes."""
        self._add("TRAILER!!!", b"", 0)
        return self._out.getvalue()

    def _add(self, name: str, content: bytes, mode: int) -> None:
        self._count += 1
        path = name.encode() + b"\0"
        # inode, mode, user, group, links, time, size, two devices of two numbers each, name, checksum
        numbers = (self._count, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(path), 0)
        self._out.write(b"070701" + b"".join(b"%08x" % number for number in numbers))
        for part in (path, content):
            self._out.write(part)
            self._out.write(bytes(-self._out.tell() % self._ALIGNMENT))
