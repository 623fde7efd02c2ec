"""How the two sides of a connection notice that the other one has gone silent.

A stopped process or a pulled cable leaves a connection standing. So each side sends a BEAT when it has
nothing else to send, and calls the peer lost when for ``silence_seconds`` nothing was heard from it
and it took nothing of what was sent. A busy connection costs no extra frame.
"""

import asyncio
from collections.abc import Callable
from typing import Final

_CHECKS_PER_SILENCE: Final = 4


class Pulse:
    """Watches one connection until ``stop``.

    Args:
        silence_seconds: How long the peer may be silent.
        on_check: Called some times within that span: send a BEAT, look at deadlines.
        on_silence: Called once, when the span is over.
    """

    __slots__ = ("_heard_at", "_loop", "_on_check", "_on_silence", "_silence_seconds", "_timer")

    def __init__(
        self, silence_seconds: float, *, on_check: Callable[[], None], on_silence: Callable[[], None]
    ) -> None:
        assert silence_seconds > 0
        self._loop = asyncio.get_running_loop()
        self._silence_seconds = silence_seconds
        self._on_check = on_check
        self._on_silence = on_silence
        self._heard_at = self._loop.time()
        self._timer = self._loop.call_later(silence_seconds / _CHECKS_PER_SILENCE, self._check)

    def heard(self) -> None:
        """The peer has said or taken something."""
        self._heard_at = self._loop.time()

    def stop(self) -> None:
        """Watch no more."""
        self._timer.cancel()

    def _check(self) -> None:
        # Within one turn of the event loop sockets are read before timers run: a pause of our own process
        # is not mistaken for the peer's silence.
        if self._loop.time() - self._heard_at >= self._silence_seconds:
            self._on_silence()
            return
        self._timer = self._loop.call_later(self._silence_seconds / _CHECKS_PER_SILENCE, self._check)
        self._on_check()
