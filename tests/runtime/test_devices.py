"""A device's two threads: what runs on them, how it is waited for, and what does not stop them."""

import asyncio
import sys
import threading

import pytest

from onepiece.core.inventory import DeviceKind
from onepiece.errors import CodecError, ConfigError
from onepiece.runtime.devices import discover_devices, open_device_threads, parse_device, torch_name
from tests.runtime.rig import until


def test_devices_are_written_as_torch_writes_them() -> None:
    """With their memory, or without: then the machine's is taken."""
    device = parse_device("cpu:1=1.5GiB")
    assert (device.name, device.kind, device.memory_bytes) == ("cpu:1", DeviceKind.CPU, 3 << 29)
    assert parse_device("cpu:0").memory_bytes > 1 << 28
    for wrong in ("cpu:0=infGiB", "cpu:0=nanGiB", "cpu:²"):
        with pytest.raises(ConfigError):
            parse_device(wrong)
    assert parse_device("cuda:2=80GiB").kind is DeviceKind.GPU
    assert (torch_name("cpu:3"), torch_name("cuda:3")) == ("cpu", "cuda:3")


@pytest.mark.parametrize(
    "text", ["", "cpu", "tpu:0", "cpu:x", "cuda:-1", "cpu:0=", "cpu:0=much", "cpu:0=-1GiB"]
)
def test_a_device_that_is_none_is_named(text: str) -> None:
    """A wrong option says which part is wrong; an empty size is no size."""
    if text == "cpu:0=":
        assert parse_device(text).memory_bytes > 0
        return
    with pytest.raises(ConfigError, match=r"cpu:0=4GiB|more than nothing"):
        parse_device(text)


@pytest.mark.parametrize("why", [CodecError("torch is not installed"), RuntimeError("no driver\nat all")])
def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, why: Exception) -> None:
    """The error is that of a wrong option, whatever torch says, and tells what to write instead."""

    def ask(index: int) -> int:
        raise why

    monkeypatch.setattr("onepiece.runtime.devices.cuda_memory_bytes", ask)
    with pytest.raises(ConfigError, match=r"cuda:3 cannot be used here: (torch is not|no driver\.).*cpu:0"):
        parse_device("cuda:3")
    assert parse_device("cuda:3=80GiB").kind is DeviceKind.GPU


def test_no_gpu_is_found_where_none_may_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable that narrows a process's GPUs down to none leaves the processor."""
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert [device.name for device in discover_devices()] == ["cpu:0"]


async def test_the_stage_thread_has_a_loop_of_its_own() -> None:
    """Coroutines of stages share it, and what blocks there does not block the caller's loop."""
    async with open_device_threads("cpu:0", close_seconds=5) as threads:

        async def where() -> tuple[int, int]:
            return threading.get_ident(), id(asyncio.get_running_loop())

        first, second = await threads.run_stage(where), await threads.run_stage(where)
        assert first == second
        assert first[0] != threading.get_ident()
        assert first[1] != id(asyncio.get_running_loop())
        may_go_on = threading.Event()

        async def block() -> bool:
            return may_go_on.wait(20)

        blocked = asyncio.ensure_future(threads.run_stage(block))
        await asyncio.sleep(0)
        assert not blocked.done()
        may_go_on.set()
        assert await blocked


async def test_errors_of_both_threads_reach_the_caller() -> None:
    """Those that would end a thread, too; and the next one is served."""
    async with open_device_threads("cpu:0", close_seconds=5) as threads:
        for error in (ValueError, KeyboardInterrupt, SystemExit, MemoryError):

            async def fail(error: type[BaseException] = error) -> None:
                raise error("here")

            def fail_plainly(error: type[BaseException] = error) -> None:
                raise error("here")

            with pytest.raises(error, match="here"):
                await threads.run_stage(fail)
            with pytest.raises(error, match="here"):
                await threads.run_compute(fail_plainly)

        async def answer() -> int:
            return 42

        assert await threads.run_stage(answer) == 42
        assert await threads.run_compute(lambda: 43) == 43


async def test_a_stages_own_task_does_not_stop_the_loop() -> None:
    """``sys.exit`` in a task that nobody awaits interrupts the loop, which goes on."""
    async with open_device_threads("cpu:0", close_seconds=5) as threads:
        left: list[asyncio.Task[None]] = []

        async def leave() -> None:
            sys.exit(3)

        async def start() -> None:
            left.append(asyncio.get_running_loop().create_task(leave()))

        await threads.run_stage(start)
        await until(left[0].done)

        async def answer() -> int:
            return 42

        assert await threads.run_stage(answer) == 42
        assert isinstance(left[0].exception(), SystemExit)


async def test_a_cancelled_caller_waits_for_the_end() -> None:
    """The coroutine is cancelled on its own loop, and has ended when the caller sees the cancellation."""
    async with open_device_threads("cpu:0", close_seconds=5) as threads:
        events: list[str] = []
        is_running = threading.Event()

        async def wait() -> None:
            is_running.set()
            try:
                await asyncio.sleep(3600)
            finally:
                events.append("cancelled")

        waiting = asyncio.ensure_future(threads.run_stage(wait))
        await until(is_running.is_set)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert events == ["cancelled"]


async def test_compute_runs_one_call_at_a_time_in_order() -> None:
    """A cancelled caller waits for the call that runs; one that has not begun is dropped."""
    async with open_device_threads("cpu:0", close_seconds=5) as threads:
        may_end, events = threading.Event(), list[str]()

        def first() -> str:
            events.append("first begins")
            assert may_end.wait(20)
            events.append("first ends")
            return "first"

        running = asyncio.ensure_future(threads.run_compute(first))
        await until(lambda: events)
        queued = asyncio.ensure_future(threads.run_compute(lambda: events.append("second")))
        third = asyncio.ensure_future(threads.run_compute(lambda: events.append("third")))
        await asyncio.sleep(0)
        queued.cancel()
        running.cancel()
        await asyncio.sleep(0)
        assert not running.done()
        may_end.set()
        for each in (running, queued):
            with pytest.raises(asyncio.CancelledError):
                await each
        await third
        assert events == ["first begins", "first ends", "third"]


async def test_closing_gives_up_on_a_call_that_hangs() -> None:
    """After its bound; whoever waits for the call is let go by ``abandon``; later calls are refused."""
    may_end = threading.Event()
    async with open_device_threads("cpu:0", close_seconds=0.1) as threads:
        hanging = asyncio.ensure_future(threads.run_compute(lambda: may_end.wait(20)))
        await asyncio.sleep(0)
        threads.abandon()
        with pytest.raises(asyncio.CancelledError):
            await hanging
    with pytest.raises(RuntimeError, match="the device is closing"):
        await threads.run_compute(lambda: None)
    may_end.set()
