"""Work in threads that nobody waits for."""

import asyncio
import threading

import pytest

from onepiece.runtime.unjoined import in_unjoined_thread


async def test_what_it_returns_or_raises_comes_back() -> None:
    """Off the loop's thread."""
    assert await in_unjoined_thread(
        lambda one, two: (one + two, threading.current_thread().daemon), 1, 2
    ) == (
        3,
        True,
    )
    with pytest.raises(SystemExit):
        await in_unjoined_thread(lambda: exit(7))  # noqa: PLR1722 - a module may do so


def test_neither_the_loop_nor_a_waiter_is_held_up_by_what_never_returns() -> None:
    """The waiter is cancelled at once, the loop closes, and what comes later is dropped."""
    may_return, returned = threading.Event(), threading.Event()

    def block() -> None:
        may_return.wait()
        returned.set()

    async def give_up() -> None:
        waiting = asyncio.ensure_future(in_unjoined_thread(block))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(give_up())
    assert not returned.is_set()
    may_return.set()
    assert returned.wait(10)
