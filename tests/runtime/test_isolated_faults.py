"""A helper process that dies, in every way, ends its calls and nothing else."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from onepiece.errors import StageFailed
from onepiece.runtime.stage_process import ProcessEnded, StageNotLoaded
from onepiece.runtime.task_worker import Outcome
from tests.runtime.isolated_stages import break_down, linger, traced
from tests.runtime.rig import SHORT, children, descriptors, is_alive, rig, until


def failure(outcome: Outcome[object]) -> StageFailed:
    """The error of a stage task that must have failed in its stage."""
    assert isinstance(outcome.error, StageFailed), outcome
    assert outcome.error.fields["node"] == "node-1"
    assert outcome.error.fields["stage"] == "stage"
    return outcome.error


DEATHS = {
    "segfault": "its process was killed by SIGSEGV",
    "_exit": "its process exited with status 3",
    "kill": "its process was killed by SIGKILL (by the kernel, if memory ran out)",
}

IN_DOUBT = {
    "sys.exit": "SystemExit",
    "sys.exit in a thread": "SystemExit",
    "interrupt": "KeyboardInterrupt",
    "memory": "MemoryError",
}


async def test_the_end_of_the_process_is_the_jobs_error() -> None:
    """Noticed by the exit itself, which the error names (fault 5); the next stage task has a new process."""
    async with rig(break_down) as rigged:
        processes = {await rigged.value(fault="none")}
        for fault, how in DEATHS.items():
            outcome = await rigged.run(fault=fault)
            assert how in failure(outcome).message
            assert outcome.is_dirty
            assert rigged.loaded.is_broken
            assert how.endswith(await rigged.loaded.broken())
            await rigged.reload()
            process = await rigged.value(fault="none")
            assert process not in processes
            processes.add(process)


async def test_what_leaves_the_interpreter_in_doubt_is_dirty() -> None:
    """The process lives, but no further stage task runs in it (faults 30, 31 and 77)."""
    async with rig(break_down) as rigged:
        process = await rigged.value(fault="none")
        for fault, cause in IN_DOUBT.items():
            outcome = await rigged.run(fault=fault)
            assert failure(outcome).fields["cause"] == cause
            assert outcome.is_dirty
            await rigged.reload()
            assert not is_alive(process)
            process, before = await rigged.value(fault="none"), process
            assert process != before


async def test_an_ordinary_error_leaves_the_process_as_it_is() -> None:
    """Like in a node: the stage task fails with its traceback, and the next one runs in the same process."""
    async with rig(break_down) as rigged:
        process = await rigged.value(fault="none")
        for fault, words in {
            "raise": "ValueError: the latents are not finite",
            "wrong type": "the str 'text' where int is wanted",
            "no wire form": "an int of 101 bits",
        }.items():
            outcome = await rigged.run(fault=fault)
            assert words in failure(outcome).message
            assert not outcome.is_dirty
        assert "the latents are not finite" in failure(await rigged.run(fault="raise")).fields["traceback"]
        much = failure(await rigged.run(fault="raise much"))
        assert "characters in all)" in much.message
        assert len(much.message) < 10_000
        assert "ValueError" in much.fields["cause"]
        assert await rigged.value(fault="none") == process
        assert (await rigged.run(fault=3)).error is not None  # no such fault: a wrong type that came in
        assert (await rigged.run(colour="red")).error is not None


async def test_a_process_killed_from_outside_ends_its_jobs_at_once() -> None:
    """By kill -9, as the kernel does when memory runs out: all its stage tasks end, by its exit (fault 5)."""
    async with rig(linger) as rigged:
        started = [rigged.start(how=how) for how in ("sleep", "compute", "sleep")]
        await until(lambda: len(rigged.progress) >= 3)
        os.kill(rigged.process.process_id, signal.SIGKILL)
        for each in started:
            outcome = await each.task
            assert "was killed by SIGKILL" in failure(outcome).message
            assert outcome.is_dirty
        await rigged.reload()
        assert (await rigged.run(how="sleep", seconds=0.0)).shipment == "sleep"


async def test_a_process_that_dies_idle_is_noticed() -> None:
    """Nobody calls it, and still it is known to be broken, and how it ended."""
    async with rig(break_down) as rigged:
        os.kill(rigged.process.process_id, signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await rigged.loaded.broken() == "was killed by SIGTERM"
        assert rigged.loaded.is_broken
        late = await rigged.run(fault="none")
        assert "was killed by SIGTERM" in failure(late).message
        assert late.is_dirty


async def test_a_stopped_process_is_ended_all_the_same() -> None:
    """SIGSTOP: it does not answer, nor take SIGTERM; SIGKILL ends it when the actor does."""
    async with rig(break_down, SHORT) as rigged:
        process = rigged.process.process_id
        os.kill(process, signal.SIGSTOP)
    assert not is_alive(process)


async def test_a_stage_that_spoils_the_socket_loses_its_process() -> None:
    """What comes from there is checked, and its end is an end: the node goes on."""
    async with rig(break_down, SHORT) as rigged:
        nonsense = failure(await rigged.run(fault="say nonsense"))
        assert "sent what is no message (a packet of 8 bytes that was cut) and was ended" in nonsense.message
        await rigged.reload()
        closed = await rigged.run(fault="close the socket")
        assert "its process" in failure(closed).message
        assert closed.is_dirty
        await rigged.reload()
        assert await rigged.value(fault="none") == rigged.process.process_id


async def test_no_process_is_left_behind() -> None:
    """Neither the helper, nor what its stage has started, nor a descriptor, however it ends."""
    before, processes = descriptors(), children()
    async with rig(break_down) as rigged:
        helper = rigged.process.process_id
        left = await rigged.value(fault="leave a process")
        assert is_alive(left)
        assert children() - processes == {helper}
        orphan = await rigged.value(fault="leave a process")
        await rigged.run(fault="segfault")
        await until(lambda: not is_alive(orphan))
    await until(lambda: not is_alive(left))
    assert not is_alive(helper)
    assert children() == processes
    assert descriptors() == before


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ``traced`` writes what happens to it."""
    path = tmp_path / "traces"
    path.touch()
    monkeypatch.setenv("ONEPIECE_TEST_TRACES", str(path))
    return path


