"""Checks of a transport's operations: what lands, in which order, and what is refused."""

import asyncio
import time
from typing import Final

from transports.errors import PeerLost, ProtocolError, TransportError
from transports.memory import RemoteMemory
from transports.operations import EXPIRED, Chain, CompareAndSwap, Guarded, Write
from transports.testing.setting import Check, Setting, raised, staged, until


def _word(view: memoryview, offset: int) -> int:
    return int.from_bytes(view[offset : offset + 8], "little")


async def fresh_region_is_zeroed_and_aligned(setting: Setting) -> None:
    """A region holds zeros and can be seen by its owner as plain writable bytes."""
    async with staged(setting, 1 << 16) as stage:
        view = stage.region.view
        assert view.nbytes == 1 << 16
        assert view.format == "B"
        assert not view.readonly
        assert not any(view)
        assert stage.region.address.name == "check/1"


async def session_knows_number_and_welcome(setting: Setting) -> None:
    """The owner sees the hello; the producer sees the session's number and the welcome."""
    async with staged(setting) as stage:
        first, second = await stage.connect(b"one"), await stage.connect(b"two")
        assert stage.diary.hellos == [b"one", b"two"]
        assert (first.session, first.welcome) == (1, b"welcome one")
        assert (second.session, second.welcome) == (2, b"welcome two")
        await first.close()
        await second.close()


async def chain_lands_whole_and_notifies(setting: Setting) -> None:
    """Gathered buffers land one behind the other, and a chain with ``notify`` wakes the owner after it."""
    async with staged(setting) as stage:
        memory = await stage.connect()
        parts = tuple(bytes([index % 251]) * (index % 7) for index in range(1500))
        expected = b"".join(parts)
        quiet = Chain((Write(64, (b"quiet",)),), notify=False)
        await memory.post(quiet)
        await memory.flush()
        assert bytes(stage.region.view[64:69]) == b"quiet"
        assert stage.diary.notified == 0
        await memory.post(Chain((Write(128, parts), Write(8192, (memoryview(b"last"),)))))
        await until(lambda: stage.diary.notified > 0, "the notification")
        assert bytes(stage.region.view[128 : 128 + len(expected)]) == expected
        assert bytes(stage.region.view[8192:8196]) == b"last"
        await memory.close()


async def later_writes_win(setting: Setting) -> None:
    """Writes of one session land in the order in which they were posted."""
    async with staged(setting) as stage:
        memory = await stage.connect()
        for round_ in range(200):
            value = round_.to_bytes(8, "little")
            await memory.post(Chain((Write(0, (b"x" * 8,)), Write(0, (value,))), notify=False))
        await memory.flush()
        assert _word(stage.region.view, 0) == 199
        await memory.close()


async def empty_chain_still_notifies(setting: Setting) -> None:
    """A chain without writes, or with an empty one, changes nothing and wakes the owner."""
    async with staged(setting) as stage:
        memory = await stage.connect()
        await memory.post(Chain(()))
        await until(lambda: stage.diary.notified == 1, "the notification of no writes")
        await memory.post(Chain((Write(16, ()), Write(16, (b"",)))))
        await until(lambda: stage.diary.notified == 2, "the notification of empty writes")
        assert not any(stage.region.view)
        await memory.close()


