"""What only the tcp transport has: strangers, half frames, silence, full sockets, certificates."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from attrs import evolve

from transports import (
    Address,
    AuthenticationFailed,
    ConnectFailed,
    Geometry,
    ListenFailed,
    OperationTimeout,
    Options,
    PeerLost,
    ProtocolError,
    TransportError,
    open_receiver,
)
from transports import tcp_frames as frames
from transports.introductions import Hello
from transports.operations import Chain, Write
from transports.tcp import TcpTransport
from transports.tcp_frames import Introduction, Kind
from transports.tcp_reasons import parse_reason
from transports.testing import Setting, until
from transports.testing.setting import Stage, raised, staged

CERTIFICATES = Path(__file__).with_name("certificates")
HERE = Address.parse("tcp://127.0.0.1:0?shm=off")
HELLO = frames.hello_frame(Introduction(bytes(32), "check/1", b"stranger"), has_secret=False)


def setting(options: Options | None = None) -> Setting:
    """A free port."""
    return Setting(TcpTransport(), HERE, options or Options())


class Stranger:
    """A peer that speaks bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def say(self, data: bytes) -> None:
        """Send bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def hear_end(self) -> TransportError | None:
        """Read all frames until the connection ends; the reason that the last one tells."""
        reason = None
        bounds = {int(kind): 1 << 20 for kind in Kind if kind is not Kind.DATA}
        reader = frames.FrameReader(bounds, lambda _: memoryview(b""))
        while data := await self.reader.read(1000):
            reader.next_buffer()[: len(data)] = data
            reader.received(len(data))
            for header, body in reader.frames():
                if header.kind in {Kind.REFUSED, Kind.ENDED}:
                    reason = parse_reason(header, body)
        return reason

    async def enter(self) -> None:
        """Open a session as a well-behaved producer without a secret would."""
        await self.say(HELLO)
        challenge = await self.reader.readexactly(frames.HEADER_BYTES + 32)
        introduction = Introduction(bytes(32), "check/1", b"stranger")
        proof = frames.Proofs(None, introduction, challenge[frames.HEADER_BYTES :]).producer
        await self.say(frames.frame(Kind.PROOF, body=len(proof)) + proof)
        welcome = await self.reader.readexactly(frames.HEADER_BYTES)
        assert welcome[0] == Kind.WELCOME
        await self.reader.readexactly(int.from_bytes(welcome[8:16], "little"))


@asynccontextmanager
async def stranger_at(stage: Stage) -> AsyncIterator[Stranger]:
    """A stranger's connection to the stage's port."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stage.listener.address.port)
    try:
        yield Stranger(reader, writer)
    finally:
        writer.transport.abort()


