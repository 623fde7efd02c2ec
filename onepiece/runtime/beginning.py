"""Work that begins at once, and becomes a task only if it has to wait.

A task costs a turn of the event loop before it does anything. Where the first step of some work is all
that somebody waits for, it is done in place.
"""

import asyncio
import inspect
import types
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any


def begin(
    work: Coroutine[Any, Any, None], tasks: asyncio.TaskGroup, on_ended: Callable[[object], None]
) -> None:
    """Run the first step of ``work`` here, and leave the rest, if there is one, to a task.

    Args:
        work: Its first step runs in the caller's task, which it must not know of: no timeout, task group
            or cancellation scope may be entered in it.
        tasks: Where the rest runs.
        on_ended: Called when all of it is done, or its task has ended otherwise.

    Raises what the work raises in its first step.
    """
    try:
        waits_for = work.send(None)
    except StopIteration:
        on_ended(None)
        return
    task = tasks.create_task(_rest_of(work, waits_for))
    task.add_done_callback(lambda _: _give_up(work, waits_for))
    task.add_done_callback(on_ended)


def _give_up(work: Coroutine[Any, Any, None], waits_for: object) -> None:
    """A task that is cancelled at once never goes on with the work: what that waits for is nobody's then."""
    if inspect.getcoroutinestate(work) == inspect.CORO_SUSPENDED and isinstance(waits_for, asyncio.Future):
        waits_for.cancel()
    work.close()


async def _rest_of(work: Coroutine[Any, Any, None], waits_for: object) -> None:
    await _going_on(work, waits_for)


@types.coroutine
def _going_on(work: Coroutine[Any, Any, None], waits_for: object) -> Generator[Any, Any, None]:
    while True:
        try:
            sent = yield waits_for
        except BaseException as error:  # noqa: BLE001 - the work decides, as if it had waited itself
            step = partial(work.throw, error)
        else:
            step = partial(work.send, sent)
        try:
            waits_for = step()
        except StopIteration:
            return