async def read_sees_what_landed(setting: Setting) -> None:
    """A read behind a write of the same session returns it, at any length, up to the region's end."""
    size = 3 << 20
    async with staged(setting, size) as stage:
        memory = await stage.connect()
        pattern = bytes(range(256)) * (size // 256)
        await memory.post(Chain((Write(0, (pattern,)),)))
        for offset, length in ((0, 0), (5, 1), (100, 4096), (size - 8, 8), (0, size)):
            assert bytes(await memory.read(offset, length)) == pattern[offset : offset + length]
        await memory.close()


async def swap_only_what_was_expected(setting: Setting) -> None:
    """A swap returns the word found and changes it only if it is the one expected."""
    async with staged(setting) as stage:
        memory = await stage.connect()
        largest = (1 << 64) - 1
        assert await memory.compare_and_swap(CompareAndSwap(8, 0, largest)) == 0
        assert await memory.compare_and_swap(CompareAndSwap(8, 0, 5)) == largest
        assert _word(stage.region.view, 8) == largest
        assert await memory.compare_and_swap(CompareAndSwap(8, largest, 5)) == largest
        assert _word(stage.region.view, 8) == 5
        await memory.close()


async def late_swap_is_not_attempted(setting: Setting) -> None:
    """A swap whose moment has passed changes nothing and says so, alone and guarded."""
    async with staged(setting) as stage:
        memory = await stage.connect()
        late = CompareAndSwap(8, 0, 5, not_after=time.monotonic() - 1.0)
        assert await memory.compare_and_swap(late) is EXPIRED
        if memory.capabilities.guarded_bytes_max:
            assert await memory.guarded(Guarded(late, Chain((Write(64, (b"no",)),)))) is EXPIRED
        await memory.flush()
        assert not any(stage.region.view)
        in_time = CompareAndSwap(8, 0, 5, not_after=time.monotonic() + 60.0)
        assert await memory.compare_and_swap(in_time) == 0
        await memory.close()


async def additions_wrap(setting: Setting) -> None:
    """An addition returns the word found and wraps at 64 bits."""
    async with staged(setting) as stage:
        memory = await stage.connect()
        assert await memory.fetch_and_add(16, (1 << 64) - 1) == 0
        assert await memory.fetch_and_add(16, 3) == (1 << 64) - 1
        assert _word(stage.region.view, 16) == 2
        await memory.close()


async def guarded_is_all_or_nothing(setting: Setting) -> None:
    """The chain behind a swap lands exactly if the swap took place, up to the size declared."""
    async with staged(setting, 1 << 17) as stage:
        memory = await stage.connect()
        allowed = min(memory.capabilities.guarded_bytes_max, 1 << 16)
        if allowed:
            payload = b"g" * (allowed - 8)
            chain = Chain((Write(4096, (payload,)), Write(64, (b"commit!!",))))
            assert await memory.guarded(Guarded(CompareAndSwap(8, 1, 2), chain)) == 0
            await memory.flush()
            assert not any(stage.region.view)
            assert stage.diary.notified == 0
            assert await memory.guarded(Guarded(CompareAndSwap(8, 0, 1), chain)) == 0
            await until(lambda: stage.diary.notified == 1, "the notification")
            assert _word(stage.region.view, 8) == 1
            assert bytes(stage.region.view[64:72]) == b"commit!!"
            assert bytes(stage.region.view[4096 : 4096 + len(payload)]) == payload
        await memory.close()


async def no_swap_is_lost(setting: Setting) -> None:
    """Many sessions that count in one word by swap, and in another by addition, lose no step."""
    sessions, steps = 6, 40

    async def count(memory: RemoteMemory) -> None:
        for _ in range(steps):
            await memory.fetch_and_add(8, 1)
            found = -1
            expected = 0
            while found != expected:
                expected = max(found, 0)
                outcome = await memory.compare_and_swap(CompareAndSwap(0, expected, expected + 1))
                assert outcome is not EXPIRED
                found = outcome
        await memory.close()

    async with staged(setting) as stage:
        memories = [await stage.connect() for _ in range(sessions)]
        async with asyncio.TaskGroup() as tasks:
            for memory in memories:
                tasks.create_task(count(memory))
        assert _word(stage.region.view, 0) == sessions * steps
        assert _word(stage.region.view, 8) == sessions * steps


async def calls_of_many_tasks_do_not_mix(setting: Setting) -> None:
    """Tasks that use one session at once each get their own outcome and their own bytes."""
    tasks_count, area = 16, 1 << 18

    async def work(memory: RemoteMemory, index: int) -> None:
        body = bytes([index + 1]) * area
        start = 4096 + index * area
        for step in range(4):
            await memory.post(Chain((Write(start, (body[: area // 2], body[area // 2 :])),)))
            assert bytes(await memory.read(start, 4096)) == body[:4096]
            assert await memory.fetch_and_add(index * 8, 1) == step

    async with staged(setting, 4096 + tasks_count * area) as stage:
        memory = await stage.connect()
        async with asyncio.TaskGroup() as tasks:
            for index in range(tasks_count):
                tasks.create_task(work(memory, index))
        await memory.flush()
        for index in range(tasks_count):
            start = 4096 + index * area
            assert stage.region.view[start : start + area] == bytes([index + 1]) * area
        await memory.close()


async def much_more_than_a_wire_holds(setting: Setting) -> None:
    """Posting more than any queue holds waits where it must, and all of it lands."""
    piece = 4 << 20
    async with staged(setting, 2 * piece) as stage:
        memory = await stage.connect()
        buffers = [bytes([value]) * piece for value in range(1, 17)]
        for index, buffer in enumerate(buffers):
            await memory.post(Chain((Write(index % 2 * piece, (buffer,)),)))
        await memory.flush()
        assert stage.region.view[:piece] == buffers[14]
        assert stage.region.view[piece:] == buffers[15]
        await memory.close()


async def nothing_outside_the_region(setting: Setting) -> None:
    """An operation beyond the end, or on no aligned word, changes nothing and ends only its session."""
    size = 1 << 16

    async def attempt(memory: RemoteMemory, case: int) -> None:
        match case:
            case 0:
                await memory.post(Chain((Write(size - 4, (b"12345678",)),)))
            case 1:
                await memory.post(Chain((Write(1 << 63, (b"12345678",)),)))
            case 2:
                await memory.read(size - 4, 8)
            case 3:
                await memory.compare_and_swap(CompareAndSwap(size, 0, 1))
            case 4:
                await memory.compare_and_swap(CompareAndSwap(4, 0, 1))
            case 5:
                await memory.fetch_and_add(size - 4, 1)
            case _:
                chain = Chain((Write(0, (b"first",)), Write(size - 4, (b"12345678",))))
                await memory.guarded(Guarded(CompareAndSwap(8, 0, 1), chain))
        await memory.flush()

    async with staged(setting, size) as stage:
        bystander = await stage.connect()
        for case in range(6 + bool(bystander.capabilities.guarded_bytes_max)):
            memory = await stage.connect()
            error = await raised(TransportError, attempt(memory, case))
            assert isinstance(error, ProtocolError | PeerLost), f"case {case} ended in {error!r}"
            await raised(type(error), memory.flush())
            await until(lambda number=memory.session: number in stage.diary.lost, "the lost session")  # type: ignore[misc]  # bound at once
            await memory.close()
        assert not any(stage.region.view)
        assert await bystander.fetch_and_add(0, 1) == 0
        await bystander.close()


REMOTE_MEMORY_CHECKS: Final[tuple[Check, ...]] = (
    fresh_region_is_zeroed_and_aligned,
    session_knows_number_and_welcome,
    chain_lands_whole_and_notifies,
    later_writes_win,
    empty_chain_still_notifies,
    read_sees_what_landed,
    swap_only_what_was_expected,
    late_swap_is_not_attempted,
    additions_wrap,
    guarded_is_all_or_nothing,
    no_swap_is_lost,
    calls_of_many_tasks_do_not_mix,
    much_more_than_a_wire_holds,
    nothing_outside_the_region,
)
