"""Starting helper processes, with what they see of the machine; and again, if they die while they load."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final, TypeVar

from attrs import field, frozen

from onepiece.limits import ISOLATED_STARTS_MAX, LOADS_AT_ONCE
from onepiece.log import chosen, get_logger
from onepiece.runtime.isolated_channel import IsolatedStart
from onepiece.runtime.isolated_process import IsolatedProcess, IsolationBounds
from onepiece.runtime.stage_process import ProcessEnded
from onepiece.stage import Stage

_ROOT: Final = str(Path(__file__).parents[2])
_BOOT: Final = """\
import sys
sys.path.insert(0, sys.argv[1])
from onepiece.runtime.isolated_child import main
main()
"""
"""With the node's own copy of this package, whatever lies in the current directory: the node may have
been started elsewhere, and the path that stages are imported by comes with ``IsolatedStart``."""
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_LOOPBACK: Final = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""The ranks of an actor share a host: what they say to each other need not leave it."""

Opened = TypeVar("Opened")


@frozen
class Rank:
    """Which of several processes one is; by default the only one."""

    number: int = 0
    world_size: int = 1
    meeting: int | None = None
    """The descriptor of the file by which the ranks find each other."""

    def __str__(self) -> str:
        return f"rank {self.number} of {self.world_size}"


@frozen
class Surroundings:
    """Where the processes of one stage run, and who watches over them."""

    node: str
    """The node's name."""
    tasks: asyncio.TaskGroup
    bounds: IsolationBounds = field(factory=IsolationBounds)
    load_gate: asyncio.Semaphore = field(factory=lambda: asyncio.Semaphore(LOADS_AT_ONCE))
    """How many ranks on this host may be in their setups at once."""


def child_device(device: str) -> str:
    """What the node's device is called in a helper process, which sees no other of its kind."""
    return "cuda:0" if device.startswith("cuda") else device


def seeing_only(device: str, environment: Mapping[str, str]) -> dict[str, str]:
    """An environment that shows of all GPUs just this device; one of another kind changes nothing."""
    narrowed = dict(environment)
    kind, _, index = device.partition(":")
    if kind == "cuda":
        visible = [part.strip() for part in environment.get(_VISIBLE, "").split(",") if part.strip()]
        narrowed[_VISIBLE] = visible[int(index)] if int(index) < len(visible) else index
    return narrowed


def child_environment(device: str, environment: Mapping[str, str], rank: Rank = Rank()) -> dict[str, str]:
    """The node's environment; of its GPUs only the process's own."""
    narrowed = seeing_only(device, environment)
    return narrowed if rank.world_size == 1 else _LOOPBACK | narrowed


def _spawn(stage: str, device: str, bounds: IsolationBounds, rank: Rank) -> IsolatedProcess:
    """Start a helper; on the event loop's own thread, as the kernel watches over that one for it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            process = subprocess.Popen(  # noqa: S603 - our own module, by the interpreter that runs us
                [
                    *(sys.executable, "-P", "-c", _BOOT, _ROOT),
                    *(stage, str(theirs.fileno()), str(os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                env=child_environment(device, os.environ, rank),
                pass_fds=[each for each in (theirs.fileno(), rank.meeting) if each is not None],
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
    try:
        return IsolatedProcess(stage, process, ours, bounds)
    except BaseException:  # no descriptor for watching it
        ours.close()
        process.kill()
        process.wait()
        raise


@contextlib.asynccontextmanager
async def running(
    stage: Stage[Any, Any, Any], device: str, around: Surroundings, rank: Rank = Rank()
) -> AsyncIterator[tuple[IsolatedProcess, IsolatedStart]]:
    """A helper process that has loaded nothing yet, and what it is to be told; ended with the context."""
    log_format, log_level = chosen()
    start = IsolatedStart(
        stage=stage.key,
        signature=stage.spec.signature,
        device=child_device(device),
        node=around.node,
        import_paths=tuple(sys.path),
        log_format=log_format,
        log_level=log_level,
        rank=rank.number,
        world_size=rank.world_size,
        meeting=rank.meeting,
    )
    process = _spawn(stage.key, device, around.bounds, rank)
    serving = around.tasks.create_task(process.serve(), name=f"process of {stage.key}")
    try:
        yield process, start
    finally:
        try:
            await process.end()
            await asyncio.wait([serving])
        finally:
            process.close()


@contextlib.asynccontextmanager
async def _loaded(
    stage: Stage[Any, Any, Any], device: str, around: Surroundings
) -> AsyncIterator[IsolatedProcess]:
    async with running(stage, device, around) as (process, start):
        await process.load(start)
        yield process


@contextlib.asynccontextmanager
async def persistent(
    stage: str, bounds: IsolationBounds, opening: Callable[[], AbstractAsyncContextManager[Opened]]
) -> AsyncIterator[Opened]:
    """Open a process, or several; what dies while it loads is started again, a bounded number of times."""
    async with contextlib.AsyncExitStack() as stack:
        pause = bounds.pause_seconds
        for start in range(1, ISOLATED_STARTS_MAX + 1):
            try:
                opened = await stack.enter_async_context(opening())
                break
            except ProcessEnded as ended:
                if start == ISOLATED_STARTS_MAX:
                    raise ProcessEnded(f"{ended}, {start} times in a row, while it loaded") from ended
                get_logger().warning("isolated_process_died_loading", stage=stage, how=str(ended))
            await asyncio.sleep(pause)
            pause *= 2
        yield opened


def open_isolated(
    stage: Stage[Any, Any, Any], device: str, around: Surroundings
) -> AbstractAsyncContextManager[IsolatedProcess]:
    """Start a helper process and load the stage in it; the process ends with the context.

    One that dies while it loads is started again, a bounded number of times. Raises ``StageNotLoaded``
    if the module or the setup raises, ``ProcessEnded`` if it dies each time, ``OSError`` if the system
    gives no process.
    """
    return persistent(stage.key, around.bounds, lambda: _loaded(stage, device, around))
