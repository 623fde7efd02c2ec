"""What a stop does to a node that still starts, and to one that serves."""

import asyncio
import os
import signal
import threading

import pytest
from attrs import define, field

from onepiece.errors import ConfigError
from onepiece.node import stopping
from onepiece.node.stopping import StopSignal, unless_told, watch_signals


@define(eq=False)
class Run:
    """What starts and serves, in place of a node."""

    stop: StopSignal = field(factory=StopSignal)
    may_start: asyncio.Event = field(factory=asyncio.Event)
    said: list[str] = field(factory=list)

    async def __call__(self) -> bool:
        """Start when the test says so, and serve until told to stop."""
        try:
            await self.may_start.wait()
            self.stop.is_serving = True
            await self.stop.drain.wait()
            await asyncio.sleep(0)
            self.said.append("drained")
        finally:
            self.said.append("closed")
        return True


async def test_a_start_is_given_up() -> None:
    """At once, and it closes what it had opened; there was nothing to drain."""
    run = Run()
    ended = asyncio.ensure_future(unless_told(run.stop, run()))
    await asyncio.sleep(0)
    run.stop.request()
    async with asyncio.timeout(10):
        assert await ended is None
    assert run.said == ["closed"]


async def test_a_node_that_serves_drains() -> None:
    """It is not cancelled: it ends by itself."""
    run = Run()
    run.may_start.set()
    ended = asyncio.ensure_future(unless_told(run.stop, run()))
    while not run.stop.is_serving:  # noqa: ASYNC110 - no event says so
        await asyncio.sleep(0)
    run.stop.request()
    assert await ended is True
    assert run.said == ["drained", "closed"]


async def test_what_a_start_raises_is_raised() -> None:
    """Whether or not it is told to stop meanwhile."""
    stop = StopSignal()

    async def fail() -> None:
        raise ConfigError("no such workflow")

    with pytest.raises(ExceptionGroup) as caught:
        await unless_told(stop, fail())
    assert [str(error) for error in caught.value.exceptions] == ["no such workflow"]


async def test_a_signal_that_comes_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is sent to a node and to its group; one that comes later ends the node at once."""
    started: list[threading.Timer] = []
    monkeypatch.setattr(stopping, "ONE_SIGNAL_SECONDS", 60.0)

    def note(watchdog: threading.Timer) -> None:
        started.append(watchdog)  # and not more: it would end this process

    monkeypatch.setattr(threading.Timer, "start", note)
    stop = StopSignal()
    with watch_signals(stop):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        await stop.drain.wait()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not stop.now.is_set()
    monkeypatch.setattr(stopping, "ONE_SIGNAL_SECONDS", 0.0)
    with watch_signals(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.now.wait()
    assert len(started) == 1
