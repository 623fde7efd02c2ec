"""Checks of channels whose payload ring lies in a device's memory; for transports that take such inboxes.

They ask for ``Setting.device``. Whether the host could reach it is the device's secret: nothing here looks
into its memory but by its own copies.
"""

import asyncio
import gc
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from attrs import frozen

from transports.address import Address
from transports.channel import Delivery, Leniency, Receiver, Sender, open_receiver, open_sender
from transports.device_memory import Device, DeviceSpan
from transports.errors import DeviceUnreachable, MessageTooLarge, RingFull
from transports.fences import STALLED
from transports.memory import Listener, Options, RemoteMemory, Transport
from transports.operations import Bytes, Content, Put
from transports.ring import Geometry
from transports.testing.faults import Faults, FaultyTransport
from transports.testing.forwarding import ForwardingMemory
from transports.testing.setting import LIMIT_SECONDS, Check, Setting, raised

SMALL: Final = Geometry(slot_count=8, payload_bytes=1 << 14, session_count=16, head_bytes=256)
_LENIENT: Final = Leniency(lease_seconds=5.0, slowest_bytes_per_second=1e6)
_STRICT: Final = Leniency(lease_seconds=0.3, slowest_bytes_per_second=1e7)
_FAULTY_MESSAGES: Final = 40
_RNG: Final = random.Random


@frozen(eq=False)
class _Box:
    """A receiver in a device's memory."""

    setting: Setting
    listener: Listener
    receiver: Receiver
    device: Device

    @asynccontextmanager
    async def sender(self, identity: str, transport: Transport | None = None) -> AsyncIterator[Sender]:
        """A sender to it."""
        async with open_sender(
            self.receiver.address,
            identity,
            options=self.setting.options,
            transport=transport or self.setting.transport,
        ) as sender:
            yield sender

    async def next(self) -> Delivery:
        """The next message; an assertion fails if none comes."""
        async with asyncio.timeout(LIMIT_SECONDS):
            return await self.receiver.receive()


@asynccontextmanager
async def _inbox(
    setting: Setting, geometry: Geometry = SMALL, leniency: Leniency = _LENIENT
) -> AsyncIterator[_Box]:
    device = setting.device
    assert device is not None, "these checks need a device: give the setting one"
    async with (
        setting.transport.listen(setting.address, setting.options) as listener,
        open_receiver(listener, "actor/7", geometry, leniency=leniency, memory=device) as receiver,
    ):
        yield _Box(setting, listener, receiver, device)


def _content(delivery: Delivery) -> bytes:
    """The payload, copied off the device."""
    span = delivery.on_device
    assert span is not None
    assert len(delivery.payload) == 0
    return span.device.read(span.address, len(span))


def _body(number: int, length: int) -> bytes:
    return random.Random(number * 100_003 + length).randbytes(length)  # noqa: S311  # anything that differs


def _on(device: Device, data: bytes) -> DeviceSpan:
    """Bytes on the device."""
    memory = device.allocate(max(1, len(data)))
    memory.put(0, (data,))
    device.flush()
    return memory.span(0, len(data))


async def any_length_arrives_from_host_and_device(setting: Setting) -> None:
    """Payloads of no byte, of the whole ring and between, of host and device bytes in turn, arrive equal."""
    async with _inbox(setting) as box, box.sender("a") as sender:
        longest = SMALL.message_bytes_max
        for number, length in enumerate((0, 1, 63, 64, 65, 4096, longest, 0, 100, longest, 777)):
            body, third = _body(number, length), length // 3
            parts: list[Content] = [
                body[:third],
                _on(box.device, body[third : 2 * third]),
                b"",
                memoryview(body)[2 * third :],
            ]
            head = _body(number, min(length, SMALL.head_bytes))
            sending = asyncio.ensure_future(sender.send(parts, kind=number, flags=255 - number, head=head))
            delivery = await box.next()
            assert _content(delivery) == body
            assert delivery.head == head
            assert (delivery.producer, delivery.number) == ("a", number)
            assert (delivery.kind, delivery.flags) == (number, 255 - number)
            box.receiver.release(delivery)
            assert await sending == number


