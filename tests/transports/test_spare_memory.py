"""Memory that is used again: never while somebody refers to it, and no more of it than there may be."""

import threading

import numpy as np

from transports.spare_memory import SpareMemory

MIB = 1 << 20


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_it_comes_back_with_the_last_view() -> None:
    """A part, an array over it, a copy of the view: each keeps it."""
    spare = SpareMemory(4 * MIB)
    taken = spare.take(MIB).view
    where = _address(taken)
    kept = np.frombuffer(taken[100:200], np.uint8)
    taken.release()
    other = spare.take(MIB).view
    assert _address(other) != where
    assert not kept.any()
    del kept
    assert _address(spare.take(MIB).view) == where


def test_what_may_still_be_written_to_does_not_come_back() -> None:
    """A pull that was given up may go on filling it (fault 48)."""
    spare = SpareMemory(4 * MIB)
    taken = spare.take(MIB)
    taken.never_again()
    del taken
    spare.take(1)
    assert spare.bytes == 0
    other = spare.take(MIB)
    del other
    spare.take(1)
    assert spare.bytes >= MIB


def test_lengths_that_are_alike_share_it() -> None:
    """Messages differ by some bytes; what is lent is as long as it was asked for."""
    spare = SpareMemory(4 * MIB)
    where = _address(spare.take(MIB - 1).view)
    again = spare.take(MIB - 60_000).view
    assert (_address(again), len(again)) == (where, MIB - 60_000)
    assert not again.readonly
    assert len(spare.take(0).view) == 0


def test_it_is_bounded() -> None:
    """However much is taken, and of however many lengths."""
    spare = SpareMemory(4 * MIB)
    for length in range(MIB // 2, 2 * MIB, 50_000):
        taken = [spare.take(length).view for _ in range(3)]
        taken.clear()
        spare.take(1)
        assert spare.bytes <= 2 * MIB
    assert spare.bytes > 0


def test_it_may_be_let_go_of_anywhere() -> None:
    """Stages drop what they were given in threads of their own."""
    spare = SpareMemory(64 * MIB)

    def churn(number: int) -> None:
        for _ in range(200):
            taken = spare.take(MIB).view
            taken[:8] = number.to_bytes(8, "little")
            lent.append(taken)

    lent: list[memoryview] = []

    def drop() -> None:
        while not is_over.is_set() or lent:
            if lent:
                lent.pop()

    is_over = threading.Event()
    droppers = [threading.Thread(target=drop) for _ in range(3)]
    for each in droppers:
        each.start()
    churn(1)
    is_over.set()
    for each in droppers:
        each.join()
    assert spare.bytes <= 32 * MIB
