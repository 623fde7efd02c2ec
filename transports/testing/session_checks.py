"""Checks of a transport's sessions: how they begin, are refused, are revoked and end."""

import asyncio
from typing import Final

from attrs import evolve

from transports.errors import (
    AuthenticationFailed,
    ChannelClosed,
    ConnectFailed,
    HandshakeRefused,
    IdentityRefused,
    LayoutMismatch,
    ListenFailed,
    OperationTimeout,
    PeerLost,
    SessionFenced,
    UnknownRegion,
)
from transports.memory import RemoteMemory
from transports.operations import Chain, Write
from transports.testing.setting import Check, Setting, raised, staged, until


async def refusal_reaches_the_producer(setting: Setting) -> None:
    """Why the owner refuses is what the producer is told, with its kind; the next one may enter."""
    async with staged(setting) as stage:
        for kind in (HandshakeRefused, IdentityRefused, LayoutMismatch, UnknownRegion):
            stage.diary.refusal = kind(f"no entry because of {kind.__name__}")
            error = await raised(kind, stage.connect())
            assert f"no entry because of {kind.__name__}" in str(error)
        stage.diary.refusal = ChannelClosed("all seats are taken")
        assert "all seats are taken" in str(await raised(HandshakeRefused, stage.connect()))
        stage.diary.refusal = None
        memory = await stage.connect()
        await memory.close()


async def unknown_places_are_named(setting: Setting) -> None:
    """A region that is not served, and an address where nobody listens, each have their error."""
    transport, options = setting.transport, setting.options
    async with staged(setting) as stage:
        nowhere = stage.region.address.region("check/2")
        error = await raised(UnknownRegion, transport.connect(nowhere, b"", options))
        assert "check/2" in str(error)
        gone = stage.region.address
    await raised(ConnectFailed, transport.connect(gone, b"", options))


async def taken_addresses_and_names_are_refused(setting: Setting) -> None:
    """Listening twice fails with a name and an advice, a region's name is given once; nothing breaks."""
    async with staged(setting) as stage:
        again = setting.transport.listen(stage.listener.address, setting.options)
        taken = await raised(ListenFailed, again.__aenter__())
        assert str(stage.listener.address.port or stage.listener.address.host) in str(taken)
        registering = stage.listener.register(
            "check/1",
            4096,
            accept=stage.diary.accept,
            on_notify=stage.diary.on_notify,
            on_session_lost=stage.diary.on_session_lost,
        )
        assert "check/1" in str(await raised(ValueError, registering))
        memory = await stage.connect()
        await memory.flush()
        await memory.close()


async def secret_is_proven_both_ways(setting: Setting) -> None:
    """Only who holds the same secret gets as far as ``accept``; whoever lacks it is told."""
    secret = evolve(setting.options, secret=b"a secret of the cluster")
    others = [evolve(setting.options, secret=b"another"), evolve(setting.options, secret=None)]
    async with staged(evolve(setting, options=secret)) as stage:
        for options in others:
            work = setting.transport.connect(stage.region.address, b"stranger", options)
            await raised(AuthenticationFailed, work)
        assert stage.diary.hellos == []
        memory = await stage.connect()
        await memory.flush()
        await memory.close()
    async with staged(evolve(setting, options=evolve(setting.options, secret=None))) as stage:
        work = setting.transport.connect(stage.region.address, b"member", secret)
        await raised(AuthenticationFailed, work)
        assert stage.diary.hellos == []


async def fence_is_final(setting: Setting) -> None:
    """When ``fence`` returns nothing of the session lands any more, whatever was on its way."""
    size = 8 << 20
    async with staged(setting, size) as stage:
        memory, bystander = await stage.connect(), await stage.connect()
        if not memory.capabilities.fences_sessions:
            return

        async def write_on(memory: RemoteMemory) -> None:
            value = 0
            while True:
                value = value % 255 + 1
                await memory.post(Chain((Write(4096, (bytes([value]) * (size - 4096),)),)))
                await asyncio.sleep(0)

        writing = asyncio.ensure_future(raised(SessionFenced, write_on(memory)))
        waiting = asyncio.ensure_future(raised(SessionFenced, memory.wait_notified(60.0)))
        await until(lambda: stage.region.view[size - 1] != 0, "the first write")
        await stage.region.fence([memory.session, 999])
        frozen = bytes(stage.region.view)
        await asyncio.gather(writing, waiting)
        assert await bystander.fetch_and_add(0, 0) == 0
        assert stage.region.view == frozen, "a write landed behind the fence"
        for work in (memory.flush(), memory.read(0, 8), memory.fetch_and_add(0, 1)):
            await raised(SessionFenced, work)
        await memory.close()
        assert stage.diary.lost == [], "a fenced session is not reported as lost"
        await stage.region.fence([memory.session])
        await bystander.close()


