"""The socket pair between a node and a helper process: order, sizes, ends, and whatever may come in."""

import array
import asyncio
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from onepiece.codec import CodecError, WireTensor, in_host, materialise
from onepiece.limits import ISOLATED_MESSAGE_BYTES_MAX, ISOLATED_PACKET_BYTES_MAX
from onepiece.runtime import isolated_channel
from onepiece.runtime.isolated_channel import (
    EndOfIsolated,
    IsolatedChannel,
    IsolatedProgress,
    IsolatedReady,
    IsolatedReturn,
    Received,
    map_in,
    read_out,
    run_in_thread,
)
from onepiece.types import ANY
from tests.runtime.rig import descriptors, until

Taker = Callable[[int, int], memoryview]


@asynccontextmanager
async def pair(take: Taker = read_out) -> AsyncIterator[tuple[IsolatedChannel, IsolatedChannel]]:
    """Both ends; nothing may stay open behind them."""
    before = descriptors()
    left, right = (
        IsolatedChannel(end, take) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    )
    try:
        yield left, right
    finally:
        left.close()
        right.close()
    await until(lambda: descriptors() == before)  # a thread may hold what it took for a moment


def value(received: Received) -> Any:
    """The value in a message; of a tensor the bytes."""
    found = received.values["value"]
    return bytes(in_host(found.buffer)) if isinstance(found, WireTensor) else materialise(found, ANY)


@pytest.mark.parametrize("take", [read_out, map_in])
async def test_messages_keep_their_order_whatever_their_size(take: Taker) -> None:
    """Small ones do not overtake large ones, which lie in shared memory."""
    async with pair(take) as (left, right):
        sizes = [0, 10, 3_000_000, 10, ISOLATED_PACKET_BYTES_MAX, 10, ISOLATED_PACKET_BYTES_MAX - 200, 7]
        for number, size in enumerate(sizes):
            array_sent = np.full(size, number, np.uint8)
            left.send(left.prepare(IsolatedReturn(number, 0.0), {"value": array_sent}))
        for number, size in enumerate(sizes):
            received = await right.receive()
            assert received.header == IsolatedReturn(number, 0.0)
            assert value(received) == bytes([number]) * size
            del received
        left.send(left.prepare(IsolatedReady()))
        assert (await right.receive()).header == IsolatedReady()


async def test_what_does_not_fit_waits_and_is_sent() -> None:
    """Nothing blocks while the peer reads nothing, and nothing is lost or joined when it does."""
    async with pair() as (left, right):
        count = 0
        while not left._queue or count < 40:
            count += 1
            left.send(left.prepare(IsolatedReturn(count, 0.0), {"value": bytes(100_000)}))
        flushed = asyncio.ensure_future(left.flushed())
        await asyncio.sleep(0)
        assert not flushed.done()
        for number in range(1, count + 1):
            assert (await right.receive()).header == IsolatedReturn(number, 0.0)
        await flushed


async def test_memory_is_given_back_when_a_message_is_prepared() -> None:
    """The sender may change what it sent at once, queued or not."""
    async with pair() as (left, right):
        for size in (1000, 1_000_000):
            array_sent = np.ones(size, np.uint8)
            outgoing = await left.prepare_in_thread(IsolatedReturn(1, 0.0), {"value": array_sent}, size)
            array_sent[:] = 0
            left.send(outgoing)
            del outgoing
            assert value(await right.receive()) == b"\1" * size


async def test_what_was_sent_before_an_end_still_comes() -> None:
    """Then the end does, again and again."""
    async with pair() as (left, right):
        left.send(left.prepare(IsolatedReturn(1, 0.0), {"value": bytes(1_000_000)}))
        left.send(left.prepare(IsolatedReady()))
        left.close()
        assert value(await right.receive()) == bytes(1_000_000)
        assert (await right.receive()).header == IsolatedReady()
        for _ in range(2):
            with pytest.raises(EndOfIsolated):
                await right.receive()


async def test_a_peer_that_is_gone_is_an_end_though_its_socket_is_open() -> None:
    """A process that it had forked may hold the socket; what the peer had sent still comes."""
    async with pair() as (left, right):
        left.send(left.prepare(IsolatedReady()))
        right.peer_is_gone()
        assert (await right.receive()).header == IsolatedReady()
        with pytest.raises(EndOfIsolated):
            await right.receive()
        waiting = asyncio.ensure_future(left.receive())
        await asyncio.sleep(0)
        left.peer_is_gone()
        with pytest.raises(EndOfIsolated):
            await waiting


async def test_closing_wakes_who_waits() -> None:
    """Receiving from a channel that is closed here ends, too."""
    async with pair() as (left, _right):
        waiting = asyncio.ensure_future(left.receive())
        await asyncio.sleep(0)
        left.close()
        with pytest.raises(EndOfIsolated):
            await waiting


async def test_sending_to_nobody_drops_the_message() -> None:
    """Its exit tells the sender; the memory is freed, and ``flushed`` does not wait for ever."""
    async with pair() as (left, right):
        right.close()
        for _ in range(3):
            left.send(left.prepare(IsolatedReturn(1, 0.0), {"value": bytes(1_000_000)}))
        async with asyncio.timeout(10):
            await left.flushed()
        unsent = left.prepare(IsolatedReturn(1, 0.0), {"value": bytes(1_000_000)})
        del unsent


