"""Channels beyond the public suite: large payloads, shared identities, exhausted sessions, fairness."""

import asyncio
import random
from array import array
from collections.abc import Sequence
from itertools import count

import pytest

from transports import (
    Address,
    ChannelClosed,
    Geometry,
    HandshakeRefused,
    Leniency,
    PeerLost,
    hashing,
)
from transports.fences import REFUSED, REPLACED
from transports.hashing import HASH_ELSEWHERE_BYTES
from transports.local import LocalTransport
from transports.operations import Bytes
from transports.ring.layout import hash_payload
from transports.tcp import TcpTransport
from transports.testing import Faults, FaultyTransport, Setting, until
from transports.testing.channel_checks import inbox, next_of
from transports.testing.setting import raised

SMALL = Geometry(slot_count=8, payload_bytes=256 << 10, session_count=4)
LARGE = Geometry(slot_count=8, payload_bytes=16 << 20, session_count=4)
STRICT = Leniency(lease_seconds=0.2, slowest_bytes_per_second=1e9)
LENGTH = HASH_ELSEWHERE_BYTES + 1000

_NAMES = count()


@pytest.fixture(params=["local", "tcp"])
def setting(request: pytest.FixtureRequest) -> Setting:
    """Each transport in turn."""
    if request.param == "tcp":
        return Setting(TcpTransport(), Address.parse("tcp://127.0.0.1:0"))
    return Setting(LocalTransport(), Address.parse(f"local://channel-{next(_NAMES)}"))


async def test_large_and_small_keep_their_order(setting: Setting) -> None:
    """A payload that is hashed in a thread comes before the small ones behind it, polled or received."""
    async with inbox(setting, LARGE) as box, box.sender("a") as sender:
        for round_ in range(3):
            bodies = [bytes([round_]) * LENGTH, b"small", b"", bytes([round_ + 9]) * LENGTH, b"last"]
            for body in bodies:
                await sender.send(body)
            held = [await next_of(box.receiver) for _ in bodies]
            assert [bytes(delivery.payload) for delivery in held] == bodies
            for delivery in reversed(held):
                box.receiver.release(delivery)
        await sender.send(b"x" * LENGTH)
        polled: list[int] = []

        def poll() -> bool:
            delivery = box.receiver.poll_nowait()
            if delivery is not None:
                polled.append(len(delivery.payload))
            return bool(polled)

        await until(poll, "the large message, polled")
        assert polled == [LENGTH]


@pytest.mark.parametrize("fault", ["flip_chance", "drop_chance", "cut_chance"])
async def test_large_messages_survive_faults(setting: Setting, fault: str) -> None:
    """Flips, drops and cuts in large payloads: each message once, whole, in order."""
    faults = Faults(random.Random(11), remaining=2)
    setattr(faults, fault, 0.3)
    transport = FaultyTransport(setting.transport, faults)
    bodies = [random.Random(number).randbytes(LENGTH) for number in range(4)]
    async with (
        inbox(setting, LARGE, STRICT) as box,
        box.sender("a", transport=transport) as sender,
        asyncio.TaskGroup() as tasks,
    ):

        async def send() -> None:
            for body in bodies:
                await sender.send(body)
            await sender.drained()

        tasks.create_task(send())
        for number, body in enumerate(bodies):
            delivery = await next_of(box.receiver)
            assert delivery.number == number
            assert delivery.payload == body
            box.receiver.release(delivery)
    assert faults.remaining == 0


