"""Whether this process can still open anything, asked before what would take its not being able to badly."""

import errno
import os
import resource
from typing import Final

_NONE_LEFT: Final = frozenset({errno.EMFILE, errno.ENFILE})


def who_is_out_of_descriptors(wanted: int) -> str:
    """Who has not so many file descriptors left, in words that begin a sentence; "" if there are."""
    opened: list[int] = []
    try:
        for _ in range(wanted):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))  # noqa: PERF401 - keeps what it got
    except OSError as error:
        if error.errno not in _NONE_LEFT:
            raise
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        whose = "the machine" if error.errno == errno.ENFILE else f"this process, which may have {most},"
        return f"{whose} is out of file descriptors"
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return ""
