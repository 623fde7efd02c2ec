"""Checks of channels over a sound wire: messages, back-pressure, closing, cancellation."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from attrs import frozen

from transports.channel import (
    Delivery,
    Leniency,
    Patience,
    Receiver,
    Sender,
    Terms,
    Undelivered,
    open_receiver,
    open_sender,
)
from transports.errors import (
    ChannelClosed,
    HandshakeRefused,
    LayoutMismatch,
    MessageTooLarge,
    PeerLost,
    RingFull,
)
from transports.introductions import Hello
from transports.memory import Listener, Transport
from transports.operations import Bytes
from transports.ring import Geometry
from transports.testing.setting import LIMIT_SECONDS, Check, Setting, raised, until

SMALL: Final = Geometry(slot_count=8, payload_bytes=1 << 14, session_count=16)
PULLED_BYTES: Final = 1 << 18
"""What receivers pull and senders lend at a time."""
LENIENT: Final = Leniency(lease_seconds=5.0, slowest_bytes_per_second=1e6)


@frozen(eq=False)
class Inbox:
    """A receiver, and a way to open senders to it."""

    setting: Setting
    listener: Listener
    receiver: Receiver

    @asynccontextmanager
    async def sender(
        self,
        identity: str,
        *,
        transport: Transport | None = None,
        patience: Patience | None = None,
        exported_bytes_max: int = PULLED_BYTES,
    ) -> AsyncIterator[Sender]:
        """A sender of this identity."""
        async with open_sender(
            self.receiver.address,
            identity,
            options=self.setting.options,
            patience=patience,
            terms=Terms(exported_bytes_max=exported_bytes_max),
            transport=transport or self.setting.transport,
        ) as sender:
            yield sender


@asynccontextmanager
async def inbox(
    setting: Setting,
    geometry: Geometry = SMALL,
    leniency: Leniency = LENIENT,
    *,
    pulled_bytes_max: int = PULLED_BYTES,
) -> AsyncIterator[Inbox]:
    """A listener with one receiver."""
    async with (
        setting.transport.listen(setting.address, setting.options) as listener,
        open_receiver(
            listener, "actor/7", geometry, leniency=leniency, pulled_bytes_max=pulled_bytes_max
        ) as receiver,
    ):
        yield Inbox(setting, listener, receiver)


def _body(message: Undelivered) -> bytes:
    """The only buffer of a message that was not delivered."""
    (buffer,) = message.buffers
    assert isinstance(buffer, bytes | bytearray | memoryview)
    return bytes(buffer)


async def next_of(receiver: Receiver) -> Delivery:
    """The next message; an assertion fails if none comes."""
    async with asyncio.timeout(LIMIT_SECONDS):
        return await receiver.receive()


async def any_length_arrives_whole(setting: Setting) -> None:
    """Messages of no byte, of a ring's whole length and between, in one and many buffers, arrive equal."""
    async with inbox(setting) as box, box.sender("a") as sender:
        lengths = [0, 1, 63, 64, 65, 4096, SMALL.payload_bytes, 0, 100, SMALL.payload_bytes, 777]
        for number, length in enumerate(lengths):
            body = bytes((index * 7 + number) % 256 for index in range(length))
            third = length // 3
            parts: list[Bytes] = [
                body[:third],
                memoryview(body)[third : 2 * third],
                b"",
                bytearray(body[2 * third :]),
            ]
            sending = asyncio.ensure_future(sender.send(parts, kind=number, flags=255 - number))
            delivery = await next_of(box.receiver)
            assert bytes(delivery.payload) == body
            assert (delivery.producer, delivery.number) == ("a", number)
            assert (delivery.kind, delivery.flags) == (number, 255 - number)
            assert box.receiver.depth == 1
            box.receiver.release(delivery)
            assert box.receiver.depth == 0
            assert await sending == number
        await sender.drained()
        assert sender.delivered == len(lengths)
        assert sender.undelivered() == []


