"""A stage's state: loaded by its ``setup``, kept, and unloaded by the rest of it.

The whole life of a setup, from its first line to its last, runs in one task of the loop on which the
stage's body runs, so that a setup may hold task groups, cancel scopes and connections open across its
``yield``.
"""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from onepiece.context import StageContext
from onepiece.graph import Isolation
from onepiece.log import get_logger
from onepiece.runtime.devices import DeviceThreads
from onepiece.stage import Stage


class LoadedStage:
    """One life of a stage's setup; make a new one to load again."""

    def __init__(self, stage: Stage[Any, Any, Any], threads: DeviceThreads, tasks: asyncio.TaskGroup) -> None:
        self._stage = stage
        self._threads = threads
        self._tasks = tasks
        self._node_loop = asyncio.get_running_loop()
        self._state: asyncio.Future[Any] = self._node_loop.create_future()
        self._unload: Callable[[], object] | None = None
        self._task: asyncio.Task[None] | None = None

    async def load(self, context: StageContext[None]) -> Any:
        """Run the setup up to its ``yield``; returns the state, raises what it raised.

        Cancellation: the setup is cancelled too, and waited for.
        """
        self._task = self._tasks.create_task(self._live(context), name=f"setup {self._stage.name}")
        try:
            return await asyncio.shield(self._state)
        except asyncio.CancelledError:
            self._task.cancel()
            raise

    async def unload(self) -> None:
        """Run the rest of the setup; what it raises is logged, since nobody could act on it."""
        if self._task is None:
            return
        if self._unload is not None:
            self._unload()
        await asyncio.wait([self._task])

    async def _live(self, context: StageContext[None]) -> None:
        run: Callable[[Callable[[], Coroutine[Any, Any, None]]], Coroutine[Any, Any, None]]
        run = _directly if self._stage.spec.isolation is Isolation.LOOP else self._threads.run_stage
        try:
            await run(lambda: self._hold(context))
        except asyncio.CancelledError:
            self._state.cancel()
            raise
        except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
            if not self._state.done():
                self._state.set_exception(_as_exception(error))
            else:
                get_logger().warning("stage_unload_failed", stage=self._stage.key, error=repr(error))

    async def _hold(self, context: StageContext[None]) -> None:
        loop = asyncio.get_running_loop()
        unload = asyncio.Event()
        self._unload = functools.partial(loop.call_soon_threadsafe, unload.set)
        async with self._stage.loaded(context) as state:
            self._node_loop.call_soon_threadsafe(self._loaded, state)
            await unload.wait()

    def _loaded(self, state: Any) -> None:
        if not self._state.done():
            self._state.set_result(state)


async def _directly(make: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await make()


def _as_exception(error: BaseException) -> Exception:
    """A future cannot hold ``SystemExit`` and its kin without stopping the loop that reads it."""
    if isinstance(error, Exception):
        return error
    return RuntimeError(f"it raised {type(error).__name__}: {error}")
