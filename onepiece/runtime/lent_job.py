"""A lent device's job: a process of the operator's choice, in a session of its own.

Its end is an event of the node's loop (a pidfd): that of its keeper (``lent_keeper``), which ends when
nothing of the job is left. It is started on the loop's own thread, the node's main one: when that ends, the
kernel tells the keeper, which kills it. Should the keeper itself be killed, what is left in its session is
killed from here.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from onepiece.runtime.isolated_start import seeing_only
from onepiece.runtime.lent_keeper import KILL
from onepiece.runtime.process_exit import described_exit

DEVICE_VARIABLE: Final = "ONEPIECE_DEVICE"
_STDERR: Final = 2
"""The job writes where the node logs; the node's standard output is not its."""
_DEAD: Final = frozenset("ZX")
_LOOK_SECONDS: Final = 0.02
"""Between two looks at what an ended keeper has left."""
_KEEPER: Final = str(Path(__file__).with_name("lent_keeper.py"))


def lent_environment(device: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The node's environment, with the device's name; of its GPUs only that device."""
    return seeing_only(device, environment) | {DEVICE_VARIABLE: device}


class LentJob:
    """One run of the command on one device.

    Args:
        command: Program and arguments.
        device: As the node calls it.
        on_end: Called on the loop when it has ended.

    Raises:
        OSError: The system gives no process, or no descriptor to watch it.
    """

    def __init__(self, command: Sequence[str], device: str, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self.how = ""
        """How it ended; "" until it has."""
        self._next_look: asyncio.TimerHandle | None = None
        self._process = subprocess.Popen(  # noqa: S603 - the operator's own command
            [sys.executable, "-I", "-S", _KEEPER, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,
            env=lent_environment(device, os.environ),
            start_new_session=True,
        )
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        self._loop.add_reader(self._pidfd, self._exited)

    @property
    def process_id(self) -> int:
        """The keeper's, and its session's; may be another's once it has ended."""
        return self._process.pid

    def terminate(self) -> None:
        """Ask it to end (SIGTERM); no error if it has ended."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill all of it; no error if it has ended."""
        self._signal(KILL)

    def _signal(self, number: signal.Signals) -> None:
        if not self.how:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def leave(self) -> None:
        """Watch it no longer."""
        if not self.how:
            self._stop_watching()
            os.close(self._pidfd)

    def _stop_watching(self) -> None:
        self._loop.remove_reader(self._pidfd)
        if self._next_look is not None:
            self._next_look.cancel()

    def _exited(self) -> None:
        """The keeper is a zombie: its id, and so its session's, cannot have gone to somebody else yet."""
        self._stop_watching()
        if _kill_session(self._process.pid):  # somebody has killed the keeper
            self._next_look = self._loop.call_later(_LOOK_SECONDS, self._exited)
            return
        os.close(self._pidfd)
        self.how = described_exit(self._process.wait())
        self._on_end()


def _kill_session(session: int) -> bool:
    """Kill what lives in a session; False if nothing does."""
    found = False
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal() and _lives_in(directory, session):
            found = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(directory.name), signal.SIGKILL)
    return found


def _lives_in(directory: Path, session: int) -> bool:
    """By the fields behind the name in proc_pid_stat(5): state, parent, group, session."""
    try:
        state, _, _, its_session = (directory / "stat").read_text().rpartition(")")[2].split()[:4]
    except (OSError, ValueError):
        return False
    return state not in _DEAD and int(its_session) == session
