"""A lent device's job: a process of the operator's choice, in a process group of its own.

Its end is an event of the node's loop (a pidfd). When it has ended, what is left in its group is killed. It
is started on the loop's own thread, the node's main one: when that ends, the kernel tells the job's keeper
(``lent_keeper``), and nothing of it is left.
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
from onepiece.runtime.process_exit import described_exit

DEVICE_VARIABLE: Final = "ONEPIECE_DEVICE"
_STDERR: Final = 2
"""The job writes where the node logs; the node's standard output is not its."""
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
        """The process's, and its group's; may be another's once it has ended."""
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of it; no error if it has ended."""
        if not self.how:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def leave(self) -> None:
        """Watch it no longer."""
        if not self.how:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)

    def _exited(self) -> None:
        """It is a zombie: its id, and so its group's, cannot have gone to somebody else yet."""
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.signal(signal.SIGKILL)
        self.how = described_exit(self._process.wait())
        self._on_end()
