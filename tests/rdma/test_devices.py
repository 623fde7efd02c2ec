"""Inboxes beside which memory of a device lies, over verbs: two registrations and two keys for one session.

The device is made of the host's memory, since Soft-RoCE reaches no other. What adapters do with its addresses
is what they do with a GPU's under nvidia_peermem; dmabuf and CUDA take no part.
"""

import ctypes
import gc
import mmap

import pytest
from attrs import evolve

from tests.rdma.devices import verbs
from transports.channel import open_receiver, open_sender
from transports.device_memory import DeviceError
from transports.errors import DeviceUnreachable, ProtocolError
from transports.operations import Put
from transports.ring import Geometry
from transports.testing import DEVICE_CHECKS, Check, FakeDevice
from transports.testing.setting import Diary, raised

SHORT = {"any_length_arrives_from_host_and_device", "the_hosts_inbox_takes_no_device_bytes"}


class HostBackedDevice(FakeDevice):
    """A device whose memory adapters can be given, by its address."""

    def __init__(self) -> None:
        super().__init__("pretended:0")
        self._maps: dict[int, mmap.mmap] = {}

    def _take(self, size_bytes: int) -> int:
        memory = mmap.mmap(-1, size_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._maps[address] = memory
        return address

    @property
    def allocations(self) -> int:
        """How much memory was taken and not given back, in pieces."""
        return len(self._maps)

    def give_back(self, address: int) -> None:
        """Free memory."""
        gc.collect()
        self._maps.pop(address).close()

    def check_peer_access(self) -> None:
        """Adapters take its addresses as they are."""

    def _find(self, address: int, length: int) -> tuple[memoryview, int]:  # type: ignore[override]  # as good
        for start, memory in self._maps.copy().items():  # the garbage collector gives memory back at any time
            if start <= address <= address + length <= start + len(memory):
                return memoryview(memory), address - start
        raise DeviceError(f"{self.name} has no {length} bytes at {address:#x}")


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=check.__name__, marks=[] if check.__name__ in SHORT else [pytest.mark.slow])
        for check in DEVICE_CHECKS
    ],
)
async def test_device_inboxes(check: Check) -> None:
    """What the check's docstring says holds over verbs, and all memory is given back."""
    device = HostBackedDevice()
    await check(evolve(verbs(), device=device))
    gc.collect()
    assert device.allocations == 0


async def test_puts_reach_the_devices_memory_and_nothing_else() -> None:
    """A put lands beside the region; one that lies outside is refused before it leaves; the wire says so."""
    device, setting, diary = HostBackedDevice(), verbs(), Diary()
    memory = device.allocate(1 << 16)
    async with setting.transport.listen(setting.address, setting.options) as listener:
        region = await listener.register(
            "inbox",
            4096,
            accept=diary.accept,
            on_notify=diary.on_notify,
            on_session_lost=diary.on_session_lost,
            device=memory,
        )
        session = await setting.transport.connect(region.address, b"", setting.options)
        assert session.capabilities.device_bytes == 1 << 16
        assert session.capabilities.wire.endswith("payload into a device")
        session.reach(device)
        source = device.allocate(3 << 20)
        source.put(0, (b"from the device",))
        await session.put(Put(8, (b"from the host, ", source.span(0, 15))))
        await session.flush()
        assert memory.peek(0, 40) == bytes(8) + b"from the host, from the device" + bytes(2)
        assert not any(region.view), "nothing of it lands in the region"
        await raised(ProtocolError, session.put(Put((1 << 16) - 4, (b"12345",))))


async def test_a_device_that_adapters_do_not_reach() -> None:
    """Neither an inbox nor a sender takes it, and the message says both ways that were tried."""
    setting, device = verbs(), HostBackedDevice()
    geometry = Geometry(8, 1 << 14, 4, head_bytes=64)
    async with setting.transport.listen(setting.address, setting.options) as listener:
        with pytest.raises(
            DeviceUnreachable, match=r"fake:0 through rxe0.*by dmabuf: .*by its own address: "
        ):
            async with open_receiver(listener, "other", geometry, memory=FakeDevice()):
                raise AssertionError("it was opened")
        async with (
            open_receiver(listener, "inbox", geometry, memory=device) as receiver,
            open_sender(
                receiver.address, "a", options=setting.options, transport=setting.transport
            ) as sender,
        ):
            unreachable = FakeDevice()
            span = unreachable.allocate(64).span(0, 64)
            assert "by dmabuf" in str(await raised(DeviceUnreachable, sender.send(span)))
            await sender.send(b"of the host", head=b"h")
            delivery = await receiver.receive()
            assert delivery.on_device is not None
            assert device.read(delivery.on_device.address, 11) == b"of the host"
