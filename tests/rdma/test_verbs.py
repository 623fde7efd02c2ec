"""The verbs transport on devices, beyond the public suite."""

import asyncio
import ipaddress
import os
from pathlib import Path

import pytest
from attrs import evolve

from tests.rdma.devices import OWNERS, PRODUCERS, verbs
from transports import verbs_link, verbs_pulls
from transports._pyverbs import Registered, VerbsError
from transports._pyverbs_pair import Pair, Verb, Work
from transports.address import Address
from transports.channel import open_receiver, open_sender
from transports.errors import ConnectFailed, ExportGone, ListenFailed, PeerLost, TransportError
from transports.memory import Atomics, RemoteMemory
from transports.operations import Bytes, Chain, CompareAndSwap, Write
from transports.registry import transport_for
from transports.ring import Geometry
from transports.tcp_pulls import Pulls
from transports.testing import until
from transports.testing.setting import raised, staged
from transports.verbs_devices import SETTINGS_VARIABLE, GidKind, devices_of
from transports.verbs_owner import PinnedMemory, VerbsRegion
from transports.verbs_producer import VerbsMemory


def linked(memory: RemoteMemory) -> VerbsMemory:
    """The session, by its class."""
    assert isinstance(memory, VerbsMemory)
    return memory


async def test_the_kernels_tables_are_read() -> None:
    """Both devices are there, each with an active Ethernet port and gids of two kinds."""
    devices = {device.name: device for device in devices_of()}
    for name, address in (("rxe0", "10.77.0.1"), ("rxe1", "10.77.0.2")):
        (port,) = devices[name].ports
        assert port.is_active
        assert [port.kind(gid) for gid in port.gids] == [GidKind.LINK_LOCAL, GidKind.IPV4]
        assert port.gids[1].address == ipaddress.IPv6Address(f"::ffff:{address}")


async def test_sessions_say_where_their_packets_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapters do the work; device, port and gid are in the wire's name; an address says no device."""
    async with staged(verbs()) as stage:
        assert stage.region.address.options == {}
        memory = await stage.connect()
        capabilities = memory.capabilities
        assert capabilities.wire == "rdma (rxe1 port 1, gid 1: 10.77.0.2 (RoCE v2))"
        assert (capabilities.atomics, capabilities.one_sided) == (Atomics.ADAPTER, True)
        await memory.close()
        monkeypatch.delenv(SETTINGS_VARIABLE)
        own = await stage.connect()
        assert own.capabilities.wire.startswith("rdma (rxe0 port 1")
        await own.close()


@pytest.mark.parametrize("gid", ["0", "fe80::ff:fe00:1"])
async def test_gids_of_the_peers_kind_are_chosen(gid: str) -> None:
    """Behind a link-local gid, given by number or address, producers leave by a link-local one."""
    address = Address.parse(f"verbs://127.0.0.1:0?{OWNERS}&gid={gid}")
    async with staged(evolve(verbs(), address=address)) as stage:
        memory = await stage.connect()
        assert "gid 0: fe80::ff:fe00:2" in memory.capabilities.wire
        assert await memory.fetch_and_add(0, 1) == 0
        await memory.close()


