"""The ucx transport beyond the public suite: its library, its wires, and how its sessions end."""

import asyncio
import ctypes
import gc
import os
import resource
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from attrs import evolve

from tests.transports.libucp_at_hand import needs_libucp
from transports import tcp_frames as frames
from transports._libucp import LIBRARY_VARIABLE, UcpError, UcpStarvedError, load
from transports.address import Address
from transports.channel import open_receiver, open_sender
from transports.errors import (
    AddressError,
    ConnectFailed,
    ListenFailed,
    OperationTimeout,
    PeerLost,
    ProtocolError,
)
from transports.hashing import HASH_ELSEWHERE_BYTES
from transports.memory import Options, RemoteMemory
from transports.operations import Chain, CompareAndSwap, Guarded, Write
from transports.registry import transport_for
from transports.ring import Geometry
from transports.tcp import TcpTransport
from transports.tcp_frames import Kind
from transports.testing import Setting, until
from transports.testing.setting import Stage, raised, staged
from transports.ucx import UcxTransport
from transports.ucx_link import Offer, Requirement, Wire, WireKind
from transports.ucx_owner import UcxRegion
from transports.ucx_producer import UcxMemory
from transports.ucx_worker import Role, Worker

HERE = Address.parse("ucx://127.0.0.1:0")
SECRET = Options(secret=b"of this cluster")


@asynccontextmanager
async def region(
    size_bytes: int = 1 << 16, options: Options = SECRET, address: Address = HERE
) -> AsyncIterator[Stage]:
    """A region served over ucx."""
    async with staged(Setting(UcxTransport(), address, options), size_bytes) as stage:
        yield stage


def linked(memory: RemoteMemory) -> UcxMemory:
    """The session, which must have a link."""
    assert isinstance(memory, UcxMemory)
    assert memory._link is not None
    return memory


@needs_libucp
def test_a_call_that_fails_is_named() -> None:
    """A status is the byte that libucp returns, whatever stands beside it in the register."""
    with pytest.raises(UcpError, match=r"ucp_init_version failed with NO_DEVICE \(-14\)"):
        load().context({"TLS": "nosuch"}, 0)


# Without the library.