async def test_a_queue_that_is_left_frees_its_memory() -> None:
    """Also when the peer goes while messages wait for it (fault 66)."""
    async with pair() as (left, right):
        while len(left._queue) < 10:
            left.send(left.prepare(IsolatedReturn(1, 0.0), {"value": bytes(100_000)}))
        left.send(left.prepare(IsolatedReturn(1, 0.0), {"value": bytes(1_000_000)}))
        right.close()
        async with asyncio.timeout(10):
            await left.flushed()


async def test_a_message_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the sender, with its size and the bound."""
    monkeypatch.setattr(isolated_channel, "ISOLATED_MESSAGE_BYTES_MAX", 1_000_000)
    async with pair() as (left, _right):
        with pytest.raises(CodecError, match="at most 1000000 travel"):
            left.prepare(IsolatedReturn(1, 0.0), {"value": bytes(2_000_000)})


def packet(kind: int, length: int, body: bytes = b"") -> bytes:
    """A packet as it is on the socket."""
    return struct.pack("<QQ", kind, length) + body


def shared(content: bytes, size: int | None = None) -> int:
    """Shared memory of this content, or of any size without one."""
    descriptor = os.memfd_create("test")
    os.write(descriptor, content)
    os.ftruncate(descriptor, len(content) if size is None else size)
    return descriptor


READY = len(isolated_channel._HEADERS) - 8
"""The place of ``IsolatedReady`` among the kinds."""

HOSTILE: list[tuple[str, bytes, Callable[[], Sequence[int]]]] = [
    ("cut", b"short", list),
    ("cut", bytes(ISOLATED_PACKET_BYTES_MAX + 17), list),
    ("unknown kind 99", packet(99, 0), list),
    ("0 bytes that says it has 5", packet(READY, 5), list),
    ("3 bytes that says it has 2", packet(READY, 2, b"abc"), list),
    ("message of 3 bytes is cut short", packet(READY, 3, b"abc"), list),
    ("begins with", packet(READY, 20, bytes(20)), list),
    ("descriptor of 4 bytes", packet(READY, 5), lambda: [shared(b"abcd")]),
    ("beside a packet that says 4", packet(READY, 4, b"abcd"), lambda: [shared(b"abcd")]),
    ("descriptor of 0 bytes", packet(READY, 0), lambda: [os.open(os.devnull, os.O_RDONLY)]),
    ("begins with", packet(READY, 20), lambda: [shared(bytes(20))]),
    ("cut", packet(READY, 4), lambda: [shared(b"abcd"), shared(b"abcd"), shared(b"abcd")]),
    (
        f"{ISOLATED_MESSAGE_BYTES_MAX} at most",
        packet(READY, ISOLATED_MESSAGE_BYTES_MAX + 1),
        lambda: [shared(b"", ISOLATED_MESSAGE_BYTES_MAX + 1)],
    ),
]


@pytest.mark.parametrize(("words", "data", "open_descriptors"), HOSTILE)
async def test_what_is_no_message_is_refused(
    words: str, data: bytes, open_descriptors: Callable[[], Sequence[int]]
) -> None:
    """Named, without an allocation of the size that it claims, and without a descriptor kept."""
    before = descriptors()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = IsolatedChannel(ours, read_out)
    opened = open_descriptors()
    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", opened))] if opened else []
    theirs.sendmsg([data], beside)
    for descriptor in opened:
        os.close(descriptor)
    with pytest.raises(CodecError, match=words):
        await channel.receive()
    channel.close()
    theirs.close()
    assert descriptors() == before


async def test_shared_memory_that_shrinks_is_an_error() -> None:
    """The sender's mistake is not ours: no fault, no endless loop."""
    descriptor = shared(bytes(1000))
    with pytest.raises(CodecError, match="of 2000 bytes ends at 1000"):
        read_out(descriptor, 2000)
    os.close(descriptor)


async def test_receiving_can_be_cancelled_while_a_message_is_taken() -> None:
    """It is taken to its end, dropped, and its descriptor closed; the next one comes whole (fault 66)."""
    is_taking, may_go_on = threading.Event(), threading.Event()

    def slowly(descriptor: int, length: int) -> memoryview:
        is_taking.set()
        assert may_go_on.wait(20)
        return read_out(descriptor, length)

    async with pair(slowly) as (left, right):
        left.send(left.prepare(IsolatedReturn(1, 0.0), {"value": bytes(1_000_000)}))
        left.send(left.prepare(IsolatedProgress(1, "progress"), {"value": 7}))
        receiving = asyncio.ensure_future(right.receive())
        await until(is_taking.is_set)
        receiving.cancel()
        await asyncio.sleep(0)
        receiving.cancel()
        assert not receiving.done()
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        assert value(await right.receive()) == 7


async def test_work_in_a_thread_ends_before_its_caller() -> None:
    """Cancelled once or thrice: memory that the thread reads stays until it has read it."""
    is_running, may_go_on = threading.Event(), threading.Event()

    def work() -> int:
        is_running.set()
        assert may_go_on.wait(20)
        return 1

    running = asyncio.ensure_future(run_in_thread(work))
    await until(is_running.is_set)
    for _ in range(3):
        running.cancel()
        await asyncio.sleep(0)
    assert not running.done()
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await run_in_thread(lambda: 3) == 3
