"""Inboxes in a device's memory over ucx: the real libucp, on memory that it takes for CUDA's."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import pytest
from attrs import evolve

from tests.transports.libucp_at_hand import needs_libucp
from tests.transports.ucx_pretence import CUDA, HOST, Pretence, PretendedDevice, garbage
from transports import ucx_devices, ucx_link
from transports._libucp import UcpError, load
from transports.address import Address
from transports.channel import Leniency, Receiver, Sender, open_receiver, open_sender
from transports.device_memory import MARGIN_BYTES, DeviceError, DeviceSpan
from transports.errors import (
    ChannelClosed,
    ConnectFailed,
    DeviceUnreachable,
    MessageTooLarge,
    PeerLost,
    ProtocolError,
    RingFull,
    UnknownRegion,
)
from transports.memory import Options
from transports.operations import Chain, Put, Write
from transports.ring import Geometry
from transports.testing import DEVICE_CHECKS, Check, FakeDevice, Setting, until
from transports.testing.setting import Diary, raised
from transports.ucx import UcxTransport
from transports.ucx_link import Link, Offer, OfferBeside
from transports.ucx_producer import UcxMemory
from transports.ucx_worker import Role

HERE = Address.parse("ucx://127.0.0.1:0?require=shm")
SECRET = Options(secret=b"of this cluster")
GEOMETRY = Geometry(slot_count=8, payload_bytes=1 << 14, session_count=8, head_bytes=256)


@pytest.fixture
def pretence(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretence]:
    """A device that libucp takes for CUDA's."""
    yield Pretence(PretendedDevice(), monkeypatch)
    ucx_devices.memory_types.cache_clear()


@asynccontextmanager
async def inbox(pretence: Pretence, leniency: Leniency | None = None) -> AsyncIterator[Receiver]:
    """An inbox on the device."""
    async with (
        UcxTransport().listen(HERE, SECRET) as listener,
        open_receiver(listener, "actor/7", GEOMETRY, leniency=leniency, memory=pretence.device) as receiver,
    ):
        yield receiver


def _memory_of(sender: Sender) -> UcxMemory:
    memory = sender._current().memory
    assert isinstance(memory, UcxMemory)
    return memory


def _die(sender: Sender) -> None:
    """End its session as a process's death would: nobody says that all has landed."""
    memory = _memory_of(sender)
    memory._flying[10**9] = (float("inf"), 1)
    memory._end(PeerLost("it died"))


# Over the real library.


@needs_libucp
@pytest.mark.parametrize("check", DEVICE_CHECKS, ids=lambda check: check.__name__)
async def test_device_inboxes(check: Check, pretence: Pretence) -> None:
    """What the check's docstring says holds over ucx, also where regions are retired; all is given back."""
    await check(Setting(UcxTransport(), HERE, SECRET, pretence.device))
    gc.collect()
    assert pretence.device.allocations == 0
    assert pretence.open_maps == 0


@needs_libucp
async def test_the_device_is_mapped_as_what_it_is(pretence: Pretence) -> None:
    """Ring and margin are mapped as CUDA's memory; puts of spans name it; the wire says so."""
    device = pretence.device
    async with inbox(pretence) as receiver, open_sender(receiver.address, "a", options=SECRET) as sender:
        assert receiver.device is device
        ((address, length),) = pretence.mapped
        assert length == GEOMETRY.payload_bytes + MARGIN_BYTES
        assert sender.wire.endswith("payload into a device")
        assert _memory_of(sender).capabilities.device_bytes == GEOMETRY.payload_bytes
        source = device.allocate(64)
        source.put(0, (b"of a tensor",))
        await sender.send((b"host, ", source.span(0, 11)), head=b"shape")
        delivery = await receiver.receive()
        assert delivery.on_device is not None
        assert address <= delivery.on_device.address < address + GEOMETRY.payload_bytes
        assert device.read(delivery.on_device.address, 17) == b"host, of a tensor"
        assert pretence.put_types == [CUDA]
        memory = _memory_of(sender)
        await raised(ProtocolError, memory.put(Put(GEOMETRY.payload_bytes - 4, (b"12345",))))


