"""Boots the machine, runs one command in it, and passes on what the command says and how it ends."""

import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from tests.rdma.vm.images import CACHE, HERE, PYTHON_PATH, Archive, NotPossibleError, is_made, say

TIMED_OUT: Final = 124
FAILED: Final = 125

_PORTS: Final = ("out", "err", "status")
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LOOK_SECONDS: Final = 0.1
_LOG_CHARACTERS_SHOWN: Final = 4000
_KERNEL_ARGUMENTS: Final = (
    "console=ttyS0 quiet rdinit=/init panic=-1 oops=panic tsc=reliable mitigations=off nokaslr"
    " cryptomgr.notests random.trust_cpu=on"
)
_PASSED_ON: Final = ("PATH", "HOME", "LANG", "VIRTUAL_ENV", "OMP_NUM_THREADS", "HF_HUB_OFFLINE")
_PASSED_ON_PREFIXES: Final = ("ONEPIECE_", "PYTEST_", "UCX_")


def run(
    command: Sequence[str],
    *,
    timeout_seconds: float,
    processors: int,
    memory_mib: int,
    counted: bool = False,
) -> int:
    """Run a command in the machine, in the current folder.

    Args:
        command: The program and its arguments.
        timeout_seconds: Before the machine is switched off.
        processors: Virtual ones; under emulation one is the fastest.
        counted: The machine's clock goes by what its only processor has executed, a nanosecond for each
            instruction: how busy the host is does not show in what is measured inside.
        memory_mib: Of the machine; what the command writes to files takes up to three quarters of it.

    Returns:
        The command's exit status; ``TIMED_OUT``; ``FAILED`` if the machine failed, whose log is shown then.

    Raises:
        NotPossibleError: It is not set up.
    """
    if not is_made():
        raise NotPossibleError("there are no images yet: run `python -m tests.rdma.vm setup` first")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="onepiece-rdma-vm-") as name:
        folder = Path(name)
        for port in (*_PORTS, "log"):
            (folder / port).touch()
        initramfs = (CACHE / "initramfs").read_bytes() + _job(command)
        (folder / "initramfs").write_bytes(initramfs)
        arguments = _qemu(folder, processors, memory_mib, counted=counted)
        with (
            _following(folder / "out", sys.stdout.buffer) as out,
            _following(folder / "err", sys.stderr.buffer) as err,
            subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=2,
                preexec_fn=_die_with_parent,  # noqa: PLW1509  # one system call, and no lock is taken
            ) as machine,
        ):
            try:
                while machine.poll() is None and time.monotonic() - began < timeout_seconds:
                    time.sleep(_LOOK_SECONDS)
                    out.copy()
                    err.copy()
            finally:
                in_time = machine.poll() is not None
                machine.kill()
        return _outcome(folder, time.monotonic() - began, in_time=in_time)


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _outcome(folder: Path, seconds: float, *, in_time: bool) -> int:
    status, log = (folder / "status").read_text().strip(), (folder / "log").read_text(errors="replace")
    if status:
        ready = re.search(r"vm: ready after ([0-9.]+) s", log)
        boot = ready[1] if ready else "?"
        say(f"the command ended with {status}; {seconds:.1f} s, {boot} s of them to boot")
        return int(status)
    sys.stderr.write(log[-_LOG_CHARACTERS_SHOWN:])
    say("the machine ended without a status" if in_time else f"switched off after {seconds:.0f} s")
    return FAILED if in_time else TIMED_OUT


def _job(command: Sequence[str]) -> bytes:
    """What the machine is to do, as an archive behind the initramfs."""
    given = {name: value for name, value in os.environ.items() if _is_passed_on(name)}
    paths = [str(PYTHON_PATH), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment: Mapping[str, str] = given | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        "ONEPIECE_EMULATED": "1",
    }
    lines = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    lines += [
        "ulimit -l unlimited",
        f"cd {shlex.quote(str(Path.cwd()))} || exit 126",
        f"exec {shlex.join(command)}",
    ]
    archive = Archive()
    archive.file("job/second.sh", (HERE / "second.sh").read_bytes())
    archive.file("job/command.sh", "\n".join([*lines, ""]).encode())
    return archive.finish()


def _is_passed_on(name: str) -> bool:
    return name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)


def _qemu(folder: Path, processors: int, memory_mib: int, *, counted: bool) -> list[str]:
    arguments = ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    arguments += ["-machine", "pc", "-accel", f"tcg,thread={'single' if counted else 'multi'},tb-size=256"]
    arguments += ["-cpu", "max"]
    if counted:
        arguments += ["-icount", "shift=0,sleep=on"]
    arguments += ["-smp", str(processors), "-m", str(memory_mib)]
    arguments += [
        "-kernel",
        str(CACHE / "kernel"),
        "-initrd",
        str(folder / "initramfs"),
        "-append",
        _KERNEL_ARGUMENTS,
    ]
    arguments += ["-chardev", f"file,id=log,path={folder}/log", "-serial", "chardev:log"]
    arguments += ["-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"]
    arguments += ["-device", "virtio-9p-pci,fsdev=host,mount_tag=host", "-device", "virtio-serial-pci"]
    for port in _PORTS:
        arguments += ["-chardev", f"file,id={port},path={folder}/{port}"]
        arguments += ["-device", f"virtserialport,chardev={port},name={port}"]
    return arguments


class _Follower:
    """Copies what is added to a file."""

    def __init__(self, source: BinaryIO, target: BinaryIO) -> None:
        self._source = source
        self._target = target

    def copy(self) -> None:
        """Copy what came since the last call."""
        if data := self._source.read():
            self._target.write(data)
            self._target.flush()


@contextmanager
def _following(path: Path, target: BinaryIO) -> Iterator[_Follower]:
    with path.open("rb") as source:
        follower = _Follower(source, target)
        yield follower
        follower.copy()