async def close_ends_a_session_once(setting: Setting) -> None:
    """Closing tells the owner once, wakes who waits, and makes every later call raise."""
    async with staged(setting) as stage:
        memory = await stage.connect()
        waiting = asyncio.ensure_future(raised(ChannelClosed, memory.wait_notified(60.0)))
        await asyncio.sleep(0)
        await memory.close()
        await memory.close()
        await waiting
        for work in (memory.flush(), memory.read(0, 8), memory.post(Chain(()))):
            await raised(ChannelClosed, work)
        await until(lambda: stage.diary.lost == [memory.session], "the lost session")


async def closed_region_is_lost(setting: Setting) -> None:
    """Closing a region ends its sessions on both sides; its name is free again."""
    async with staged(setting) as stage:
        memory = await stage.connect()
        waiting = asyncio.ensure_future(raised(PeerLost, memory.wait_notified(60.0)))
        await asyncio.sleep(0)
        await stage.region.close()
        await stage.region.close()
        await waiting
        await raised(PeerLost, memory.read(0, 8))
        await raised(UnknownRegion, stage.connect())
        stage.region = await stage.listener.register(
            "check/1",
            4096,
            accept=stage.diary.accept,
            on_notify=stage.diary.on_notify,
            on_session_lost=stage.diary.on_session_lost,
        )
        again = await stage.connect()
        await again.flush()
        await again.close()
        await memory.close()


async def closed_listener_ends_everything(setting: Setting) -> None:
    """Leaving the listener's context ends the sessions of all its regions."""
    async with staged(setting) as stage:
        memory = await stage.connect()
    await raised(PeerLost, memory.wait_notified(60.0))
    await memory.close()


async def nudges_are_not_missed(setting: Setting) -> None:
    """A nudge wakes who waits; one given between looking and waiting counts; a wait without one ends."""
    async with staged(setting) as stage:
        memory = await stage.connect()
        await memory.read(0, 8)
        assert not await memory.wait_notified(0.01)
        waiting = asyncio.ensure_future(memory.wait_notified(60.0))
        await memory.flush()
        await asyncio.sleep(0)
        stage.region.nudge()
        assert await waiting
        await memory.read(0, 8)
        stage.region.nudge()
        assert await memory.wait_notified(60.0)
        await memory.read(0, 8)
        assert not await memory.wait_notified(0.01)
        await memory.close()


async def cancelled_call_leaves_the_session_whole(setting: Setting) -> None:
    """A call that is cancelled while it waits does not disturb the next ones (fault 59)."""
    async with staged(setting, 1 << 20) as stage:
        memory = await stage.connect()
        for _ in range(20):
            reading = asyncio.ensure_future(memory.read(0, 1 << 19))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait([reading])
        assert await memory.fetch_and_add(8, 7) == 0
        assert bytes(await memory.read(8, 1)) == b"\7"
        await memory.close()


async def late_acceptance_is_taken_back(setting: Setting) -> None:
    """Whoever gives up before the owner has answered leaves no session behind."""
    impatient = evolve(setting.options, connect_timeout_seconds=0.05)
    async with staged(setting) as stage:
        stage.diary.accepting.clear()
        connecting = setting.transport.connect(stage.region.address, b"impatient", impatient)
        await raised(OperationTimeout, connecting)
        stage.diary.accepting.set()
        memory = await stage.connect()
        assert await memory.fetch_and_add(0, 1) == 0
        assert memory.session in stage.diary.answered
        await memory.close()
        await until(lambda: sorted(stage.diary.lost) == sorted(stage.diary.answered), "all lost sessions")


SESSION_CHECKS: Final[tuple[Check, ...]] = (
    refusal_reaches_the_producer,
    unknown_places_are_named,
    taken_addresses_and_names_are_refused,
    secret_is_proven_both_ways,
    fence_is_final,
    close_ends_a_session_once,
    closed_region_is_lost,
    closed_listener_ends_everything,
    nudges_are_not_missed,
    cancelled_call_leaves_the_session_whole,
    late_acceptance_is_taken_back,
)
