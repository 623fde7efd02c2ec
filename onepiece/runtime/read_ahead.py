"""Reads the files of a stage's weights into the page cache, before the stage is loaded.

A stage's ``prefetch`` says which files these are; a directory stands for all that is in it. They are read
piece by piece in a thread, and what is read is thrown away: the system keeps it in memory as long as there
is room, and whoever loads the weights then reads memory. At most half of what is free is read, as more would
drive out what was read before it.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from onepiece.errors import DefinitionError

_PIECE_BYTES: Final = 4 << 20
_FILES_MAX: Final = 65_536


def free_bytes() -> int:
    """Host memory that can be had without driving out anything of use; 0 where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    line = next((line for line in lines if line.startswith("MemAvailable:")), "MemAvailable: 0 kB")
    return int(line.split()[1]) * 1024


def read_ahead(name: Callable[[], Iterable[Any]], bytes_max: int, is_stopped: Callable[[], bool]) -> int:
    """Read the files that ``name`` names; returns how many bytes that were.

    Args:
        name: Returns paths of files and directories; may block.
        bytes_max: No more is read.
        is_stopped: Asked before each piece.

    Raises:
        DefinitionError: It returns what is no path.
        OSError: A file cannot be read.
    """
    done = 0
    for path in _files(name()):
        with path.open("rb", buffering=0) as file:
            while not is_stopped() and done < bytes_max:
                piece = len(file.read(min(_PIECE_BYTES, bytes_max - done)))
                done += piece
                if not piece:
                    break
        if is_stopped() or done >= bytes_max:
            break
    return done


def _files(paths: Iterable[Any]) -> Iterator[Path]:
    count = 0
    for path in paths:
        if not isinstance(path, str | os.PathLike):
            raise DefinitionError(
                f"prefetch returned {path!r}; it names files and directories by their paths"
            )
        found = Path(path)
        within = sorted(found.rglob("*")) if found.is_dir() else [found]
        for each in within:
            if found.is_dir() and not each.is_file():
                continue
            count += 1
            if count > _FILES_MAX:
                return
            yield each


async def reading_ahead(name: Callable[[], Iterable[Any]], seconds_max: float) -> int:
    """``read_ahead`` in a thread of its own, of at most half of what is free, and for so long at most.

    Cancellation: the thread stops before its next piece; a ``prefetch`` that blocks is left to itself, and
    does not keep the process from ending.
    """
    stopped = threading.Event()
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[int] = loop.create_future()

    def settle(done: int, error: Exception | None) -> None:
        if outcome.done():
            return
        if error is None:
            outcome.set_result(done)
        else:
            outcome.set_exception(error)

    def run() -> None:
        done, problem = 0, None
        try:
            done = read_ahead(name, free_bytes() // 2, stopped.is_set)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, done, problem)

    threading.Thread(target=run, name="read-ahead", daemon=True).start()
    try:
        async with asyncio.timeout(seconds_max):
            return await outcome
    finally:
        stopped.set()