async def still_serves(stage: Stage) -> None:
    """A new session works, and nothing has been written."""
    memory = await stage.connect()
    assert not any(await memory.read(0, 4096))
    await memory.close()


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1:7070\r\nAccept: */*\r\n\r\n", "b'GET / HTTP"),
        (bytes(200), "no OnePiece node"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), "the peer encrypts"),
        (b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\n\r\n", "serves HTTP"),
        (frames.frame(Kind.HELLO, body=1 << 50), "at most"),
        (frames.frame(Kind.HELLO, body=3) + b"abc", "does not speak"),
        (frames.frame(Kind.HELLO, a=frames.MAGIC, b=77, body=3) + b"abc", "wire version 77"),
        (frames.frame(Kind.HELLO, a=frames.MAGIC, b=frames.WIRE_VERSION, body=3) + b"abc", "too short"),
        (frames.frame(Kind.WRITE, body=8) + bytes(8), "WRITE"),
        (HELLO + frames.frame(Kind.WRITE, body=8) + bytes(8), "WRITE"),
        (HELLO + frames.frame(Kind.PROOF, body=32) + bytes(32), "another cluster secret"),
        (HELLO + frames.frame(Kind.PROOF, body=33) + bytes(33), "at most"),
    ],
)
async def test_strangers_are_told_and_shown_out(
    said: bytes, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever does not speak the protocol is told why, logged and disconnected; others are served."""
    caplog.set_level(logging.WARNING)
    async with staged(setting()) as stage:
        async with stranger_at(stage) as stranger:
            await stranger.say(said)
            assert expected in str(await stranger.hear_end())
        assert expected in caplog.text
        assert stage.diary.hellos == []
        await still_serves(stage)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (frames.frame(Kind.WRITE, a=1 << 60, body=1 << 30), "outside the region"),
        (frames.frame(Kind.WRITE, a=(1 << 64) - 1, body=1 << 39), "outside the region"),
        (frames.frame(Kind.WRITE, a=8, body=1 << 41), "at most"),
        (frames.frame(Kind.READ, a=0, b=1 << 40), "at most"),
        (frames.frame(Kind.READ, a=1 << 60, b=8), "outside the region"),
        (frames.frame(Kind.SWAP, a=3), "no aligned word"),
        (frames.frame(Kind.ADD, a=1 << 16), "no aligned word"),
        (frames.frame(Kind.GUARDED, writes=99, body=4) + b"four", "cannot name 99"),
        (frames.frame(Kind.WELCOME), "WELCOME"),
        (frames.frame(Kind.HELLO), "HELLO"),
        (frames.frame(Kind.CLAIM, a=64), "has not said that it executes any"),
        (frames.frame(Kind.CLAIM, a=64, body=8) + bytes(8), "at most 0"),
    ],
)
async def test_hostile_members_change_nothing(said: bytes, expected: str) -> None:
    """A session that breaks a rule is ended before a byte is written, and reported as lost."""
    async with staged(setting()) as stage:
        async with stranger_at(stage) as stranger:
            await stranger.enter()
            await stranger.say(said)
            reason = await stranger.hear_end()
            assert isinstance(reason, ProtocolError)
            assert expected in str(reason)
        await until(lambda: stage.diary.lost == [1], "the lost session")
        await still_serves(stage)


async def test_half_a_frame(caplog: pytest.LogCaptureFixture) -> None:
    """A producer that dies in the middle of a frame is a lost session, with the reason in the log."""
    caplog.set_level(logging.WARNING)
    async with staged(setting()) as stage:
        async with stranger_at(stage) as stranger:
            await stranger.enter()
            await stranger.say(frames.frame(Kind.SWAP, a=0, b=0, c=1)[:20])
            await asyncio.sleep(0)
        await until(lambda: stage.diary.lost == [1], "the lost session")
        assert "in the middle of a frame" in caplog.text
        async with stranger_at(stage) as stranger:
            await stranger.enter()
            await stranger.say(frames.frame(Kind.WRITE, a=4096, body=60_000) + b"x" * 1000)
            await until(lambda: stage.region.view[4096 + 999] == ord("x"), "the first part")
        await until(lambda: stage.diary.lost == [1, 2], "the lost session")
        await still_serves(stage)


async def test_slow_handshake_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """A stranger that says nothing, or half a hello, is disconnected when its time is over."""
    options = Options(connect_timeout_seconds=0.1)
    async with staged(setting(options)) as stage:
        async with stranger_at(stage) as mute, stranger_at(stage) as halting:
            await halting.say(HELLO[:50])
            assert "not finished within 0.1 s" in str(await mute.hear_end())
            assert "not finished within 0.1 s" in str(await halting.hear_end())
        await still_serves(stage)


async def test_silent_producer_is_lost() -> None:
    """A session whose producer neither says nor takes anything is ended within the bound."""
    async with staged(setting(Options(silence_seconds=0.2))) as stage:
        lively = await stage.connect()
        async with stranger_at(stage) as stranger:
            await stranger.enter()
            await until(lambda: stage.diary.lost == [2], "the silent session")
        assert await lively.fetch_and_add(0, 1) == 0, "a session that only beats is no silent one"
        await lively.close()


async def test_producer_that_reads_no_answers_is_not_read_either() -> None:
    """Answers that nobody reads do not pile up: the owner stops reading, and goes on when they are read."""
    asked = 200
    async with staged(setting(), 1 << 20) as stage, stranger_at(stage) as stranger:
        await stranger.enter()
        sessions = stage.listener._sessions  # type: ignore[attr-defined]  # of the tcp listener
        (session,) = sessions
        stranger.reader._limit = 1 << 16  # type: ignore[attr-defined]  # stop reading soon
        await stranger.say(frames.frame(Kind.READ, a=0, b=1 << 20) * asked)
        await until(lambda: not session.wire._receiving, "the owner to stop reading")
        assert session.wire.pending_bytes < 10 << 20
        for _ in range(asked):
            await stranger.reader.readexactly(frames.HEADER_BYTES + (1 << 20))


@asynccontextmanager
async def impostor(*answers: bytes, close: bool = True) -> AsyncIterator[Address]:
    """An owner that answers every connection with these bytes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        for said in answers:
            await reader.read(1 << 16)
            writer.write(said)
        if close:
            writer.close()

    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield evolve(HERE, port=server.sockets[0].getsockname()[1], name="check/1")
        for writer in writers:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


CHALLENGE = frames.frame(Kind.CHALLENGE, body=32) + bytes(32)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ((b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",), ProtocolError),
        ((b"",), ConnectFailed),
        ((CHALLENGE[:20],), ConnectFailed),
        ((frames.frame(Kind.CHALLENGE, body=1 << 40),), ProtocolError),
        ((frames.frame(Kind.CHALLENGE, body=5) + b"12345",), ProtocolError),
        ((frames.frame(Kind.CHALLENGE, flags=frames.SECRET, body=32) + bytes(32),), AuthenticationFailed),
        ((CHALLENGE, frames.frame(Kind.WELCOME, a=1, body=32) + bytes(32)), AuthenticationFailed),
        ((CHALLENGE, frames.frame(Kind.WORD)), ProtocolError),
    ],
)
async def test_impostors_are_named(answers: tuple[bytes, ...], expected: type[TransportError]) -> None:
    """An owner that does not speak the protocol, or cannot prove the secret, is an error with a name."""
    async with impostor(*answers) as address:
        await raised(expected, TcpTransport().connect(address, b"", Options()))


async def test_mute_owner_is_a_timeout() -> None:
    """An owner that takes the connection and says nothing is given up within the bound."""
    async with impostor(b"", close=False) as address:
        work = TcpTransport().connect(address, b"", Options(connect_timeout_seconds=0.1))
        await raised(OperationTimeout, work)


async def test_unanswered_operation_is_a_timeout() -> None:
    """An owner whose process hangs: an operation ends in OperationTimeout, silence in PeerLost."""
    options = Options(operation_timeout_seconds=0.3, silence_seconds=0.6)
    async with staged(setting(options)) as stage:
        memory = await stage.connect()
        (session,) = stage.listener._sessions  # type: ignore[attr-defined]  # of the tcp listener
        session.wire.pause_receiving()
        session._pulse.stop()
        await raised(OperationTimeout, memory.read(0, 8))
        await raised(PeerLost, memory.wait_notified(30.0))
        await raised(PeerLost, memory.read(0, 8))


async def test_full_socket_holds_the_producer_back() -> None:
    """While the owner does not read, posting waits instead of queueing without bound; then it goes on."""
    piece = bytes(1 << 20)
    async with staged(setting(), 1 << 21) as stage:
        memory = await stage.connect()
        (session,) = stage.listener._sessions  # type: ignore[attr-defined]  # of the tcp listener
        session.wire.pause_receiving()
        posted = 0

        async def post() -> None:
            nonlocal posted
            for _ in range(100):
                await memory.post(Chain((Write(0, (piece,)),), notify=False))
                posted += 1
            await memory.post(Chain((Write(1 << 20, (b"x" * (1 << 20),)),)))

        posting = asyncio.ensure_future(post())
        before = -1
        while posted != before:
            before = posted
            await asyncio.sleep(0.05)
        assert posted < 100, "nothing held the producer back"
        assert memory.wire.pending_bytes < 8 << 20  # type: ignore[attr-defined]  # of the tcp session
        session.wire.resume_receiving()
        await posting
        await memory.flush()
        assert stage.region.view[-1] == ord("x")
        await memory.close()


async def test_port_in_use_leaves_nothing_behind() -> None:
    """A port in use is named with an advice, and leaving what was half opened is immediate (fault 17)."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        address = evolve(HERE, port=port)
        before = len(asyncio.all_tasks())
        with pytest.raises(ListenFailed, match=f"{port}.*choose another port"):
            async with TcpTransport().listen(address, Options()):
                pytest.fail("the port was given twice")
        assert len(asyncio.all_tasks()) == before
    async with TcpTransport().listen(address, Options()) as listener:
        assert listener.address.port == port


async def test_hosts_that_are_not_ours() -> None:
    """A host of another machine cannot be listened on, one without a name not be reached."""
    with pytest.raises(ListenFailed, match="host of"):
        async with TcpTransport().listen(Address.parse("tcp://192.0.2.1:0"), Options()):
            pytest.fail("this address is documentation's")
    nowhere = Address.parse("tcp://nowhere.invalid:1/x")
    await raised(ConnectFailed, TcpTransport().connect(nowhere, b"", Options()))


def certified(*, presents: bool) -> Options:
    """Options of a side that trusts the test authority, and perhaps presents a certificate."""
    return Options(
        tls_authority=str(CERTIFICATES / "authority.pem"),
        tls_certificate=str(CERTIFICATES / "node.pem") if presents else None,
        tls_key=str(CERTIFICATES / "node.key") if presents else None,
    )


async def test_who_has_not_the_secret_is_told_what_to_do() -> None:
    """Whether it has another one, or none, or the owner has none."""
    secret, another, none = Options(secret=b"of this cluster"), Options(secret=b"another"), Options()
    for owner, producer in ((secret, another), (secret, none), (none, secret)):
        async with staged(setting(owner)) as stage:
            work = TcpTransport().connect(stage.region.address, b"", producer)
            assert "give both sides the same" in str(await raised(AuthenticationFailed, work))


async def test_encrypted_session_works() -> None:
    """With certificates on both sides everything works as without, also what is larger than any buffer."""
    async with staged(setting(certified(presents=True)), 8 << 20) as stage:
        memory = await stage.connect()
        assert not memory.capabilities.zero_copy_send
        payload = bytes(range(256)) * (8 << 12)
        await memory.post(Chain((Write(0, (payload[:100], payload[100:])),)))
        await memory.flush()
        assert stage.region.view == payload
        assert bytes(await memory.read(0, 8 << 20)) == payload
        await stage.region.fence([memory.session])
        await until(memory._ending.over, "the fence")  # type: ignore[attr-defined]  # of the tcp session
        await memory.close()


async def test_without_certificate_nobody_enters(caplog: pytest.LogCaptureFixture) -> None:
    """Who has no certificate of the authority, or does not encrypt at all, gets no session; both hear why."""
    async with staged(setting(certified(presents=True))) as stage:
        for options in (certified(presents=False), Options()):
            work = TcpTransport().connect(stage.region.address, b"", options)
            await raised(ConnectFailed, work)
        assert stage.diary.hellos == []
        assert "reset ()" not in caplog.text
        memory = await stage.connect()
        await memory.flush()
        await memory.close()
    async with staged(setting(Options())) as stage:
        work = TcpTransport().connect(stage.region.address, b"", certified(presents=True))
        assert "do both sides have certificates" in str(await raised(ConnectFailed, work))
        assert "the peer encrypts" in caplog.text


async def test_unusable_certificates_are_named() -> None:
    """A certificate that cannot be read is named before anything is bound or connected."""
    options = Options(tls_certificate="/nowhere/node.pem")
    with pytest.raises(ListenFailed, match=r"/nowhere/node\.pem"):
        async with TcpTransport().listen(HERE, options):
            pytest.fail("there is no such certificate")
    await raised(ConnectFailed, TcpTransport().connect(HERE, b"", options))


async def test_a_welcome_to_who_has_given_up_is_no_error() -> None:
    """A connection that is opened and cancelled at any moment ends quietly: its answer may be on its way."""
    loop, complaints = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    transport = TcpTransport()
    async with (
        transport.listen(Address.parse("tcp://127.0.0.1:0"), Options()) as listener,
        open_receiver(listener, "ring", Geometry(8, 1 << 12, 64)) as receiver,
    ):
        for steps in range(60):
            opening = asyncio.ensure_future(
                transport.connect(receiver.address, Hello(f"{steps}").to_bytes(), Options())
            )
            for _ in range(steps):
                await asyncio.sleep(0)
            opening.cancel()
            await asyncio.wait([opening])
            if not opening.cancelled() and opening.exception() is None:
                await opening.result().close()
    assert not complaints
