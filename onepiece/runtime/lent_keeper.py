"""Keeps a lent device's job: a small process between the node and the command.

It is run as a script, by path: the command may be of any kind, and nothing of this package is loaded for it.

The node's end is the job's end: when the node dies, however it does, the kernel signals the keeper, which
kills its whole process group, the command's own children included. The keeper ends as the command ends, and
so tells the node how. A request to end (SIGTERM to the group) is the command's to follow.
"""

import contextlib
import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_NODE_DIED: Final = signal.SIGUSR1
_NICENESS: Final = 19
_NOT_STARTED: Final = 127
"""As shells have it."""


def _end_all(_number: int, _frame: object) -> None:
    os.killpg(0, signal.SIGKILL)


def _go_first() -> None:
    """If memory runs out, this is to end before any actor."""
    with (
        contextlib.suppress(OSError),
        open("/proc/self/oom_score_adj", "w", encoding="ascii") as file,  # noqa: PTH123 - starts quicker
    ):
        file.write("1000")


def _begin(command: list[str]) -> int:
    """Start the command in this process group; its id."""
    child = os.fork()
    if child:
        return child
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        os.execvp(command[0], command)  # noqa: S606 - the operator's own command, and no shell is wanted
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}\n")
        sys.stderr.flush()
    os._exit(_NOT_STARTED)


def _end_as(status: int) -> None:
    """End by the same status, or by the same signal."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def main() -> None:
    """Run the command that the arguments behind the node's process id name."""
    node, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _NODE_DIED)
    signal.signal(_NODE_DIED, _end_all)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: None)  # handlers are not inherited by the command
    if os.getppid() != int(node):  # it died before the first line
        return
    os.nice(_NICENESS)
    _go_first()
    _, status = os.waitpid(_begin(command), 0)
    _end_as(status)


if __name__ == "__main__":
    main()
