"""A lock for threads that many may share and one may have alone."""

import contextlib
import threading
from collections.abc import Iterator

from attrs import define, field


@define(eq=False)
class SharedLock:
    """Held by any number of threads at a time in shared mode, or by one in exclusive mode.

    Who waits for exclusive mode is not overtaken by those that come later for shared mode. A thread that
    holds the lock must not ask for it again.
    """

    _changed: threading.Condition = field(factory=threading.Condition)
    _sharing: int = 0
    _exclusive: bool = False
    _waiting: int = 0

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Wait until nobody has it alone or waits to, and share it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._exclusive and not self._waiting)
            self._sharing += 1
        try:
            yield
        finally:
            with self._changed:
                self._sharing -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Wait until nobody has it, and have it alone."""
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._exclusive and not self._sharing)
            finally:
                self._waiting -= 1
            self._exclusive = True
        try:
            yield
        finally:
            with self._changed:
                self._exclusive = False
                self._changed.notify_all()