async def test_what_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for and is not there: the error names device, port, gid and the table (fault 53)."""
    for options in ("device=mlx5_7", "device=rxe0&port=2", "device=rxe0&gid=10.0.0.9"):
        listening = transport_for("verbs").listen(
            Address.parse(f"verbs://127.0.0.1:0?{options}"), verbs().options
        )
        error = await raised(ListenFailed, listening.__aenter__())
        for part in (options, "rxe0 [port 1 Ethernet ACTIVE", "1: 10.77.0.1 (RoCE v2)", "onepiece doctor"):
            assert part in str(error)
    async with staged(verbs()) as stage:
        monkeypatch.setenv(SETTINGS_VARIABLE, "device=rxe1&gid=0")
        error2 = await raised(ConnectFailed, stage.connect())
        assert "the peer's kind (IPV4)" in str(error2)
        await until(lambda: stage.diary.lost == [1], "the end of the session that could not be connected")


async def test_a_chain_is_one_list_with_one_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Payload, slot and commit are posted together; the last one alone asks for a completion and notifies."""
    lists: list[list[Work]] = []
    post = Pair.post

    def noted(pair: Pair, works: list[Work], key: int) -> None:
        lists.append(list(works))
        post(pair, works, key)

    monkeypatch.setattr(Pair, "post", noted)
    async with staged(verbs()) as stage:
        memory = await stage.connect()
        await memory.post(
            Chain((Write(4096, (b"p" * 3000,)), Write(72, (b"s" * 48,)), Write(64, (b"commit!!",))))
        )
        await memory.flush()
        (works, (flush,)) = lists
        assert [work.verb for work in works] == [Verb.WRITE, Verb.WRITE, Verb.WRITE_AND_NOTIFY]
        assert [work.signalled for work in works] == [False, False, True]
        assert [work.inline for work in works] == [False, True, True]
        assert flush.verb is Verb.READ
        assert bytes(stage.region.view[64:120]) == b"commit!!" + b"s" * 48
        await until(lambda: stage.diary.notified == 1, "the notification")
        await memory.close()


async def test_a_small_send_queue_and_staging_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for few requests and bytes everything waits its turn, and lands in order."""
    monkeypatch.setattr(verbs_link, "_SENDS", 3)
    monkeypatch.setattr(verbs_link, "STAGED_BYTES", 3 * verbs_link.PIECE_BYTES)
    async with staged(verbs(), 1 << 21) as stage:
        memory = await stage.connect()
        body = os.urandom((1 << 20) + 77)
        await memory.post(Chain((Write(64, (body[:500_000], body[500_000:])),)))
        for value in range(200):
            await memory.post(Chain((Write(0, (value.to_bytes(8, "little"),)),)))
        assert int.from_bytes(bytes(await memory.read(0, 8)), "little") == 199
        assert bytes(await memory.read(64, len(body))) == body
        assert stage.region.view[64 : 64 + len(body)] == body
        await until(lambda: stage.diary.notified > 0, "a notification")
        await memory.close()


async def test_notifications_beyond_the_store_are_heard() -> None:
    """More notifications than the owner has receive requests are neither lost nor in the way."""
    async with staged(verbs()) as stage:
        memory = await stage.connect()
        for value in range(600):
            await memory.post(Chain((Write(0, (value.to_bytes(8, "little"),)),)))
        await memory.flush()
        assert int.from_bytes(stage.region.view[:8], "little") == 599
        before = stage.diary.notified
        await memory.post(Chain(()))
        await until(lambda: stage.diary.notified > before, "one more")
        await memory.close()


async def test_a_wrong_key_ends_only_its_session() -> None:
    """What an adapter refuses ends the session, on which more calls raise; others stay (fault 61)."""
    async with staged(verbs()) as stage:
        bystander, memory = await stage.connect(), linked(await stage.connect())
        link = memory._link
        link._pair._peer = evolve(link._owner, key=link._owner.key ^ 0xFF00)
        await memory.post(Chain((Write(64, (b"forged",)),)))
        error = await raised(PeerLost, memory.flush())
        assert "rxe" in str(error)
        for _ in range(3):
            await raised(PeerLost, memory.post(Chain((Write(64, (b"on a failed pair",)),))))
        await until(lambda: stage.diary.lost == [memory.session], "the end of the session")
        assert not any(stage.region.view)
        assert await bystander.fetch_and_add(0, 1) == 0
        await bystander.close()


async def test_reading_memory_that_is_gone_is_an_error() -> None:
    """A read of memory that was taken from the adapter is told as an error, and soon (fault 15)."""
    async with staged(verbs()) as stage:
        memory = await stage.connect()
        assert bytes(await memory.read(0, 8)) == bytes(8)
        assert isinstance(stage.region, VerbsRegion)
        assert isinstance(stage.region.memory, PinnedMemory)
        stage.region.memory.registered.close()
        await raised(PeerLost, memory.read(0, 8))
        stage.region.memory.registered = Registered(
            stage.region.memory.domain, stage.region.view, for_peers=True
        )


async def test_overlapping_registrations_stand_alone() -> None:
    """Of memory that was registered twice, the end of one registration leaves the other's (fault 57)."""
    async with staged(verbs()) as stage:
        memory = linked(await stage.connect())
        assert isinstance(stage.region, VerbsRegion)
        assert isinstance(stage.region.memory, PinnedMemory)
        again = Registered(stage.region.memory.domain, stage.region.view[:8192], for_peers=True)
        first, pair = memory._link._owner, memory._link._pair
        for owner, body in (
            (evolve(first, key=again.remote_key), b"by the second"),
            (first, b"by the first"),
        ):
            pair._peer = owner
            await memory.post(Chain((Write(4096, (body,)),)))
            await memory.flush()
            assert stage.region.view[4096 : 4096 + len(body)] == body
            if owner is not first:
                again.close()
        await memory.close()


