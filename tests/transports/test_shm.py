"""Memory shared within a host: who gets it, in which order bytes land, and peers that break rules."""

import asyncio
import errno
import gc
import os
import resource
import socket
from pathlib import Path

import pytest
from attrs import evolve

from tests.transports.shm_parts import COPIED, HERE, LARGE, READ_WIRE, SECRET, UNASKED, linked, region, write
from transports import shared_memory, shm_lender
from transports import tcp_frames as frames
from transports.address import Address
from transports.channel import open_receiver, open_sender
from transports.errors import (
    AddressError,
    ConnectFailed,
    ProtocolError,
    TransportError,
)
from transports.memory import Options
from transports.operations import Chain, CompareAndSwap, Guarded, Write
from transports.ring import Geometry
from transports.shared_memory import Bypass, LentMemory, map_memory
from transports.shm_link import Offer
from transports.tcp import TcpTransport
from transports.tcp_frames import Kind
from transports.testing import until
from transports.testing.setting import Stage, raised

CERTIFICATES = Path(__file__).with_name("certificates")


# Who gets it.


@pytest.mark.parametrize("side", ["both", "producer", "owner"])
async def test_it_is_used_without_being_asked_for(side: str) -> None:
    """On one host payloads land without the owner's processor; ``shm=off`` on either side is respected."""
    off = {"shm": "off"}
    async with region(2 * LARGE, address=evolve(HERE, options=off if side == "owner" else {})) as stage:
        options = off if side == "producer" else {}
        address = evolve(stage.region.address, options=options)
        memory = await TcpTransport().connect(address, b"", SECRET)
        assert memory.capabilities.fences_sessions is (side != "both")
        body = os.urandom(LARGE)
        if side == "both":
            await memory.post(write(64, b"small"))
            assert memory.capabilities.wire == "tcp (shm from the first large payload on)"
            await memory.post(write(64, body))
            assert stage.region.view[64 : 64 + LARGE] == body, "it lands without the owner's processor"
        assert memory.capabilities.wire == (READ_WIRE if side == "both" else "tcp")
        await memory.post(write(128, body, notify=True))
        await until(lambda: stage.diary.notified == 1, "the notification")
        assert stage.region.view[128 : 128 + LARGE] == body
        await memory.close()


async def test_what_is_required_and_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``shm=required`` no other way is taken, and the error says what was in the way."""
    required = {"shm": "required"}
    async with region(address=evolve(HERE, options={"shm": "off"})) as stage:
        address = evolve(stage.region.address, options=required)
        error = await raised(ConnectFailed, TcpTransport().connect(address, b"", SECRET))
        assert "the owner lends no memory" in str(error)
        await until(lambda: stage.diary.lost == [1], "the end of the session")
    monkeypatch.setattr(shm_lender, "_user_of", lambda _: os.geteuid() + 1)
    async with region(address=evolve(HERE, options=required)) as stage:
        error = await raised(ConnectFailed, stage.connect())
        assert "another user" in str(error)


async def test_nothing_is_lent_to_other_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of another user gets no memory; it writes over tcp, and says why."""
    monkeypatch.setattr(shm_lender, "_user_of", lambda _: os.geteuid() + 1)
    async with region(address=UNASKED) as stage:
        memory = await stage.connect()
        await memory.post(write(4096, b"by the owner" * 100))
        await memory.flush()
        assert memory.capabilities.wire.startswith("tcp (no shm: ")
        assert bytes(stage.region.view[4096:4108]) == b"by the owner"
        await memory.close()


