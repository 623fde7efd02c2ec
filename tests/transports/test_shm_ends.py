"""Memory shared within a host: how it is taken back from sessions that end, and from processes that die."""

import asyncio
import gc
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from attrs import evolve

from tests.transports.shm_parts import LARGE, SECRET, connect_over_tcp, hold_on, linked, region, write
from transports import shared_memory
from transports import tcp_frames as frames
from transports.channel import open_sender
from transports.errors import (
    PeerLost,
    SessionFenced,
)
from transports.memory import RemoteMemory
from transports.shm_producer import SharingMemory
from transports.tcp_frames import Kind
from transports.tcp_wire import SocketWire
from transports.testing import until
from transports.testing.setting import Stage, raised

ROOT = Path(__file__).resolve().parents[2]


async def test_a_fence_that_is_heard_disturbs_nobody() -> None:
    """A fenced producer that is well lets go: the memory stays, and so do all other sessions."""
    async with region() as stage:
        memory, bystander = await stage.connect(), await stage.connect()
        view, link = stage.region.view, linked(memory)
        await stage.region.fence([memory.session])
        assert link.closed, "it could still write when the fence had returned"
        assert stage.region.view is view
        assert stage.diary.lost == []
        await raised(SessionFenced, memory.flush())
        assert linked(bystander)
        assert await bystander.fetch_and_add(0, 1) == 0
        await memory.close()
        await bystander.close()


async def test_what_a_forked_child_keeps_is_no_session() -> None:
    """A child has copies of its parent's sockets: the end of the parent is heard, and costs nobody."""
    async with region(options=evolve(SECRET, silence_seconds=1000.0)) as stage:
        memory, bystander = await stage.connect(), await stage.connect()
        copies = [os.dup(linked(memory)._lifeline.fileno()), os.dup(_socket_of(memory).fileno())]
        view = stage.region.view
        await memory.close()
        await until(lambda: stage.diary.lost == [memory.session], "the end of the parent's session")
        assert stage.region.view is view
        assert await bystander.fetch_and_add(0, 1) == 0
        await bystander.close()
        for copy in copies:
            os.close(copy)


def _socket_of(memory: RemoteMemory) -> socket.socket:
    assert isinstance(memory, SharingMemory)
    assert isinstance(memory.wire, SocketWire)
    return memory.wire._socket