@pytest.mark.slow
class _Carried:
    """Bytes of exports that owners asked for over connections."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        ask = Pulls._ask

        def counted(pulls: Pulls, export: int, start: int, into: memoryview) -> int:
            self.bytes += len(into)
            return ask(pulls, export, start, into)

        monkeypatch.setattr(Pulls, "_ask", counted)


async def test_exports_are_read_by_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an export one byte takes the connection; read-only and overlapping buffers are no exception."""
    carried = _Carried(monkeypatch)
    monkeypatch.setattr(verbs_pulls, "_PIECE_BYTES", 8 << 10)  # so that there are several windows
    body = os.urandom((1 << 20) + 13)
    async with staged(verbs()) as stage:
        memory = await stage.connect()
        parts: list[Bytes] = [body[:100_000], memoryview(body)[100_000:], bytearray(b"the end")]
        key = memory.export(parts)
        into = memoryview(bytearray(len(body) + 7))
        await stage.region.pull(memory.session, key, into)
        assert into == body + b"the end"
        assert carried.bytes == 1
        memory.withdraw(key)
        await raised(ExportGone, stage.region.pull(memory.session, key, into))
        assert await memory.fetch_and_add(0, 1) == 0, "the session goes on"
        await memory.close()


@pytest.mark.parametrize("why", ["many", "lent", "sink", "much"])
async def test_what_adapters_cannot_reach_takes_the_connection(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Too many buffers for a key, too much to pin, memory that cannot be pinned at either end."""
    carried = _Carried(monkeypatch)

    def refuse(*arguments: object, **options: object) -> None:
        raise VerbsError("the limit of locked memory is 8192 bytes")

    body = os.urandom(300_000)
    async with staged(verbs()) as stage:
        memory = await stage.connect()
        if why in {"lent", "sink"}:
            monkeypatch.setattr(verbs_pulls, "Readable" if why == "lent" else "Registered", refuse)
        if why == "much":
            monkeypatch.setattr(verbs_pulls, "_PINNED_BYTES_MAX", len(body) - 1)
        parts = [body[start : start + 1000] for start in range(0, len(body), 1000)]
        key = memory.export(parts if why == "many" else [body])
        into = memoryview(bytearray(len(body)))
        await stage.region.pull(memory.session, key, into)
        assert into == body
        assert carried.bytes == len(body) + (why == "sink")
        memory.withdraw(key)
        await memory.close()


async def test_small_messages_over_a_wire_that_loses_some() -> None:
    """Thousands of messages of 1 to 64 bytes where packets are lost: each comes once, in order (fault 63)."""
    count = 2000

    def body(number: int) -> bytes:
        return (number.to_bytes(2, "little") * 32)[: number % 64 + 1]

    async with (
        transport_for("verbs").listen(verbs().address, verbs().options) as listener,
        open_receiver(listener, "actor/7", Geometry(64, 1 << 14, 4)) as receiver,
        open_sender(receiver.address, "small", options=verbs().options) as sender,
    ):

        async def send() -> None:
            for number in range(count):
                assert await sender.send(body(number)) == number
            await sender.drained()

        await _outage("add", "loss", "0.5%")
        try:
            sending = asyncio.ensure_future(send())
            for number in range(count):
                delivery = await receiver.receive()
                assert (delivery.number, bytes(delivery.payload)) == (number, body(number))
                receiver.release(delivery)
            await sending
        finally:
            await _outage("del")


@pytest.mark.slow
async def test_an_outage_is_healed() -> None:
    """No packet passes for longer than adapters try; then all arrives, once, in order (fault 47)."""
    count = 40
    async with (
        transport_for("verbs").listen(verbs().address, verbs().options) as listener,
        open_receiver(listener, "actor/7", Geometry(8, 1 << 14, 4)) as receiver,
        open_sender(receiver.address, "patient", options=verbs().options) as sender,
    ):
        first = sender._current()

        async def send() -> None:
            for number in range(count):
                await sender.send(number.to_bytes(2, "little") * 100)
            await sender.drained()

        async def receive() -> None:
            for number in range(count):
                delivery = await receiver.receive()
                assert bytes(delivery.payload) == number.to_bytes(2, "little") * 100
                receiver.release(delivery)

        await _outage("add", "loss", "100%")
        try:
            sending = asyncio.ensure_future(send())
            receiving = asyncio.ensure_future(receive())
            await until(lambda: sender._session is not first, "the end of a session by the outage")
        finally:
            await _outage("del")
        async with asyncio.timeout(100):
            await asyncio.gather(sending, receiving)


async def _outage(verb: str, *how: str) -> None:
    """Begin or end it, on the way from rxe1 to rxe0."""
    tc = await asyncio.create_subprocess_exec("tc", "qdisc", verb, "dev", "veth1", "root", "netem", *how)
    assert await tc.wait() == 0


async def test_sessions_reach_their_own_region_only() -> None:
    """A key of another region of the same process opens nothing: each has a protection domain of its own."""
    async with staged(verbs()) as stage:
        other = await stage.listener.register(
            "check/2",
            4096,
            accept=stage.diary.accept,
            on_notify=stage.diary.on_notify,
            on_session_lost=stage.diary.on_session_lost,
        )
        theirs = linked(await stage.setting.transport.connect(other.address, b"", stage.setting.options))
        memory = linked(await stage.connect())
        memory._link._owner = memory._link._pair._peer = theirs._link._owner
        await memory.post(Chain((Write(64, (b"forged",)),)))
        await raised(PeerLost, memory.flush())
        assert not any(other.view)
        await theirs.close()


async def test_spinning_finds_the_answer_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``spin`` a question that is answered in time does not wait for the event loop to be woken."""
    monkeypatch.setenv(SETTINGS_VARIABLE, f"{PRODUCERS}&spin=1000")
    async with staged(verbs()) as stage:
        memory = linked(await stage.connect())
        link = memory._link
        assert link._spin_seconds == pytest.approx(0.001)
        link._spin_seconds = 20.0  # as long as an emulated adapter may take
        asyncio.get_running_loop().remove_reader(link._pair._descriptor)
        assert await memory.compare_and_swap(CompareAndSwap(0, 0, 5)) == 0
        assert await memory.fetch_and_add(0, 1) == 5
        await memory.close()


async def test_a_pair_goes_with_its_session() -> None:
    """Pairs, channels and their descriptors are given back when sessions end, however they end (fault 65)."""
    async with staged(verbs()) as stage:
        descriptors = _descriptors()
        for fenced in (False, True) * 10:
            memory = await stage.connect()
            if fenced:
                await stage.region.fence([memory.session])
                await raised(TransportError, memory.wait_notified(60.0))
            await memory.close()
            await until(lambda: not stage.listener._sessions, "the end of the connection")  # type: ignore[attr-defined]  # ours
        assert _descriptors() == descriptors


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
