"""The thread that flushes: after changes, not too often, and it ends when it is told."""

import threading

from onepiece.store._flusher import Flusher

LIMIT_SECONDS = 20.0


def test_flushes_after_a_change_only() -> None:
    """Nothing is flushed before there is a change, and a change is flushed."""
    flushed = threading.Event()
    flusher = Flusher(flushed.set, 0.001)
    assert not flushed.is_set()
    flusher.note_change()
    assert flushed.wait(LIMIT_SECONDS)
    flusher.stop()
    assert not flusher._thread.is_alive()


def test_stops_at_once_while_it_waits() -> None:
    """A stop waits neither for a change nor for the time between two flushes."""
    idle = Flusher(lambda: None, 3600.0)
    idle.stop()
    patient = Flusher(lambda: None, 3600.0)
    patient.note_change()
    patient.stop()
    assert not patient._thread.is_alive()


def test_stop_at_the_moment_of_a_flush() -> None:
    """A stop that comes between waiting and flush is not overlooked: a node's end would hang."""
    flusher = Flusher(lambda: None, 0.001)
    flusher.stop()

    class StoppedWhenCleared(threading.Event):
        def clear(self) -> None:
            flusher._stopped.set()
            self.set()
            super().clear()

    flusher._stopped, flusher._changed = threading.Event(), StoppedWhenCleared()
    thread = threading.Thread(target=flusher._run, daemon=True)
    thread.start()
    flusher.note_change()
    thread.join(LIMIT_SECONDS)
    assert not thread.is_alive()
