"""The simulated network and disks do the harm that they are asked for, and no other."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from attrs import evolve

from onepiece.core.manager import ManagerState
from onepiece.errors import StoreFull, UnknownRequest
from onepiece.store import PutOutcome, StoreOptions
from simulations.loop import Process, VirtualLoop, elapse, virtual_loop
from simulations.sim_disk import SimDisk
from simulations.sim_network import SILENCE_SECONDS, Network, Weather
from simulations.sim_transport import SimTransport
from transports import (
    Address,
    ConnectFailed,
    Geometry,
    Options,
    PeerLost,
    RemoteMemory,
    Sender,
    TransportError,
    open_receiver,
    open_sender,
)
from transports.operations import Chain, Write
from transports.testing.setting import Diary

RING = Address.parse("sim://ringing/ring")
ADDRESS = Address.parse("sim://owner/region")
FAIR = evolve(
    Weather.draw(Random(1)),
    latency_seconds=0.001,
    jitter_seconds=0.0,
    spike_chance=0.0,
    flip_chance=0.0,
    fence_seconds=0.0,
    one_sided=False,
    split_chance=1.0,
    piece_bytes=64,
)


class Rig:
    """An owner with one region, and a producer, each in a process of its own."""

    def __init__(self, loop: VirtualLoop, weather: Weather = FAIR) -> None:
        self.loop = loop
        self.network = Network(loop, Random(7), weather)
        self.owner, self.producer = (self._move_in(name) for name in ("owner", "producer"))
        self.diary = Diary()
        self.view = memoryview(b"")

    def _move_in(self, name: str) -> Process:
        process = self.network.host(name).process = self.loop.add_process(name)
        return process

    async def serve(self) -> None:
        """Serve a region until cancelled."""
        async with SimTransport(self.network, self.network.host("owner")).listen(
            ADDRESS.region(""), Options()
        ) as listener:
            region = await listener.register(
                "region",
                4096,
                accept=self.diary.accept,
                on_notify=self.diary.on_notify,
                on_session_lost=self.diary.on_session_lost,
            )
            self.view = region.view
            await self.loop.create_future()

    async def receive(self, came: list[bytes]) -> None:
        """Serve a ring on a host of its own and keep what comes until cancelled."""
        self.network.host("ringing").process = self.owner
        transport = SimTransport(self.network, self.network.host("ringing"))
        async with (
            transport.listen(RING.region(""), Options()) as listener,
            open_receiver(listener, "ring", Geometry(8, 1 << 12, 4), clock=self.loop.time) as receiver,
        ):
            while True:
                delivery = await receiver.receive()
                came.append(bytes(delivery.payload))
                receiver.release(delivery)

    def sender(self) -> AbstractAsyncContextManager[Sender]:
        """A way into that ring."""
        transport = SimTransport(self.network, self.network.host("producer"))
        return open_sender(RING, "a", transport=transport, clock=self.loop.time)

    async def connect(self) -> RemoteMemory:
        """Open a session."""
        transport = SimTransport(self.network, self.network.host("producer"))
        return await transport.connect(ADDRESS, b"hello", Options())


def run(work: Callable[[Rig], Coroutine[Any, Any, None]], weather: Weather = FAIR) -> None:
    """Run a producer's work while the owner serves."""
    uncaught: list[dict[str, Any]] = []
    loop = virtual_loop(Random(3), uncaught.append)

    async def main() -> None:
        rig = Rig(loop, weather)
        serving = rig.owner.start(rig.serve(), "owner")
        await elapse(0.1)
        try:
            await rig.producer.start(work(rig), "producer")
        finally:
            serving.cancel()
            await asyncio.wait([serving])

    loop.run_until_complete(main())
    assert not uncaught


async def _ended(work: Coroutine[Any, Any, object]) -> TransportError:
    try:
        await work
    except TransportError as error:
        return error
    raise AssertionError("it did not fail")


def test_cut_holds_up_one_direction() -> None:
    """What is sent into a cut waits for its end; the other direction is not concerned."""

    async def work(rig: Rig) -> None:
        memory = await rig.connect()
        rig.network.cut("producer", "owner")
        await memory.post(Chain((Write(0, (b"late",)),)))
        await elapse(SILENCE_SECONDS / 2)
        assert bytes(rig.view[:4]) == bytes(4)
        rig.network.heal("producer", "owner")
        await memory.flush()
        assert bytes(rig.view[:4]) == b"late"
        await memory.close()

    run(work)


