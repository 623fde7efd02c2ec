"""What is taken over when the device memory of an inbox is given up: without any wire that would need it."""

from itertools import count

from transports.address import Address
from transports.channel import open_receiver, open_sender
from transports.local import LocalTransport
from transports.memory import Options, RemoteMemory
from transports.operations import Bytes, Put
from transports.ring import Geometry
from transports.testing import FakeDevice
from transports.testing.forwarding import ForwardingMemory

GEOMETRY = Geometry(slot_count=4, payload_bytes=1 << 10, session_count=4, head_bytes=64)
_NAMES = count()


class _Diarist(FakeDevice):
    """Notes what is read and copied, by the place in the memory that was taken first."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, int]] = []

    def read(self, address: int, length: int) -> bytes:
        self._note("read", address, length)
        return super().read(address, length)

    def copy(self, to: int, address: int, length: int) -> None:
        self._note("copy", address, length)
        self._land(to, super().read(address, length))

    def _note(self, what: str, address: int, length: int) -> None:
        self.calls.append((what, address - min(self._memory), length))


class _Unsealed(ForwardingMemory):
    """Keeps back the seals of some messages, which are the second put of each."""

    kept_back: frozenset[int] = frozenset()

    def __init__(self, inner: RemoteMemory) -> None:
        super().__init__(inner)
        self._puts = 0

    async def put(self, put: Put) -> None:
        number, is_seal = divmod(self._puts, 2)
        self._puts += 1
        if not is_seal or number not in self.kept_back:
            await super().put(put)


class _Transport(LocalTransport):
    async def connect(self, address: Address, hello: bytes, options: Options) -> RemoteMemory:
        return _Unsealed(await super().connect(address, hello, options))


def _body(number: int) -> Bytes:
    return bytes([number + 1]) * 100


async def test_only_what_is_sealed_is_taken_over() -> None:
    """From the cursor on, each seal is read before its payload is copied; the rest is zero in what follows.

    One message is held, the next has no seal, and the last one has all.
    """
    device = _Diarist()
    _Unsealed.kept_back = frozenset({2})
    address = Address.parse(f"local://apart-{next(_NAMES)}")
    async with (
        LocalTransport().listen(address, Options()) as listener,
        open_receiver(listener, "inbox", GEOMETRY, memory=device) as receiver,
        open_sender(receiver.address, "a", transport=_Transport()) as sender,
    ):
        for number in range(3):
            await sender.send(_body(number), head=b"%d" % number)
        first, held = await receiver.receive(), await receiver.receive()
        receiver.release(first)
        await sender.send(bytes(range(128)) * 3, head=b"3")
        keeper = receiver._device_ring
        assert keeper is not None
        old, copy_of_region = keeper.memory, memoryview(bytes(receiver._open_region().view))
        device.calls.clear()
        fresh = keeper.renew(copy_of_region)
        assert keeper.memory is fresh
        # Each takes two granules and one for its seal; the last one six and one.
        assert device.calls == [("read", 512, 8), ("read", 1024 - 64, 8), ("copy", 576, 448)]
        assert device.read(fresh.address + 576, 384) == bytes(range(128)) * 3
        assert not any(device.read(fresh.address, 576))
        assert held.on_device is not None
        assert device.read(held.on_device.address, 100) == _body(1)
        old.put(0, (bytes(GEOMETRY.payload_bytes),))
        assert device.read(fresh.address + 576, 384) == bytes(range(128)) * 3


async def test_a_second_renewal_starts_from_the_first() -> None:
    """What was taken over is taken over again."""
    device = FakeDevice(late=True)
    address = Address.parse(f"local://apart-{next(_NAMES)}")
    async with (
        LocalTransport().listen(address, Options()) as listener,
        open_receiver(listener, "inbox", GEOMETRY, memory=device) as receiver,
        open_sender(receiver.address, "a", transport=LocalTransport()) as sender,
    ):
        await sender.send(b"payload", head=b"h")
        keeper = receiver._device_ring
        assert keeper is not None
        for _ in range(2):
            keeper.renew(receiver._open_region().view)
        delivery = await receiver.receive()
        assert delivery.on_device is not None
        assert device.read(delivery.on_device.address, 7) == b"payload"
        assert keeper.memory.address <= delivery.on_device.address < keeper.memory.address + 1024
