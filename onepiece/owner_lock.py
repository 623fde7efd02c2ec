"""A directory of state belongs to one process at a time, until that closes it or dies."""

import fcntl
import os
from pathlib import Path

from onepiece.errors import ConfigError


def lock_directory(path: Path, what: str) -> int:
    """Make the directory if need be and hold it; returns the descriptor whose closing lets it go.

    The lock is the kernel's, so that no death leaves it behind. ``what`` names the state in errors.

    Raises:
        ConfigError: Another process has it, or it is unusable.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        return _lock(path, what)
    except OSError as error:
        raise ConfigError(f"the {what}'s directory {str(path)!r} is unusable: {error}") from error


def _lock(path: Path, what: str) -> int:
    descriptor = os.open(path / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise ConfigError(
            f"the {what} in {str(path)!r} is in use by process {owner}: give each node its own "
            "directory, or stop the other node"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