async def test_a_fence_that_is_not_heard_takes_the_memory_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does not let go writes into memory that nobody reads; all else stays (fault 48)."""
    async with region(2 * LARGE) as stage:
        stopped, mapped, framed = await stage.connect(), await stage.connect(), await connect_over_tcp(stage)
        await stopped.post(write(64, b"before" * 100))
        await stopped.flush()
        held, old, link = stage.region.view[64:70], stage.region.view, linked(stopped)
        half = _Halves(stage)
        await half.send_first()
        hold_on(monkeypatch)
        await stage.region.fence([stopped.session])
        await link.write(64, (b"behind",))
        assert bytes(held) == b"behind", "it still reaches the old memory"
        assert stage.region.view is not old
        assert bytes(stage.region.view[64:70]) == b"before"
        assert stage.diary.lost == [mapped.session]
        error = await raised(PeerLost, mapped.wait_notified(60.0))
        assert "did not let go" in str(error)
        await half.send_second()
        assert await framed.fetch_and_add(0, 1) == 0
        again = await stage.connect()
        await again.post(write(64, b"anew" * 100))
        await again.flush()
        assert bytes(stage.region.view[64:68]) == b"anew"
        monkeypatch.undo()
        for left in (link, linked(mapped)):
            left.close()
        for memory in (stopped, mapped, framed, again):
            await memory.close()


class _Halves:
    """A session as of another host, half of whose body has come when the memory is replaced."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    async def send_first(self) -> None:
        """Half of a body, so that the owner holds a place in the memory of now."""
        self._memory = await connect_over_tcp(self._stage)
        header = frames.frame(Kind.WRITE, a=LARGE, body=LARGE)
        self._memory._send([header, b"1" * (LARGE // 2)])  # type: ignore[attr-defined]  # of the tcp session
        await until(lambda: self._stage.region.view[LARGE + LARGE // 2 - 1] == ord("1"), "the first half")

    async def send_second(self) -> None:
        """The other half; both must be in the memory of now."""
        self._memory._send([b"2" * (LARGE - LARGE // 2)])  # type: ignore[attr-defined]  # of the tcp session
        await self._memory.flush()
        expected = b"1" * (LARGE // 2) + b"2" * (LARGE - LARGE // 2)
        assert self._stage.region.view[LARGE:] == expected
        await self._memory.close()


async def test_ends_are_told_when_nothing_lands_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clean end leaves the memory; one whose producer holds on is told only once other memory is there."""
    async with region() as stage:
        clean, cut, bystander = await stage.connect(), await stage.connect(), await stage.connect()
        view, link = stage.region.view, linked(cut)
        await clean.close()
        await until(lambda: stage.diary.lost == [clean.session], "the clean end")
        assert stage.region.view is view
        seen: list[bool] = []
        report = stage.region._on_session_lost  # type: ignore[attr-defined]  # of the tcp region

        def note(number: int) -> None:
            seen.append(stage.region.view is view)
            report(number)

        monkeypatch.setattr(stage.region, "_on_session_lost", note)
        hold_on(monkeypatch)
        cut.wire.close()  # type: ignore[attr-defined]  # of the tcp session
        await until(lambda: len(seen) == 2, "the end of both")
        assert seen == [False, False]
        await raised(PeerLost, bystander.flush())
        monkeypatch.undo()
        for left in (link, linked(bystander)):
            left.close()
        await cut.close()
        await bystander.close()


async def test_a_number_is_not_taken_for_its_next_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fence that meets a session on its way out waits for it, and its end is not told afterwards."""
    async with region() as stage:
        memory = await stage.connect()
        link = linked(memory)
        hold_on(monkeypatch)
        memory.wire.close()  # type: ignore[attr-defined]  # of the tcp session
        await until(lambda: bool(stage.region._leaving), "the session's way out")  # type: ignore[attr-defined]  # ours
        view = stage.region.view
        await stage.region.fence([memory.session])
        assert stage.region.view is not view
        assert not stage.region._writers  # type: ignore[attr-defined]  # ours
        assert stage.diary.lost == []
        monkeypatch.undo()
        link.close()
        await memory.close()


def descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_memory_goes_with_its_last_user() -> None:
    """Nothing stays mapped and no descriptor open when regions and sessions have come and gone."""
    gc.collect()
    before, lent = descriptors(), len(shared_memory._lent)
    for _ in range(5):
        async with region(1 << 20) as stage:
            memories = [await stage.connect() for _ in range(3)]
            await memories[0].close()
            await stage.region.fence([memories[1].session])
        for memory in memories:
            await memory.close()
        del stage, memories, memory
    gc.collect()
    assert descriptors() <= before
    assert len(shared_memory._lent) <= lent


OWNER = """
import asyncio, sys
from transports import Address, Geometry, Options, open_receiver, transport_for
async def main():
    place = Address.parse("tcp://127.0.0.1:0?shm=required")
    async with transport_for(place).listen(place, Options()) as listener:
        async with open_receiver(listener, "inbox", Geometry(64, 64 << 20, 8)) as receiver:
            print(receiver.address, flush=True)
            await asyncio.sleep(3600)
asyncio.run(main())
"""


async def test_a_killed_owner_leaves_nothing() -> None:
    """The owner is killed while its memory is in use: no file and no mapping is left (fault 67)."""

    def mapped(process: int | str = "self", what: str = "onepiece-region") -> bool:
        return what in Path(f"/proc/{process}/maps").read_text()

    gc.collect()
    assert not mapped()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    address = (await process.stdout.readline()).decode().strip()
    async with open_sender(address, "sender") as sender:
        await sender.send(os.urandom(LARGE))
        assert mapped()
        process.send_signal(signal.SIGKILL)
        assert await process.wait() == -signal.SIGKILL
        await raised(PeerLost, sender.lost())
    gc.collect()
    assert not mapped()
