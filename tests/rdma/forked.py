"""Producers as processes that are forked rather than started: imports take ten seconds under emulation.

``python -m tests.rdma.forked`` imports what a producer needs, and opens no device. Then each line of its
standard input, a JSON object with ``arguments``, has it fork a process that runs
``transports.testing.producer_process`` with them. It says each process's ``pid``, and later its ``status``,
as an exit code or the negative of a signal.
"""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from tests.rdma.devices import PRODUCERS
from transports import Receiver, transport_for
from transports.testing.producer_process import main as produce
from transports.verbs_devices import SETTINGS_VARIABLE

_LOOK_SECONDS = 0.02
_WAIT_SECONDS = 150.0


class Producer:
    """A forked process."""

    def __init__(self, forker: "Forker", pid: int) -> None:
        self._forker = forker
        self.pid = pid

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    async def wait(self) -> int:
        """Wait for its end: its exit code, or the negative of a signal."""
        return await self._forker.heard(lambda: self._forker.ended.get(self.pid), f"the end of {self.pid}")


class Forker:
    """The process that forks."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.ended: dict[int, int] = {}
        self._begun: list[int] = []
        self._said = b""
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)

    @asynccontextmanager
    async def producing(
        self, receiver: Receiver, identity: str, count: int, *flags: str
    ) -> AsyncIterator[Producer]:
        """A producer's process; killed if it is still there at the end."""
        assert self._process.stdin is not None
        arguments = [str(receiver.address), identity, str(count), *flags]
        self._process.stdin.write(json.dumps({"arguments": arguments}).encode() + b"\n")
        self._process.stdin.flush()
        producer = Producer(self, await self.heard(self._next, "a new process"))
        try:
            yield producer
        finally:
            self.hear()
            if producer.pid not in self.ended:
                producer.send_signal(signal.SIGKILL)
                await producer.wait()

    def _next(self) -> int | None:
        return self._begun.pop() if self._begun else None

    async def heard(self, look: Callable[[], int | None], what: str) -> int:
        """What ``look`` sees once it sees something."""
        give_up_at = time.monotonic() + _WAIT_SECONDS
        while (seen := look()) is None:
            assert time.monotonic() < give_up_at, f"waited {_WAIT_SECONDS} s for {what}"
            await asyncio.sleep(_LOOK_SECONDS)
            self.hear()
        return seen

    def hear(self) -> None:
        """Take note of who has begun and who has ended."""
        assert self._process.stdout is not None
        assert self._process.poll() is None, "the forking process has ended"
        with suppress(BlockingIOError):
            self._said += os.read(self._process.stdout.fileno(), 1 << 16)
        *lines, self._said = self._said.split(b"\n")
        for line in lines:
            word = json.loads(line)
            if "status" in word:
                self.ended[word["pid"]] = word["status"]
            else:
                self._begun.append(word["pid"])


@contextmanager
def forking() -> Iterator[Forker]:
    """A process that forks producers, until the end of the context."""
    command = [sys.executable, "-m", "tests.rdma.forked"]
    environment = os.environ | {SETTINGS_VARIABLE: PRODUCERS}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        try:
            yield Forker(process)
        finally:
            process.kill()


def _say(**words: int) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def _fork(words: dict[str, Any]) -> None:
    pid = os.fork()
    if pid:
        _say(pid=pid)
        return
    status = 1
    try:
        sys.argv[1:] = words["arguments"]
        produce()
        status = 0
    except BaseException:  # noqa: BLE001  # whatever it is, a fork must not go on as its parent
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _serve() -> None:
    transport_for("verbs")  # imports pyverbs
    children, rest = 0, b""
    while True:
        if select.select([0], [], [], _LOOK_SECONDS)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                _fork(json.loads(line))
                children += 1
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            children -= 1
            _say(pid=pid, status=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    _serve()