@needs_libucp
async def test_what_is_sealed_survives_its_region(pretence: Pretence) -> None:
    """A region is retired: what is sealed comes out, though its sender is gone; what is not is sent again.

    What is written into the old memory afterwards shows nowhere; what was handed over before stays as it is.
    """
    device = pretence.device
    async with inbox(pretence) as receiver:
        async with open_sender(receiver.address, "gone", options=SECRET) as gone:
            await gone.send(b"held")
            held = await receiver.receive()
            await gone.send(b"sealed", head=b"1")
            await gone.finish()
        async with open_sender(receiver.address, "stays", options=SECRET) as stays:
            ((address, length),) = pretence.mapped
            pretence.lost = lambda at: address <= at < address + GEOMETRY.payload_bytes
            await stays.send(b"never landed", head=b"2")
            await _memory_of(stays).flush()
            pretence.lost = lambda _: False
            _die(stays)
            await until(lambda: len(pretence.mapped) == 2, "other memory")
            assert held.on_device is not None
            assert device.read(held.on_device.address, 4) == b"held"
            garbage(address + 64 * 2, length - 64 * 2 - MARGIN_BYTES)
            for head, body in ((b"1", b"sealed"), (b"2", b"never landed")):
                async with asyncio.timeout(20):
                    delivery = await receiver.receive()
                assert delivery.head == head
                assert delivery.on_device is not None
                assert device.read(delivery.on_device.address, len(body)) == body
                assert not address <= delivery.on_device.address < address + length
                receiver.release(delivery)
            await stays.drained()
            assert device.read(held.on_device.address, 4) == b"held"
            receiver.release(held)
            del held
            gc.collect()
            assert device.allocations == 1
            assert pretence.open_maps == 1


@needs_libucp
async def test_a_device_without_memory_left_closes_the_inbox(pretence: Pretence) -> None:
    """Where a region must be retired and the device has no other memory, whoever waits is told."""
    device = pretence.device
    async with inbox(pretence) as receiver, open_sender(receiver.address, "a", options=SECRET) as sender:
        device.left = 0
        receiving = asyncio.ensure_future(receiver.receive())
        _die(sender)
        error = await raised(ChannelClosed, receiving)
        assert "needs other memory" in str(error)
        assert "out of memory" in str(error)
        await raised(UnknownRegion, open_sender(receiver.address, "b", options=SECRET).__aenter__())
    assert pretence.open_maps == 0


@needs_libucp
async def test_a_fence_without_memory_left_closes_the_inbox(pretence: Pretence) -> None:
    """The same where a stalled session is fenced: nothing is handed over from memory that may change."""
    strict = Leniency(lease_seconds=0.1, slowest_bytes_per_second=1e9)
    async with (
        inbox(pretence, strict) as receiver,
        open_sender(receiver.address, "a", options=SECRET) as sender,
    ):
        pretence.lost = lambda at: True
        pretence.device.left = 0
        await sender.send(b"never landed")
        error = await raised(ChannelClosed, receiver.receive())
        assert "out of memory" in str(error)


@needs_libucp
async def test_a_way_that_leads_nowhere_is_refused(pretence: Pretence) -> None:
    """A producer whose puts do not come to the device is told so when it connects; others notice nothing."""
    async with inbox(pretence) as receiver, open_sender(receiver.address, "a", options=SECRET) as sender:
        ((address, _),) = pretence.mapped
        pretence.lost = lambda at: at >= address + GEOMETRY.payload_bytes
        error = await raised(ConnectFailed, open_sender(receiver.address, "b", options=SECRET).__aenter__())
        assert "has not come to the memory of cuda:0" in str(error)
        pretence.lost = lambda _: False
        await sender.send(b"goes on")
        assert (await receiver.receive()).number == 0
        assert len(pretence.mapped) == 1, "the region was not retired"


