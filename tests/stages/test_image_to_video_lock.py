"""The lock between loading and computing."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest

from stages._shared_lock import SharedLock

LIMIT_SECONDS = 30


class Holder:
    """Holds a lock in a thread of its own until it is told to let go."""

    def __init__(self, pool: ThreadPoolExecutor, mode: AbstractContextManager[None]) -> None:
        self.held = threading.Event()
        self.release = threading.Event()
        self.done: Future[None] = pool.submit(self._hold, mode)

    def _hold(self, mode: AbstractContextManager[None]) -> None:
        with mode:
            self.held.set()
            assert self.release.wait(LIMIT_SECONDS)

    def finish(self) -> None:
        """Let go."""
        self.release.set()
        self.done.result(LIMIT_SECONDS)


def until_waiting(lock: SharedLock) -> None:
    """Until somebody waits for exclusive mode."""
    limit = time.monotonic() + LIMIT_SECONDS
    while not lock._waiting:
        assert time.monotonic() < limit
        time.sleep(0.001)


def test_many_share() -> None:
    """Two threads hold it in shared mode at the same time."""
    lock = SharedLock()
    with ThreadPoolExecutor() as pool:
        first, second = Holder(pool, lock.shared()), Holder(pool, lock.shared())
        assert first.held.wait(LIMIT_SECONDS)
        assert second.held.wait(LIMIT_SECONDS)
        first.finish()
        second.finish()


def test_exclusive_mode_is_alone() -> None:
    """It waits for those that share, and those that come meanwhile wait for it."""
    lock = SharedLock()
    with ThreadPoolExecutor() as pool:
        early = Holder(pool, lock.shared())
        assert early.held.wait(LIMIT_SECONDS)
        alone = Holder(pool, lock.exclusive())
        until_waiting(lock)
        late = Holder(pool, lock.shared())
        assert not alone.held.is_set()
        assert not late.held.is_set()
        early.finish()
        assert alone.held.wait(LIMIT_SECONDS)
        assert not late.held.is_set()
        alone.finish()
        assert late.held.wait(LIMIT_SECONDS)
        late.finish()


def test_an_error_lets_go() -> None:
    """What raises while it holds the lock does not hold it for ever."""
    lock = SharedLock()
    for mode in (lock.shared, lock.exclusive):
        with pytest.raises(ZeroDivisionError), mode():
            raise ZeroDivisionError
    with lock.exclusive():
        pass
