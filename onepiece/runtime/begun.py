"""Work that begins at once, and becomes a task only if it has to wait.

A task costs a turn of the event loop before it does anything. Where the first step of some work is all
that somebody waits for, it is done in place.
"""

import types
from collections.abc import Coroutine, Generator
from functools import partial
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def begun(work: Coroutine[Any, Any, _Result]) -> Coroutine[Any, Any, _Result] | None:
    """Run the first step of ``work`` here; what is left of it, for a task to finish, or None.

    The first step runs in the caller's task, which it must not know of: no timeout, task group or
    cancellation scope may be entered in it. Raises what the work raises in that step.
    """
    try:
        waits_for = work.send(None)
    except StopIteration:
        return None
    return _finished(work, waits_for)


async def _finished(work: Coroutine[Any, Any, _Result], waits_for: object) -> _Result:
    return await _rest(work, waits_for)


@types.coroutine
def _rest(work: Coroutine[Any, Any, _Result], waits_for: object) -> Generator[Any, Any, _Result]:
    try:
        while True:
            try:
                sent = yield waits_for
            except BaseException as error:  # noqa: BLE001 - the work decides, as if it had waited itself
                step = partial(work.throw, error)
            else:
                step = partial(work.send, sent)
            try:
                waits_for = step()
            except StopIteration as stop:
                result: _Result = stop.value
                return result
    finally:
        work.close()
