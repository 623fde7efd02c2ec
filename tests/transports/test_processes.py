"""Producers in processes of their own: killed at each step, stopped past the lease, racing for slots."""

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from attrs import evolve

from transports import (
    Address,
    Geometry,
    Leniency,
    Options,
    PeerLost,
    Receiver,
    UnknownScheme,
    open_receiver,
    open_sender,
    transport_for,
)
from transports.memory import RemoteMemory
from transports.operations import Chain, CompareAndSwap
from transports.testing import until
from transports.testing.producer_process import STEPS, body_of
from transports.testing.setting import raised

ROOT = Path(__file__).resolve().parents[2]
GEOMETRY = Geometry(slot_count=16, payload_bytes=1 << 13, session_count=8)
STRICT = Leniency(lease_seconds=0.3, slowest_bytes_per_second=1e9)
PATIENT = Leniency(lease_seconds=20.0)
LIMIT_SECONDS = 800.0
"""For the largest; each test has a bound of its own."""


PLACES = ["tcp://127.0.0.1:0?shm=off", "tcp://127.0.0.1:0?shm=required", "ucx://127.0.0.1:0?require=shm"]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Address:
    """Where an inbox may be: its senders' writes go through the owner, or past it."""
    address = Address.parse(request.param)
    try:
        transport_for(address)
    except UnknownScheme as missing:
        pytest.skip(f"no libucp: {missing}")
    return address


@asynccontextmanager
async def serving(
    place: Address, leniency: Leniency, options: Options | None = None
) -> AsyncIterator[Receiver]:
    """An inbox on a free port."""
    async with (
        transport_for(place).listen(place, options or Options()) as listener,
        open_receiver(listener, "actor/7", GEOMETRY, leniency=leniency) as receiver,
    ):
        yield receiver


