"""A clock that goes only while its process does, by which a manager judges how long others have been silent.

Who gets a tenth of a processor hears of things late, by each of the steps that a heartbeat takes through its
event loop. So what it was late by is nothing that others were silent for: this clock stands still from the
moment at which it should have looked until it does.
"""

import asyncio
from collections.abc import Callable
from typing import Final

LOOK_SECONDS: Final = 0.25


class OwnTime:
    """Seconds that this process has lived through; runs with ``keep``.

    Args:
        clock: Seconds of the event loop.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due_at = clock() + LOOK_SECONDS
        self._lost = 0.0

    def now(self) -> float:
        """The moment; never before an earlier one."""
        return min(self._clock(), self._due_at) - self._lost

    def on_the_loop(self, moment: float) -> float:
        """When a moment is on the loop's clock, if nothing more is lost until then."""
        return moment + self._lost

    def look(self) -> None:
        """What has passed since the last look was due is lost."""
        now = self._clock()
        self._lost += max(0.0, now - self._due_at)
        self._due_at = now + LOOK_SECONDS

    async def keep(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()