async def spans_are_what_arrives(setting: Setting) -> None:
    """One span of a device arrives as one of the inbox's device, and can be cut without a copy."""
    async with _inbox(setting) as box, box.sender("a") as sender:
        body = _body(1, 3000)
        await sender.send(_on(box.device, body)[8:2008], head=b"shape and so on")
        delivery = await box.next()
        span = delivery.on_device
        assert span is not None
        assert span.device is box.device
        part = span[100:300]
        assert box.device.read(part.address, len(part)) == body[108:308]
        box.receiver.release(delivery)


async def what_is_held_does_not_change(setting: Setting) -> None:
    """A full inbox refuses, laps overwrite nothing that is held, and room comes back in any order."""
    async with _inbox(setting) as box, box.sender("a") as sender:
        held = []
        for number in range(3):
            await sender.send(_on(box.device, _body(number, 4000)))
            held.append(await box.next())
        await raised(RingFull, sender.send(bytes(8000), timeout_seconds=0))
        box.receiver.release(held.pop(1))
        await raised(RingFull, sender.send(bytes(8000), timeout_seconds=0))
        for number in range(3, 40):
            await sender.send(_body(number, 1000 + 7 * number))
            delivery = await box.next()
            assert _content(delivery) == _body(number, 1000 + 7 * number)
            if number == 4:
                assert [_content(old) for old in held] == [_body(0, 4000), _body(2, 4000)]
                for old in held:
                    box.receiver.release(old)
            box.receiver.release(delivery)


async def many_senders_share_the_device(setting: Setting) -> None:
    """Messages of several senders arrive whole, each sender's in order, over many laps of the ring."""
    async with _inbox(setting) as box, asyncio.TaskGroup() as group:

        async def send(identity: str) -> None:
            async with box.sender(identity) as sender:
                for number in range(60):
                    await sender.send(_body(number, 10 + 37 * number), head=identity.encode())
                await sender.drained()

        for identity in "abc":
            group.create_task(send(identity))
        expected = dict.fromkeys("abc", 0)
        for _ in range(180):
            delivery = await box.next()
            number = expected[delivery.producer]
            assert delivery.number == number
            assert delivery.head == delivery.producer.encode()
            assert _content(delivery) == _body(number, 10 + 37 * number)
            expected[delivery.producer] += 1
            box.receiver.release(delivery)


async def what_does_not_fit_is_refused_alone(setting: Setting) -> None:
    """A head or payload beyond its bound is refused before anything is sent, and nothing is pulled."""
    async with _inbox(setting) as box, box.sender("a") as sender:
        head = raised(MessageTooLarge, sender.send(b"x", head=bytes(SMALL.head_bytes + 1)))
        assert "head_bytes" in str(await head)
        too_long = bytes(SMALL.message_bytes_max + 1)
        await raised(MessageTooLarge, sender.send(too_long))
        assert sender.message_bytes_max == SMALL.message_bytes_max
        assert await sender.send(b"fits", head=b"too") == 0
        assert _content(await box.next()) == b"fits"


async def the_hosts_inbox_takes_no_device_bytes(setting: Setting) -> None:
    """Spans and heads for an inbox in the host's memory are refused with what to do; the channel goes on."""
    device = setting.device
    assert device is not None
    async with (
        setting.transport.listen(setting.address, setting.options) as listener,
        open_receiver(listener, "actor/7", Geometry(8, 1 << 14, 4)) as receiver,
        open_sender(receiver.address, "a", options=setting.options, transport=setting.transport) as sender,
    ):
        refused = await raised(DeviceUnreachable, sender.send(_on(device, b"tensor")))
        assert "memory=" in str(refused)
        await raised(MessageTooLarge, sender.send(b"x", head=b"h"))
        assert await sender.send(b"plain") == 0
        assert bytes((await receiver.receive()).payload) == b"plain"


