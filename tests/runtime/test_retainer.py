"""Retainer: outputs are held until released, in memory or on disk, and stages wait for room."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from onepiece.codec import PackedAnywhere, pack
from onepiece.core.retention import OutputKey, RetentionTable
from onepiece.errors import StoreFull
from onepiece.messages import StageInput
from onepiece.runtime.device_messages import copied_to_host, lies_in_host
from onepiece.runtime.result_targets import StageTarget, Target
from onepiece.runtime.retainer import CIRCLE_SECONDS, CirclePatience, Output, Retainer
from onepiece.store import PutOutcome, ResultStore, StoreOptions
from tests.runtime.rig import until
from transports import DeviceError
from transports.testing import FakeDevice

KEY = OutputKey("u", "a", "b")


def target(uid: str = "u") -> Target:
    """Where an output goes."""
    return StageTarget(StageInput(uid, "w", "b", "a", "owner", 0.0, None, 0.0), "m:b", {"x": ()})


@asynccontextmanager
async def retainer(
    path: Path | None, *, memory: int = 1000, everything: int = 3000
) -> AsyncIterator[tuple[Retainer, ResultStore | None]]:
    """A retainer, with a spill store if there is a path."""
    table: RetentionTable[Output] = RetentionTable(memory, everything)
    if path is None:
        async with asyncio.TaskGroup() as tasks:
            yield Retainer(table, None, tasks), None
        return
    async with (
        ResultStore.open(path, StoreOptions(byte_budget=1 << 20)) as store,
        asyncio.TaskGroup() as tasks,
    ):
        yield Retainer(table, store, tasks), store


def hold(held: Retainer, key: OutputKey, content: bytes) -> bytes:
    """Retain a message with this content; the whole message."""
    packed = pack(None, {"x": content})
    held.hold(key, target(key.uid), packed)
    return b"".join(packed.parts)


async def bytes_of(held: Retainer, key: OutputKey) -> bytes | None:
    """The message as it would be sent again."""
    output = await held.fetch(key)
    if output is None:
        return None
    assert output.target == target(key.uid)
    return b"".join(copied_to_host(output.parts))


async def test_an_output_is_held_until_it_is_released() -> None:
    """As it was, with where it goes; by request, by graph node; then nothing of it is left."""
    async with retainer(None) as (held, _):
        message = hold(held, KEY, b"content")
        assert await bytes_of(held, KEY) == message
        assert held.sources_of("u") == ("a",)
        assert held.targets_of("u", "a") == [KEY]
        assert held.targets_of("u", "b") == []
        assert held.held_bytes == len(message)
        assert held.metrics() == {"outputs": 1, "memory_bytes": len(message), "disk_bytes": 0}
        held.release(KEY)
        held.release(KEY)
        assert await bytes_of(held, KEY) is None
        assert held.metrics() == {"outputs": 0, "memory_bytes": 0, "disk_bytes": 0}


async def test_what_is_too_much_for_memory_lies_on_disk(tmp_path: Path) -> None:
    """The oldest goes; it comes back bit by bit; when it is released the disk is free again."""
    async with retainer(tmp_path) as (held, store):
        assert store is not None
        keys = [OutputKey("u", "a", target) for target in "bcde"]
        messages = [hold(held, key, bytes([number]) * 600) for number, key in enumerate(keys)]
        await until(lambda: held.metrics()["memory_bytes"] <= 1000)
        assert held.metrics()["disk_bytes"] == sum(map(len, messages[:3]))
        for key, message in zip(keys, messages, strict=True):
            assert await bytes_of(held, key) == message
        held.release_request("u")
        assert held.metrics() == {"outputs": 0, "memory_bytes": 0, "disk_bytes": 0}
        await held.emptied()


async def test_an_output_released_while_it_is_written_leaves_nothing(tmp_path: Path) -> None:
    """The write is under way: what it wrote is removed behind it."""
    async with retainer(tmp_path) as (held, store):
        assert store is not None
        hold(held, KEY, bytes(2000))
        held.release(KEY)
        await until(lambda: held.metrics()["outputs"] == 0)
        hold(held, KEY, bytes(2000))
        await until(lambda: held.metrics()["disk_bytes"] > 0)
        assert await bytes_of(held, KEY) is not None
        held.release(KEY)


async def test_stages_wait_for_room() -> None:
    """At the bound no work is taken; releasing lets it go on (back-pressure, never a drop)."""
    async with retainer(None, everything=1500) as (held, _):
        await held.room()
        hold(held, KEY, bytes(2000))
        waiting = asyncio.ensure_future(held.room())
        emptying = asyncio.ensure_future(held.emptied())
        await asyncio.sleep(0)
        assert not waiting.done()
        assert await bytes_of(held, KEY) is not None
        held.release(KEY)
        await waiting
        await emptying


async def test_stages_wait_for_outputs_on_their_way() -> None:
    """What is being sent lies in memory, retained or not: beyond the memory's bound no work is taken."""
    async with retainer(None, memory=10_000, everything=1 << 20) as (held, _):
        held.sending(9000)
        waiting = asyncio.ensure_future(held.room())
        await asyncio.sleep(0)
        assert not waiting.done()
        held.sent(9000)
        await waiting
    async with retainer(None, memory=0, everything=1 << 20) as (held, _):
        await held.room()  # one at a time, where there is no memory to speak of