@asynccontextmanager
async def producing(
    receiver: Receiver, identity: str, count: int, *flags: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A producer's process; killed if it is still there at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "transports.testing.producer_process",
        str(receiver.address),
        identity,
        str(count),
        *flags,
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def take(receiver: Receiver, wanted: dict[str, int], seen: Counter[str]) -> None:
    """Receive until each identity's messages have come as often as wanted; each once, in order, whole."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while any(seen[identity] < count for identity, count in wanted.items()):
            delivery = await receiver.receive()
            assert delivery.number == seen[delivery.producer]
            assert bytes(delivery.payload) == body_of(delivery.producer, delivery.number)
            seen[delivery.producer] += 1
            receiver.release(delivery)


@pytest.mark.parametrize("step", STEPS)
async def test_killed_at_each_step(place: Address, step: str) -> None:
    """A producer killed at a step holds nobody up; back under its identity, all arrive once, in order."""
    count, number = 12, 5
    seen: Counter[str] = Counter()
    async with serving(place, STRICT) as receiver:
        async with producing(receiver, "dying", count, "--number", str(number), "--step", step) as dying:
            survived = number + (step == "behind the commit")
            await take(receiver, {"dying": survived}, seen)
            assert await dying.wait() == -signal.SIGKILL
        async with producing(receiver, "living", count) as living:
            await take(receiver, {"living": count}, seen)
            assert await living.wait() == 0
        assert seen["dying"] == survived, "a message without its commit word was delivered"
        async with producing(receiver, "dying", count) as reborn:
            await take(receiver, {"dying": count}, seen)
            assert await reborn.wait() == 0
        assert receiver.poll_nowait() is None


async def test_killed_behind_its_claim(place: Address) -> None:
    """As behind a swap: who dies between a claim and what it is for holds nobody up, and all arrive."""
    count, number = 8, 3
    seen: Counter[str] = Counter()
    flags = ("--rival", "--number", str(number), "--step", "behind the swap")
    async with serving(place, STRICT) as receiver:
        async with producing(receiver, "dying", count, *flags) as dying:
            assert await dying.wait() == -signal.SIGKILL
        async with producing(receiver, "living", count) as living:
            await take(receiver, {"dying": number, "living": count}, seen)
            assert await living.wait() == 0
        async with producing(receiver, "dying", count) as reborn:
            await take(receiver, {"dying": count}, seen)
            assert await reborn.wait() == 0
        assert receiver.poll_nowait() is None


@pytest.mark.parametrize("step", ["behind the swap", "behind the payload", "behind the slot"])
async def test_stopped_past_its_lease(place: Address, step: str) -> None:
    """A producer stopped past the lease is fenced; continued, it writes nowhere, and sends again."""
    count, number = 12, 5
    seen: Counter[str] = Counter()
    async with serving(place, STRICT) as receiver:
        flags = ("--number", str(number), "--step", step, "--signal", "SIGSTOP")
        async with (
            producing(receiver, "stopped", count, *flags) as stopped,
            producing(receiver, "living", 40) as living,
        ):
            await take(receiver, {"stopped": number, "living": 40}, seen)
            assert await living.wait() == 0
            async with producing(receiver, "later", 40) as later:
                await take(receiver, {"later": 40}, seen)
                assert await later.wait() == 0
            assert seen["stopped"] == number
            stopped.send_signal(signal.SIGCONT)
            await take(receiver, {"stopped": count}, seen)
            assert await stopped.wait() == 0
        assert receiver.poll_nowait() is None


async def test_silent_producer_is_noticed(place: Address) -> None:
    """A stopped producer that holds nothing up is still noticed as gone, and may come back."""
    seen: Counter[str] = Counter()
    options = Options(silence_seconds=0.5)
    async with serving(place, PATIENT, options) as receiver:
        flags = ("--number", "5", "--step", "behind the commit", "--signal", "SIGSTOP")
        async with producing(receiver, "silent", 12, *flags) as silent:
            await take(receiver, {"silent": 6}, seen)
            await until(lambda: receiver._consumer.session_of("silent") is None, "the end of the session")
            silent.send_signal(signal.SIGCONT)
            await take(receiver, {"silent": 12}, seen)
            assert await silent.wait() == 0


async def dies_with(memory: RemoteMemory, end: Callable[[], Awaitable[object]]) -> None:
    """What is asked for while the owner ends, and behind it, raises; closing returns, also twice."""
    while await memory.wait_notified(0.2):
        await memory.read(0, 8)  # nudges of before: it has looked now
    waiting = asyncio.ensure_future(memory.wait_notified(600.0))
    await asyncio.sleep(0)
    await end()
    await raised(PeerLost, waiting)
    swap = CompareAndSwap(0, 0, 0)
    for work in (memory.read(0, 8), memory.compare_and_swap(swap), memory.post(Chain(())), memory.flush()):
        await raised(PeerLost, work)
    await memory.close()
    await memory.close()
    await raised(PeerLost, memory.read(0, 8))


def owners_of_segments() -> set[int]:
    """Who made the segments of shared memory (System V) that this machine has."""
    lines = Path("/proc/sysvipc/shm").read_text().splitlines()
    creator = lines[0].split().index("cpid")
    return {int(line.split()[creator]) for line in lines[1:]}


async def test_an_owner_that_is_killed_is_an_error(place: Address) -> None:
    """Calls on a session of a killed owner raise, closing does not; no memory is left (faults 23, 67)."""
    command = (sys.executable, "-m", "transports.testing.consumer_process", str(place))
    owner = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    try:
        assert owner.stdout is not None
        address = Address.parse((await owner.stdout.readline()).decode().strip())
        async with open_sender(evolve(address, options=place.options), "orphan") as sender:
            await sender.send(bytes(4000))
            await sender.drained()

            async def end() -> None:
                owner.kill()
                await owner.wait()

            await dies_with(sender._current().memory, end)
        assert owner.pid not in owners_of_segments()
    finally:
        if owner.returncode is None:
            owner.kill()
            await owner.wait()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.full)])
async def test_two_processes_race_for_slots(place: Address, count: int) -> None:
    """Two processes that pause between reading the tail and swapping it: each message once (fault 42)."""
    seen: Counter[str] = Counter()
    async with serving(place, PATIENT) as receiver:
        async with (
            producing(receiver, "left", count, "--dawdle", "0.001", "--seed", "1") as left,
            producing(receiver, "right", count, "--dawdle", "0.001", "--seed", "2") as right,
        ):
            await take(receiver, {"left": count, "right": count}, seen)
            assert await left.wait() == 0
            assert await right.wait() == 0
        assert seen == {"left": count, "right": count}
        assert receiver.poll_nowait() is None
