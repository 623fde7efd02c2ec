"""How a device's memory is registered with an adapter, which way and with what rights: pyverbs is faked."""

import os
import types
from typing import Any

import pytest

from transports import _pyverbs
from transports._pyverbs import Domain, RegisteredDevice, VerbsError
from transports.device_memory import DeviceError
from transports.testing import FakeDevice

_LOCAL_WRITE, _REMOTE_WRITE = 1, 2


class _AdapterError(Exception):
    """What pyverbs would raise."""


class _Enums:
    IBV_ACCESS_LOCAL_WRITE = _LOCAL_WRITE
    IBV_ACCESS_REMOTE_WRITE = _REMOTE_WRITE


class _Region:
    """A memory region: what it was made of, and whether it is closed."""

    lkey, rkey = 11, 22

    def __init__(self, domain: object, length: int, access: int, **how: int) -> None:
        self.domain, self.length, self.access, self.how = domain, length, access, how
        self.closed = False
        if "dmabuf" in how:
            os.fstat(how["dmabuf"])  # it is open while the kernel looks at it
        _Region.made.append(self)

    made: list["_Region"] = []  # noqa: RUF012 - emptied for each test

    def close(self) -> None:
        self.closed = True


class _Refuses(_Region):
    """An adapter that knows no dmabuf."""

    def __init__(self, *_arguments: object, **_how: int) -> None:
        raise _AdapterError("Failed to register a dma-buf MR. Errno: 95, Operation not supported")


class _Old(_Region):
    """A pyverbs that wants an object of its own where later ones take a descriptor."""

    def __init__(self, *_arguments: object, dmabuf: int) -> None:
        raise TypeError("Argument 'dmabuf' has incorrect type (expected pyverbs.dmabuf.DmaBuf, got int)")


class _Gpu(FakeDevice):
    """A device that can be registered, in ways that a test takes away."""

    def __init__(self) -> None:
        super().__init__("cuda:0")
        self.lacks: set[str] = set()
        self.descriptors: list[int] = []

    def check_remote_writes(self) -> None:
        self._check("ordered writes")

    def dmabuf(self, address: int, size_bytes: int) -> int:
        self._check("dmabuf")
        self.descriptors.append(os.memfd_create("fake dmabuf"))
        return self.descriptors[-1]

    def check_peer_access(self) -> None:
        self._check("nvidia_peermem")

    def _check(self, what: str) -> None:
        if what in self.lacks:
            raise DeviceError(f"cuda:0 has no {what}")


@pytest.fixture
def domain(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A protection domain of an adapter that takes everything."""
    _Region.made.clear()
    regions = types.SimpleNamespace(DmaBufMR=_Region, MR=_Region)
    pyverbs = types.SimpleNamespace(mr=regions, enums=_Enums, error=_AdapterError)
    monkeypatch.setattr(_pyverbs, "load", lambda: pyverbs)
    made = Domain.__new__(Domain)
    object.__setattr__(made, "handle", "the domain's handle")
    return made


@pytest.mark.parametrize(("for_peers", "access"), [(True, _LOCAL_WRITE | _REMOTE_WRITE), (False, 0)])
def test_a_dmabuf_goes_first(domain: Domain, for_peers: bool, access: int) -> None:
    """By dmabuf addresses begin at 0; peers may write and nothing else; the descriptor is closed again."""
    device = _Gpu()
    registered = RegisteredDevice(domain, device.allocate(1 << 14), for_peers=for_peers)
    (region,) = _Region.made
    (descriptor,) = device.descriptors
    assert (region.domain, region.length, region.access) == ("the domain's handle", 1 << 14, access)
    assert region.how == {"dmabuf": descriptor}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert (registered.address, registered.local_key, registered.remote_key) == (0, 11, 22)
    assert device.allocations == 1, "the registration keeps the memory"
    registered.close()
    assert region.closed
    assert device.allocations == 0


@pytest.mark.parametrize("lacking", ["device", "adapter", "old pyverbs", "older pyverbs"])
def test_its_own_address_goes_second(domain: Domain, lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one of them knows no dmabuf, the device's own address is registered; none stays open."""
    device = _Gpu()
    if lacking == "device":
        device.lacks = {"dmabuf"}
    elif lacking == "older pyverbs":
        monkeypatch.delattr(_pyverbs.load().mr, "DmaBufMR")
    else:
        monkeypatch.setattr(_pyverbs.load().mr, "DmaBufMR", _Refuses if lacking == "adapter" else _Old)
    memory = device.allocate(4096)
    registered = RegisteredDevice(domain, memory, for_peers=True)
    (region,) = _Region.made
    assert region.how == {"address": memory.address}
    assert registered.address == memory.address
    for descriptor in device.descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_what_both_ways_lack_is_told(domain: Domain) -> None:
    """The message has the size, the device and each way's reason, and nothing stays behind."""
    device = _Gpu()
    device.lacks = {"dmabuf", "nvidia_peermem"}
    with pytest.raises(VerbsError) as caught:
        RegisteredDevice(domain, device.allocate(4096), for_peers=True)
    assert str(caught.value) == (
        "4096 bytes of cuda:0 cannot be registered: by dmabuf: cuda:0 has no dmabuf; by its own address:"
        " cuda:0 has no nvidia_peermem; see `onepiece doctor`"
    )
    del caught
    assert device.allocations == 0


def test_writes_that_nobody_can_see_are_not_let_in(domain: Domain) -> None:
    """A device whose adapters' writes cannot be made visible takes none of peers; its bytes may be sent."""
    device = _Gpu()
    device.lacks = {"ordered writes"}
    with pytest.raises(VerbsError, match="ordered writes"):
        RegisteredDevice(domain, device.allocate(4096), for_peers=True)
    assert not _Region.made
    RegisteredDevice(domain, device.allocate(4096), for_peers=False).close()
