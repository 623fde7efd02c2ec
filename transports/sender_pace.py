"""When a sender looks how much its receiver has taken."""

from collections.abc import Callable
from typing import Final

from attrs import define, field

_SECONDS: Final = (0.1, 0.25)
"""First and longest time between two looks. Nobody waits for one but ``drained``, and each costs both
sides about as much as a message."""
_DRAINING_SECONDS: Final = (0.005, 0.01)
"""First and longest while somebody waits in ``drained``."""
_RESOLUTION_SECONDS: Final = 1e-6


@define(eq=False)
class Pace:
    """The moment of the next look: soon after something was sent, less often the longer nothing moves."""

    clock: Callable[[], float]
    drainers: int = 0
    """How many wait for everything to be taken."""
    _at: float = 0.0
    _pause: float = field(default=_SECONDS[0])

    @property
    def wait(self) -> float:
        """Seconds until the next look, 0 if it is due; timers ring a little early, and are due then."""
        seconds = self._at - self.clock()
        return seconds if seconds > _RESOLUTION_SECONDS else 0.0

    def sent(self, under_way: int) -> None:
        """A message was sent; so many are under way now. What is sent puts off no look that is due."""
        if under_way == 1 or self.drainers:
            self.soon()
        else:
            self._at = min(self._at, self.clock() + _SECONDS[0])

    def soon(self) -> None:
        """Look after the shortest pause, and double it from there."""
        self._pause = self._bounds[0]
        self._at = self.clock() + self._pause

    def later(self) -> None:
        """Nothing has moved."""
        self._pause = min(2 * self._pause, self._bounds[1])
        self._at = self.clock() + self._pause

    @property
    def _bounds(self) -> tuple[float, float]:
        return _DRAINING_SECONDS if self.drainers else _SECONDS