async def small_messages_all_arrive(setting: Setting, count: int = 1000) -> None:
    """Many messages of 1 to 64 bytes, one behind the other: each arrives once, in order (fault 63)."""

    def body(number: int) -> bytes:
        return (number.to_bytes(4, "little") * 16)[: number % 64 + 1]

    async with inbox(setting) as box, box.sender("a") as sender:

        async def send() -> None:
            for number in range(count):
                assert await sender.send(body(number)) == number

        sending = asyncio.ensure_future(send())
        for number in range(count):
            delivery = await next_of(box.receiver)
            assert (delivery.number, bytes(delivery.payload)) == (number, body(number))
            box.receiver.release(delivery)
        await sending


async def messages_are_delivered_to_whoever_asks(setting: Setting) -> None:
    """Messages go to ``take`` in order, those that came before too, until it is cancelled or raises."""
    taken: list[bytes] = []
    done = asyncio.Event()
    count = 200

    async with inbox(setting) as box, box.sender("a") as sender:

        def take(delivery: Delivery) -> None:
            taken.append(bytes(delivery.payload))
            box.receiver.release(delivery)
            if len(taken) == count:
                done.set()
            if delivery.kind == 1:
                raise ValueError("this one is not wanted")

        await sender.send(b"0")
        delivering = asyncio.ensure_future(box.receiver.deliver_to(take))
        for number in range(1, count):
            await sender.send(str(number).encode())
        async with asyncio.timeout(LIMIT_SECONDS):
            await done.wait()
        assert taken == [str(number).encode() for number in range(count)]
        assert box.receiver.depth == 0
        delivering.cancel()
        await asyncio.wait([delivering])
        assert delivering.cancelled()
        await sender.send(b"kept")
        box.receiver.release(await next_of(box.receiver))
        delivering = asyncio.ensure_future(box.receiver.deliver_to(take))
        await sender.send(b"", kind=1)
        async with asyncio.timeout(LIMIT_SECONDS):
            await asyncio.wait([delivering])
        assert isinstance(delivering.exception(), ValueError)


async def many_senders_each_in_order(setting: Setting) -> None:
    """Senders that share an inbox much smaller than their traffic: each message once, each in order."""
    senders, messages = 5, 60

    async def send(box: Inbox, index: int) -> None:
        async with box.sender(f"sender-{index}") as sender:
            for number in range(messages):
                body = bytes([index, number]) * (1 + (number * 131 + index * 17) % 1500)
                assert await sender.send(body) == number
            await sender.drained()

    async with inbox(setting) as box, asyncio.TaskGroup() as tasks:
        for index in range(senders):
            tasks.create_task(send(box, index))
        seen = dict.fromkeys((f"sender-{index}" for index in range(senders)), 0)
        for _ in range(senders * messages):
            delivery = await next_of(box.receiver)
            index = int(delivery.producer.removeprefix("sender-"))
            number = delivery.number
            assert number == seen[delivery.producer]
            seen[delivery.producer] += 1
            assert bytes(delivery.payload) == bytes([index, number]) * (
                1 + (number * 131 + index * 17) % 1500
            )
            box.receiver.release(delivery)
        assert box.receiver.poll_nowait() is None


async def many_tasks_share_a_sender(setting: Setting) -> None:
    """Tasks that send on one sender at once: each message arrives whole and once (fault 49)."""
    tasks_count, messages = 12, 15

    async with inbox(setting) as box, box.sender("shared") as sender:

        async def send(index: int) -> None:
            for step in range(messages):
                await sender.send([bytes([index]) * 300, bytes([step]) * 300])

        async with asyncio.TaskGroup() as tasks:
            for index in range(tasks_count):
                tasks.create_task(send(index))
            steps = [0] * tasks_count
            for number in range(tasks_count * messages):
                delivery = await next_of(box.receiver)
                index, step = delivery.payload[0], delivery.payload[300]
                assert bytes(delivery.payload) == bytes([index]) * 300 + bytes([step]) * 300
                assert delivery.number == number
                assert step == steps[index], "one task's messages keep their order"
                steps[index] += 1
                box.receiver.release(delivery)


