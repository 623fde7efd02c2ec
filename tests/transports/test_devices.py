"""Inboxes in a device's memory, on a device whose memory the host cannot reach by itself."""

import asyncio
import gc
from itertools import count

import pytest

from transports.address import Address
from transports.channel import open_receiver, open_sender
from transports.device_memory import DeviceError
from transports.errors import ChannelClosed, DeviceUnreachable, ProtocolError, UnknownScheme
from transports.local import LocalTransport
from transports.memory import Options
from transports.operations import Put
from transports.registry import transport_for
from transports.ring import Geometry
from transports.testing import DEVICE_CHECKS, Check, FakeDevice, Setting
from transports.testing.setting import Diary

_NAMES = count()
GEOMETRY = Geometry(slot_count=8, payload_bytes=1 << 14, session_count=4, head_bytes=256)


def _local(device: FakeDevice) -> Setting:
    return Setting(LocalTransport(), Address.parse(f"local://devices-{next(_NAMES)}"), device=device)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("check", DEVICE_CHECKS, ids=lambda check: check.__name__)
async def test_device_inboxes(check: Check, late: bool) -> None:
    """What the check's docstring says holds, also where writes show only when they are flushed."""
    device = FakeDevice(late=late)
    await check(_local(device))
    gc.collect()
    assert device.allocations == 0, "all memory is given back"


async def test_memory_goes_with_its_last_holder() -> None:
    """The device's memory stays for a span that is held after everything was closed, and goes with it."""
    device = FakeDevice()
    setting = _local(device)
    async with (
        setting.transport.listen(setting.address, Options()) as listener,
        open_receiver(listener, "inbox", GEOMETRY, memory=device) as receiver,
        open_sender(receiver.address, "a", transport=setting.transport) as sender,
    ):
        assert receiver.device is device
        await sender.send(b"kept", head=b"h")
        delivery = await receiver.receive()
    del receiver, sender, listener
    gc.collect()
    assert device.allocations == 1
    span = delivery.on_device
    assert span is not None
    assert device.read(span.address, len(span)) == b"kept"
    del delivery, span
    gc.collect()
    assert device.allocations == 0


@pytest.mark.parametrize("scheme", ["tcp", "ucx"])
async def test_other_transports_refuse(scheme: str) -> None:
    """Where no device is reached, an inbox on one is refused with what to do; never taken to the host."""
    device = FakeDevice()
    address = Address.parse(f"{scheme}://127.0.0.1:0")
    try:
        transport = transport_for(address)
    except UnknownScheme as missing:
        pytest.skip(f"no libucp: {missing}")
    async with transport.listen(address, Options(secret=b"s")) as listener:
        with pytest.raises(DeviceUnreachable, match=r"fake:0.*verbs://"):
            async with open_receiver(listener, "inbox", GEOMETRY, memory=device):
                raise AssertionError("it was opened")
    gc.collect()
    await asyncio.sleep(0)  # the loop lets go of what was awaited last
    assert device.allocations == 0


async def test_memory_and_geometry_belong_together() -> None:
    """Heads without a device, a device without heads, and names of no device are each refused."""
    setting = _local(FakeDevice())
    plain = Geometry(8, 1 << 14, 4)
    async with setting.transport.listen(setting.address, Options()) as listener:
        for geometry, memory, what in (
            (GEOMETRY, "host", "head_bytes is 256"),
            (plain, "cuda:0", "needs room"),
            (GEOMETRY, "cuda", "expected 'host'"),
            (GEOMETRY, "gpu:0", "expected 'host'"),
        ):
            with pytest.raises(ValueError, match=what):
                async with open_receiver(listener, "inbox", geometry, memory=memory):
                    raise AssertionError("it was opened")


async def test_puts_outside_end_the_session() -> None:
    """Bytes that would land outside the device's memory land nowhere, and end the session."""
    device = FakeDevice()
    setting, diary, memory = _local(device), Diary(), device.allocate(4096)
    async with setting.transport.listen(setting.address, Options()) as listener:
        region = await listener.register(
            "inbox",
            256,
            accept=diary.accept,
            on_notify=diary.on_notify,
            on_session_lost=diary.on_session_lost,
            device=memory,
        )
        session = await setting.transport.connect(region.address, b"", Options())
        assert session.capabilities.device_bytes == 4096
        await session.put(Put(4090, (b"123456",)))
        assert memory.peek(4090, 6) == b"123456"
        with pytest.raises(ProtocolError, match="outside"):
            await session.put(Put(4090, (b"1234567",)))
        with pytest.raises(ProtocolError):
            await session.put(Put(0, (b"x",)))
        assert diary.lost == [1]


def test_what_was_seen_is_visible_to_all() -> None:
    """A look flushes before, so that it sees what is there; and behind, for what others might not see yet."""
    device = _Diarist()
    device.allocate(64).peek(0, 8)
    assert device.calls == ["flush", "read", "flush"]


class _Diarist(FakeDevice):
    """Notes what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def flush(self) -> None:
        self.calls.append("flush")

    def read(self, address: int, length: int) -> bytes:
        self.calls.append("read")
        return super().read(address, length)


async def test_a_device_that_fails_ends_its_channel() -> None:
    """When the device fails under the receiver, whoever waits is told, with the device's reason."""
    device = FakeDevice()
    setting = _local(device)

    def broken(address: int, length: int) -> bytes:
        raise DeviceError("fake:0 has fallen off the bus")

    async with (
        setting.transport.listen(setting.address, Options()) as listener,
        open_receiver(listener, "inbox", GEOMETRY, memory=device) as receiver,
        open_sender(receiver.address, "a", transport=setting.transport) as sender,
    ):
        device.read = broken  # type: ignore[method-assign]  # what is tested
        await sender.send(b"payload")
        with pytest.raises(ChannelClosed, match="fallen off the bus"):
            await receiver.receive()
