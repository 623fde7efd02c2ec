"""Tasks that live as long as an object, without changing how the object's user sees errors.

An ``asyncio.TaskGroup`` around a context manager's ``yield`` would wrap the errors of the user's own
block in groups. ``Background`` owns tasks in the same strict way (none outlives it, no failure is
lost) and leaves the block's errors as they are.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Self


class Background:
    """Owns tasks: ``async with Background(on_failure)``; leaving cancels and awaits them.

    Args:
        on_failure: Told of an error that a task ended with; the object it serves fails then.
    """

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` until it ends or ``stop`` is called."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def stop(self) -> None:
        """Cancel all tasks but the caller's own, and wait until they have ended."""
        own = asyncio.current_task()
        others = [task for task in self._tasks if task is not own]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)
