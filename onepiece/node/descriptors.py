"""Whether this process can still open anything: a server without file descriptors accepts no connection."""

import errno
import os
import resource
from typing import Final

_WANTED: Final = 8
"""As many must be free: a connection that is accepted mostly opens something for its request, too."""


def why_none_are_left() -> str:
    """What is wrong, in words, if this process is out of file descriptors, or nearly; else ""."""
    opened: list[int] = []
    try:
        for _ in range(_WANTED):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))  # noqa: PERF401 - keeps what it got
    except OSError as error:
        if error.errno not in {errno.EMFILE, errno.ENFILE}:
            raise
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        whose = "the machine" if error.errno == errno.ENFILE else f"this process, which may have {most},"
        return (
            f"{whose} is out of file descriptors, and connections are not accepted: raise the limit "
            "(ulimit -n), or spread clients over more proxies"
        )
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return ""
