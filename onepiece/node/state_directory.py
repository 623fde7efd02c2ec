"""Where a node keeps its state: the directory it was told, or a temporary one.

A temporary directory goes with the node. A node that is killed cannot see to that, so each holds a lock
on its directory for as long as it lives, whatever ends it, and a node that starts removes the
directories whose lock nobody holds.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from onepiece.errors import ConfigError
from onepiece.log import get_logger

_PREFIX: Final = "onepiece-node-"
_INCARNATION: Final = "incarnation"


@contextlib.contextmanager
def open_state_directory(given: Path | None) -> Iterator[Path]:
    """The directory ``given``, made if need be, or a temporary one that is removed with the context.

    Raises ``ConfigError`` if it cannot be made.
    """
    if given is not None:
        try:
            given.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--state-dir {str(given)!r} cannot be made: {error}") from error
        yield given
        return
    remove_abandoned(Path(tempfile.gettempdir()))
    try:
        path, descriptor = _make()
    except OSError as error:
        raise ConfigError(f"no temporary directory can be made: {error}; give --state-dir") from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


@contextlib.contextmanager
def holding(given: Path | None) -> Iterator[None]:
    """Keep other processes from using a directory that was given; it is theirs when this one ends, however.

    Two nodes in one would take each other's incarnations and delete what the other one retains. Raises
    ``ConfigError`` if another process has it. A file system without locks has none.
    """
    if given is None or (descriptor := _opened(given)) is None:
        yield
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--state-dir {str(given)!r} is in use by another node: give each node its own directory, or "
                "stop the other node"
            ) from None
        except OSError as error:
            get_logger().warning("state_directory_not_locked", path=str(given), error=str(error))
        yield
    finally:
        os.close(descriptor)


def _opened(directory: Path) -> int | None:
    """The directory, made if need be; None where that fails, of which ``open_state_directory`` tells."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None


def next_incarnation(directory: Path, at_least: int) -> int:
    """A number above all that this function has returned for this directory, and not below ``at_least``.

    Incarnations are moments, and a clock that was set back would have a node look older than it was before.
    A directory that takes no more does not keep a node from starting; then the clock alone must do.
    """
    path = directory / _INCARNATION
    try:
        last = int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        last = 0
    incarnation = max(last + 1, at_least)
    try:
        partial = path.with_suffix(".partial")
        partial.write_text(str(incarnation), encoding="ascii")
        partial.replace(path)
    except OSError as error:
        get_logger().warning("incarnation_not_kept", path=str(path), error=str(error))
    return incarnation


def _make() -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        descriptor = _locked(path)
        if descriptor is None:
            continue  # another node that starts took it for abandoned
        if path.exists():
            return path, descriptor
        os.close(descriptor)


def remove_abandoned(directory: Path) -> None:
    """Remove the temporary directories in ``directory`` that nodes which were killed have left."""
    for path in directory.glob(f"{_PREFIX}*"):
        descriptor = _locked(path)
        if descriptor is None:
            continue
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)
        get_logger().info("abandoned_state_removed", path=str(path))


def _locked(path: Path) -> int | None:
    """The directory opened and locked; None if somebody else has it, or it is none of ours."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None