async def full_is_seen_and_nothing_is_overwritten(setting: Setting) -> None:
    """A full ring refuses who will not wait, holds back who will, and keeps every byte (fault 45)."""
    async with inbox(setting) as box, box.sender("a") as sender:
        sent = 0
        try:
            while True:
                await sender.send(bytes([sent]) * 3000, timeout_seconds=0)
                sent += 1
        except RingFull:
            pass
        assert 0 < sent <= SMALL.slot_count
        await raised(RingFull, sender.send(b"x" * 3000, timeout_seconds=0.02))
        waiting = asyncio.ensure_future(sender.send(bytes([sent]) * 3000))
        # What is pulled takes no room in the ring, and no more memory than the ring has.
        held = [await next_of(box.receiver) for _ in range(min(sent, SMALL.payload_bytes // 3008))]
        await asyncio.wait([waiting], timeout=0.1)  # it looks again and again
        assert not waiting.done(), "handed over is not released"
        for number in range(sent + 1):
            delivery = held.pop(0) if held else await next_of(box.receiver)
            assert bytes(delivery.payload) == bytes([number]) * 3000
            box.receiver.release(delivery)
        assert await waiting == sent


async def release_in_any_order(setting: Setting) -> None:
    """Messages may be released out of order; the room comes back when those before are released too."""
    async with inbox(setting) as box, box.sender("a") as sender:
        for round_ in range(5):
            for number in range(4):
                await sender.send(bytes([round_, number]) * 1000)
            held = [await next_of(box.receiver) for _ in range(4)]
            for index in (2, 0, 3, 1):
                assert bytes(held[index].payload) == bytes([round_, index]) * 1000
                box.receiver.release(held[index])
        assert box.receiver.free_bytes == SMALL.payload_bytes


async def too_large_is_refused_alone(setting: Setting) -> None:
    """A message that can never fit is refused before anything is sent; the next one goes."""
    async with inbox(setting) as box, box.sender("a") as sender:
        length = max(SMALL.payload_bytes, PULLED_BYTES) + 1
        error = await raised(MessageTooLarge, sender.send(bytes(length)))
        assert str(length) in str(error)
        assert await sender.send(b"small") == 0
        assert bytes((await next_of(box.receiver)).payload) == b"small"


async def close_wakes_who_waits(setting: Setting) -> None:
    """Closing while one waits in ``receive`` and another in ``send``: both raise (fault 11)."""
    async with inbox(setting) as box, box.sender("a") as sender:
        receiving = asyncio.ensure_future(box.receiver.receive())
        await asyncio.sleep(0)
        assert not receiving.done()
        await box.receiver.close()
        await raised(ChannelClosed, receiving)
        await raised(ChannelClosed, box.receiver.receive())
        await sender.close()
        await raised(ChannelClosed, sender.send(b"x"))
    async with inbox(setting) as box, box.sender("a") as sender:
        for _ in range(SMALL.slot_count):
            await sender.send(b"fill")
        sends = [asyncio.ensure_future(sender.send(b"wait")) for _ in range(3)]
        draining = asyncio.ensure_future(sender.drained())
        await asyncio.sleep(0.01)
        assert not any(send.done() for send in sends)
        await sender.close()
        for waiting in (*sends, draining):
            await raised(ChannelClosed, waiting)
        assert [message.number for message in sender.undelivered()] == list(range(SMALL.slot_count))


async def cancelled_send_is_whole_or_absent(setting: Setting) -> None:
    """Sends that are cancelled at any moment leave no half message and no gap (fault 59)."""
    async with inbox(setting) as box, box.sender("a") as sender:
        received: list[bytes] = []

        async def receive() -> None:
            while True:
                delivery = await box.receiver.receive()
                received.append(bytes(delivery.payload))
                box.receiver.release(delivery)

        receiving = asyncio.ensure_future(receive())
        certain: list[bytes] = []
        for number in range(60):
            body = bytes([number]) * 900
            sending = asyncio.ensure_future(sender.send(body))
            for _ in range(number % 9):
                await asyncio.sleep(0)
            sending.cancel()
            await asyncio.wait([sending])
            if not sending.cancelled():
                certain.append(body)
        last = await sender.send(b"the last one")
        await sender.drained()
        receiving.cancel()
        await asyncio.wait([receiving])
        assert received[-1] == b"the last one"
        assert len(received) == last + 1
        assert [body for body in received if body in certain] == certain
        assert len(set(received)) == len(received)


async def cancelled_receive_loses_nothing(setting: Setting) -> None:
    """A receive that is cancelled around the moment a message comes does not swallow it."""
    async with inbox(setting) as box, box.sender("a") as sender:
        taken: list[int] = []
        for number in range(40):
            receiving = asyncio.ensure_future(box.receiver.receive())
            await asyncio.sleep(0)
            sending = asyncio.ensure_future(sender.send(bytes([number])))
            for _ in range(number % 8):
                await asyncio.sleep(0)
            receiving.cancel()
            await asyncio.wait([receiving])
            await sending
            delivery = await next_of(box.receiver) if receiving.cancelled() else receiving.result()
            taken.append(delivery.number)
            box.receiver.release(delivery)
        assert taken == list(range(40))


async def closed_receiver_is_lost_to_senders(setting: Setting) -> None:
    """A sender whose receiver is gone says so, and lists what may be sent elsewhere."""
    patience = Patience(reconnect_seconds=0.1)
    async with inbox(setting) as box, box.sender("a", patience=patience) as sender:
        for number in range(3):
            await sender.send(bytes([number]), kind=number)
        first = await next_of(box.receiver)
        box.receiver.release(first)
        await until(lambda: sender.delivered == 1, "the first message counted")
        await box.receiver.close()
        await raised(PeerLost, sender.send(b"too late"))
        await raised(PeerLost, sender.drained())
        left = [(message.number, message.kind, _body(message)) for message in sender.undelivered()]
        assert left == [(1, 1, b"\1"), (2, 2, b"\2")]


async def replaced_receiver_is_another_one(setting: Setting) -> None:
    """A new receiver under the same name knows nothing of before: the sender says PeerLost (fault 55)."""
    async with inbox(setting) as box, box.sender("a") as sender:
        await sender.send(b"kept")
        await box.receiver.close()
        async with open_receiver(box.listener, "actor/7", SMALL) as replacement:
            await raised(PeerLost, sender.send(b"new"))
            assert [_body(message) for message in sender.undelivered()] == [b"kept"]
            assert replacement.poll_nowait() is None
            async with box.sender("a") as again:
                assert await again.send(b"kept") == 0
                assert bytes((await next_of(replacement)).payload) == b"kept"


async def foreign_hellos_are_refused(setting: Setting) -> None:
    """A sender of another layout, and bytes that are no hello, are told why; the inbox goes on."""
    async with inbox(setting) as box:
        address, options = box.receiver.address, setting.options
        hello = bytearray(Hello("a").to_bytes())
        hello[0] ^= 0x40
        other_layout = setting.transport.connect(address, bytes(hello), options)
        await raised(LayoutMismatch, other_layout)
        good = Hello("a").to_bytes()
        for bad in (b"", b"\1", good[:-1], good + b"x", good[:-1] + b"\xff", good[:2] + b"\0\0"):
            await raised(HandshakeRefused, setting.transport.connect(address, bad, options))
        async with box.sender("a") as sender:
            assert await sender.send(b"fine") == 0


CHANNEL_CHECKS: Final[tuple[Check, ...]] = (
    any_length_arrives_whole,
    small_messages_all_arrive,
    messages_are_delivered_to_whoever_asks,
    many_senders_each_in_order,
    many_tasks_share_a_sender,
    full_is_seen_and_nothing_is_overwritten,
    release_in_any_order,
    too_large_is_refused_alone,
    close_wakes_who_waits,
    cancelled_send_is_whole_or_absent,
    cancelled_receive_loses_nothing,
    closed_receiver_is_lost_to_senders,
    replaced_receiver_is_another_one,
    foreign_hellos_are_refused,
)
