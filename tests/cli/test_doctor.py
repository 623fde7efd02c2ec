"""``onepiece doctor`` on machines that have much, little or nothing."""

import ipaddress
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from onepiece.cli import main as cli
from onepiece.cli.doctor import text_of
from transports import _libucp, _pyverbs, cuda, diagnosis, ucx_devices
from transports._libucp import MemoryType
from transports.cuda import Gpu
from transports.device_memory import DeviceError
from transports.diagnosis import Finding, State, diagnose
from transports.process_memory import OtherMemory


def by_subject(root: Path) -> dict[str, Finding]:
    """The findings of a machine with this root."""
    return {finding.subject: finding for finding in diagnose(root)}


def test_it_says_what_this_machine_has(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the machine lacks it ends well; each thing that is missing and can be had has its command."""
    assert cli.main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    subjects = {finding["subject"] for finding in findings}
    assert {"system", "locked memory", "pyverbs", "UCX", "shared memory", "reading in place"} <= subjects
    assert any(subject.startswith("GPU-direct") for subject in subjects)
    for finding in findings:
        if finding["state"] == "missing" and finding["subject"] != "GPU-direct":
            assert finding["fix"], finding
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "see `onepiece doctor`" not in text
    assert all(f"{finding['subject']}: " in text for finding in findings)


def test_a_machine_with_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No devices, no files, no pyverbs, no driver, no shared memory: each is named, with what would help."""
    (tmp_path / "sys/class").mkdir(parents=True)
    monkeypatch.setattr(_pyverbs, "load", _no_pyverbs)
    found = by_subject(tmp_path)
    assert "rdma link add rxe0" in found["RDMA devices"].fix
    assert "modprobe ib_uverbs" in found["device files"].fix
    assert found["pyverbs"].fix.startswith("apt-get install -y python3-pyverbs ibverbs-providers && ln -s")
    assert "no NVIDIA driver" in found["GPU-direct"].text
    assert "cannot be looked at" in found["shared memory"].text


@pytest.mark.parametrize(
    ("scope", "capabilities", "there"), [("0", 0, True), ("1", 0, False), ("1", 1 << 19, True), ("", 0, True)]
)
def test_who_may_read_where_payloads_lie(
    scope: str, capabilities: int, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Yama's setting and the capability decide, where the kernel has Yama; a sandbox may refuse it to all."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text(f"Name:\tpython\nCapEff:\t{capabilities:016x}\n")
    if scope:
        (tmp_path / "proc/sys/kernel/yama").mkdir(parents=True)
        (tmp_path / "proc/sys/kernel/yama/ptrace_scope").write_text(f"{scope}\n")
    found = by_subject(tmp_path)["reading in place"]
    assert (found.state is State.THERE) is there
    assert there or "sysctl kernel.yama.ptrace_scope=0" in found.fix
    monkeypatch.setattr(OtherMemory, "holds", lambda *_: False)
    refused = by_subject(tmp_path)["reading in place"]
    assert refused.state is State.MISSING
    assert "seccomp" in refused.fix


@pytest.mark.parametrize("capabilities", [0, 1 << 14])
def test_who_may_lock_memory(capabilities: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit binds those who lack the capability: root, as a rule, has it."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text(f"CapEff:\t{capabilities:016x}\n")
    monkeypatch.setattr("resource.getrlimit", lambda _: (8 << 20, 8 << 20))
    found = by_subject(tmp_path)["locked memory"]
    assert (found.state is State.THERE) is bool(capabilities)
    assert bool(capabilities) is not ("limit 8 MiB" in found.text)


def test_each_look_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one look stumbles over is said, and all others are there; a machine without /sys is named so."""

    def broken() -> object:
        raise RuntimeError("a library that breaks")

    assert "/sys is not mounted" in by_subject(tmp_path)["RDMA devices"].text
    (tmp_path / "sys/class").mkdir(parents=True)
    assert "the kernel knows none" in by_subject(tmp_path)["RDMA devices"].text
    monkeypatch.setattr(_pyverbs, "load", broken)
    found = by_subject(tmp_path)
    assert "cannot be looked at: RuntimeError('a library that breaks')" in found["verbs library"].text
    assert {"system", "locked memory", "UCX", "GPU-direct"} <= found.keys()


def test_shared_memory_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is of no use there: a read-only mount is told, and what is to be done."""
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert "of them free" in by_subject(tmp_path)["shared memory"].text
    found = os.statvfs(tmp_path)
    read_only = SimpleNamespace(f_frsize=1 << 30, f_blocks=8, f_bavail=8, f_flag=found.f_flag | os.ST_RDONLY)
    monkeypatch.setattr(os, "statvfs", lambda _: read_only)
    told = by_subject(tmp_path)["shared memory"]
    assert told.state is State.MISSING
    assert "cannot be written to" in told.text
    assert "remount,rw" in told.fix


def test_a_wire_that_lacks_descriptors_says_how_to_get_some() -> None:
    """What would help is what is missing."""
    assert diagnosis._wire_fix("none: out of file descriptors: raise the limit (ulimit -n)").startswith(
        "ulimit"
    )
    assert "UCX_TLS" in diagnosis._wire_fix("tcp (UCX finds no other)")


def test_a_library_that_was_named_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the variable names no libucp, installing another one would not help: that is said."""
    _libucp.load.cache_clear()
    monkeypatch.setenv(_libucp.LIBRARY_VARIABLE, "/etc/hostname")
    try:
        assert f"unset {_libucp.LIBRARY_VARIABLE}" in by_subject(Path("/"))["UCX"].fix
    finally:
        _libucp.load.cache_clear()


def test_a_kernel_with_odd_entries(tmp_path: Path) -> None:
    """What is no port, no gid or no text in the kernel's tables is passed over."""
    port = tmp_path / "sys/class/infiniband/a/ports/1"
    (port / "gids").mkdir(parents=True)
    (port.parent / "odd").mkdir()
    (tmp_path / "sys/class/infiniband/file").touch()
    for name, data in (("state", b"4: ACTIVE"), ("lid", b"x"), ("link_layer", b"\xff\xfe")):
        (port / name).write_bytes(data)
    for name, data in (("0", b"moon"), ("1", b"fe80::1"), ("odd", b"fe80::2")):
        (port / "gids" / name).write_bytes(data)
    found = [finding.text for finding in diagnose(tmp_path) if finding.subject == "RDMA device"]
    assert any("a [port 1 " in text and "gids 1: fe80::1 ()" in text for text in found), found


def test_pyverbs_that_is_installed_needs_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's pyverbs is there: a link does if it was built for this Python; else that is said."""
    monkeypatch.setattr(_pyverbs, "load", _no_pyverbs)
    installed = tmp_path / diagnosis.DEBIAN_PYVERBS
    installed.mkdir(parents=True)
    assert "version" in by_subject(tmp_path)["pyverbs"].fix
    (installed / f"mr.{sys.implementation.cache_tag}-x86_64-linux-gnu.so").touch()
    assert by_subject(tmp_path)["pyverbs"].fix.startswith(f"ln -s /{diagnosis.DEBIAN_PYVERBS} ")


def test_devices_and_drivers_are_named(tmp_path: Path) -> None:
    """A port with its gids is there; one that is down or has no gid says what would wake it."""
    for name, state, gids in (
        ("a", "4: ACTIVE", ["::ffff:10.0.0.1"]),
        ("b", "1: DOWN", []),
        ("c", "4: ACTIVE", []),
    ):
        port = tmp_path / "sys/class/infiniband" / name / "ports" / "1"
        (port / "gids").mkdir(parents=True)
        for file, text in (
            ("link_layer", "Ethernet"),
            ("state", state),
            ("rate", "25 Gb/sec"),
            ("lid", "0x0"),
        ):
            (port / file).write_text(text)
        for index, gid in enumerate(gids):
            (port / "gids" / str(index)).write_text(ipaddress.IPv6Address(gid).exploded)
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs0").touch()
    findings = diagnose(tmp_path)
    a, b, c = [finding for finding in findings if finding.subject == "RDMA device"]
    assert (a.state, a.fix) == (State.THERE, "")
    assert "10.0.0.1" in a.text
    assert "ip link set" in b.fix
    assert "ip addr add" in c.fix
    found = by_subject(tmp_path)
    assert found["device files"].state is State.THERE


def gpu(**abilities: bool) -> Gpu:
    """A device that can everything but this."""
    able = dict.fromkeys(("takes_peers", "exports_dmabuf", "orders_writes", "flushes_writes"), True)
    return Gpu(0, "NVIDIA X", **(able | abilities))


@pytest.mark.parametrize(
    ("found", "peermem", "state", "text", "fix"),
    [
        (
            gpu(),
            True,
            State.THERE,
            "by dmabuf, if their driver takes it and by nvidia_peermem; .* ordered",
            "",
        ),
        (gpu(exports_dmabuf=False), True, State.THERE, "memory by nvidia_peermem", ""),
        (gpu(orders_writes=False), False, State.THERE, "flushed by the host", ""),
        (gpu(exports_dmabuf=False), False, State.MISSING, "not loaded", "modprobe nvidia_peermem"),
        (gpu(exports_dmabuf=False, takes_peers=False), True, State.MISSING, "closed to peers", "another"),
        (gpu(orders_writes=False, flushes_writes=False), True, State.MISSING, "no inbox", "newer driver"),
    ],
)
def test_gpus_say_how_adapters_reach_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    found: Gpu,
    peermem: bool,
    state: State,
    text: str,
    fix: str,
) -> None:
    """Each GPU that the driver shows has a line: by which ways it is reached, or what is missing for one."""
    _pretend_driver(tmp_path)
    if peermem:
        (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    monkeypatch.setattr(cuda, "gpus", lambda: (found,))
    finding = by_subject(tmp_path)["GPU-direct cuda:0"]
    assert finding.state is state
    assert re.search(text, finding.text)
    assert fix in text_of(finding)


@pytest.mark.parametrize(
    ("types", "has_driver", "state", "text"),
    [
        ({MemoryType.HOST}, False, State.THERE, "memory of: host"),
        ({MemoryType.HOST, MemoryType.CUDA}, True, State.THERE, "memory of: host, cuda"),
        ({MemoryType.HOST}, True, State.MISSING, "memory of: host; not of this machine's GPUs"),
    ],
)
def test_ucx_says_what_memory_it_handles(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    types: set[MemoryType],
    has_driver: bool,
    state: State,
    text: str,
) -> None:
    """The types of memory are listed; where there is a GPU that they leave out, so is what would help."""
    if has_driver:
        _pretend_driver(tmp_path)
    monkeypatch.setattr(ucx_devices, "memory_types", lambda _: frozenset(types))
    finding = by_subject(tmp_path)["UCX's memory types"]
    assert finding.state is state
    assert finding.text.endswith(text)
    assert ("libucp with its module for CUDA" in finding.fix) is (state is State.MISSING)


def test_without_a_libucp_nothing_is_said_of_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That there is no libucp is said once."""
    monkeypatch.setattr(ucx_devices, "memory_types", _no_libucp)
    assert "UCX's memory types" not in by_subject(tmp_path)


def test_a_driver_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel module without the library, or without devices, is told from a machine without a driver."""
    _pretend_driver(tmp_path)
    monkeypatch.setattr(cuda, "gpus", _no_cuda)
    assert "no libcuda" in by_subject(tmp_path)["GPU-direct"].text
    monkeypatch.setattr(cuda, "gpus", tuple)
    assert "CUDA_VISIBLE_DEVICES" in by_subject(tmp_path)["GPU-direct"].fix


def _pretend_driver(root: Path) -> None:
    (root / "proc/driver/nvidia").mkdir(parents=True)
    (root / "proc/driver/nvidia/version").touch()


def _no_cuda() -> object:
    raise DeviceError("no libcuda.so.1")


def _no_libucp(_: object) -> object:
    raise _libucp.UcpMissingError("no libucp")


def _no_pyverbs() -> object:
    raise _pyverbs.VerbsMissingError("pyverbs cannot be imported")
