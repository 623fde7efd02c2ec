"""Simulated disks: real store files, whose jobs take time, and may be refused or cut off.

The files are LMDB's own, in a directory in memory. A job is done in one step, some time after it was
asked for, so a crash comes between two jobs: what was acknowledged is there afterwards; of what was only
asked for some first part may be.
"""

import asyncio
import shutil
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final, ParamSpec, TypeVar

from attrs import evolve

from onepiece.coordination import Coordinator
from onepiece.core.manager import ManagerState
from onepiece.errors import StoreFull
from onepiece.store import Closable, Durability, RequestLog, ResultStore, StoreOptions

_P = ParamSpec("_P")
_T = TypeVar("_T")
_ClosableT = TypeVar("_ClosableT", bound=Closable)

_READING: Final = frozenset(
    {"record", "chunk", "stats", "check_readers", "check_invariants", "orphans", "entry", "body", "totals"}
    | {"holder_of", "file_bytes", "records", "scan"}
)
"""Jobs that write nothing; a full disk does not mind them."""


class SimDisk:
    """What a machine keeps, whatever becomes of its processes.

    Args:
        path: A directory of its own.
        rng: Draws how long jobs take, and which are done in a crash.
        seconds: What a job takes on average.
    """

    def __init__(self, path: Path, rng: Random, seconds: float) -> None:
        self.path = path
        self.is_full = False
        self.manager_state = ManagerState()
        self.on_job: Callable[[SimDisk, tuple[Any, ...], Any], None] = lambda *_: None
        """Told of each job that was done: what it was given, and what it returned."""
        self._rng = rng
        self._seconds = seconds
        self._jobs: list[SimJobs] = []
        path.mkdir()

    def latency(self) -> float:
        """How long the next job takes."""
        return self._rng.expovariate(1.0) * self._seconds

    def check_room(self) -> None:
        """Raise ``StoreFull`` while the disk is full."""
        if self.is_full:
            raise StoreFull("the simulated disk took no more: make room and send the request again")

    def crash(self) -> None:
        """The process that used it is gone."""
        for jobs in self._jobs:
            jobs.crash(self._rng)

    def wipe(self) -> None:
        """Another disk is put in its place."""
        shutil.rmtree(self.path)
        self.path.mkdir()
        self.manager_state = ManagerState()

    def open_results(self, path: Path, options: StoreOptions) -> AbstractAsyncContextManager[ResultStore]:
        """As ``ResultStore.open``."""
        return ResultStore.open(path, _without_thread(options), open_jobs=self.open_jobs)

    def open_requests(self, path: Path, options: StoreOptions) -> AbstractAsyncContextManager[RequestLog]:
        """As ``RequestLog.open``."""
        return RequestLog.open(path, _without_thread(options), open_jobs=self.open_jobs)

    @asynccontextmanager
    async def open_jobs(
        self, name: str, open_file: Callable[[], _ClosableT], /
    ) -> "AsyncIterator[tuple[_ClosableT, SimJobs]]":
        """Open a file whose jobs are done on this disk."""
        opened = open_file()
        jobs = SimJobs(self)
        self._jobs.append(jobs)
        try:
            yield opened, jobs
        finally:
            jobs.finish()
            self._jobs.remove(jobs)
            opened.close()

    @asynccontextmanager
    async def open_coordinator(self, path: Path) -> AsyncIterator[Coordinator]:
        """As ``open_embedded``."""
        yield _SimCoordinator(self)


def _without_thread(options: StoreOptions) -> StoreOptions:
    """A file that flushes with each commit has no thread of its own that flushes now and then."""
    return evolve(options, durability=Durability.POWER)


class SimJobs:
    """Does the jobs of one file, one after the other."""

    def __init__(self, disk: SimDisk) -> None:
        self._disk = disk
        self._waiting: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._has_crashed = False

    async def run(self, job: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Do a job and wait for it."""
        if self._has_crashed:
            raise asyncio.CancelledError  # the process is dead: nothing it does has an effect
        done: _T = await self._enqueue(job, *args, **kwargs)
        return done

    def submit(self, job: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Have a job done behind those asked for before."""
        if not self._has_crashed:
            self._enqueue(job, *args, **kwargs)

    def crash(self, rng: Random) -> None:
        """The process is dead: some of what it asked for is done, and nobody learns of it."""
        for _ in range(rng.randint(0, len(self._waiting))):
            self._do()
        self._has_crashed = True
        self._waiting.clear()

    def finish(self) -> None:
        """Do what was asked for."""
        while self._waiting:
            self._do()

    def _enqueue(
        self, job: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs
    ) -> "asyncio.Future[Any]":
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        name = getattr(job, "__name__", "")
        self._waiting.append((partial(self._on_disk, name, partial(job, *args, **kwargs)), done))
        if len(self._waiting) == 1:
            self._schedule()
        return done

    def _on_disk(self, name: str, job: "partial[_T]") -> _T:
        if name in _READING:
            return job()
        self._disk.check_room()
        found = job()
        self._disk.on_job(self._disk, (name, *job.args), found)
        return found

    def _schedule(self) -> None:
        asyncio.get_running_loop().call_later(self._disk.latency(), self._next)

    def _next(self) -> None:
        if self._waiting:
            self._do()
        if self._waiting:
            self._schedule()

    def _do(self) -> None:
        job, done = self._waiting.popleft()
        try:
            found = job()
        except Exception as error:  # noqa: BLE001  # whoever waits is told
            if not done.done():
                done.set_exception(error)
                done.exception()  # seen: nobody may be waiting
        else:
            if not done.done():
                done.set_result(found)


class _SimCoordinator(Coordinator):
    """One manager that always leads, as the embedded one."""

    def __init__(self, disk: SimDisk) -> None:
        self._disk = disk

    async def lead(self) -> ManagerState:
        """At once, under a higher epoch."""
        before = self._disk.manager_state
        state = evolve(before, epoch=before.epoch + 1)
        await self.store(state)
        return state

    async def store(self, state: ManagerState) -> None:
        """Durable when it returns."""
        await asyncio.sleep(self._disk.latency())
        self._disk.check_room()
        self._disk.manager_state = state

    async def wait_lost(self) -> None:
        """Never."""
        await asyncio.get_running_loop().create_future()