@needs_libucp
async def test_without_a_wire_there_is_no_way_to_the_device(
    pretence: Pretence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session whose bytes would go by the connection is refused: nothing is taken to the host instead."""
    async with inbox(pretence) as receiver:
        monkeypatch.setattr(Link, "prove", _no_way)
        address = evolve(receiver.address, options={})
        error = await raised(ConnectFailed, open_sender(address, "b", options=SECRET).__aenter__())
        assert "in a device's memory" in str(error)
        assert "UNSUPPORTED" in str(error)
        assert len(pretence.mapped) == 1, "the region was not retired"


async def _no_way(_: Link) -> None:
    raise UcpError(-22, "ucp_put_nbx")


@needs_libucp
async def test_regions_with_a_device_need_a_keeper(pretence: Pretence) -> None:
    """Who registers memory of a device without saying what is whole in it is refused."""
    memory = pretence.device.allocate(4096)
    async with UcxTransport().listen(HERE, SECRET) as listener:
        with pytest.raises(ValueError, match="retires regions"):
            await listener.register(
                "x",
                4096,
                accept=Diary().accept,
                on_notify=lambda: None,
                on_session_lost=print,
                device=memory,
            )


# Without CUDA.


@needs_libucp
def test_libucp_says_what_memory_it_handles() -> None:
    """A real context handles memory of the host, and of nothing that is not there."""
    ucx_devices.memory_types.cache_clear()
    types = ucx_devices.memory_types(Role.OWNER)
    assert HOST in types
    assert ucx_devices.names_of(frozenset({CUDA, HOST})) == "host, cuda"


@needs_libucp
async def test_what_no_sender_could_reach_is_refused(pretence: Pretence) -> None:
    """An address that asks for tcp has no inbox on a device: it would open, and refuse every sender."""
    here = Address.parse("ucx://127.0.0.1:0?require=tcp")
    async with UcxTransport().listen(here, SECRET) as listener:
        with pytest.raises(DeviceUnreachable, match=r"nothing gets there over tcp.*leave out require=tcp"):
            async with open_receiver(listener, "inbox", GEOMETRY, memory=pretence.device):
                raise AssertionError("it was opened")


@needs_libucp
async def test_a_libucp_without_cuda_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an inbox on a device nor bytes of one are taken, with the library's name and what it lacks."""
    device = PretendedDevice()
    ucx_devices.memory_types.cache_clear()
    monkeypatch.setattr(type(load()), "memory_types", lambda *_: frozenset({HOST}))
    async with UcxTransport().listen(HERE, SECRET) as listener:
        with pytest.raises(DeviceUnreachable, match=r"handles memory of host, and none.*libuct_cuda\.so"):
            async with open_receiver(listener, "inbox", GEOMETRY, memory=device):
                raise AssertionError("it was opened")
    gc.collect()
    await asyncio.sleep(0)  # the loop lets go of what was awaited last
    assert device.allocations == 0
    ucx_devices.memory_types.cache_clear()


@needs_libucp
async def test_bytes_of_other_devices_are_refused(pretence: Pretence) -> None:
    """What libucp does not know as a device is no source of puts; the message and the channel go on."""
    async with inbox(pretence) as receiver, open_sender(receiver.address, "a", options=SECRET) as sender:
        other = FakeDevice().allocate(64).span(0, 64)
        assert "fake:0 is none" in str(await raised(DeviceUnreachable, sender.send(other)))
        await raised(MessageTooLarge, sender.send(bytes(1 << 15)))
        await sender.send(bytes(8000))
        await raised(RingFull, sender.send(bytes(16000), timeout_seconds=0))
        assert (await receiver.receive()).number == 0


# Without any library.


def test_offers_of_a_device_come_back() -> None:
    """What is told about a device's memory is read as it was written; what cannot be one is refused."""
    beside = OfferBeside(memory=1 << 46, size_bytes=1 << 34, proof_at=7 << 40, proof=b"p" * 16, key=b"k2")
    offer = Offer(memory=1 << 40, key=b"key", doorbell=b"d" * 16, worker=b"worker", beside=beside)
    body = memoryview(offer.to_bytes())
    assert Offer.parse(offer.memory, 3, body, offer.beside_bytes) == offer
    for length in (1, 40, len(body), 1 << 63):
        with pytest.raises(ProtocolError):
            Offer.parse(offer.memory, 3, body, length)


class _Recorder:
    """A worker and its endpoint whose puts stay under way until they are told to arrive."""

    def __init__(self) -> None:
        self.puts: list[bytes] = []
        self.flushes: list[Callable[[int], None]] = []
        self.rung = 0

    def connect(self, _address: bytes, _on_failure: object) -> "_Recorder":
        return self

    def put(self, data: bytes, *_: object) -> None:
        self.puts.append(bytes(data))

    def put_span(self, span: DeviceSpan, *_: object) -> None:
        with span.device.current():
            self.puts.append(span.to_host())

    def flush(self, done: Callable[[int], None]) -> bool:
        self.flushes.append(done)
        return False

    def ring(self, _key: bytes) -> None:
        self.rung += 1

    def fence(self) -> None:
        """Is asked for between writes."""

    def pump(self) -> None:
        """Nothing moves by itself."""

    def release(self) -> None:
        """Nobody uses it any more."""

    close = release


def _link(failures: list[Any]) -> tuple[Link, _Recorder]:
    recorder = _Recorder()
    beside = OfferBeside(0, 4096, 4096, b"p" * 16, b"k")
    offer = Offer(0, b"k", b"d" * 16, b"w", beside)
    return Link(recorder, offer, failures.append), recorder  # type: ignore[arg-type]  # as good


def test_a_seal_leaves_when_its_payload_is_there() -> None:
    """Behind a put into a device's memory nothing leaves before it has arrived: no seal, no commit word."""
    link, wire = _link([])
    landed: list[str] = []
    link.put(Put(0, (b"payload", b" in two")), lambda: landed.append("payload"))
    link.put(Put(64, (b"seal",)), lambda: landed.append("seal"))
    link.write(Chain((Write(0, (b"commit",)),)), lambda: landed.append("commit"))
    assert wire.puts == [b"payload", b" in two"]
    wire.flushes.pop()(0)
    assert (wire.puts[2:], landed) == ([b"seal"], ["payload"])
    wire.flushes.pop()(0)
    assert (wire.puts[3:], landed, wire.rung) == ([b"commit"], ["payload", "seal"], 0)
    wire.flushes.pop()(0)
    assert (landed, wire.rung) == (["payload", "seal", "commit"], 1)


@pytest.mark.parametrize("how", ["fails", "closed"])
def test_nothing_follows_a_put_that_did_not_arrive(how: str) -> None:
    """Where a payload fails, or the session ends first, its seal never leaves."""
    failures: list[UcpError] = []
    link, wire = _link(failures)
    landed: list[str] = []
    link.put(Put(0, (b"payload",)), lambda: landed.append("payload"))
    link.put(Put(64, (b"seal",)), lambda: landed.append("seal"))
    if how == "closed":
        link.close()
    wire.flushes.pop()(-25 if how == "fails" else 0)
    assert wire.puts == [b"payload"]
    assert landed == []
    assert len(failures) == (how == "fails")


def test_devices_that_cannot_show_what_was_put_are_refused() -> None:
    """Memory in which the host would never know what has come is not mapped."""

    class Blind(PretendedDevice):
        def check_remote_writes(self) -> None:
            raise DeviceError("cuda:0 orders nothing")

        def _take(self, size_bytes: int) -> int:
            return 4096

        def give_back(self, address: int) -> None:
            """Nothing was taken."""

    with pytest.raises(DeviceError, match="orders nothing"):
        ucx_devices.MappedDevice(Blind().allocate(64))


class _Fails(FakeDevice):
    """A CUDA device that nothing can be done with any more, once ``left`` calls have been made."""

    kind = "cuda"
    left = 0

    def current(self) -> nullcontext[None]:
        """Its context cannot be made current."""
        if not self.left:
            raise DeviceError("cuda:0 has fallen off the bus")
        self.left -= 1
        return nullcontext()


def test_a_sender_whose_device_fails_puts_no_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session ends with the driver's reason, and what was to follow the payload never leaves."""
    monkeypatch.setattr(ucx_link, "type_of", lambda *_: CUDA)
    failures: list[UcpError | DeviceError] = []
    link, wire = _link(failures)
    link.put(Put(0, (_Fails().allocate(64).span(0, 64),)), lambda: None)
    link.put(Put(64, (b"seal",)), lambda: None)
    link.write(Chain((Write(0, (b"commit",)),)), lambda: None)
    assert [str(each) for each in failures] == ["cuda:0 has fallen off the bus"]
    assert (wire.puts, wire.rung) == ([], 0)


@needs_libucp
@pytest.mark.parametrize("left", [0, 1], ids=["before", "on the way"])
async def test_a_sender_whose_device_fails_is_told(left: int, pretence: Pretence) -> None:
    """Nothing goes from there in any session, so ``send`` says it; other senders notice nothing."""
    device = _Fails()
    device.left = left
    async with inbox(pretence) as receiver, open_sender(receiver.address, "b", options=SECRET) as other:
        async with open_sender(receiver.address, "a", options=SECRET) as sender:
            told = await raised(DeviceUnreachable, sender.send(device.allocate(64).span(0, 64)))
            assert "bytes on fake:0 cannot be sent over UCX: cuda:0 has fallen off the bus" in str(told)
            if not left:
                assert await sender.send(b"plain") == 0
                receiver.release(await receiver.receive())
        assert await other.send(b"plain") == 0


@needs_libucp
async def test_a_device_that_is_gone_does_not_keep_its_region_open(
    pretence: Pretence, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the device fails as its memory is taken from adapters, that is logged, and the inbox closes."""

    def gone() -> nullcontext[None]:
        raise DeviceError("cuda:0 has fallen off the bus")

    async with inbox(pretence):
        monkeypatch.setattr(pretence.device, "current", gone)
    assert "fallen off the bus" in caplog.text
