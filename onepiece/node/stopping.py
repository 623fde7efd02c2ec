"""How a node is told to stop, by signals among others."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, Final, TypeVar

from attrs import define, field

STOPPED_AT_ONCE: Final = 130
"""Exit status of a node that a second signal stopped."""
ONE_SIGNAL_SECONDS: Final = 0.3
"""Signals within this time are one: what runs a node (``timeout``, a shell, a container's first process)
may send a signal both to it and to the group that it is in."""
_LAST_SECONDS: Final = 5.0
"""For what a node closes at its end, its temporary files for example: some wait a bounded time themselves."""


_T = TypeVar("_T")


@define(eq=False)
class StopSignal:
    """How a node is told to stop: once to drain, twice to stop at once."""

    drain: asyncio.Event = field(factory=asyncio.Event)
    now: asyncio.Event = field(factory=asyncio.Event)
    reason: str | None = None
    """Why the set wants this node to stop, if it does."""
    is_serving: bool = False
    """The node has started: it drains, rather than end at once, when it is told to stop."""

    def order(self, reason: str) -> None:
        """Stop the node since the set will not have it; saying so again changes nothing."""
        self.reason = reason
        self.drain.set()

    def request(self) -> None:
        """Ask the node to stop; the second time at once."""
        if self.drain.is_set():
            self.now.set()
        self.drain.set()


async def unless_told(stop: StopSignal, start_and_serve: Coroutine[Any, Any, _T]) -> _T | None:
    """Start a node and serve until it has stopped; None if it was told to stop while it still started.

    It holds nothing yet then, and some starts take minutes: whatever it was doing is cancelled.
    """
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(start_and_serve)
        told = tasks.create_task(stop.drain.wait())
        await asyncio.wait({running, told}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if not stop.is_serving:
            running.cancel()
    return None if running.cancelled() else running.result()


@contextlib.contextmanager
def watch_signals(stop: StopSignal) -> Iterator[None]:
    """Let SIGTERM and SIGINT ask the node to stop; the second one ends the process at once."""
    loop = asyncio.get_running_loop()
    one_until = 0.0

    def on_signal() -> None:
        nonlocal one_until
        now = loop.time()
        if now < one_until:
            return
        one_until = now + ONE_SIGNAL_SECONDS
        if stop.drain.is_set():
            watchdog = threading.Timer(_LAST_SECONDS, os._exit, [STOPPED_AT_ONCE])
            watchdog.daemon = True
            watchdog.start()  # a thread that hangs must not keep us
        stop.request()

    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
