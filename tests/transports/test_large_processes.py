"""Large messages between processes: either side killed or stopped at each step of a pull."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from transports import (
    Address,
    Delivery,
    Geometry,
    Leniency,
    Options,
    Patience,
    PeerLost,
    Receiver,
    Sender,
    open_receiver,
    open_sender,
    transport_for,
)
from transports.testing import until
from transports.testing.consumer_process import PULL_STEPS
from transports.testing.producer_process import STEPS, body_of

ROOT = Path(__file__).resolve().parents[2]
PLACE = Address.parse("tcp://127.0.0.1:0")
GEOMETRY = Geometry(slot_count=16, payload_bytes=1 << 13, session_count=8)
STRICT = Leniency(lease_seconds=0.3, slowest_bytes_per_second=1e9)
LONGER = 5 << 20
"""More than the ring holds, and more than one part of a pull."""
MUCH_LONGER = 40 << 20
"""More than is asked for at a time, and than a connection holds: a stopped producer has not sent it all."""
LIMIT_SECONDS = 60.0


@asynccontextmanager
async def running(module: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process; killed if it is still there at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def serving() -> AsyncIterator[Receiver]:
    """An inbox in this process."""
    async with (
        transport_for(PLACE).listen(PLACE, Options()) as listener,
        open_receiver(listener, "actor/7", GEOMETRY, leniency=STRICT) as receiver,
    ):
        yield receiver


def producing(
    receiver: Receiver, identity: str, count: int, *flags: str, longer: int = LONGER
) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    """A producer of large messages."""
    arguments = (str(receiver.address), identity, str(count), "--longer", str(longer), *flags)
    return running("transports.testing.producer_process", *arguments)


async def take(receiver: Receiver, identity: str, first: int, end: int, longer: int = LONGER) -> None:
    """Receive these numbers: each once, in order, whole."""
    async with asyncio.timeout(LIMIT_SECONDS):
        for number in range(first, end):
            delivery: Delivery = await receiver.receive()
            assert (delivery.producer, delivery.number) == (identity, number)
            assert delivery.payload == body_of(identity, number, longer)
            receiver.release(delivery)


async def send(sender: Sender, identity: str, first: int, end: int, longer: int = LONGER) -> None:
    """Send what the receiver does not have; the first may have come whole just before its sender's end."""
    assert first <= sender.delivered <= first + 1
    for number in range(sender.delivered, end):
        assert await sender.send(body_of(identity, number, longer)) == number


async def back(receiver: Receiver, identity: str, first: int, end: int) -> None:
    """The next life of a producer, in this process."""
    async with open_sender(receiver.address, identity) as sender, asyncio.TaskGroup() as tasks:
        tasks.create_task(send(sender, identity, first, end))
        tasks.create_task(take(receiver, identity, first, end))


@pytest.mark.parametrize("step", STEPS)
async def test_producer_killed_at_each_step(step: str) -> None:
    """A producer killed around an offer takes the message along; back, it sends it once, in order."""
    async with serving() as receiver:
        async with producing(receiver, "dying", 3, "--number", "1", "--step", step) as dying:
            await take(receiver, "dying", 0, 1)
            assert await dying.wait() == -signal.SIGKILL
        await back(receiver, "dying", 1, 3)
        assert receiver.poll_nowait() is None


@pytest.mark.parametrize("dies", [True, False])
async def test_producer_that_stops_while_it_is_pulled_from(dies: bool) -> None:
    """A pull from a stopped producer ends with its death or the lease; the message comes later, once."""
    async with serving() as receiver:
        flags = ("--number", "1", "--step", "behind the commit", "--signal", "SIGSTOP")
        async with producing(receiver, "stopped", 2, *flags, longer=MUCH_LONGER) as stopped:
            await take(receiver, "stopped", 0, 1, MUCH_LONGER)
            taking = asyncio.ensure_future(take(receiver, "stopped", 1, 2, MUCH_LONGER))
            await until(lambda: receiver._pulling, "a pull")
            if dies:
                stopped.kill()
                await stopped.wait()
                async with open_sender(receiver.address, "stopped") as reborn:
                    assert reborn.delivered == 1
                    await send(reborn, "stopped", 1, 2, MUCH_LONGER)
                    await taking
            else:
                await until(lambda: receiver._consumer.session_of("stopped") is None, "a fence")
                stopped.send_signal(signal.SIGCONT)
                await taking
                assert await stopped.wait() == 0
        assert receiver.poll_nowait() is None


def _body(number: int) -> bytes:
    return body_of("sender", number, LONGER if number % 2 else 0)


async def _send_all(sender: Sender, count: int) -> None:
    for number in range(count):
        await sender.send(_body(number))
    await sender.drained()


@pytest.mark.parametrize("step", PULL_STEPS)
async def test_consumer_killed_at_each_step(step: str) -> None:
    """A consumer killed at a step of a pull: all that it was not seen to take is kept, and lent to nobody."""
    arguments = (str(PLACE), "--number", "2", "--step", step)
    async with running("transports.testing.consumer_process", *arguments) as dying:
        assert dying.stdout is not None
        address = (await dying.stdout.readline()).decode().strip()
        async with open_sender(address, "sender", patience=Patience(reconnect_seconds=0.1)) as sender:
            with pytest.raises(PeerLost):
                await _send_all(sender, 6)
            assert await dying.wait() == -signal.SIGKILL
            said = (await dying.stdout.read()).decode().splitlines()
            left = sender.undelivered()
    handed = [int(line.split()[1]) for line in said]
    was_handed = step in {"behind the hand-over", "behind the release"}
    assert handed == list(range(4 if was_handed else 3)), "the second pull is that of message 3"
    assert sender.delivered <= len(handed), "what counts as delivered was handed over"
    assert [message.number for message in left] == list(range(sender.delivered, sender.delivered + len(left)))
    assert all(message.buffers == (_body(message.number),) for message in left)
