"""A thread that flushes a file now and then, so that no commit has to wait for the disk."""

import threading
from collections.abc import Callable


class Flusher:
    """Calls ``flush`` at most once in ``seconds``, and only after a change; until ``stop``.

    Args:
        flush: Blocks until the disk has what was written; raises nothing.
        seconds: The shortest time between two calls.
    """

    def __init__(self, flush: Callable[[], object], seconds: float) -> None:
        self._flush = flush
        self._seconds = seconds
        self._changed = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="onepiece-store-flush", daemon=True)
        self._thread.start()

    def note_change(self) -> None:
        """There is something to flush."""
        self._changed.set()

    def stop(self) -> None:
        """End the thread, behind a flush that may be under way."""
        self._stopped.set()
        self._changed.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._changed.wait()
            if self._stopped.wait(self._seconds):
                return
            self._changed.clear()
            if self._stopped.is_set():
                return  # ``stop`` came just before, and what it set to wake this thread was cleared
            self._flush()
