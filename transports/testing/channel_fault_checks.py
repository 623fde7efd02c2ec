"""Checks of channels over wires that misbehave: every message still once, whole and in order."""

import asyncio
import random
from typing import Final

from transports.channel import Leniency, Receiver, Sender
from transports.errors import SessionFenced
from transports.fences import STALLED
from transports.introductions import Hello, Welcome
from transports.operations import CompareAndSwap, Read
from transports.ring import Geometry, Producer
from transports.testing.channel_checks import LENIENT, SMALL, inbox, next_of
from transports.testing.faults import Faults, FaultyTransport
from transports.testing.setting import Check, Setting, raised

STRICT: Final = Leniency(lease_seconds=0.15, slowest_bytes_per_second=1e9)
"""A short lease, so that a check of recovery is quick."""


def body_of(number: int) -> bytes:
    """A message's bytes, told from every other's."""
    length = 1 + number * 389 % 2500
    return random.Random(number).randbytes(length)  # noqa: S311  # a pattern, no secret


async def send_all(sender: Sender, count: int) -> None:
    """Send so many messages, and wait until they are taken."""
    for number in range(count):
        assert await sender.send(body_of(number)) == number
    await sender.drained()
    assert sender.undelivered() == []


async def receive_all(receiver: Receiver, count: int) -> None:
    """Receive them, each whole and in its turn."""
    for number in range(count):
        delivery = await next_of(receiver)
        assert delivery.number == number
        assert bytes(delivery.payload) == body_of(number), f"message {number} is not what was sent"
        receiver.release(delivery)


async def traffic(
    setting: Setting,
    faults: Faults,
    count: int,
    *,
    leniency: Leniency = LENIENT,
    geometry: Geometry = SMALL,
) -> bool:
    """Send through these faults; returns whether the sender's owner executes claims."""
    transport = FaultyTransport(setting.transport, faults)
    async with inbox(setting, geometry, leniency) as box, box.sender("a", transport=transport) as sender:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send_all(sender, count))
            tasks.create_task(receive_all(box.receiver, count))
        assert box.receiver.poll_nowait() is None
        return transport.sessions[-1].capabilities.claims


async def shuffled_pieces_are_whole(setting: Setting) -> None:
    """Writes that land in pieces of 64 bytes in any order are never seen half (fault 43)."""
    await traffic(setting, Faults(random.Random(1), shuffle_pieces=True), 60)  # noqa: S311  # a schedule


async def delays_change_nothing(setting: Setting) -> None:
    """Operations that dawdle change nothing."""
    faults = Faults(random.Random(2), delay_seconds=0.002)  # noqa: S311  # a schedule
    await traffic(setting, faults, 40)


async def cut_connections_are_resumed(setting: Setting) -> None:
    """Connections cut before and behind swaps: each message once, in order, under one identity."""
    faults = Faults(random.Random(3), cut_chance=0.1, remaining=25)  # noqa: S311  # a schedule
    await traffic(setting, faults, 120, leniency=STRICT)
    assert len(faults.happened) >= 10
    assert "cut behind a swap" in faults.happened


async def idle_cut_is_resumed(setting: Setting) -> None:
    """A connection cut while nothing is sent is opened again for what was not taken yet."""
    faults = Faults(random.Random(4))  # noqa: S311  # a schedule
    transport = FaultyTransport(setting.transport, faults)
    async with inbox(setting) as box, box.sender("a", transport=transport) as sender:
        await sender.send(body_of(0))
        await transport.cut()
        await receive_all(box.receiver, 1)
        await sender.drained()
        await transport.cut()
        assert await sender.send(body_of(1)) == 1
        delivery = await next_of(box.receiver)
        assert (delivery.number, bytes(delivery.payload)) == (1, body_of(1))


async def flipped_bits_are_never_delivered(setting: Setting) -> None:
    """One bit changed in a payload, slot or commit word: the message comes again, whole (faults 9, 73)."""
    for seed in range(3):
        faults = Faults(random.Random(seed), flip_chance=0.2, remaining=3)  # noqa: S311  # a schedule
        await traffic(setting, faults, 30, leniency=STRICT)
        assert faults.happened == ["flip"] * 3


async def flipped_metadata_is_never_delivered(setting: Setting) -> None:
    """One bit changed in a slot's metadata fails the message as a bit of its payload does (fault 73)."""
    faults = Faults(
        random.Random(7),  # noqa: S311  # a schedule
        flip_chance=0.3,
        remaining=3,
        flips_wanted=lambda write: write.length == 48,
    )
    await traffic(setting, faults, 20, leniency=STRICT)
    assert faults.happened == ["flip"] * 3


async def dropped_writes_are_sent_again(setting: Setting) -> None:
    """Chains that never arrive are found after the lease, and the messages come again."""
    faults = Faults(random.Random(5), drop_chance=0.2, remaining=3)  # noqa: S311  # a schedule
    await traffic(setting, faults, 30, leniency=STRICT)
    assert faults.happened == ["drop"] * 3


async def everything_at_once(setting: Setting) -> None:
    """All faults together: still once, whole, in order."""
    faults = Faults(
        random.Random(6),  # noqa: S311  # a schedule
        shuffle_pieces=True,
        delay_seconds=0.0005,
        cut_chance=0.03,
        flip_chance=0.02,
        drop_chance=0.02,
        remaining=12,
    )
    await traffic(setting, faults, 160, leniency=STRICT)
    assert faults.remaining == 0


async def stalled_reservation_is_recovered(setting: Setting) -> None:
    """A producer that reserves and stops holds the others up for one lease, and is fenced."""
    async with inbox(setting, SMALL, STRICT) as box:
        memory = await setting.transport.connect(
            box.receiver.address, Hello("stalled").to_bytes(), setting.options
        )
        welcome = Welcome.from_bytes(memory.welcome)
        producer = Producer(
            welcome.geometry,
            session=memory.session,
            generation=welcome.generation,
            first_number=welcome.first_number,
            lease_seconds=1e6,
        )
        program = producer.send([b"never written"], kind=0, now=asyncio.get_running_loop().time())
        operation = next(program)
        assert isinstance(operation, Read)
        operation = program.send(await memory.read(operation.offset, operation.length))
        assert isinstance(operation, CompareAndSwap)
        assert await memory.compare_and_swap(operation) == operation.expected
        async with box.sender("b") as sender, asyncio.TaskGroup() as tasks:
            tasks.create_task(send_all(sender, 20))
            tasks.create_task(receive_all(box.receiver, 20))
        assert box.receiver.fenced[STALLED] >= 1, "the fence was not counted"
        await raised(SessionFenced, memory.read(0, 8))
        await memory.close()


CHANNEL_FAULT_CHECKS: Final[tuple[Check, ...]] = (
    shuffled_pieces_are_whole,
    delays_change_nothing,
    cut_connections_are_resumed,
    idle_cut_is_resumed,
    flipped_bits_are_never_delivered,
    flipped_metadata_is_never_delivered,
    dropped_writes_are_sent_again,
    everything_at_once,
    stalled_reservation_is_recovered,
)
