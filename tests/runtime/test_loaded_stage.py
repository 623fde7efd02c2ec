"""A stage's setup: one life, in one task, on the loop of the stage's body."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
from attrs import evolve

from onepiece import StageContext, stage
from onepiece.graph import Isolation
from tests.runtime.rig import PATIENT, loaded_stage, rig, until

EVENTS: list[str] = []
THREADS: set[int] = set()
TASKS: set[int] = set()


async def setup(ctx: StageContext[None]) -> AsyncIterator[list[str]]:
    """Hold a task group open across the ``yield``, which only one task may do."""
    EVENTS.append("load")
    async with asyncio.timeout(3600), asyncio.TaskGroup() as tasks:
        beside = tasks.create_task(asyncio.sleep(3600))
        THREADS.add(threading.get_ident())
        TASKS.add(id(asyncio.current_task()))
        yield EVENTS
        TASKS.add(id(asyncio.current_task()))
        THREADS.add(threading.get_ident())
        beside.cancel()
    EVENTS.append("unload")


@stage(setup=setup)
async def held(ctx: StageContext[list[str]], word: str) -> str:
    """Use the state."""
    THREADS.add(threading.get_ident())
    ctx.state.append(word)
    return word


async def fail(ctx: StageContext[None]) -> AsyncIterator[None]:
    """Fail at once."""
    if ctx.stage:
        raise OSError("the weights are not there")
    yield


async def leave(ctx: StageContext[None]) -> AsyncIterator[None]:
    """Leave the interpreter."""
    if ctx.stage:
        raise SystemExit(3)
    yield


async def fail_behind(ctx: StageContext[None]) -> AsyncIterator[None]:
    """Fail when unloading."""
    yield
    EVENTS.append("fails")
    raise OSError("the weights are gone")


async def hang(ctx: StageContext[None]) -> AsyncIterator[None]:
    """Load for ever."""
    EVENTS.append("loading")
    try:
        await asyncio.sleep(3600)
    finally:
        EVENTS.append("cancelled")
    yield


@stage(setup=fail)
async def failing(ctx: StageContext[None]) -> None:
    """Never loaded."""


@stage(setup=leave)
async def leaving(ctx: StageContext[None]) -> None:
    """Never loaded."""


@stage(setup=fail_behind)
async def failing_behind(ctx: StageContext[None]) -> None:
    """Loaded, and not unloaded."""


@stage(setup=hang)
async def hanging(ctx: StageContext[None]) -> None:
    """Never loaded."""


@pytest.fixture(autouse=True)
def _no_traces() -> None:
    for traces in (EVENTS, THREADS, TASKS):
        traces.clear()


@pytest.mark.parametrize("isolation", [Isolation.LOOP, Isolation.THREAD])
async def test_a_setup_lives_where_the_body_runs(isolation: Isolation) -> None:
    """In one task from its first line to its last, loop or thread; the body's thread is the same."""
    given = evolve(held, spec=evolve(held.spec, isolation=isolation))
    async with rig(given) as rigged:
        assert rigged.state is EVENTS
        assert await rigged.value(word="used") == "used"
        assert not rigged.loaded.is_broken
        assert not rigged.loaded.has_worked  # what has no process has no such count
    assert EVENTS == ["load", "used", "unload"]
    assert len(TASKS) == len(THREADS) == 1
    assert ({threading.get_ident()} == THREADS) is (isolation is Isolation.LOOP)


async def test_what_a_setup_raises_is_the_loads_error() -> None:
    """As it is; what would end the interpreter as a plain error with its cause."""
    with pytest.raises(BaseExceptionGroup) as caught:
        async with rig(failing):
            pass
    assert [str(error) for error in caught.value.exceptions] == ["the weights are not there"]
    with pytest.raises(BaseExceptionGroup) as caught:
        async with rig(leaving):
            pass
    (error,) = caught.value.exceptions
    assert isinstance(error, RuntimeError)
    assert isinstance(error.__cause__, SystemExit)


async def test_what_an_unload_raises_is_logged_only() -> None:
    """Nobody could act on it, and the actor is ending."""
    async with rig(failing_behind):
        pass
    assert EVENTS == ["fails"]


async def test_a_load_can_be_cancelled() -> None:
    """The setup is cancelled, too, and has ended before whoever waits for its group goes on."""

    async def load() -> None:
        async with rig(hanging):
            raise AssertionError("it cannot have loaded")

    loading = asyncio.ensure_future(load())
    await until(lambda: EVENTS)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert EVENTS == ["loading", "cancelled"]


async def test_what_was_never_loaded_is_unloaded_at_once() -> None:
    """Unloading is safe at any time."""
    async with rig(held) as rigged:
        await loaded_stage(held, rigged.threads, rigged.tasks, PATIENT).unload()
        await rigged.loaded.unload()
        await rigged.loaded.unload()
