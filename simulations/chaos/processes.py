"""Node processes for chaos: each in a session of its own, started again in its place when it died.

A node keeps its name, its state directory and its ports through all its lives, as one under a
supervisor does. It dies with the process that started it.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import define, field

import simulations

_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_ROOT: Final = str(Path(simulations.__path__[0]).parent)
_PORT_TAKEN: Final = 3
"""The exit status of a node whose port somebody else has: it is tried again."""


@define(eq=False)
class ChaosNode:
    """One node of the set, through all its lives."""

    name: str
    roles: frozenset[str]
    options: Sequence[str]
    directory: Path
    process: "subprocess.Popen[bytes] | None" = None
    lives: int = 0
    ended_by_itself: list[int] = field(factory=list)
    """Exit statuses of lives that nobody ended."""
    _ready: Mapping[str, Any] = field(factory=dict)
    """What its first life said of its addresses."""

    @property
    def log_path(self) -> Path:
        """What all its lives wrote."""
        return self.directory / f"{self.name}.log"

    @property
    def _ready_path(self) -> Path:
        return self.directory / f"{self.name}.ready.json"

    @property
    def pid(self) -> int:
        """The process."""
        assert self.process is not None
        return self.process.pid

    @property
    def is_running(self) -> bool:
        """Whether its process is there."""
        return self.process is not None and self.process.poll() is None

    @property
    def address(self) -> str:
        """Where nodes reach it."""
        return str(self._ready["address"])

    @property
    def http(self) -> str:
        """Where clients reach it."""
        return str(self._ready["http"])

    def start(self) -> None:
        """Begin a life."""
        assert not self.is_running
        self._ready_path.unlink(missing_ok=True)
        self.lives += 1
        places: list[str] = []
        if self._ready:
            places += ["--listen", self.address]
            if self._ready["http"] is not None:
                places += ["--http", self.http.removeprefix("http://")]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and options
                [
                    *(sys.executable, "-m", "onepiece.node", "--name", self.name),
                    *("--roles", ",".join(sorted(self.roles))),
                    *("--state-dir", str(self.directory / self.name)),
                    *("--ready-file", str(self._ready_path)),
                    *places,
                    *self.options,
                ],
                env=self._environment(),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, and no lock is taken
            )

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ONEPIECE_")}
        path = os.pathsep.join([_ROOT, os.environ.get("PYTHONPATH", "")])
        return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def is_listening(self) -> bool:
        """Whether this life has said where it listens."""
        if not self._ready_path.exists():
            return False
        self._ready = json.loads(self._ready_path.read_text())
        return True

    def revive(self) -> None:
        """Start it again if it ended and nobody ended it."""
        if self.process is None or self.is_running:
            return
        if self.process.returncode != _PORT_TAKEN:
            self.ended_by_itself.append(self.process.returncode)
        self.process = None
        self.start()

    def kill(self) -> None:
        """End it as the kernel does when memory is out; ``start`` brings it back."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def pause(self) -> None:
        """Let it stand still."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def terminate(self, seconds: float) -> int | None:
        """Let it drain and end; its exit status, None if it had to be killed."""
        if not self.is_running:
            return None
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None


def wait_listening(nodes: Sequence[ChaosNode], seconds: float) -> None:
    """Wait until these nodes have said where they listen.

    Raises:
        RuntimeError: One ended, or time is over; the end of its log is shown.
    """
    give_up_at = time.monotonic() + seconds
    for node in nodes:
        while not node.is_listening():
            if not node.is_running or time.monotonic() > give_up_at:
                tail = "\n".join(node.log_path.read_text(errors="replace").splitlines()[-20:])
                raise RuntimeError(f"{node.name} does not listen:\n{tail}")
            time.sleep(0.05)


def end_all(nodes: Sequence[ChaosNode]) -> None:
    """End every process without a word."""
    for node in nodes:
        if node.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            assert node.process is not None
            node.process.wait()


def remove(directory: Path) -> None:
    """Remove what the nodes left."""
    shutil.rmtree(directory, ignore_errors=True)


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
