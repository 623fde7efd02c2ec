"""A stage's state: loaded by its ``setup``, kept, and unloaded by the rest of it.

The whole life of a setup, from its first line to its last, runs in one task of the loop on which the
stage's body runs, so that a setup may hold task groups, cancel scopes and connections open across its
``yield``. That of an isolated stage runs in a helper process instead; what is its state there is for the
node the process itself, or all of them for a stage on several devices.
"""

import asyncio
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from onepiece._bounded import described
from onepiece.context import StageContext
from onepiece.graph import Isolation
from onepiece.log import get_logger
from onepiece.runtime.devices import DeviceThreads, is_cancelled
from onepiece.runtime.isolated_start import Surroundings, open_isolated
from onepiece.runtime.rank_group import open_ranks
from onepiece.runtime.stage_process import StageProcess
from onepiece.stage import Stage


class LoadedStage:
    """One life of a stage's setup; make a new one to load again.

    Args:
        stage: The stage.
        threads: Those of its (first) device, for a stage in this process.
        around: For a stage in a process of its own, or in several.
        devices: Those of a stage on several.
        inbox_bytes: What its inbox takes of its device.
    """

    def __init__(
        self,
        stage: Stage[Any, Any, Any],
        threads: DeviceThreads,
        around: Surroundings,
        devices: Sequence[str] = (),
        inbox_bytes: int = 0,
    ) -> None:
        self._stage = stage
        self._threads = threads
        self._around = around
        self._devices = devices
        self._inbox_bytes = inbox_bytes
        self._process: StageProcess | None = None
        self._node_loop = asyncio.get_running_loop()
        self._state: asyncio.Future[Any] = self._node_loop.create_future()
        self._unload: Callable[[], object] | None = None
        self._task: asyncio.Task[None] | None = None

    async def load(self, context: StageContext[None]) -> Any:
        """Run the setup up to its ``yield``; returns the state, raises what it raised.

        For an isolated stage: returns its ``StageProcess``, raises as ``open_isolated``.

        Cancellation: the setup is cancelled too, and waited for.
        """
        self._threads.memory.enter(self)
        self._task = self._around.tasks.create_task(self._live(context), name=f"setup {self._stage.name}")
        self._task.add_done_callback(lambda _: self._threads.memory.leave(self))
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

    @property
    def is_broken(self) -> bool:
        """Whether nothing can run on it any more: its process has ended."""
        return self._process is not None and self._process.is_over

    @property
    def has_worked(self) -> bool:
        """Whether its process was given anything to do."""
        return self._process is not None and self._process.has_worked

    @property
    def memory_bytes(self) -> int:
        """What it and its inbox have taken of its device, or of each, at most; 0 if that cannot be told."""
        if self._process is not None:
            return self._process.memory_bytes
        taken = self._threads.memory.peak_bytes(self)
        return taken + self._inbox_bytes if taken else 0

    async def broken(self) -> str:
        """Wait until it is broken, which takes for ever without a process; returns how."""
        if self._process is None:
            await self._node_loop.create_future()
        assert self._process is not None
        return await self._process.over()

    async def _live(self, context: StageContext[None]) -> None:
        try:
            match self._stage.spec.isolation:
                case Isolation.LOOP:
                    await self._hold(context)
                case Isolation.THREAD:
                    await self._threads.run_stage(lambda: self._hold(context))
                case Isolation.PROCESS:
                    await self._hold_process()
        except asyncio.CancelledError:
            self._state.cancel()
            raise
        except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
            if not self._state.done():
                self._state.set_exception(_as_exception(error))
            else:
                get_logger().warning("stage_unload_failed", stage=self._stage.key, error=described(error))

    async def _hold(self, context: StageContext[None]) -> None:
        loop = asyncio.get_running_loop()
        unload = asyncio.Event()
        self._unload = functools.partial(loop.call_soon_threadsafe, unload.set)
        try:
            async with self._stage.loaded(context) as state:
                self._node_loop.call_soon_threadsafe(self._loaded, state)
                await unload.wait()
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise _as_exception(error) from error  # the setup's own

    async def _hold_process(self) -> None:
        unload = asyncio.Event()
        self._unload = unload.set
        async with self._opened() as process:
            self._process = process
            self._loaded(process)
            await unload.wait()
            await process.unload()

    def _opened(self) -> AbstractAsyncContextManager[StageProcess]:
        if self._stage.spec.is_collaborative:
            return open_ranks(self._stage, self._devices, self._around)
        return open_isolated(self._stage, self._threads.name, self._around)

    def _loaded(self, state: Any) -> None:
        if not self._state.done():
            self._state.set_result(state)


def _as_exception(error: BaseException) -> Exception:
    """A future cannot hold ``SystemExit`` and its kin without stopping the loop that reads it."""
    if isinstance(error, Exception):
        return error
    wrapped = RuntimeError(f"it raised {described(error)}")
    wrapped.__cause__ = error
    return wrapped
