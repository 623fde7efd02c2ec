"""Work in a thread that nobody has to wait for: the process may end before it has returned.

asyncio's own executor is joined when the loop closes and again when the process ends. What may take minutes,
or for ever, and cannot be stopped, as an import, would keep whoever pressed Ctrl-C waiting for it.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


async def in_unjoined_thread(function: Callable[..., _T], *arguments: Any) -> _T:
    """Call a function in a thread of its own, and wait for what it returns or raises.

    Cancelled: it runs on, and what comes of it is dropped.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[_T] = loop.create_future()

    def tell(value: _T | None, error: BaseException | None) -> None:
        if outcome.done():  # cancelled
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(value)  # type: ignore[arg-type]  # there is a value where there is no error

    def run() -> None:
        value, error = None, None
        try:
            value = function(*arguments)
        except BaseException as raised:  # noqa: BLE001 - whoever waits for it has it
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, value, error)

    threading.Thread(target=run, name=f"unjoined {function.__name__}", daemon=True).start()
    return await outcome