def lines_in(traces: Path) -> list[str]:
    """What happened, each with the id of the process."""
    return traces.read_text().splitlines()


def words_in(traces: Path) -> list[str]:
    """The same without the ids."""
    return [line.split()[0] for line in lines_in(traces)]


async def test_a_setup_lives_in_the_process(traces: Path) -> None:
    """It loads there, its state is there, and the rest of it runs when the actor ends."""
    async with rig(traced) as rigged:
        process = rigged.process.process_id
        assert (await rigged.run(word="hello")).shipment == process
    assert lines_in(traces) == [f"{word} {process}" for word in ("load", "hello", "unload")]


@pytest.mark.parametrize(
    ("fault", "words"),
    [("raise", "OSError: the weights are not there"), ("exit", "SystemExit")],
)
async def test_a_setup_that_raises_is_the_loads_error(
    fault: str, words: str, traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its traceback, and it is not tried again here: it would raise again."""
    monkeypatch.setenv("ONEPIECE_TEST_SETUP", fault)
    before = descriptors()
    with pytest.raises(BaseExceptionGroup) as caught:
        async with rig(traced):
            pass
    (error,) = caught.value.exceptions
    assert isinstance(error, StageNotLoaded)
    assert words in str(error)
    assert "setup_with_traces" in error.__notes__[0]
    assert words_in(traces) == ["load"]
    assert descriptors() == before


async def test_a_crash_while_loading_is_tried_again(traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been for want of memory for a moment (fault 31)."""
    monkeypatch.setenv("ONEPIECE_TEST_SETUP", "crash once")
    async with rig(traced) as rigged:
        assert (await rigged.run(word="hello")).error is None
    assert words_in(traces) == ["load", "load", "hello", "unload"]


async def test_a_stage_that_always_crashes_while_loading_fails(
    traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a few times, with the reason; nothing of the tries is left."""
    monkeypatch.setenv("ONEPIECE_TEST_SETUP", "crash")
    before, processes = descriptors(), children()
    with pytest.raises(BaseExceptionGroup) as caught:
        async with rig(traced):
            pass
    (error,) = caught.value.exceptions
    assert isinstance(error, ProcessEnded)
    assert str(error) == "exited with status 7, 3 times in a row, while it loaded"
    assert words_in(traces) == ["load"] * 3
    assert descriptors() == before
    assert children() == processes


async def test_loading_can_be_cancelled(traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor that is ended while it loads takes its process along."""
    monkeypatch.setenv("ONEPIECE_TEST_SETUP", "hang")
    processes = children()

    async def load() -> None:
        async with rig(traced):
            raise AssertionError("it cannot have loaded")

    loading = asyncio.create_task(load())
    await until(lambda: words_in(traces) == ["load"])
    assert children() != processes
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert children() == processes


async def test_an_unload_that_hangs_is_cut_short(traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is the actor's, and the process goes (fault 27)."""
    monkeypatch.setenv("ONEPIECE_TEST_SETUP", "hang in unload")
    processes = children()
    async with rig(traced, SHORT):
        pass
    assert words_in(traces) == ["load", "unload"]
    assert children() == processes


async def test_a_crash_loop_leaves_nothing_behind() -> None:
    """Four crashes and as many new processes later there are as many descriptors and children as before."""
    before, processes = descriptors(), children()
    async with rig(break_down) as rigged:
        for _ in range(4):
            assert (await rigged.run(fault="_exit")).is_dirty
            await rigged.reload()
        assert (await rigged.run(fault="none")).error is None
    assert descriptors() == before
    assert children() == processes


async def test_jobs_of_a_process_that_is_being_replaced_may_end() -> None:
    """One stage task made it dirty; another one that runs in it is not cut short by the reload."""
    async with rig(linger) as rigged:
        slow = rigged.start(how="sleep", seconds=0.5)
        await until(lambda: rigged.steps == [1])
        unloading = rigged.tasks.create_task(rigged.loaded.unload())
        assert (await slow.task).shipment == "sleep"
        await unloading
        refused = await rigged.run(how="sleep", seconds=0.0)
        assert "exited with status 0" in failure(refused).message
        assert refused.is_dirty