async def test_without_free_descriptors_payloads_take_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer that can open no socket, or take no descriptor, writes over tcp, and says why."""
    async with region(2 * LARGE, address=UNASKED) as stage:
        memory, other = await stage.connect(), await stage.connect()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            await memory.post(write(64, body := os.urandom(LARGE)))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert memory.capabilities.wire.startswith("tcp (no shm: its memory cannot be had: [Errno 24]")
        await memory.flush()
        assert stage.region.view[64 : 64 + LARGE] == body
        monkeypatch.setattr(socket, "recv_fds", lambda *_: (b"\0", [], socket.MSG_CTRUNC, None))
        await other.post(write(64, body))
        assert other.capabilities.wire == "tcp (no shm: this process has no file descriptor free for it)"
        for session in (memory, other):
            await session.close()


async def test_what_is_lent_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond the bound regions have memory of their own, and their senders write over tcp."""
    gc.collect()
    lent = sum(map(len, shared_memory._lent))
    monkeypatch.setattr(shared_memory, "LENT_BYTES_MAX", lent + (1 << 16))
    async with region() as first, region(address=UNASKED) as second:
        assert linked(await first.connect())
        assert not isinstance(second.region.memory, LentMemory)  # type: ignore[attr-defined]  # of the tcp region
        memory = await second.connect()
        assert memory.capabilities.wire == "tcp"
        await memory.close()
    assert "above the bound" in caplog.text


