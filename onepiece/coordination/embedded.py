"""The default coordinator: one manager, which always leads.

Its state lies in a directory of its node, and a lock on that directory keeps a second process out.
After a restart it leads again, under a higher epoch, with all it had acknowledged. There is no other
candidate: while its process is down nobody leads, and the data path goes on by the last routes.

Without a directory (``onepiece dev``, tests) the state lasts as long as the coordinator.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
from attrs import define, evolve, field

from onepiece.coordination._state_file import StateFile
from onepiece.coordination.interface import Coordinator
from onepiece.core.manager import ManagerState
from onepiece.errors import LeadershipLost


@asynccontextmanager
async def open_embedded(directory: Path | None) -> AsyncIterator[Coordinator]:
    """A coordinator that keeps its state in ``directory`` (None: in memory).

    Leaving the context gives the leadership up and lets other processes have the directory.

    Raises:
        ConfigError: The directory is in use by another process, or unusable.
    """
    file = None if directory is None else await anyio.to_thread.run_sync(StateFile.open, directory)
    coordinator = _Embedded(file)
    try:
        yield coordinator
    finally:
        with anyio.CancelScope(shield=True):
            await coordinator.close()


@define(eq=False)
class _Embedded(Coordinator):
    _file: StateFile | None
    _led: ManagerState | None = field(default=None, init=False)
    """The state of this leadership; None: not led yet."""
    _is_closed: bool = field(default=False, init=False)
    _lost: anyio.Event = field(factory=anyio.Event, init=False)
    _one_at_a_time: anyio.Lock = field(factory=anyio.Lock, init=False)
    """Of two states stored at once the one given last must be the one that stays."""

    async def lead(self) -> ManagerState:
        async with self._one_at_a_time:
            before = await self._before()
            state = evolve(before, epoch=before.epoch + 1)
            await self._write(state)
            self._led = state
            return state

    async def store(self, state: ManagerState) -> None:
        async with self._one_at_a_time:
            if self._led is None or self._is_closed:
                raise LeadershipLost(f"the manager of epoch {state.epoch} does not lead here")
            assert state.epoch >= self._led.epoch, "a manager's epoch never falls"
            assert state.next_actor_id >= self._led.next_actor_id, "actor ids are never used twice"
            await self._write(state)
            self._led = state

    async def wait_lost(self) -> None:
        if self._led is not None:
            await self._lost.wait()

    async def close(self) -> None:
        """Give the leadership up, behind a write that is under way."""
        async with self._one_at_a_time:
            self._is_closed = True
            self._lost.set()
            if self._file is not None:
                await anyio.to_thread.run_sync(self._file.close)

    async def _before(self) -> ManagerState:
        if self._is_closed:
            raise LeadershipLost("this coordinator is closed")
        if self._led is not None:
            return self._led
        return ManagerState() if self._file is None else await anyio.to_thread.run_sync(self._file.load)

    async def _write(self, state: ManagerState) -> None:
        if self._file is not None:
            await anyio.to_thread.run_sync(self._file.write, state)