def test_a_library_that_is_not_there_is_named() -> None:
    """Asking for ucx without a libucp says what to install and which variable names one; tcp goes on."""
    script = (
        "from transports import UnknownScheme, transport_for\n"
        "transport_for('tcp')\n"
        "try: transport_for('ucx')\n"
        "except UnknownScheme as error: print(error)\n"
    )
    environment = os.environ | {LIBRARY_VARIABLE: "/nowhere/libucp.so.0"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    for part in ("/nowhere/libucp.so.0", "onepiece[ucx]", LIBRARY_VARIABLE):
        assert part in done.stdout


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Have this process open no more than so many files."""
    highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unused = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]
    try:
        while unused[-1] <= highest:  # what lies between is free, too
            unused.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        resource.setrlimit(resource.RLIMIT_NOFILE, (unused[-1] + 1 + count, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in unused:
            os.close(descriptor)


@pytest.mark.parametrize("left", [0, 3, 8])
async def test_without_free_descriptors_the_library_is_not_called(left: int) -> None:
    """It would end the process; the error says what to raise."""
    with descriptors_left(left), pytest.raises(UcpStarvedError, match=r"out of file descriptors.*ulimit -n"):
        Worker(Role.OWNER)


@needs_libucp
async def test_with_few_descriptors_sessions_go_on_over_their_connection() -> None:
    """A listener and a producer each say what they lack, and the process lives."""
    async with region() as stage:
        with descriptors_left(8):
            memory = await stage.connect()
            assert "UCX cannot be used: this process" in memory.capabilities.wire
            await memory.close()
            with pytest.raises(ListenFailed, match="ulimit -n"):
                async with UcxTransport().listen(HERE, SECRET):
                    pass


@pytest.mark.parametrize(
    "text", ["ucx://h:1?requir=rdma", "ucx://h:1?require=fast", "ucx://h:1?a=b&require=shm"]
)
def test_options_that_mean_nothing_are_refused(text: str) -> None:
    """A misspelt requirement is not taken for none."""
    with pytest.raises(AddressError, match=r"require=shm\|rdma\|tcp\|one-sided"):
        Requirement.of(Address.parse(text))


def test_requirements_say_what_is_unmet() -> None:
    """Each requirement is met by its wire, ``one-sided`` by two; what is unmet names both wires."""
    wires = {kind: Wire(kind, "details") for kind in WireKind}
    met = {
        (requirement, kind)
        for requirement in Requirement
        for kind, wire in wires.items()
        if requirement.unmet(wire) is None
    }
    assert met == {
        *((Requirement.NOTHING, kind) for kind in wires),
        (Requirement.SHM, WireKind.SHM),
        (Requirement.RDMA, WireKind.RDMA),
        (Requirement.TCP, WireKind.TCP),
        (Requirement.ONE_SIDED, WireKind.SHM),
        (Requirement.ONE_SIDED, WireKind.RDMA),
    }
    unmet = Requirement.RDMA.unmet(wires[WireKind.TCP])
    assert unmet is not None
    assert "require=rdma" in unmet
    assert "tcp (details)" in unmet


def test_wires_and_offers_come_back() -> None:
    """What is told about a wire or the memory is read as it was written; other bytes are refused."""
    for wire in (Wire(WireKind.SHM, "sysv/memory, posix/memory"), Wire(WireKind.TCP)):
        assert Wire.parse(str(wire)) == wire
    offer = Offer(memory=1 << 40, key=b"key", doorbell=b"d" * 16, worker=b"worker")
    assert Offer.parse(offer.memory, 3, memoryview(offer.to_bytes())) == offer
    for text in ("pigeon", "", "shm (two\nlines)"):
        with pytest.raises(ProtocolError):
            Wire.parse(text)
    with pytest.raises(ProtocolError):
        Offer.parse(0, 100, memoryview(offer.to_bytes()))
    with pytest.raises(ProtocolError):
        Offer.parse(0, 1 << 63, memoryview(b""))


# The wire in use.


@needs_libucp
async def test_writes_land_without_the_owner() -> None:
    """Over shared memory bytes are there when ``post`` returns, though the owner has done nothing."""
    async with region(4 << 20) as stage:
        memory = linked(await stage.connect())
        assert memory.capabilities.wire.startswith("shm")
        assert memory.capabilities.one_sided
        body = os.urandom(3 << 20)
        memory._link.write(Chain((Write(64, (body,)),), notify=False), lambda: None)  # type: ignore[union-attr]  # linked
        assert bytes(stage.region.view[64 : 64 + len(body)]) == body
        await memory.close()


@needs_libucp
@pytest.mark.parametrize("side", ["producer", "owner"])
async def test_an_unmet_requirement_fails_loudly(side: str) -> None:
    """Whoever asks for a wire that is not in use gets an error that names both; nothing goes another way."""
    options = {"require": "rdma"}
    async with region(address=evolve(HERE, options=options if side == "owner" else {})) as stage:
        address = evolve(stage.region.address, options=options if side == "producer" else {})
        error = await raised(ConnectFailed, UcxTransport().connect(address, b"", SECRET))
        assert "require=rdma" in str(error)
        assert "in use is shm" in str(error)
        await until(lambda: stage.diary.lost == [1], "the refused session's end")


@needs_libucp
async def test_without_a_wire_the_connection_carries_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where UCX finds no wire the session says that it is tcp, and fences alone; a requirement refuses it."""
    monkeypatch.setattr(UcxRegion, "offer", lambda *_: Offer(0, b"", b"d" * 16, b""))
    async with region() as stage:
        memory, bystander = await stage.connect(), await stage.connect()
        assert memory.capabilities.wire.startswith("tcp (")
        assert not memory.capabilities.one_sided
        await memory.post(Chain((Write(64, (b"by the owner",)),)))
        await memory.flush()
        assert bytes(stage.region.view[64:76]) == b"by the owner"
        await stage.region.fence([memory.session])
        assert await bystander.fetch_and_add(0, 1) == 0
        address = evolve(stage.region.address, options={"require": "one-sided"})
        error = await raised(ConnectFailed, UcxTransport().connect(address, b"", SECRET))
        assert "no memory to lend" in str(error)
        await bystander.close()


@needs_libucp
async def test_certificates_are_refused() -> None:
    """What is written beside the connection is not encrypted, so nobody is left to believe it is."""
    with_tls = evolve(SECRET, tls_authority="authority.pem")
    await raised(ConnectFailed, UcxTransport().connect(Address.parse("ucx://127.0.0.1:1/x"), b"", with_tls))
    with pytest.raises(ListenFailed, match="does not encrypt"):
        UcxTransport().listen(HERE, evolve(SECRET, tls_certificate="certificate.pem"))


@needs_libucp
async def test_senders_say_what_carries_them() -> None:
    """The wire in use can be asked of a channel's sender, over each transport."""
    wires = {}
    places = ("local://wires", "tcp://127.0.0.1:0?shm=off", "ucx://127.0.0.1:0?require=one-sided")
    for place in places:
        transport, address = transport_for(place.partition(":")[0]), Address.parse(place)
        async with (
            transport.listen(address, Options()) as listener,
            open_receiver(listener, "actor/7", Geometry(8, 1 << 14, 4)) as receiver,
            open_sender(receiver.address, "sender") as sender,
        ):
            wires[address.scheme] = sender.wire.partition(" ")[0]
    assert wires == {"local": "memory", "tcp": "tcp", "ucx": "shm"}


@needs_libucp
async def test_a_large_payload_is_read_where_it_is_now() -> None:
    """The memory is replaced while a large payload is being hashed: it arrives whole from the new memory."""
    size = HASH_ELSEWHERE_BYTES + 4096
    body = os.urandom(size)
    async with (
        UcxTransport().listen(HERE, SECRET) as listener,
        open_receiver(listener, "actor/7", Geometry(8, 2 * size // 64 * 64, 4)) as receiver,
        open_sender(receiver.address, "large", options=SECRET) as sender,
        open_sender(receiver.address, "other", options=SECRET) as other,
    ):
        first = receiver._open_region().view
        sending = asyncio.ensure_future(sender.send(body))
        receiving = asyncio.ensure_future(receiver.receive())
        await until(lambda: receiver._hashing or receiving.done(), "the hash")
        other._current().memory.wire.close()  # type: ignore[attr-defined]  # as a process that died
        await until(lambda: receiver._open_region().view is not first, "other memory")
        async with asyncio.timeout(20):
            delivery = await receiving
        assert bytes(delivery.payload) == body
        receiver.release(delivery)
        assert await sending == 0
        await sender.drained()


@needs_libucp
async def test_workers_and_memory_are_given_back() -> None:
    """The last session's end ends the loop's worker; memory goes when the last view of it is dropped."""
    async with region() as stage:
        memory, other = await stage.connect(), await stage.connect()
        worker = linked(memory)._link._worker  # type: ignore[union-attr]  # linked
        await memory.close()
        assert not worker.closed
        await other.close()
        await until(lambda: worker.closed, "the worker's end")
        again = await stage.connect()
        assert linked(again)._link._worker is not worker  # type: ignore[union-attr]  # linked
        held, old = stage.region.view[:8], weakref.ref(stage.region.view.obj)
        await stage.region.fence([again.session])
        await until(lambda: len(stage.listener._sessions) == 0, "the fenced session")  # type: ignore[attr-defined]  # ours
        gc.collect()
        assert old() is not None
        assert bytes(held) == bytes(8)
        del held
        gc.collect()
        assert old() is None
        await again.close()


# Order and ends.


@needs_libucp
async def test_two_ways_keep_the_order() -> None:
    """A guarded chain goes by the connection, a posted one beside it: whichever is posted last wins."""
    async with region() as stage:
        memory = await stage.connect()
        for round_ in range(50):
            await memory.post(Chain((Write(64, (b"posted %06d" % round_,)),), notify=False))
            guarded = Guarded(CompareAndSwap(0, round_, round_ + 1), Chain((Write(64, (b"guarded",)),)))
            guarding = asyncio.ensure_future(memory.guarded(guarded))
            if round_ % 2:
                assert await guarding == round_
                assert bytes(stage.region.view[64:71]) == b"guarded"
            else:
                await asyncio.sleep(0)
                guarding.cancel()  # on its way, and nobody waits for it
                await asyncio.wait([guarding])
                await memory.post(Chain((Write(64, (b"behind",)),)))
                await memory.flush()
                assert bytes(stage.region.view[64:70]) == b"behind"
                assert int.from_bytes(stage.region.view[:8], "little") == round_ + 1
        await memory.close()


@needs_libucp
async def test_a_fence_takes_the_memory_away() -> None:
    """What a fenced session goes on writing lands nowhere; bytes and old views stay; others come back."""
    async with region() as stage:
        memory, bystander = linked(await stage.connect()), await stage.connect()
        await memory.post(Chain((Write(64, (b"before",)),)))
        await memory.flush()
        held = stage.region.view[64:70]
        link = memory._link
        assert link is not None
        await stage.region.fence([memory.session])
        link.write(Chain((Write(64, (b"behind",)),)), lambda: None)
        assert bytes(held) == b"behind", "the link still reaches the old memory"
        assert bytes(stage.region.view[64:70]) == b"before"
        assert stage.diary.lost == [bystander.session]
        error = await raised(PeerLost, bystander.wait_notified(60.0))
        assert "other memory" in str(error)
        again = await stage.connect()
        assert bytes(await again.read(64, 6)) == b"before"
        await again.close()


@needs_libucp
async def test_only_clean_ends_leave_the_memory() -> None:
    """A session that says that all has landed ends alone; one that is cut takes the memory with it."""
    async with region() as stage:
        clean, cut, bystander = await stage.connect(), linked(await stage.connect()), await stage.connect()
        view = stage.region.view
        await clean.close()
        await until(lambda: stage.diary.lost == [clean.session], "the clean end")
        assert stage.region.view is view
        assert await bystander.fetch_and_add(0, 1) == 0
        cut.wire.close()
        await until(lambda: len(stage.diary.lost) == 3, "the end of all sessions")
        assert stage.region.view is not view
        await raised(PeerLost, bystander.flush())


@needs_libucp
async def test_beats_leave_a_session_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that is looked at from time to time, idle or not, stays the same session."""
    looks = 0
    check = UcxMemory._check

    def counted(memory: UcxMemory) -> None:
        nonlocal looks
        looks += 1
        check(memory)

    monkeypatch.setattr(UcxMemory, "_check", counted)
    async with region(options=evolve(SECRET, silence_seconds=0.4)) as stage:
        memory = await stage.connect()
        await until(lambda: looks >= 8, "two spans of silence")
        await memory.post(Chain((Write(0, (b"still here",)),)))
        await memory.flush()
        assert stage.diary.lost == []
        await memory.close()


@needs_libucp
async def test_a_wire_that_breaks_is_named() -> None:
    """When UCX gives the peer up and the owner says nothing, the session ends with the reason."""
    async with region() as stage:
        memory = linked(await stage.connect())
        assert memory._link is not None
        (endpoint,) = memory._link._worker._endpoints.values()
        memory._link._worker._failed.append((endpoint.handle, -25))
        memory._link._worker.pump()
        error = await raised(PeerLost, memory.wait_notified(60.0))
        assert "CONNECTION_RESET" in str(error)
        await raised(PeerLost, memory.post(Chain((Write(0, (b"x",)),))))


@needs_libucp
async def test_a_write_that_never_lands_ends_the_session() -> None:
    """Each write has a deadline; nothing waits for ever for a wire that carries nothing."""
    async with region(options=evolve(SECRET, operation_timeout_seconds=0.1, silence_seconds=2.0)) as stage:
        memory = linked(await stage.connect())
        memory._flying[10**9] = (0.0, 5 << 20)
        error = await raised(PeerLost, memory.post(Chain((Write(0, (b"x",)),))))
        assert "did not carry" in str(error)


# Peers that do not follow the rules.


@needs_libucp
async def test_keys_are_only_for_members() -> None:
    """Nothing but a session that has proven the secret is offered memory, and it is offered once."""
    async with region() as stage:
        memory = linked(await stage.connect())
        memory._send([frames.frame(Kind.ATTACH)])
        await raised(ProtocolError, memory.wait_notified(60.0))
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.region.address.port)
        writer.write(frames.frame(Kind.ATTACH))
        header = await reader.readexactly(frames.HEADER_BYTES)
        assert header[0] == Kind.REFUSED
        writer.close()
        await writer.wait_closed()


@needs_libucp
async def test_producers_of_tcp_are_refused() -> None:
    """A session that has not said which wire it takes may not write, so a requirement cannot be passed by."""
    async with region() as stage:
        address = Address("tcp", "127.0.0.1", stage.region.address.port, stage.region.address.name)
        memory = await TcpTransport().connect(address, b"", SECRET)
        await memory.post(Chain((Write(0, (b"by another way",)),)))
        await raised(ProtocolError, memory.flush())
        assert not any(stage.region.view)


@needs_libucp
async def test_emulated_writes_find_nobody() -> None:
    """A member that has UCX emulate its writes, which would go anywhere, changes nothing in the owner."""
    async with region() as stage:
        memory, target = linked(await stage.connect()), ctypes.create_string_buffer(b"not yours")
        link = memory._link
        assert link is not None
        # A key begins with the map of the wires that reach the memory; with none left, writes are emulated.
        key = link._endpoint.unpack(bytes(8) + link._offer.key[8:])
        link._endpoint.put(b"now mine!", ctypes.addressof(target), key, lambda _: None)
        link._worker.pump()
        link._endpoint.ring(link._offer.doorbell)
        await until(lambda: stage.diary.notified == 1, "the doorbell behind the write")
        assert target.value == b"not yours"
        await memory.close()


@needs_libucp
async def test_strange_doorbells_are_ignored() -> None:
    """A doorbell's key that belongs to no session wakes nobody."""
    async with region() as stage:
        memory = linked(await stage.connect())
        assert memory._link is not None
        for key in (b"?" * 16, b"short", b""):
            memory._link._endpoint.ring(key)
        await memory.post(Chain(()))
        await until(lambda: stage.diary.notified == 1, "the right doorbell")
        await memory.flush()
        assert stage.diary.notified == 1
        await memory.close()


@needs_libucp
async def test_a_handshake_that_stops_in_the_middle_times_out() -> None:
    """An owner that never makes its offer does not hold a producer up beyond its patience."""
    async with region(options=evolve(SECRET, connect_timeout_seconds=0.2)) as stage:
        stage.diary.accepting.clear()
        await raised(OperationTimeout, stage.connect())
        stage.diary.accepting.set()