def test_long_cut_ends_sessions_on_both_sides() -> None:
    """Whoever hears nothing for long gives up; a new session is possible once the cut is healed."""

    async def work(rig: Rig) -> None:
        memory = await rig.connect()
        rig.network.cut("owner", "producer")
        assert isinstance(await _ended(memory.read(0, 8)), PeerLost)
        assert rig.loop.now > SILENCE_SECONDS
        await elapse(1.0)
        assert rig.diary.lost == [memory.session]
        rig.network.heal("owner", "producer")
        await (await rig.connect()).close()

    run(work)


@pytest.mark.parametrize("cut_seconds", [SILENCE_SECONDS / 2, 3 * SILENCE_SECONDS])
def test_channel_works_behind_a_cut(cut_seconds: float) -> None:
    """A cut shorter than the silence only delays; behind a longer one a new link works (fault 47)."""

    async def work(rig: Rig) -> None:
        came: list[bytes] = []
        receiving = rig.owner.start(rig.receive(came), "receiver")
        await elapse(0.1)
        try:
            await send_around_a_cut(rig, cut_seconds)
        finally:
            receiving.cancel()
            await asyncio.wait([receiving])
        assert came[0] == b"before"
        assert came[-1] == b"behind"
        assert b"meanwhile" in came or cut_seconds > SILENCE_SECONDS
        assert len(set(came)) == len(came)

    run(work)


async def send_around_a_cut(rig: Rig, cut_seconds: float) -> None:
    """A message before, amid and behind a cut."""
    async with rig.sender() as sender:
        await sender.send(b"before")
        await sender.drained()
        rig.network.cut("producer", "ringing")
        sending = asyncio.ensure_future(sender.send(b"meanwhile"))
        await elapse(cut_seconds)
        rig.network.heal("producer", "ringing")
        with nullcontext() if cut_seconds < SILENCE_SECONDS else suppress(PeerLost):
            await sending
            await sender.drained()
    async with rig.sender() as sender:  # under the same identity
        await sender.send(b"behind")
        await sender.drained()


@pytest.mark.parametrize("silently", [False, True])
def test_dead_owner_is_noticed(silently: bool) -> None:
    """A process that dies resets its wires; one whose machine goes dark is missed after a silence."""

    async def work(rig: Rig) -> None:
        memory = await rig.connect()
        died_at = rig.loop.now
        rig.network.bury(rig.network.host("owner"), silently=silently)
        await _ended(memory.read(0, 8))
        assert (rig.loop.now - died_at > SILENCE_SECONDS / 2) == silently
        error = await _ended(rig.connect())
        assert isinstance(error, ConnectFailed) != silently

    run(work)


def test_dead_producer_leaves_a_part_of_its_chain() -> None:
    """What was posted before a death lands up to some piece, in order; then the owner is told."""
    landed = set()
    for seed in range(20):

        async def work(rig: Rig, seed: int = seed) -> None:
            rig.network.rng.seed(seed)
            memory = await rig.connect()
            writes = tuple(Write(64 * place, (bytes([place + 1]) * 64,)) for place in range(5))
            await memory.post(Chain(writes))
            rig.network.bury(rig.network.host("producer"), silently=False)
            await _ended(memory.flush())
            await elapse(1.0)
            pieces = [rig.view[64 * place] for place in range(5)]
            assert pieces == [1, 2, 3, 4, 5][: len([each for each in pieces if each])] + [0] * pieces.count(0)
            assert rig.diary.lost == [memory.session]
            landed.add(len([each for each in pieces if each]))

        run(work)
    assert len(landed) > 2


def test_buffers_are_read_when_they_land() -> None:
    """A sender that changes what it has posted sends what it is then, as an adapter would."""

    async def work(rig: Rig) -> None:
        memory = await rig.connect()
        buffer = bytearray(b"early")
        await memory.post(Chain((Write(0, (buffer,)),)))
        buffer[:] = b"later"
        await memory.flush()
        assert bytes(rig.view[:5]) == b"later"
        await memory.close()

    run(work)


