"""Large messages that their receiver reads where they lie: whose memory, how much, and what if it fails."""

import asyncio
import ctypes
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from attrs import evolve, frozen

from tests.transports.shm_parts import COPIED, READ_WIRE, SECRET, UNASKED
from transports import process_memory, shm_link
from transports.address import Address
from transports.channel import open_receiver, open_sender
from transports.operations import Bytes
from transports.process_memory import SPANS_MAX, OtherMemory, Place, Spans, address_of
from transports.receiver import Receiver
from transports.ring import Geometry
from transports.ring.layout import hash_payload
from transports.sender import Sender
from transports.tcp import TcpTransport
from transports.testing import until

LENGTH = 300_000
RING_BYTES = 1 << 20


@frozen
class Joined:
    """Both ends of a channel."""

    sender: Sender
    receiver: Receiver

    async def pass_through(self, buffers: Sequence[Bytes]) -> bytes:
        """Send a message and take it."""
        sending = asyncio.ensure_future(self.sender.send(buffers))
        async with asyncio.timeout(20):
            delivery = await self.receiver.receive()
            await sending
        content = bytes(delivery.payload)
        self.receiver.release(delivery)
        return content


@asynccontextmanager
async def joined(
    place: Address = UNASKED, *, seen_as: dict[str, str] | None = None, is_asked: bool = True
) -> AsyncIterator[Joined]:
    """A channel within this process; its first large message, which gets it the memory, is behind it."""
    async with (
        TcpTransport().listen(place, SECRET) as listener,
        open_receiver(listener, "actor/7", Geometry(64, RING_BYTES, 4)) as receiver,
    ):
        address = receiver.address
        if seen_as is not None:
            address = evolve(address, options=seen_as)
        async with open_sender(address, "near", options=SECRET) as sender:
            ends = Joined(sender, receiver)
            if is_asked:
                assert await ends.pass_through([bytes(LENGTH)]) == bytes(LENGTH)
            yield ends


def here() -> OtherMemory:
    """This process, as others see it."""
    return OtherMemory(os.getpid())


# The memory itself.


def test_a_secret_is_found_where_it_lies_and_nowhere_else() -> None:
    """So a process that is not meant, is gone, or may not be read, is told apart from the one that is."""
    secret = os.urandom(16)
    where = address_of(memoryview(secret))
    assert here().holds(secret, where)
    assert not here().holds(os.urandom(16), where)
    assert not here().holds(secret, 16)
    assert not OtherMemory(0).holds(secret, where)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert not OtherMemory(ended.pid).holds(secret, where)