async def test_small_and_large_outputs_wait_for_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their sizes, memory holds no more than its bound and what was just computed (fault 85)."""
    sizes, may_write = (500, 20_000), asyncio.Semaphore(0)
    async with retainer(tmp_path, memory=50_000, everything=1 << 20) as (held, _):
        put = ResultStore.put

        async def slowly(*args: Any, **how: Any) -> PutOutcome:
            await may_write.acquire()
            return await put(*args, **how)

        monkeypatch.setattr(ResultStore, "put", slowly)
        most = 0
        for number in range(24):
            computing = asyncio.ensure_future(held.room())
            await asyncio.sleep(0)
            while not computing.done():
                may_write.release()  # as slow as can be: it writes while nothing else can be done
                await asyncio.sleep(0.005)
            hold(held, OutputKey(f"u{number}", "a", "b"), bytes(sizes[number % 2]))
            held.check_invariants()
            most = max(most, held.metrics()["memory_bytes"])
        assert 50_000 < most <= 50_000 + 1000 + max(sizes)
        assert held.metrics()["disk_bytes"] > 100_000, "it was not provoked"
        for _ in range(24):
            may_write.release()
        held.release_all()


async def test_a_stage_goes_on_where_what_is_on_its_way_waits_for_its_own_inbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each would wait for the other until a deadline; but not where more is held than there is room for."""
    monkeypatch.setattr("onepiece.runtime.retainer.CIRCLE_SECONDS", 0.01)
    async with retainer(None, memory=10_000, everything=1500) as (held, _):
        held.sending(9000)
        await held.room()
        hold(held, KEY, bytes(2000))
        waiting = asyncio.ensure_future(held.room())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await asyncio.shield(waiting)
        held.release(KEY)
        await waiting


def test_circles_are_left_ever_quicker_as_long_as_that_helps() -> None:
    """Half the time for each that let something arrive; the whole time again behind one that did not."""
    patience = CirclePatience()
    waited = []
    for arrived in (3, 4, 9, 9, 10, *range(11, 20)):
        waited.append(patience.seconds / CIRCLE_SECONDS)
        patience.goes_on(arrived)
    assert waited[:6] == [1.0, 0.5, 0.25, 0.125, 1.0, 0.5]
    assert waited[-1] == 1 / 64


async def test_a_disk_that_refuses_leaves_outputs_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full, or gone: nothing is lost, and it counts against the bound."""

    async def refuse(*_: object, **__: object) -> None:
        raise StoreFull("the disk is full")

    async with retainer(tmp_path) as (held, store):
        assert store is not None
        monkeypatch.setattr(ResultStore, "put", refuse)
        message = hold(held, KEY, bytes(2000))
        for _ in range(3):
            await asyncio.sleep(0)
        assert await bytes_of(held, KEY) == message
        assert held.metrics()["memory_bytes"] == len(message)
        held.release(KEY)


async def test_a_new_life_holds_nothing() -> None:
    """A node that was declared dead drops what it held for its old life."""
    async with retainer(None) as (held, _):
        for uid in "abc":
            hold(held, OutputKey(uid, "a", "b"), b"x")
        held.release_all()
        assert held.metrics()["outputs"] == 0


def on_device(device: FakeDevice, content: bytes) -> PackedAnywhere:
    """A message whose content lies on the device, and is referred to by nobody else."""
    packed = pack(None, {"x": content})
    *front, data = packed.parts
    memory = device.allocate(len(data))
    memory.put(0, (data,))
    return PackedAnywhere((*front, memory.span(0, len(data))), packed.length)


async def test_what_lies_on_a_device_is_brought_to_the_host() -> None:
    """It counts from the beginning and may be sent before; then the device has its memory back."""
    device = FakeDevice()
    async with retainer(None) as (held, _):
        for number in range(3):
            key = OutputKey("u", "a", str(number))
            held.hold(key, target(), on_device(device, bytes([number]) * 2000))
        first = await held.fetch(OutputKey("u", "a", "0"))
        assert first is not None
        assert not lies_in_host(first.parts)
        del first
        assert device.allocations == 3
        assert held.held_bytes > 6000
        held.release(OutputKey("u", "a", "1"))  # its turn has not come, and never will
        await until(lambda: device.allocations == 0)
        for number in (0, 2):
            output = await held.fetch(OutputKey("u", "a", str(number)))
            assert output is not None
            assert lies_in_host(output.parts)
            assert output.parts[-1] == bytes([number]) * 2000
        assert await held.fetch(OutputKey("u", "a", "1")) is None
        held.check_invariants()


async def test_what_lies_on_a_device_is_spilled_too(tmp_path: Path) -> None:
    """Bytes are what the disk gets, whether they had been copied to the host by then or not."""
    device = FakeDevice()
    async with retainer(tmp_path, memory=1000) as (held, _):
        packed = on_device(device, bytes(range(250)) * 10)
        wanted = b"".join(copied_to_host(packed.parts))
        held.hold(KEY, target(), packed)
        del packed
        await until(lambda: held.metrics()["disk_bytes"] == len(wanted))
        assert device.allocations == 0
        assert await bytes_of(held, KEY) == wanted
        held.release(KEY)


async def test_an_output_of_a_device_that_fails_stays_held() -> None:
    """It cannot be copied: that is logged, and it stays what it is until nobody needs it."""
    device = FakeDevice("cuda:0")

    def broken(address: int, length: int) -> bytes:
        raise DeviceError("cuda:0 has fallen off the bus")

    with capture_logs() as logs:
        async with retainer(None) as (held, _):
            packed = on_device(device, bytes(2000))
            device.read = broken  # type: ignore[method-assign]  # what is tested
            held.hold(KEY, target(), packed)
            await until(lambda: logs)
            output = await held.fetch(KEY)
            assert output is not None
            assert output.parts == packed.parts
            held.release(KEY)
            assert held.held_bytes == 0
    assert [each["event"] for each in logs] == ["retained_output_not_copied"]
    assert "fallen off the bus" in logs[0]["error"]
