"""One thread for one file: jobs are done in the order in which they were asked for, off the event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import ParamSpec, Protocol, TypeVar

import anyio
from anyio import to_thread
from attrs import define, field


class Closable(Protocol):
    """Something that is opened and closed on its thread."""

    def close(self) -> None:
        """Give it back; blocks."""
        ...


P = ParamSpec("P")
T = TypeVar("T")
ClosableT = TypeVar("ClosableT", bound=Closable)


class Jobs(Protocol):
    """Does the jobs of one file, one after the other; ``Thread`` is what does them outside simulations."""

    async def run(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do a job and wait for it. Cancelled: the job is done all the same, if it had begun."""
        ...

    def submit(self, job: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Have a job done behind those asked for before, without waiting; it must not raise."""
        ...


class OpenJobs(Protocol):
    """Opens a file where its jobs are done, as ``open_on_thread``."""

    def __call__(
        self, name: str, open_file: Callable[[], ClosableT], /
    ) -> AbstractAsyncContextManager[tuple[ClosableT, Jobs]]:
        """Open it, and close it behind the block and all jobs."""
        ...


@define(eq=False)
class Thread:
    """Where the jobs of one file are done; made by ``open_on_thread``."""

    _executor: ThreadPoolExecutor = field(repr=False)

    async def run(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do a job and wait for it. Cancelled: the job is done all the same, if it had begun."""
        return await asyncio.wrap_future(self._executor.submit(job, *args, **kwargs))

    def submit(self, job: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Have a job done behind those asked for before, without waiting; it must not raise."""
        self._executor.submit(job, *args, **kwargs)


@asynccontextmanager
async def open_on_thread(
    name: str, open_file: Callable[[], ClosableT]
) -> AsyncIterator[tuple[ClosableT, Thread]]:
    """Open something on a thread of its own, and close it there behind the block and all jobs.

    Raises:
        OnePieceError: Whatever ``open_file`` raises.
    """
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
    try:
        opening = executor.submit(open_file)
        try:
            opened = await asyncio.wrap_future(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unwanted)
            raise
        try:
            yield opened, Thread(executor)
        finally:
            executor.submit(opened.close)
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(executor.shutdown)


def _close_unwanted(opening: Future[ClosableT]) -> None:
    """Close what its opener was cancelled for; runs on the thread."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
