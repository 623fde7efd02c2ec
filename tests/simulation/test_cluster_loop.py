"""The virtual loop: time that jumps, processes that are paused, an order that repeats."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, TypeVar

import pytest

from simulations import loop as loop_module
from simulations.loop import Process, Stuck, VirtualLoop, elapse, virtual_loop

T = TypeVar("T")


def run(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]], seed: int = 1) -> T:
    """Run a coroutine in a world of its own."""
    uncaught: list[dict[str, Any]] = []
    loop = virtual_loop(Random(seed), uncaught.append)
    found = loop.run_until_complete(main(loop))
    loop.close()
    assert not uncaught
    return found


def test_time_passes_only_while_nothing_is_ready() -> None:
    """A long sleep is over at once, and steps take no time."""

    async def main(loop: VirtualLoop) -> tuple[float, float]:
        for _ in range(100):
            await asyncio.sleep(0)
        before = loop.time()
        await elapse(1000.0)
        return before, loop.time()

    assert run(main) == (0.0, 1000.0)


def test_timeouts_and_timers_keep_their_order() -> None:
    """Timers go off by their moment, and those of one moment in the order in which they were set."""

    async def main(loop: VirtualLoop) -> list[str]:
        told: list[str] = []
        for name, delay in (("late", 2.0), ("first", 1.0), ("second", 1.0), ("cancelled", 1.5)):
            timer = loop.call_later(delay, told.append, name)
            if name == "cancelled":
                timer.cancel()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await elapse(10.0)
        told.append("timeout")
        await elapse(1.0)
        return told

    assert run(main) == ["first", "second", "timeout", "late"]


def test_what_a_process_starts_belongs_to_it() -> None:
    """Tasks, timers and callbacks of a task are of its process, however deep they are started."""

    async def main(loop: VirtualLoop) -> tuple[list[Process], int]:
        process = loop.add_process("node", clock_offset=50.0)
        seen: list[Process] = []

        async def leaf() -> None:
            await elapse(1.0)
            seen.append(loop.current)
            loop.call_soon(lambda: seen.append(loop.current))

        async def root() -> None:
            assert loop.time() == 50.0
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(leaf())
                assert len(loop.tasks_of(process)) == 2
            await asyncio.sleep(0)

        await process.start(root(), "root")
        assert seen == [process, process]
        return seen, len(loop.tasks_of(process))

    assert run(main)[1] == 0


def test_paused_processes_run_nothing() -> None:
    """What becomes ready in a pause runs behind it, in its order, and late; others go on meanwhile."""

    async def main(loop: VirtualLoop) -> list[tuple[str, float]]:
        process = loop.add_process("node")
        told: list[tuple[str, float]] = []

        async def tick() -> None:
            for name in ("a", "b", "c"):
                await elapse(1.0)
                told.append((name, loop.now))

        ticking = process.start(tick(), "tick")
        await elapse(1.5)
        process.pause()
        await elapse(5.0)
        process.resume()
        await ticking
        return told

    assert run(main) == [("a", 1.0), ("b", 6.5), ("c", 7.5)]


def test_fuse_burns_between_two_steps() -> None:
    """A callback can be set behind any step of a process, in the middle of what its tasks do."""

    async def main(loop: VirtualLoop) -> int:
        process = loop.add_process("node")
        done: list[int] = []

        async def work() -> None:
            for step in range(100):
                done.append(step)
                await asyncio.sleep(0)

        working = process.start(work(), "work")
        process.after_steps(10, lambda: _cancel(working))
        await asyncio.wait([working])
        assert working.cancelled()
        return len(done)

    assert run(main) == 10


def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()


def _interleaving(seed: int) -> list[str]:
    async def main(loop: VirtualLoop) -> list[str]:
        told: list[str] = []

        async def work(name: str) -> None:
            for step in range(5):
                told.append(f"{name}{step}")
                await asyncio.sleep(0)

        tasks = [loop.add_process(name).start(work(name), name) for name in "abc"]
        await asyncio.wait(set(tasks))
        return told

    return run(main, seed)


def test_order_between_processes_is_drawn_and_repeats() -> None:
    """The same seed gives the same order of steps, another one another; each process keeps its own order."""
    orders = [_interleaving(seed) for seed in (1, 1, 2)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    for order in orders:
        for name in "abc":
            assert [told for told in order if told[0] == name] == [f"{name}{step}" for step in range(5)]


def test_sets_of_tasks_iterate_in_the_order_of_their_making() -> None:
    """Tasks and futures hash by a running number: their place in memory decides nothing."""

    async def main(loop: VirtualLoop) -> bool:
        tasks = [loop.create_task(asyncio.sleep(0)) for _ in range(50)]
        futures = [loop.create_future() for _ in range(3)]
        await asyncio.wait(tasks)
        hashes = [hash(each) for each in (*tasks, *futures)]
        return hashes == sorted(hashes)

    assert run(main)


def test_worlds_that_never_end_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for what nobody will do, steps that take no time, and endless waiting are told as such."""

    async def wait(loop: VirtualLoop) -> None:
        await loop.create_future()

    async def spin(loop: VirtualLoop) -> None:
        for _ in itertools.count():
            await asyncio.sleep(0)

    async def doze(loop: VirtualLoop) -> None:
        for _ in itertools.count():
            await elapse(100.0)

    monkeypatch.setattr(loop_module, "STEPS_AT_ONE_MOMENT_MAX", 1000)
    for main, words in (
        (wait, "nothing will ever happen"),
        (spin, "step after step"),
        (doze, "goes on for more"),
    ):
        with pytest.raises(Stuck, match=words):
            run(main)


def test_what_nobody_caught_is_told() -> None:
    """An exception in a callback, or in a task that nobody waits for, reaches the handler."""
    uncaught: list[dict[str, Any]] = []
    loop = virtual_loop(Random(1), uncaught.append)

    async def main() -> None:
        loop.call_soon({}.__getitem__, "nothing")
        await elapse(1.0)

    loop.run_until_complete(main())
    assert [type(each["exception"]) for each in uncaught] == [KeyError]


def test_threads_and_sockets_are_refused() -> None:
    """Nothing real can be reached from inside: it would not repeat."""

    async def main(loop: VirtualLoop) -> None:
        with pytest.raises(RuntimeError):
            await asyncio.open_connection("127.0.0.1", 1)
        with pytest.raises(RuntimeError):
            loop.run_in_executor(None, print)

    run(main)


def test_dropped_generators_are_finished() -> None:
    """An asynchronous generator that is left in the middle cleans up, as under asyncio."""

    async def main(loop: VirtualLoop) -> list[str]:
        told: list[str] = []

        async def numbers() -> Any:
            try:
                for number in range(3):
                    yield number
            finally:
                await asyncio.sleep(0)
                told.append("clean")

        async for _ in numbers():
            break
        await elapse(1.0)
        return told

    assert run(main) == ["clean"]