@pytest.mark.parametrize("one_sided", [False, True])
def test_paused_owner(one_sided: bool) -> None:
    """Only a one-sided wire works on a process that is stopped; on others its peers give it up."""

    async def work(rig: Rig) -> None:
        memory = await rig.connect()
        rig.owner.pause()
        rig.network.notice_pause(rig.owner)
        if one_sided:
            assert await memory.fetch_and_add(0, 5) == 0
        else:
            assert isinstance(await _ended(memory.fetch_and_add(0, 5)), PeerLost)
        rig.owner.resume()
        await elapse(1.0)
        assert bool(rig.diary.lost) != one_sided
        await memory.close()

    run(work, evolve(FAIR, one_sided=one_sided))


def test_flips_change_one_bit() -> None:
    """Damage on the wire is a bit of a posted write, and counted."""

    async def work(rig: Rig) -> None:
        memory = await rig.connect()
        await memory.post(Chain((Write(0, (bytes(64),)),)))
        await memory.flush()
        assert sum(byte.bit_count() for byte in rig.view[:64]) == 1
        assert rig.network.flips == 1
        await memory.close()

    run(work, evolve(FAIR, flip_chance=1.0))


# --- disks -----------------------------------------------------------------------------------------


def on_disk(work: Callable[[SimDisk], Coroutine[Any, Any, None]], directory: Path, seed: int = 1) -> None:
    """Run work on a disk of its own."""
    loop = virtual_loop(Random(seed), lambda _: None)

    async def main() -> None:
        await work(SimDisk(directory / f"disk-{seed}", Random(seed), 0.01))

    loop.run_until_complete(main())


def test_crash_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    """Results that were acknowledged are there after a crash; of those asked for some first ones may be."""
    survivors = set()

    for seed in range(8):

        async def work(disk: SimDisk) -> None:
            async with disk.open_results(disk.path / "results", StoreOptions()) as store:
                assert await _put(store, "first") is PutOutcome.STORED
                waiting = [asyncio.ensure_future(_put(store, f"later-{number}")) for number in range(4)]
                await asyncio.sleep(0)
                disk.crash()
                for each in waiting:
                    each.cancel()
                await asyncio.wait(waiting)
            async with disk.open_results(disk.path / "results", StoreOptions()) as store:
                assert (await store.meta("first")).total_bytes == 5
                there = [number for number in range(4) if await _has(store, f"later-{number}")]
                assert there == list(range(len(there)))
                survivors.add(len(there))

        on_disk(work, tmp_path, seed)
    assert len(survivors) > 2


async def _put(store: Any, uid: str) -> PutOutcome:
    outcome: PutOutcome = await store.put(uid, [b"value"], content_type="text/plain", now=1.0)
    return outcome


async def _has(store: Any, uid: str) -> bool:
    try:
        await store.meta(uid)
    except UnknownRequest:
        return False
    return True


def test_full_disk_refuses_and_goes_on(tmp_path: Path) -> None:
    """Writing is refused by name while the disk is full, reading is not; room makes all well."""

    async def work(disk: SimDisk) -> None:
        async with disk.open_results(disk.path / "results", StoreOptions()) as store:
            await _put(store, "first")
            disk.is_full = True
            with pytest.raises(StoreFull):
                await _put(store, "second")
            assert await _has(store, "first")
            disk.is_full = False
            assert await _put(store, "second") is PutOutcome.STORED

    on_disk(work, tmp_path)


def test_manager_state_outlives_processes_but_not_the_disk(tmp_path: Path) -> None:
    """Each leadership has a higher epoch, until the disk is replaced."""

    async def work(disk: SimDisk) -> None:
        async with disk.open_coordinator(disk.path) as coordinator:
            state = await coordinator.lead()
            await coordinator.store(evolve(state, next_actor_id=9))
        async with disk.open_coordinator(disk.path) as coordinator:
            assert await coordinator.lead() == ManagerState(epoch=2, next_actor_id=9)
        disk.wipe()
        async with disk.open_coordinator(disk.path) as coordinator:
            assert (await coordinator.lead()).epoch == 1

    on_disk(work, tmp_path)
