"""Keeps a lent device's job: a small process between the node and the command.

It is run as a script, by path: the command may be of any kind, and nothing of this package is loaded for it.

The node's end is the job's end: when the node dies, however it does, the kernel signals the keeper, which
kills the command and all that it has started. The node has it do the same by that signal (``KILL``). A
request to end (SIGTERM) is passed on, and is the command's to follow.

The keeper ends last: a killed process keeps its device's memory until the kernel has taken it apart, so only
the keeper's end says that the device is free. What the command leaves behind becomes the keeper's child,
whatever group or session it has gone to, and is killed and waited for. Then the keeper ends as the command
did, and so tells the node how.
"""

import contextlib
import ctypes
import os
import signal
import sys
from typing import Final, NoReturn

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
KILL: Final = signal.SIGUSR1
"""The node died, or wants all of it killed."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, KILL)
_NICENESS: Final = 19
_NOT_STARTED: Final = 127
"""As shells have it."""


def _go_first() -> None:
    """If memory runs out, this is to end before any actor."""
    with (
        contextlib.suppress(OSError),
        open("/proc/self/oom_score_adj", "w", encoding="ascii") as file,  # noqa: PTH123 - starts quicker
    ):
        file.write("1000")


def _begin(command: list[str]) -> int:
    """Start the command in a process group of its own; its id, and the group's."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    child = os.fork()
    if not child:
        _become(command)
    with contextlib.suppress(OSError):
        os.setpgid(child, child)  # whoever of the two is first
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: _pass_on(child, number))
    signal.signal(KILL, lambda _number, _frame: _kill_all(child))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    return child


def _become(command: list[str]) -> NoReturn:
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    try:
        os.execvp(command[0], command)  # noqa: S606 - the operator's own command, and no shell is wanted
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}\n")
        sys.stderr.flush()
    os._exit(_NOT_STARTED)


def _pass_on(command: int, number: int) -> None:
    """To the whole group, or to the command alone if that has gone to another one."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            send(command, number)
            return


def _kill_all(command: int) -> None:
    """Kill the command's group, and what else is the keeper's child."""
    with contextlib.suppress(OSError):
        os.killpg(command, signal.SIGKILL)
    for child in _children():
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)


def _children() -> list[int]:
    """The keeper's; none where the kernel does not tell."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:  # noqa: PTH123 - as above
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def _wait_for_all(command: int) -> int:
    """The command's status, once it and all that it has left behind are gone."""
    found = 0
    has_ended = False
    while True:
        try:
            process, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return found
        if process == command:
            found, has_ended = status, True
        if has_ended:
            _kill_all(command)  # children of those that die become the keeper's before it hears of the death


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
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, KILL)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != int(node):  # it died before the first line
        return
    os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    _go_first()
    _end_as(_wait_for_all(_begin(command)))


if __name__ == "__main__":
    main()
