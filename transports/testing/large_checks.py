"""Checks of messages that are pulled instead of written into the ring, and of the pulling itself.

Where a transport exports nothing (``Capabilities.pull_share`` is 0) they check that what the ring cannot
hold is refused before anything is sent.
"""

import asyncio
import random
from typing import Final

from transports.channel import Delivery, Sender
from transports.errors import ExportGone, MessageTooLarge, PeerLost, RingFull, SessionFenced
from transports.memory import RemoteMemory
from transports.operations import Bytes
from transports.testing.channel_checks import SMALL, inbox, next_of
from transports.testing.channel_fault_checks import STRICT
from transports.testing.faults import Faults, FaultyTransport
from transports.testing.setting import Check, Setting, raised, staged

LARGE_BYTES: Final = 5 * SMALL.payload_bytes + 77
"""No ring of the checks holds this."""


def large_body(number: int, length: int = LARGE_BYTES) -> bytes:
    """A message's bytes, told from every other's."""
    return random.Random(number).randbytes(length)  # noqa: S311  # a pattern, no secret


def _exports(memory: RemoteMemory) -> bool:
    return memory.capabilities.pull_share > 0


def _can_pull(sender: Sender) -> bool:
    return sender.message_bytes_max > SMALL.payload_bytes


async def exports_are_pulled_whole(setting: Setting) -> None:
    """What a session exports, in one and many buffers, comes equal; several at a time too."""
    async with staged(setting) as stage:
        memory = await stage.connect()
        if not _exports(memory):
            return
        for length in (1, 4096, (9 << 20) + 5):
            body = large_body(length, length)
            parts: list[Bytes] = [body[: length // 3], b"", memoryview(body)[length // 3 :]]
            keys = [memory.export([body]), memory.export(parts)]
            into = [memoryview(bytearray(length)) for _ in keys]
            pulls = [stage.region.pull(memory.session, key, to) for key, to in zip(keys, into, strict=True)]
            await asyncio.gather(*pulls)
            assert all(to == body for to in into)
            assert await memory.fetch_and_add(0, 1) >= 0
        await memory.close()


async def withdrawn_exports_are_gone(setting: Setting) -> None:
    """An export that has ended, another length of it and an unknown session are errors; the rest goes on."""
    async with staged(setting) as stage:
        memory = await stage.connect()
        if not _exports(memory):
            return
        first, second = memory.export([b"first"]), memory.export([b"second"])
        assert first != second
        memory.withdraw(first)
        memory.withdraw(first)
        third = memory.export([b"third"])
        assert third not in {first, second}, "a key names one export for ever"
        into = memoryview(bytearray(5))
        await raised(ExportGone, stage.region.pull(memory.session, first, into))
        await raised(ExportGone, stage.region.pull(memory.session, second, into))
        await raised(PeerLost, stage.region.pull(memory.session + 100, third, into))
        await stage.region.pull(memory.session, third, into)
        assert bytes(into) == b"third"
        await memory.close()


async def overlapping_exports_stand_alone(setting: Setting) -> None:
    """Of two views of the same bytes the end of one's export leaves the other's as it is (fault 57)."""
    async with staged(setting) as stage:
        memory = await stage.connect()
        if not _exports(memory):
            return
        body = memoryview(large_body(57, 9000))
        whole, part = memory.export([body]), memory.export([body[2000:7000]])
        memory.withdraw(whole)
        into = memoryview(bytearray(5000))
        await raised(ExportGone, stage.region.pull(memory.session, whole, memoryview(bytearray(9000))))
        await stage.region.pull(memory.session, part, into)
        assert into == body[2000:7000]
        await memory.close()


async def pulls_end_with_their_session(setting: Setting) -> None:
    """A pull from a session that is fenced or closed, before or meanwhile, ends in an error."""
    size = 32 << 20
    for fences in (True, False):
        async with staged(setting) as stage:
            memory = await stage.connect()
            if not _exports(memory):
                return
            key = memory.export([bytes(size)])
            pulling = asyncio.ensure_future(
                stage.region.pull(memory.session, key, memoryview(bytearray(size)))
            )
            await asyncio.sleep(0)
            await (stage.region.fence([memory.session]) if fences else memory.close())
            await asyncio.wait([pulling])
            if (error := pulling.exception()) is not None:
                assert isinstance(error, SessionFenced | PeerLost), error
            into = memoryview(bytearray(size))
            await raised(PeerLost, stage.region.pull(memory.session, key, into))
            await memory.close()


async def cancelled_pulls_leave_the_session_whole(setting: Setting) -> None:
    """A pull that is cancelled does not disturb the next ones, nor the session's operations (fault 59)."""
    async with staged(setting) as stage:
        memory = await stage.connect()
        if not _exports(memory):
            return
        body = large_body(1, (6 << 20) + 1)
        key = memory.export([body])
        for steps in range(8):
            pulling = asyncio.ensure_future(
                stage.region.pull(memory.session, key, memoryview(bytearray(len(body))))
            )
            for _ in range(steps):
                await asyncio.sleep(0)
            pulling.cancel()
            await asyncio.wait([pulling])
            await memory.fetch_and_add(0, 1)
        into = memoryview(bytearray(len(body)))
        await stage.region.pull(memory.session, key, into)
        assert into == body
        await memory.close()


async def large_messages_arrive_whole(setting: Setting) -> None:
    """Messages larger than the ring, between small ones, arrive in order and equal."""
    async with inbox(setting) as box, box.sender("a") as sender:
        bodies = [large_body(number, LARGE_BYTES if number % 2 else number) for number in range(7)]
        if not _can_pull(sender):
            await raised(MessageTooLarge, sender.send(bodies[1]))
            return

        async def send() -> None:
            for number, body in enumerate(bodies):
                assert await sender.send([body[:9], memoryview(body)[9:]], kind=number) == number

        sending = asyncio.ensure_future(send())
        for number, body in enumerate(bodies):
            delivery = await next_of(box.receiver)
            assert (delivery.number, delivery.kind) == (number, number)
            assert delivery.payload == body
            box.receiver.release(delivery)
        await sending
        await sender.drained()
        assert sender.lent_bytes == 0, "what was delivered is lent no longer"


async def memory_for_large_messages_is_bounded(setting: Setting) -> None:
    """What is held of pulled messages holds back the next one; what is lent, the sender."""
    bound = 2 * LARGE_BYTES
    async with (
        inbox(setting, pulled_bytes_max=bound) as box,
        box.sender("a", exported_bytes_max=bound) as sender,
    ):
        if not _can_pull(sender):
            return
        error = await raised(MessageTooLarge, sender.send(bytes(bound + 1)))
        assert str(bound) in str(error)
        held: list[Delivery] = []
        for number in range(2):
            await sender.send(large_body(number))
            held.append(await next_of(box.receiver))
        await sender.drained()
        assert [await sender.send(large_body(number)) for number in (2, 3)] == [2, 3]
        assert box.receiver.poll_nowait() is None, "two are held, and that is the bound"
        await raised(RingFull, sender.send(large_body(4), timeout_seconds=0))
        await raised(RingFull, sender.send(large_body(4), timeout_seconds=0.02))
        waiting = asyncio.ensure_future(sender.send(large_body(4)))
        for number in range(5):
            delivery = held.pop(0) if held else await next_of(box.receiver)
            assert delivery.payload == large_body(delivery.number)
            assert delivery.number == number
            box.receiver.release(delivery)
        assert await waiting == 4


async def large_messages_survive_cuts(setting: Setting) -> None:
    """Connections cut at any operation: messages larger than the ring come once, in order, whole."""
    count = 24
    faults = Faults(random.Random(8), cut_chance=0.1, remaining=12)  # noqa: S311  # a schedule
    transport = FaultyTransport(setting.transport, faults)
    async with inbox(setting, SMALL, STRICT) as box, box.sender("a", transport=transport) as sender:
        if not _can_pull(sender):
            return

        async def send() -> None:
            for number in range(count):
                assert await sender.send(large_body(number)) == number
            await sender.drained()

        sending = asyncio.ensure_future(send())
        for number in range(count):
            delivery = await next_of(box.receiver)
            assert delivery.number == number
            assert delivery.payload == large_body(number)
            box.receiver.release(delivery)
        await sending
        assert len(faults.happened) >= 5
        assert box.receiver.poll_nowait() is None


async def damaged_large_messages_come_again(setting: Setting) -> None:
    """What is pulled and is not what was offered is not handed over; its session ends, and it comes again."""
    transport = FaultyTransport(setting.transport, Faults(random.Random(9)))  # noqa: S311  # without faults
    async with inbox(setting) as box, box.sender("a", transport=transport) as sender:
        if not _can_pull(sender):
            return
        body = bytearray(large_body(0))
        await sender.send([body])
        body[77] ^= 1  # stands for a bit that flips on the way
        delivery = await next_of(box.receiver)
        assert len(transport.sessions) == 2, "what was damaged was not handed over"
        assert delivery.number == 0
        assert delivery.payload == body, "offered again, as it is now"
        box.receiver.release(delivery)


async def cancelled_large_sends_leave_nothing(setting: Setting) -> None:
    """Large sends cancelled at any moment are whole or absent, and leave nothing lent (faults 48, 59)."""
    async with inbox(setting) as box, box.sender("a") as sender:
        if not _can_pull(sender):
            return
        received: list[bytes] = []

        async def receive() -> None:
            while True:
                delivery = await box.receiver.receive()
                received.append(bytes(delivery.payload))
                box.receiver.release(delivery)

        receiving = asyncio.ensure_future(receive())
        for number in range(20):
            sending = asyncio.ensure_future(sender.send(large_body(number)))
            for _ in range(number % 7):
                await asyncio.sleep(0)
            sending.cancel()
            await asyncio.wait([sending])
        last = await sender.send(b"the last one")
        await sender.drained()
        receiving.cancel()
        await asyncio.wait([receiving])
        assert len(received) == last + 1
        assert received[-1] == b"the last one"
        assert set(received[:-1]) <= {large_body(number) for number in range(20)}
        assert len(set(received)) == len(received)
        assert sender.lent_bytes == 0


async def large_messages_wait_for_a_regular_exit(setting: Setting) -> None:
    """Leaving a sender's block waits for the receiver to pull what was sent."""
    async with inbox(setting) as box:

        async def send() -> bool:
            async with box.sender("a") as sender:
                if _can_pull(sender):
                    await sender.send(large_body(1))
                    return True
            return False

        sending = asyncio.ensure_future(send())
        await asyncio.wait([sending], timeout=0.05)
        if sending.done() and not await sending:
            return
        delivery = await next_of(box.receiver)
        assert delivery.payload == large_body(1)
        assert await sending


async def lost_senders_take_their_large_messages_along(setting: Setting) -> None:
    """A large message that was sent and not pulled when its sender closed is dropped, and comes again."""
    async with inbox(setting) as box:
        async with box.sender("a") as sender:
            if not _can_pull(sender):
                return
            await sender.send(large_body(1))
            await sender.close()
            assert [message.number for message in sender.undelivered()] == [0]
        assert box.receiver.poll_nowait() is None
        async with box.sender("a") as sender:
            assert sender.delivered == 0
            sending = asyncio.ensure_future(sender.send(large_body(2)))
            delivery = await next_of(box.receiver)
            assert (delivery.number, bytes(delivery.payload)) == (0, large_body(2))
            assert await sending == 0


LARGE_MEMORY_CHECKS: Final[tuple[Check, ...]] = (
    exports_are_pulled_whole,
    withdrawn_exports_are_gone,
    overlapping_exports_stand_alone,
    pulls_end_with_their_session,
    cancelled_pulls_leave_the_session_whole,
)

LARGE_CHANNEL_CHECKS: Final[tuple[Check, ...]] = (
    large_messages_arrive_whole,
    memory_for_large_messages_is_bounded,
    large_messages_survive_cuts,
    damaged_large_messages_come_again,
    cancelled_large_sends_leave_nothing,
    large_messages_wait_for_a_regular_exit,
    lost_senders_take_their_large_messages_along,
)
