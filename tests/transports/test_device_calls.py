"""Calls of devices in threads of their own."""

import asyncio
import threading

import pytest

from transports.device_calls import in_thread


async def test_results_and_errors_come_back() -> None:
    """What the call returns or raises, whatever it is, is had where it is awaited."""
    assert await in_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await in_thread(divmod, 7, 0)
    with pytest.raises(SystemExit):
        await in_thread(exit, 3)


async def test_what_nobody_waits_for_is_dropped() -> None:
    """A call whose caller was cancelled goes on, and its end disturbs nobody."""
    goes_on, is_over = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def work() -> None:
        goes_on.wait()
        loop.call_soon_threadsafe(is_over.set)

    waiting = asyncio.ensure_future(in_thread(work))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    goes_on.set()
    await is_over.wait()
    await asyncio.sleep(0)
    assert waiting.cancelled()


def test_a_device_that_hangs_keeps_no_process() -> None:
    """The event loop ends though a call never does, and so would the process."""
    never = threading.Event()

    async def begin() -> None:
        waiting = asyncio.ensure_future(in_thread(never.wait))
        await asyncio.sleep(0)
        waiting.cancel()

    running = threading.Thread(target=asyncio.run, args=(begin(),), daemon=True)
    running.start()
    running.join(20)
    (call,) = [thread for thread in threading.enumerate() if thread.name == "device-call"]
    assert (running.is_alive(), call.daemon) == (False, True)
    never.set()
    call.join()
