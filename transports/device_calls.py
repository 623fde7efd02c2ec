"""Calls of a device that may take long, or for ever: each in a thread of its own that keeps nobody.

A device that hangs never answers, and no call of its driver can be interrupted. The threads of asyncio's
executor are waited for when the event loop ends, and again when the process does: it would never end.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

_Result = TypeVar("_Result")


async def in_thread(call: Callable[..., _Result], *arguments: Any) -> _Result:
    """What a blocking call returns, or raises; other tasks go on meanwhile.

    Cancellation: the call goes on in its thread, and what it returns is dropped.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[_Result] = loop.create_future()

    def run() -> None:
        try:
            result = call(*arguments)
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            _tell(answer.set_exception, error)
        else:
            _tell(answer.set_result, result)

    def _tell(settle: Callable[[Any], None], what: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(lambda: None if answer.done() else settle(what))

    threading.Thread(target=run, name="device-call", daemon=True).start()
    return await answer
