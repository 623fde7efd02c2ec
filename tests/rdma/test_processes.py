"""Producers in processes of their own, on rxe1, killed or stopped at each step; the inbox is behind rxe0."""

import asyncio
import json
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.rdma.devices import OWNERS
from tests.rdma.forked import Forker, forking
from tests.transports.test_processes import ROOT, dies_with, serving, take
from transports import Address, Leniency, Options, Receiver, open_sender
from transports.testing import until
from transports.testing.producer_process import STEPS

PLACE = Address.parse(f"verbs://127.0.0.1:0?{OWNERS}")
LENIENCY = Leniency(lease_seconds=3.0, slowest_bytes_per_second=1e7)
"""Long enough that no producer loses its lease because the machine is emulated."""
COUNT, NUMBER = 12, 5

OWNER = """
import asyncio
from transports import Address, Geometry, Options, open_receiver, transport_for

async def main():
    place = Address.parse("verbs://127.0.0.1:0?device=rxe0")
    async with (
        transport_for(place).listen(place, Options(silence_seconds=600.0)) as listener,
        open_receiver(listener, "actor/7", Geometry(8, 1 << 14, 4)) as receiver,
    ):
        print(receiver.address, flush=True)
        while True:
            receiver.release(await receiver.receive())

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    """Starts producers."""
    with forking() as forker:
        yield forker


@pytest.mark.parametrize(
    "step",
    [pytest.param(step, marks=[] if step == "behind the slot" else [pytest.mark.slow]) for step in STEPS],
)
async def test_killed_at_each_step(forker: Forker, step: str) -> None:
    """A producer killed at a step holds nobody up; back under its identity, all arrive once, in order."""
    seen: Counter[str] = Counter()
    survived = NUMBER + (step == "behind the commit")
    async with serving(PLACE, LENIENCY) as receiver:
        flags = ("--number", str(NUMBER), "--step", step)
        async with (
            forker.producing(receiver, "dying", COUNT, *flags) as dying,
            forker.producing(receiver, "living", COUNT) as living,
        ):
            await take(receiver, {"dying": survived, "living": COUNT}, seen)
            assert await dying.wait() == -signal.SIGKILL
            assert await living.wait() == 0
        assert seen["dying"] == survived, "a message without its commit word was delivered"
        async with forker.producing(receiver, "dying", COUNT) as reborn:
            await take(receiver, {"dying": COUNT}, seen)
            assert await reborn.wait() == 0
        assert receiver.poll_nowait() is None


@pytest.mark.slow
@pytest.mark.parametrize("step", ["behind the swap", "behind the payload", "behind the slot"])
async def test_stopped_past_its_lease(forker: Forker, step: str) -> None:
    """A producer stopped past its lease is fenced alone; continued, it writes nowhere, and sends again."""
    seen: Counter[str] = Counter()
    async with serving(PLACE, LENIENCY) as receiver:
        flags = ("--number", str(NUMBER), "--step", step, "--signal", "SIGSTOP")
        async with (
            forker.producing(receiver, "stopped", COUNT, *flags) as stopped,
            forker.producing(receiver, "living", COUNT) as living,
        ):
            await take(receiver, {"stopped": NUMBER, "living": COUNT}, seen)
            assert await living.wait() == 0
            async with forker.producing(receiver, "later", COUNT) as later:
                await take(receiver, {"later": COUNT}, seen)
                assert await later.wait() == 0
            assert seen["stopped"] == NUMBER
            stopped.send_signal(signal.SIGCONT)
            await take(receiver, {"stopped": COUNT}, seen)
            assert await stopped.wait() == 0
        assert receiver.poll_nowait() is None


async def in_use() -> dict[str, dict[str, int]]:
    """How many pairs, queues, contexts and pieces of memory the kernel holds for each device."""
    command = ("rdma", "-j", "resource", "show")
    asking = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await asking.communicate()
    return {device.pop("ifname"): device for device in json.loads(said)}


def files_in_memory() -> set[Path]:
    """What is in /dev/shm."""
    return set(Path("/dev/shm").iterdir())


async def killed(forker: Forker, receiver: Receiver, identity: str) -> None:
    """A producer comes, is killed amid its second message, and its session is gone."""
    flags = ("--number", "1", "--step", "behind the slot")
    async with forker.producing(receiver, identity, 2, *flags) as dying:
        await take(receiver, {identity: 1}, Counter())
        assert await dying.wait() == -signal.SIGKILL
    await until(lambda: receiver._consumer.session_of(identity) is None, "the end of its session")


@pytest.mark.slow
async def test_killed_processes_leave_nothing(forker: Forker) -> None:
    """What killed producers and owners had of the adapters is taken back; /dev/shm stays empty (fault 67)."""
    async with serving(PLACE, LENIENCY) as receiver:
        await killed(forker, receiver, "first")
        before, files = await in_use(), files_in_memory()
        for number in range(5):
            await killed(forker, receiver, f"next-{number}")
        async with owning() as (owner, address), open_sender(address, "orphan") as sender:
            await sender.send(b"heard")
            await sender.drained()
            assert await in_use() != before
            owner.kill()
            await owner.wait()
        assert await in_use() == before
        assert files_in_memory() == files


@asynccontextmanager
async def owning() -> AsyncIterator[tuple[asyncio.subprocess.Process, Address]]:
    """An owner in a process of its own, and its inbox; killed if it is still there at the end."""
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert owner.stdout is not None
        yield owner, Address.parse((await owner.stdout.readline()).decode().strip())
    finally:
        if owner.returncode is None:
            owner.kill()
            await owner.wait()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_an_owner_that_is_gone_is_noticed(how: signal.Signals) -> None:
    """A killed owner is noticed by the connection's end, a stopped one by silence; calls raise (fault 23)."""
    options = Options(silence_seconds=600.0 if how == signal.SIGKILL else 2.0)
    async with owning() as (owner, address), open_sender(address, "orphan", options=options) as sender:
        await sender.send(b"heard")
        await sender.drained()

        async def end() -> None:
            owner.send_signal(how)

        await dies_with(sender._current().memory, end)