@pytest.mark.parametrize("call_bytes", [7, 4096, 1 << 24])
async def test_what_spans_say_is_read_one_behind_the_other(
    call_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that may be written to or not, none at all, and more pieces than the system takes at once."""
    monkeypatch.setattr(process_memory, "_CALL_BYTES_MAX", call_bytes)
    pieces: list[Bytes] = [os.urandom(number % 5) for number in range(2000)]
    pieces += [bytearray(os.urandom(9000)), b"", memoryview(os.urandom(70))[3:]]
    whole = b"".join(pieces)
    spans = Spans(pieces)
    into = bytearray(len(whole))
    computed = await here().fetch(spans.place, memoryview(into))
    assert bytes(into) == whole
    assert computed == hash_payload((whole,))


@pytest.mark.parametrize("length", [1000, 1001, 2400])
async def test_long_ones_are_hashed_part_by_part(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the next part is read: the hash is that of the whole."""
    monkeypatch.setattr(process_memory, "_CALL_BYTES_MAX", 800)
    monkeypatch.setattr(process_memory, "_READ_HERE_BYTES", 999)
    monkeypatch.setattr(process_memory, "_LONG_BYTES", 1000)
    whole = os.urandom(length)
    spans = Spans([whole[:700], whole[700:]])
    into = bytearray(length)
    assert await here().fetch(spans.place, memoryview(into)) == hash_payload((whole,))
    assert bytes(into) == whole


async def test_spans_that_are_not_what_was_offered_are_an_error() -> None:
    """Nothing is read beyond what there is room for, and the number of spans is bounded."""
    spans = Spans([b"a" * 100, b"b" * 100])
    for room in (0, 100, 199, 201):
        with pytest.raises(OSError, match=f"do not hold {room} bytes"):
            await here().fetch(spans.place, memoryview(bytearray(room)))
    table = (ctypes.c_uint64 * (2 * SPANS_MAX + 4))()
    many = Place(ctypes.addressof(table), SPANS_MAX + 1, 0)
    with pytest.raises(OSError, match=f"{SPANS_MAX} are allowed"):
        await here().fetch(many, memoryview(bytearray(0)))
    with pytest.raises(OSError, match=r"Bad address|could be read"):
        await here().fetch(Place(16, 1, 0), memoryview(bytearray(100)))


# Channels.


async def test_what_was_given_up_is_not_read() -> None:
    """Neither behind the end of a loan, though its bytes may still lie there, nor where it ends meanwhile."""
    spans, memory = Spans([b"a" * 100]), here()
    into = memoryview(bytearray(100))
    await memory.fetch(spans.place, into)
    read_into = memory._read_into

    def read_and_give_up(into: memoryview, places: Sequence[tuple[int, int]]) -> None:
        read_into(into, places)
        if len(into) == 100:
            spans.end()

    memory._read_into = read_and_give_up  # type: ignore[assignment]  # ends the loan behind the bytes
    with pytest.raises(OSError, match="not lent any more"):
        await memory.fetch(spans.place, into)
    with pytest.raises(OSError, match="not lent any more"):
        await memory.fetch(spans.place, into)


async def test_large_messages_are_read_where_they_lie() -> None:
    """Each in memory of its own, which stays behind its release while something refers to it."""
    async with joined() as ends:
        assert ends.sender.wire == READ_WIRE
        bodies = [os.urandom(LENGTH) for _ in range(30)]
        kept = []
        for body in bodies:
            sending = asyncio.ensure_future(ends.sender.send([body[:1000], body[1000:]]))
            delivery = await ends.receiver.receive()
            await sending
            assert delivery.is_own
            kept.append(delivery.payload[:])
            ends.receiver.release(delivery)
        assert [bytes(each) for each in kept] == bodies
        assert ends.receiver.pulled_bytes == 0
        await ends.sender.drained()
        assert ends.sender.lent_bytes == 0


async def test_the_first_message_may_be_one_that_no_ring_holds() -> None:
    """It gets its session the memory as one that is written does: the next ones are read where they lie."""
    async with joined(is_asked=False) as ends:
        content = os.urandom(RING_BYTES + 1)
        assert await ends.pass_through([content]) == content
        assert ends.sender.wire == READ_WIRE


async def test_small_messages_lie_in_the_ring() -> None:
    """They go with their swap, which costs less."""
    async with joined() as ends:
        sending = asyncio.ensure_future(ends.sender.send([b"small"]))
        delivery = await ends.receiver.receive()
        await sending
        assert not delivery.is_own
        ends.receiver.release(delivery)


@pytest.mark.parametrize("side", ["both", "owner", "producer"])
async def test_either_side_may_forbid_it(side: str) -> None:
    """``shm=copy``: memory is shared, and nobody reads the other's."""
    owner = UNASKED if side == "producer" else COPIED
    seen_as = {"shm": "auto"} if side == "owner" else dict(COPIED.options)
    async with joined(owner, seen_as=seen_as) as ends:
        assert ends.sender.wire == "shm (beside tcp)"
        body = os.urandom(LENGTH)
        assert await ends.pass_through([body]) == body


async def test_a_sender_whose_memory_cannot_be_read_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system does not allow it, or where the secret is not where it is said to lie."""
    monkeypatch.setattr(shm_link, "address_of", lambda _: 16)
    async with joined() as ends:
        assert ends.sender.wire == "shm (beside tcp)"
        body = os.urandom(LENGTH)
        assert await ends.pass_through([body]) == body


async def test_what_cannot_be_read_any_more_comes_over_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process may drop what allowed it while a session stands: nothing is lost, and no session ends."""
    async with joined() as ends:

        async def refused(*_: object) -> int:
            raise PermissionError("not any more")

        monkeypatch.setattr(OtherMemory, "fetch", refused)
        body = os.urandom(LENGTH)
        session = ends.sender._session
        assert await ends.pass_through([body]) == body
        assert ends.sender._session is session


async def test_a_message_of_very_many_buffers_comes_over_the_connection() -> None:
    """Where they lie is told of so many, and no more."""
    async with joined() as ends:
        pieces = [os.urandom(40) for _ in range(SPANS_MAX + 1)]
        assert await ends.pass_through(pieces) == b"".join(pieces)


async def test_what_is_changed_while_it_is_lent_is_not_delivered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was read is not what was offered: its session ends, and the message comes in the next one."""
    async with joined() as ends:
        body = bytearray(os.urandom(LENGTH))
        fetch, is_first = OtherMemory.fetch, True

        async def torn(memory: OtherMemory, place: Place, into: memoryview) -> int:
            nonlocal is_first
            if is_first:
                is_first, body[7] = False, body[7] ^ 1
                try:
                    return await fetch(memory, place, into)
                finally:
                    body[7] ^= 1
            return await fetch(memory, place, into)

        monkeypatch.setattr(OtherMemory, "fetch", torn)
        session = ends.sender._session
        assert await ends.pass_through([body]) == body
        assert ends.sender._session is not session
    assert "do not write to it before it has arrived" in caplog.text


async def test_a_receiver_that_keeps_messages_takes_no_more_memory_than_its_ring() -> None:
    """Whatever is lent: what the ring could hold is pulled only while it has that much room."""
    async with joined() as ends:
        bodies = [os.urandom(LENGTH) for _ in range(9)]
        sending = [asyncio.ensure_future(ends.sender.send([body])) for body in bodies]
        held = [await ends.receiver.receive() for _ in range(3)]
        for _ in range(20):
            await asyncio.sleep(0)
            assert ends.receiver.poll_nowait() is None
            assert ends.receiver.pulled_bytes == 3 * LENGTH <= RING_BYTES
        got: list[bytes] = []
        while len(got) < len(bodies):
            delivery = held.pop(0)
            got.append(bytes(delivery.payload))
            ends.receiver.release(delivery)
            if len(got) + len(held) < len(bodies):
                async with asyncio.timeout(20):
                    held.append(await ends.receiver.receive())
        assert got == bodies
        await asyncio.gather(*sending)


async def test_nothing_is_lent_behind_the_end_of_a_session() -> None:
    """Buffers are let go of with it."""
    async with joined() as ends:
        memory = ends.sender._session
        assert memory is not None
        await ends.sender.send([os.urandom(LENGTH)])
        await ends.sender.close()
        await until(lambda: not vars(memory.memory)["_spans"], "what was lent is let go of")
