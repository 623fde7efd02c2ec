"""Where a result is saved: a file that appears when it is whole, or what takes bytes as they come.

A rename would put a file in the place of a pipe, a device or a symbolic link. So a link is followed to
the file it names, and what is no regular file is written to.
"""

import errno
import os
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import anyio
from anyio import to_thread

_PIECE_BYTES: Final = 1 << 20
_READER_POLL_SECONDS: Final = 0.1
_STANDARD: Final = frozenset({Path("/dev/stdout"), Path("/dev/stderr")})


def is_written_through(path: Path) -> bool:
    """Whether it takes bytes instead of being replaced; raises ``OSError`` for a loop of links."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    return not stat.S_ISREG(mode) or _is_descriptor(path)


def _is_descriptor(path: Path) -> bool:
    """Whether it stands for an open file: others may have written to it, and hold it."""
    directory = Path(os.path.realpath(path.parent))
    return path.absolute() in _STANDARD or directory.is_relative_to("/proc")


def replaced_by(path: Path) -> Path:
    """The file that is replaced when a result is saved there: links are followed."""
    return Path(os.path.realpath(path))


@asynccontextmanager
async def saving(path: Path, uid: str) -> AsyncIterator[Path]:
    """Yield a file to write a result to; it goes to ``path`` if the block ends without an error.

    Raises:
        OSError: ``path`` cannot be written.

    Cancelled: nothing is left of the file; bytes that went into a pipe stay there.
    """
    if is_written_through(path):
        async with await anyio.open_file(await _open_for_writing(path), "wb") as stream:
            with _spool(uid) as part:
                yield part
                async with await anyio.open_file(part, "rb") as file:
                    while piece := await file.read(_PIECE_BYTES):
                        await stream.write(piece)
    else:
        target = replaced_by(path)
        part = target.with_name(f"{target.name}.{uid}.part")
        try:
            yield part
            await to_thread.run_sync(part.replace, target)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def _spool(uid: str) -> Iterator[Path]:
    with TemporaryDirectory(prefix="onepiece-") as directory:
        yield Path(directory) / uid


async def _open_for_writing(path: Path) -> int:
    """A descriptor; waits for the reader of a named pipe, as a shell does, but can be cancelled."""
    while True:
        try:
            # Appending: where /dev/stdout is a file, others have written to it before.
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO or not await anyio.Path(path).is_fifo():
                raise
            await anyio.sleep(_READER_POLL_SECONDS)
        else:
            os.set_blocking(descriptor, True)
            return descriptor
