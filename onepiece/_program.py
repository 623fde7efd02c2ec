"""Ctrl-C while a program of ours imports what it needs: it ends, without the traceback of an import.

That takes a second or two, and this package is the first part of it; so it imports this module before all
else, and importing it is enough. In somebody else's program nothing of this happens: signals are not a
library's matter.
"""

import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any, Final

INTERRUPTED: Final = 130
"""The exit code of what Ctrl-C ended."""
_SCRIPTS: Final = frozenset({"onepiece", "onepiece-node"})
_MODULES: Final = frozenset({"onepiece.cli", "onepiece.node"})


def is_ours(argv: Sequence[str], command: Sequence[str]) -> bool:
    """Whether the process runs a program of ours.

    Args:
        argv: ``sys.argv`` as it is before a program runs: ``-m`` stands first if a module is to be run.
        command: ``sys.orig_argv``, the interpreter's whole command line.
    """
    if not argv:
        return False
    if argv[0] != "-m":
        return argv[0].rpartition("/")[2] in _SCRIPTS
    module = command[len(command) - len(argv)]  # behind it stand the program's own arguments
    return module.removeprefix("-m") in _MODULES


def _guard_imports() -> None:
    """From now on, and until ``imported``, Ctrl-C ends a program of ours at once."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and is_ours(getattr(sys, "argv", ()), sys.orig_argv):  # an embedding program may have none
        _replace(signal.default_int_handler, _end)


def imported() -> None:
    """Ctrl-C is a ``KeyboardInterrupt`` again, as the program knows what to do about it."""
    _replace(_end, signal.default_int_handler)


def _replace(old: object, new: Any) -> None:
    if signal.getsignal(signal.SIGINT) is old:  # whoever else has it, or ignores it, keeps it so
        signal.signal(signal.SIGINT, new)


def _end(_number: int, _frame: object) -> None:
    os._exit(INTERRUPTED)  # nothing is open yet that would have to be closed


_guard_imports()
