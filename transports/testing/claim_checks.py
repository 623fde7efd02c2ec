"""Checks of claims: reservations that the owner executes, where a transport declares that it does."""

import asyncio
import random
from typing import Final

from transports.errors import PeerLost, ProtocolError, SessionFenced, TransportError
from transports.memory import Atomics, RemoteMemory
from transports.operations import Claim, Claimed
from transports.ring import Claims, Geometry
from transports.ring.layout import HEAD_OFFSET, TAIL_OFFSET, unpack_position
from transports.testing.channel_checks import SMALL, inbox
from transports.testing.channel_fault_checks import STRICT, receive_all, send_all, traffic
from transports.testing.faults import Faults, FaultyTransport
from transports.testing.setting import Check, Setting, raised, staged, until

_RING: Final = Geometry(4, 8 * 64, 40)


def _word(view: memoryview, offset: int) -> int:
    return int.from_bytes(view[offset : offset + 8], "little")


async def claims_are_declared_where_they_are_executed(setting: Setting) -> None:
    """Only an owner that executes operations executes claims, and only where the region has a claimant."""
    async with staged(setting) as stage:
        memory = await stage.connect()
        assert not memory.capabilities.claims
        await memory.close()
    async with staged(setting, _RING.region_bytes, Claims(_RING)) as stage:
        memory = await stage.connect()
        assert not memory.capabilities.claims or memory.capabilities.atomics is Atomics.OWNER
        await memory.close()


async def claims_take_what_is_free(setting: Setting) -> None:
    """A claim replaces the tail if there is room, for its own session, and says what it found."""
    async with staged(setting, _RING.region_bytes, Claims(_RING)) as stage:
        first, second = await stage.connect(), await stage.connect()
        if first.capabilities.claims:
            view = stage.region.view
            view[_RING.delivered_offset(2) : _RING.delivered_offset(2) + 8] = (77).to_bytes(8, "little")
            assert await first.claim(Claim(65)) == Claimed(0, 0, 0, taken=True)
            tail = _word(view, TAIL_OFFSET)
            assert unpack_position(tail) == (1, 1, 2)
            assert await second.claim(Claim(6 * 64)) == Claimed(tail, 0, 77, taken=True)
            full = _word(view, TAIL_OFFSET)
            assert unpack_position(full) == (2, 2, 8)
            assert await first.claim(Claim(1)) == Claimed(full, 0, 0, taken=False)
            assert _word(view, TAIL_OFFSET) == full
            view[HEAD_OFFSET : HEAD_OFFSET + 8] = (1 << 28 | 2).to_bytes(8, "little")
            assert await first.claim(Claim(1)) == Claimed(full, 1 << 28 | 2, 0, taken=True)
        await first.close()
        await second.close()


async def no_claim_is_lost(setting: Setting) -> None:
    """Many sessions that claim at once, each once: all take place, each behind another one."""
    sessions = 12
    ring = Geometry(16, 1 << 12, 16)
    async with staged(setting, ring.region_bytes, Claims(ring)) as stage:
        memories = [await stage.connect() for _ in range(sessions)]
        if memories[0].capabilities.claims:
            claimed = await asyncio.gather(*(memory.claim(Claim(64)) for memory in memories))
            assert all(each.taken for each in claimed)
            assert sorted(unpack_position(each.tail)[1] for each in claimed) == list(range(sessions))
            assert unpack_position(_word(stage.region.view, TAIL_OFFSET))[1:] == (sessions, sessions)
        for memory in memories:
            await memory.close()


async def a_claim_is_a_look(setting: Setting) -> None:
    """A nudge that came before a claim is no news behind it, and one that comes after it is."""
    async with staged(setting, _RING.region_bytes, Claims(_RING)) as stage:
        memory = await stage.connect()
        if memory.capabilities.claims:
            await memory.read(0, 8)
            stage.region.nudge()
            await memory.claim(Claim(64))
            assert not await memory.wait_notified(0.05)
            stage.region.nudge()
            assert await memory.wait_notified(20.0)
        await memory.close()


async def impossible_claims_change_nothing(setting: Setting) -> None:
    """A claim of more than the ring ever holds ends its session; others only where none is revoked alone."""
    async with staged(setting, _RING.region_bytes, Claims(_RING)) as stage:
        for length in (_RING.message_bytes_max + 1, (1 << 64) - 1):
            memory, bystander = await stage.connect(), await stage.connect()
            if memory.capabilities.claims:
                error = await raised(TransportError, memory.claim(Claim(length)))
                assert isinstance(error, ProtocolError | PeerLost), f"{length} bytes ended in {error!r}"
                await raised(type(error), memory.flush())
                await until(lambda number=memory.session: number in stage.diary.lost, "the lost session")  # type: ignore[misc]  # bound at once
            if memory.capabilities.fences_sessions:
                await bystander.flush()
            await memory.close()
            await bystander.close()
        assert not any(stage.region.view)


async def a_fenced_session_claims_nothing(setting: Setting) -> None:
    """When ``fence`` returns no claim of the session takes place any more, whatever was on its way."""
    ring = Geometry(1 << 14, 64, 4)

    async def claim_on(memory: RemoteMemory) -> None:
        while True:
            await asyncio.sleep(0)
            assert (await memory.claim(Claim(0))).taken

    async with staged(setting, ring.region_bytes, Claims(ring)) as stage:
        memory = await stage.connect()
        if memory.capabilities.claims:
            claiming = asyncio.ensure_future(raised(SessionFenced, claim_on(memory)))
            await until(lambda: _word(stage.region.view, TAIL_OFFSET) > 0, "the first claim")
            await stage.region.fence([memory.session])
            frozen = _word(stage.region.view, TAIL_OFFSET)
            await claiming
            await raised(SessionFenced, memory.claim(Claim(0)))
            other = await stage.connect()
            assert (await other.claim(Claim(0))).tail == frozen, "a claim took place behind the fence"
            await other.close()
        await memory.close()


async def rivals_hold_nobody_up(setting: Setting) -> None:
    """Senders that lose every swap get all through where there are claims: each message once, in order."""
    faults = Faults(random.Random(11), rival_chance=1.0)  # noqa: S311  # a schedule
    transport = FaultyTransport(setting.transport, faults)
    async with inbox(setting, SMALL) as box, box.sender("a", transport=transport) as sender:
        if not transport.sessions[-1].capabilities.claims:
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send_all(sender, 60))
            tasks.create_task(receive_all(box.receiver, 60))
    assert "rival" in faults.happened


async def claims_are_resumed(setting: Setting) -> None:
    """Connections cut before and behind claims, so that answers are lost: each message once, in order."""
    faults = Faults(random.Random(12), cut_chance=0.15, rival_chance=0.3, remaining=20)  # noqa: S311  # a schedule
    claims = await traffic(setting, faults, 60, leniency=STRICT)
    assert len(faults.happened) >= 10
    assert not claims or "cut behind a claim" in faults.happened


CLAIM_CHECKS: Final[tuple[Check, ...]] = (
    claims_are_declared_where_they_are_executed,
    claims_take_what_is_free,
    no_claim_is_lost,
    a_claim_is_a_look,
    impossible_claims_change_nothing,
    a_fenced_session_claims_nothing,
)
"""Of sessions."""

CLAIM_CHANNEL_CHECKS: Final[tuple[Check, ...]] = (rivals_hold_nobody_up, claims_are_resumed)
"""Of channels."""