async def test_damaged_large_payload_is_not_hashed_all_the_time(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the lease of a damaged large payload runs it is hashed a few times, not in a circle."""
    hashed = 0

    def hash_and_count(payload: Sequence[Bytes]) -> int:
        nonlocal hashed
        hashed += 1
        return hash_payload(payload)

    monkeypatch.setattr(hashing, "hash_payload", hash_and_count)
    faults = Faults(
        random.Random(1), flip_chance=1.0, remaining=1, flips_wanted=lambda write: write.length > 4096
    )
    transport = FaultyTransport(setting.transport, faults)
    async with inbox(setting, LARGE, STRICT) as box, box.sender("a", transport=transport) as sender:
        await sender.send(b"x" * LENGTH)
        delivery = await next_of(box.receiver)
        assert delivery.payload == b"x" * LENGTH
    assert faults.happened == ["flip"]
    assert 2 <= hashed <= 6


async def test_fences_are_counted_by_their_reason(setting: Setting) -> None:
    """A sender that comes back replaces its own session; one that is refused loses it."""
    async with inbox(setting) as box, box.sender("a") as first:
        await first.send(b"one")
        box.receiver.release(await next_of(box.receiver))
        async with box.sender("a") as second:
            assert box.receiver.fenced == {REPLACED: 1}
            await second.send(b"two")
            box.receiver.release(await next_of(box.receiver))
            box.receiver.refuse("a")
            await until(lambda: box.receiver.fenced[REFUSED] == 1, "the fence of what is refused")
        assert box.receiver.fenced == {REPLACED: 1, REFUSED: 1}


async def test_closing_while_a_hash_is_computed(setting: Setting) -> None:
    """A receiver closed while it hashes wakes who waits, and leaves no task behind."""
    async with inbox(setting, LARGE) as box, box.sender("a") as sender:
        await sender.send(b"x" * LENGTH)
        receiving = asyncio.ensure_future(box.receiver.receive())
        await until(lambda: box.receiver._hashing or receiving.done(), "the hash")
        await box.receiver.close()
        if not (receiving.done() and receiving.exception() is None):
            await raised(ChannelClosed, receiving)


async def test_two_senders_of_one_identity_are_told(setting: Setting) -> None:
    """Where two senders share an identity, the one that falls behind is told; nothing is mixed up."""
    async with inbox(setting) as box, box.sender("same") as first:
        assert await first.send(b"first") == 0
        box.receiver.release(await next_of(box.receiver))
        async with box.sender("same") as second:
            for number in (1, 2):
                assert await second.send(b"second") == number
                box.receiver.release(await next_of(box.receiver))
            error = await raised(PeerLost, first.send(b"too late"))
            assert "another sender uses this identity" in str(error)
        assert box.receiver.poll_nowait() is None


async def test_sessions_run_out_and_come_back(setting: Setting) -> None:
    """More senders than the inbox has sessions are refused with the reason; a free one is used again."""
    geometry = Geometry(slot_count=8, payload_bytes=1 << 14, session_count=2)
    async with inbox(setting, geometry) as box, box.sender("a") as sender:
        async with box.sender("b"):
            error = await raised(HandshakeRefused, box.sender("c").__aenter__())
            assert "2 sessions" in str(error)
        receiving = asyncio.ensure_future(box.receiver.receive())
        await until(lambda: box.receiver._consumer.session_of("b") is None, "the end of the session")
        await asyncio.sleep(0)
        async with box.sender("c") as late:
            await late.send(b"at last")
            assert bytes((await receiving).payload) == b"at last"
        assert sender.delivered == 0


async def test_a_busy_receiver_lets_others_run(setting: Setting) -> None:
    """Receiving many waiting messages in a row does not keep other tasks from running."""
    geometry = Geometry(slot_count=512, payload_bytes=1 << 16, session_count=2)
    async with inbox(setting, geometry) as box, box.sender("a") as sender:
        for _ in range(400):
            await sender.send(b"x")
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        running = asyncio.ensure_future(others())
        for _ in range(400):
            box.receiver.release(await box.receiver.receive())
        running.cancel()
        await asyncio.wait([running])
        assert turns >= 4


async def test_released_payloads_are_closed(setting: Setting) -> None:
    """A payload that is used after its release is an error, not another message's bytes."""
    async with inbox(setting) as box, box.sender("a") as sender:
        await sender.send(b"soon gone")
        delivery = await next_of(box.receiver)
        box.receiver.release(delivery)
        with pytest.raises(ValueError, match="released"):
            bytes(delivery.payload)


async def test_kind_and_flags_have_bounds(setting: Setting) -> None:
    """A kind or flags that do not fit a byte are refused where they are given; the channel goes on."""
    async with inbox(setting) as box, box.sender("a") as sender:
        for kind, flags in ((256, 0), (-1, 0), (0, 256)):
            with pytest.raises(ValueError, match="0 to 255"):
                await sender.send(b"x", kind=kind, flags=flags)
        assert await sender.send(b"x", kind=255, flags=255) == 0

        assert (await next_of(box.receiver)).kind == 255


async def test_buffers_of_other_elements_are_their_bytes(setting: Setting) -> None:
    """Elements wider than a byte, and rows, arrive as the bytes that they lie in; pulled ones too."""
    rows = memoryview(bytes(range(6))).cast("B", (2, 3))
    async with (
        inbox(setting, SMALL, pulled_bytes_max=1 << 20) as box,
        box.sender("a", exported_bytes_max=1 << 20) as sender,
    ):
        for count_ in (1, 5_000, 12_000):
            floats = memoryview(array("d", [0.5, -1.0, 3.25]) * count_)
            for parts in ([floats], [memoryview(b"head"), floats, rows, floats[:0]]):
                await sender.send(parts)
                delivery = await next_of(box.receiver)
                assert bytes(delivery.payload) == b"".join([part.tobytes() for part in parts])
                box.receiver.release(delivery)


async def test_what_is_not_plain_bytes_is_refused_before_it_is_sent(setting: Setting) -> None:
    """Gaps between elements, and what is no buffer, are the caller's error; the channel goes on."""
    async with inbox(setting) as box, box.sender("a") as sender:
        with pytest.raises(ValueError, match="not one piece of plain bytes"):
            await sender.send([b"head", memoryview(bytes(20))[::2]])
        for wrong in ("text", ["text"], [1]):
            with pytest.raises(TypeError):
                await sender.send(wrong)  # type: ignore[arg-type]  # what is wrong is the point
        assert await sender.send(b"fine") == 0
        assert bytes((await next_of(box.receiver)).payload) == b"fine"


async def test_without_threads_large_payloads_are_hashed_by_the_loop(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that may start no thread sends, receives and pulls all the same."""

    async def no_thread(*_: object) -> object:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(asyncio, "to_thread", no_thread)
    async with (
        inbox(setting, SMALL, pulled_bytes_max=LENGTH) as box,
        box.sender("a", exported_bytes_max=LENGTH) as sender,
    ):
        await sender.send(b"p" * LENGTH)
        assert bytes((await next_of(box.receiver)).payload) == b"p" * LENGTH
    async with inbox(setting, LARGE) as box, box.sender("a") as sender:
        await sender.send(b"r" * LENGTH)
        assert bytes((await next_of(box.receiver)).payload) == b"r" * LENGTH