async def _traffic(setting: Setting, transport: Transport, leniency: Leniency) -> Counter[str]:
    """Messages over a wire that misbehaves, each of which must arrive; the fences that it took."""
    async with _inbox(setting, leniency=leniency) as box:

        async def send() -> None:
            async with box.sender("a", transport) as sender:
                for number in range(_FAULTY_MESSAGES):
                    await sender.send(_on(box.device, _body(number, 2000 + number)), head=_head(number))
                await sender.drained()

        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            for number in range(_FAULTY_MESSAGES):
                delivery = await box.next()
                assert (delivery.number, delivery.head) == (number, _head(number))
                assert _content(delivery) == _body(number, 2000 + number)
                box.receiver.release(delivery)
        return box.receiver.fenced


def _head(number: int) -> bytes:
    return b"head %d" % number * 5


async def delays_pieces_and_cuts_damage_nothing(setting: Setting) -> None:
    """Over a wire that dawdles, shuffles the pieces of writes and puts, and breaks, all arrive as sent."""
    faults = Faults(_RNG(3), shuffle_pieces=True, delay_seconds=0.002, cut_chance=0.05, remaining=8)
    await _traffic(setting, FaultyTransport(setting.transport, faults), _STRICT)
    assert {"cut", "cut behind a swap"} & {*faults.happened}


async def puts_that_never_land_are_not_handed_over(setting: Setting) -> None:
    """A slot whose payload never came is no message, though all that the host sees of it is right."""
    faults = _LosesPuts(_RNG(4), remaining=3)
    fenced = await _traffic(setting, FaultyTransport(setting.transport, faults), _STRICT)
    assert faults.happened == ["drop of puts"] * 3
    assert fenced[STALLED] == 3


async def damaged_heads_are_sent_again(setting: Setting) -> None:
    """A head of which one bit is wrong is never handed over."""
    faults = Faults(
        _RNG(5), flip_chance=0.2, remaining=3, flips_wanted=lambda write: write.offset >= SMALL.heads_start
    )
    await _traffic(setting, FaultyTransport(setting.transport, faults), _STRICT)
    assert faults.happened == ["flip"] * 3


async def late_puts_are_waited_for(setting: Setting) -> None:
    """A payload that lands behind its commit word is waited for, and nobody is suspected (fault 43)."""
    patient = Leniency(lease_seconds=100 * LIMIT_SECONDS)
    assert not await _traffic(setting, _LateTransport(setting.transport, Faults(_RNG(6))), patient)


class _LosesPuts(Faults):
    """Drops puts, and nothing else."""

    def strikes(self, chance: float, what: str) -> bool:
        """Now and then, if it is a put."""
        return what == "drop of puts" and super().strikes(0.1, what)


class _LateTransport(FaultyTransport):
    """Opens sessions whose puts land late."""

    async def connect(self, address: Address, hello: bytes, options: Options) -> RemoteMemory:
        """Open one."""
        return _LateMemory(await super().connect(address, hello, options))


class _LateMemory(ForwardingMemory):
    """Keeps puts back until the sender looks whether they were taken."""

    def __init__(self, inner: RemoteMemory) -> None:
        super().__init__(inner)
        self._late: list[Put] = []

    async def put(self, put: Put) -> None:
        """Not now."""
        self._late.append(put)

    async def read(self, offset: int, length: int) -> Bytes:
        """Now."""
        late, self._late = self._late, []
        for put in late:
            await self._inner.put(put)
        return await self._inner.read(offset, length)


async def a_payload_outlives_its_inbox(setting: Setting) -> None:
    """What was not released stays readable when the receiver has closed, for as long as somebody has it."""
    async with _inbox(setting) as box:
        device = box.device
        async with box.sender("a") as sender:
            await sender.send(_on(device, b"still there"))
            delivery = await box.next()
    del box, sender
    gc.collect()
    assert _content(delivery) == b"still there"


DEVICE_CHECKS: Final[tuple[Check, ...]] = (
    any_length_arrives_from_host_and_device,
    spans_are_what_arrives,
    what_is_held_does_not_change,
    many_senders_share_the_device,
    what_does_not_fit_is_refused_alone,
    the_hosts_inbox_takes_no_device_bytes,
    delays_pieces_and_cuts_damage_nothing,
    puts_that_never_land_are_not_handed_over,
    damaged_heads_are_sent_again,
    late_puts_are_waited_for,
    a_payload_outlives_its_inbox,
)
