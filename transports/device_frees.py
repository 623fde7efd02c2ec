"""Gives memory of devices back in a thread of its own.

Freeing may wait until the device has done all that it was given by then, seconds of work; and who lets go of
memory last is often an event loop, or the garbage collector in whatever thread it runs.
"""

import threading
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue
from typing import Final

_WAIT_SECONDS: Final = 10.0


class Frees:
    """Does what it is asked for in order, in one thread, which ends with the process."""

    def __init__(self) -> None:
        # One of the few things that may be touched wherever the garbage collector runs.
        self._queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
        threading.Thread(target=self._serve, name="device-frees", daemon=True).start()

    def later(self, free: Callable[[], object]) -> None:
        """Have something freed, by a call that does not raise; returns at once, in any thread."""
        self._queue.put(free)

    def wait(self) -> None:
        """Return when all that was asked for before is done, or after a bound."""
        done = threading.Event()
        self.later(done.set)
        done.wait(_WAIT_SECONDS)

    def _serve(self) -> None:
        while True:
            self._queue.get()()


@cache
def frees() -> Frees:
    """Those of the process; not to be called first by the garbage collector, as it starts a thread."""
    return Frees()
