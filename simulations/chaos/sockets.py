"""Closing a connection inside another process, as a broken network does: neither end is asked.

Linux lets a process take a copy of another one's descriptor (``pidfd_getfd``) where it may trace it: it
is its child, or the user is root. ``shutdown`` on the copy ends the connection for both ends.
"""

import ctypes
import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

_PIDFD_GETFD: Final = 438
"""The number of the system call, the same on all architectures; libc has no wrapper for it yet."""
_ESTABLISHED: Final = "01"
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def connections(pid: int) -> list[int]:
    """The descriptors of a process that are connected TCP sockets."""
    established = _established()
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:[") and target[8:-1] in established:
            found.append(int(entry.name))
    return sorted(found)


def shut_down(pid: int, descriptor: int) -> bool:
    """End the connection behind a descriptor of another process; False if it is gone already.

    Raises:
        PermissionError: This process may not take descriptors of that one.
    """
    with _pidfd(pid) as process:
        copy = _LIBC.syscall(_PIDFD_GETFD, process, descriptor, 0)
        if copy < 0:
            number = ctypes.get_errno()
            error = OSError(number, f"pidfd_getfd: {os.strerror(number)}")
            if isinstance(error, PermissionError):
                raise error
            return False
    with closing(socket.socket(fileno=copy)) as connection:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # its peer was quicker
            return False
    return True


def may_shut_down() -> bool:
    """Whether this process may close connections of its children; tried on itself."""
    one, other = socket.socketpair()
    with one, other:
        try:
            return shut_down(os.getpid(), one.fileno())
        except OSError:
            return False


@contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _established() -> set[str]:
    """The inodes of connected TCP sockets on this machine."""
    found = set()
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _ESTABLISHED:
                    found.add(fields[9])
    return found
