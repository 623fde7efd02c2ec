"""Work that begins in place: its first step, and what is left of it."""

import asyncio

import pytest

from onepiece.runtime.beginning import begin


async def test_work_that_need_not_wait_is_done_at_once() -> None:
    """No task is made."""
    done: list[str] = []

    async def work() -> None:
        done.append("all of it")

    async with asyncio.TaskGroup() as tasks:
        begin(work(), tasks, lambda _: done.append("ended"))
        assert done == ["all of it", "ended"]
        assert len(asyncio.all_tasks()) == 1


async def test_what_is_left_goes_on_in_a_task_of_its_own() -> None:
    """Behind the first wait everything is as in any task: results, timeouts, cancellations."""
    first: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    steps: list[object] = []

    async def work() -> None:
        steps.append("first step")
        steps.append(await first)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await asyncio.sleep(3600)
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            steps.append("cancelled")
            raise

    async with asyncio.TaskGroup() as tasks:
        begin(work(), tasks, lambda _: steps.append("ended"))
        [task] = asyncio.all_tasks() - {asyncio.current_task()}
        assert steps == ["first step"]
        first.set_result(1)
        for _ in range(10):
            await asyncio.sleep(0)
        task.cancel()
    assert steps == ["first step", 1, "cancelled", "ended"]


async def test_work_whose_task_never_began_is_closed() -> None:
    """Its own cleaning up is done before anybody hears that it has ended."""
    steps: list[str] = []
    awaited: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        try:
            await awaited
        finally:
            steps.append("cleaned up")

    async with asyncio.TaskGroup() as tasks:
        begin(work(), tasks, lambda _: steps.append("ended"))
        [task] = asyncio.all_tasks() - {asyncio.current_task()}
        task.cancel()
    assert steps == ["cleaned up", "ended"]
    assert awaited.cancelled()  # nobody is left to look at what becomes of it


async def test_an_error_of_the_first_step_is_raised_at_once() -> None:
    """Whoever begins the work sees it."""

    async def work() -> None:
        raise ValueError("at once")

    async with asyncio.TaskGroup() as tasks:
        with pytest.raises(ValueError, match="at once"):
            begin(work(), tasks, lambda _: None)
