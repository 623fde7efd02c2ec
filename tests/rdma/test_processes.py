"""Producers in processes of their own, on rxe1, killed or stopped at each step; the inbox is behind rxe0."""

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.rdma.devices import OWNERS
from tests.rdma.forked import Forker, forking
from tests.transports.test_processes import ROOT, serving, take
from transports import Address, Leniency, Options, PeerLost, open_sender
from transports.testing.producer_process import STEPS
from transports.testing.setting import raised

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


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_an_owner_that_is_gone_is_noticed(how: signal.Signals) -> None:
    """A killed owner is noticed by its connection's end; a stopped one, whose adapter goes on, by silence."""
    options = Options(silence_seconds=600.0 if how == signal.SIGKILL else 2.0)
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert owner.stdout is not None
        address = Address.parse((await owner.stdout.readline()).decode().strip())
        async with open_sender(address, "orphan", options=options) as sender:
            await sender.send(b"heard")
            await sender.drained()
            waiting = asyncio.ensure_future(sender._current().memory.wait_notified(600.0))
            owner.send_signal(how)
            await raised(PeerLost, waiting)
    finally:
        owner.kill()
        await owner.wait()