def test_where_memory_is_counted_strictly_all_is_taken_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """What there is no memory for is known before anybody touches it, which would end the process."""
    size_bytes = 1 << 20
    strict = tmp_path / "overcommit_memory"
    monkeypatch.setattr(shared_memory, "_OVERCOMMIT", strict)
    for text, taken_bytes in (("0\n", 0), ("2\n", size_bytes)):
        strict.write_text(text)
        memory = shared_memory.new_memory(size_bytes)
        assert isinstance(memory, LentMemory)
        assert os.fstat(memory.descriptor).st_blocks * 512 == taken_bytes

    def none_left(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no pages")

    monkeypatch.setattr(os, "posix_fallocate", none_left)
    assert not isinstance(shared_memory.new_memory(size_bytes), LentMemory)
    assert "no pages" in caplog.text


@pytest.mark.parametrize("text", ["tcp://h:1?smh=off", "tcp://h:1?shm=maybe", "tcp://h:1?shm=off&require=x"])
async def test_options_that_mean_nothing_are_refused(text: str) -> None:
    """A misspelt option is not taken for none, by either side."""
    address = Address.parse(text)
    with pytest.raises(AddressError, match=r"shm=auto\|off\|required\|copy"):
        Bypass.of(address)
    with pytest.raises(AddressError):
        async with TcpTransport().listen(evolve(address, host="127.0.0.1", port=0), Options()):
            pytest.fail("it listens")
    with pytest.raises(AddressError):  # and not that nobody listens there
        await TcpTransport().connect(evolve(address, host="127.0.0.1"), b"", Options())


async def test_beside_an_encrypted_connection() -> None:
    """With certificates the token travels encrypted, and payloads do not leave the host."""
    options = Options(
        tls_authority=str(CERTIFICATES / "authority.pem"),
        tls_certificate=str(CERTIFICATES / "node.pem"),
        tls_key=str(CERTIFICATES / "node.key"),
    )
    async with region(2 * LARGE, options) as stage:
        memory = await stage.connect()
        assert memory.capabilities.wire == "shm (beside tls, read in place)"
        body = os.urandom(LARGE)
        await memory.post(write(64, body))
        await memory.flush()
        assert stage.region.view[64 : 64 + LARGE] == body
        await memory.close()


# Order.


async def test_two_ways_keep_the_order() -> None:
    """Frames and copies land in the order of their posts, whichever goes which way, however large."""
    async with region(2 * LARGE) as stage:
        memory = await stage.connect()
        for round_ in range(40):
            long = bytes([round_ + 1]) * (LARGE if round_ % 4 == 0 else 1000)
            await memory.post(write(64, b"short" * 10))
            await memory.post(write(64, long))
            await memory.post(
                Chain((Write(64, (b"A" * 200,)), Write(64, (b"short",)), Write(80, (b"B" * 90,))))
            )
            guarded = Guarded(CompareAndSwap(0, round_, round_ + 1), Chain((Write(128, (b"guarded",)),)))
            assert await memory.guarded(guarded) == round_
            await memory.post(write(130, b"C" * 100))
            await memory.flush()
            expected = b"short" + b"A" * 11 + b"B" * 48 + b"gu" + b"C" * 100
            assert bytes(stage.region.view[64 : 64 + len(expected)]) == expected
            assert stage.region.view[264:1000] == long[:736]
        await memory.close()


async def test_posts_that_are_cancelled_leave_the_order_alone() -> None:
    """What follows a post that nobody waits for any more still lands behind it."""
    async with region(8 * LARGE) as stage:
        memory = await stage.connect()
        for round_ in range(20):
            body = bytes([round_ + 1]) * (7 * LARGE)
            posting = asyncio.ensure_future(memory.post(write(64, body)))
            for _ in range(round_ % 5):
                await asyncio.sleep(0)
            posting.cancel()
            await asyncio.wait([posting])
            await memory.post(write(64, b"behind it"))
            await memory.flush()
            assert bytes(stage.region.view[64:73]) == b"behind it"
        await memory.close()


@pytest.mark.parametrize("place", [UNASKED, COPIED], ids=["read", "copied"])
@pytest.mark.parametrize("length", [LARGE, 24 << 20])
async def test_large_messages_arrive_whole(length: int, place: Address) -> None:
    """Messages far longer than the queue of copies, one behind the other through a ring that wraps."""
    body = os.urandom(length)
    async with (
        TcpTransport().listen(place, SECRET) as listener,
        open_receiver(listener, "actor/7", Geometry(8, (2 * length + length // 2) // 64 * 64, 4)) as receiver,
        open_sender(receiver.address, "large", options=SECRET) as sender,
    ):
        for number in range(5):
            sending = asyncio.ensure_future(sender.send([bytes([number]), body]))
            async with asyncio.timeout(20):
                delivery = await receiver.receive()
            assert delivery.payload[0] == number
            assert delivery.payload[1:] == body
            receiver.release(delivery)
            assert await sending == number
        await sender.drained()
        assert sender.wire == ("shm (beside tcp)" if place is COPIED else READ_WIRE)


# Peers that do not follow the rules.


def visit(stage: Stage, said: bytes) -> socket.socket:
    """A visitor at the owner's socket that presents these bytes."""
    visitor = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    visitor.connect(f"\0{stage.listener.lender.name}")  # type: ignore[attr-defined]  # of the tcp listener
    visitor.send(said)
    visitor.setblocking(False)
    return visitor


async def shown_out(visitor: socket.socket) -> bool:
    """The visitor was sent away without a descriptor."""
    said: bytes | None = None
    descriptors: list[int] = []
    async with asyncio.timeout(20):
        while said is None:
            try:
                said, descriptors, _, _ = socket.recv_fds(visitor, 64, 4)
            except BlockingIOError:
                await asyncio.sleep(0.001)
            except ConnectionResetError:
                said = b""
    visitor.close()
    return not said and not descriptors


async def test_memory_is_only_for_members() -> None:
    """Who has no token of a session that has proven the secret gets nothing, nor does a used token help."""
    async with region() as stage:
        for said in (b"?", bytes(16), bytes(17), bytes(1000)):
            assert await shown_out(visit(stage, said))
        tokens: list[bytes] = []
        parse = Offer.parse

        def spy(body: memoryview) -> Offer:
            tokens.append(bytes(body[:16]))
            return parse(body)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Offer, "parse", spy)
            memory = await stage.connect()
        assert await shown_out(visit(stage, tokens[0]))
        memory._send([frames.frame(Kind.ATTACH)])  # type: ignore[attr-defined]  # of the tcp session
        await raised(ProtocolError, memory.wait_notified(60.0))
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.region.address.port)
        writer.write(frames.frame(Kind.ATTACH))
        assert (await reader.readexactly(frames.HEADER_BYTES))[0] == Kind.REFUSED
        writer.close()
        await writer.wait_closed()


async def test_visitors_that_say_nothing_are_shown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A visit without a token ends by itself, and there are only so many at once."""
    monkeypatch.setattr(shm_lender, "_TOKEN_SECONDS", 0.05)
    async with region() as stage:
        assert await shown_out(visit(stage, b"")), "an empty packet is the end of a visit"
        mute = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mute.connect(f"\0{stage.listener.lender.name}")  # type: ignore[attr-defined]  # of the tcp listener
        mute.setblocking(False)
        assert await shown_out(mute)
        monkeypatch.setattr(shm_lender, "_VISITS_MAX", 0)
        assert await shown_out(visit(stage, bytes(16)))


async def test_talk_on_a_lifeline_costs_the_memory() -> None:
    """A producer that breaks this rule may break others: its session ends, and the region moves on."""
    async with region() as stage:
        memory = await stage.connect()
        view = stage.region.view
        linked(memory)._lifeline.send(b"hello?")
        await raised(ProtocolError, memory.wait_notified(60.0))
        await until(lambda: stage.diary.lost == [memory.session], "the end of the session")
        assert stage.region.view is not view
        await memory.close()


async def test_nothing_beyond_the_region_is_copied() -> None:
    """A long write beyond the end is refused before a byte is copied, and ends only its own session."""
    size = 1 << 16
    async with region(size) as stage:
        bystander = await stage.connect()
        for offset in (size - 100, size, 1 << 63, -1000):
            memory = await stage.connect()
            await raised(ProtocolError, memory.post(write(offset, b"x" * 200)))
            await raised(ProtocolError, memory.flush())
            await until(lambda number=memory.session: number in stage.diary.lost, "the lost session")  # type: ignore[misc]  # bound at once
        assert not any(stage.region.view)
        assert await bystander.fetch_and_add(0, 1) == 0
        await bystander.close()


def test_memory_that_may_shrink_is_not_mapped() -> None:
    """Memory that an owner could cut off beneath a copy, or of another size, is refused."""
    good = LentMemory(1 << 16)
    for size in ((1 << 16) - 1, 1 << 20):
        with pytest.raises(ProtocolError, match="sealed"):
            map_memory(good.descriptor, size)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(good.descriptor, 4096)
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, 1 << 16)
    with pytest.raises(ProtocolError, match="sealed"):
        map_memory(unsealed, 1 << 16)
    os.close(unsealed)
    read, written = os.pipe()
    with pytest.raises(ProtocolError, match="sealed"):
        map_memory(read, 1 << 16)
    os.close(read)
    os.close(written)


@pytest.mark.parametrize(
    "body", [b"", b"t" * 16, b"t" * 16 + b"../name", b"t" * 16 + b"name\0", b"t" * 16 + b"\xff"]
)
def test_offers_that_name_no_socket_are_refused(body: bytes) -> None:
    """What an owner says is looked at before anything is connected."""
    with pytest.raises(ProtocolError):
        Offer.parse(memoryview(body))


@pytest.mark.parametrize("address", [HERE, UNASKED], ids=["required", "unasked"])
async def test_an_owner_that_keeps_the_memory_holds_nobody_up(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits in vain for what it was offered gives up in time: with an error, or by another way."""
    monkeypatch.setattr(shm_lender.Lender, "_acceptable", lambda _: None)
    async with region(options=evolve(SECRET, connect_timeout_seconds=0.2), address=address) as stage:
        if address is HERE:
            await raised(TransportError, stage.connect())
            await until(lambda: stage.diary.lost == [1], "the end of the session")
            return
        memory = await stage.connect()
        await memory.post(write(4096, b"by the owner" * 100))
        await memory.flush()
        assert "no answer within 0.2 s" in memory.capabilities.wire
        assert bytes(stage.region.view[4096:4108]) == b"by the owner"
        await memory.close()
