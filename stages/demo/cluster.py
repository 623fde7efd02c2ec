"""A set of nodes on this machine: one that serves clients, and workers, forked by one process."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
from attrs import define, field

from onepiece import OnePieceError
from stages.demo.holdings import Holdings, group_members

Value = TypeVar("Value")

SEED: Final = "seed"
_FORK_SERVER: Final = "fork-server"
_START_SECONDS: Final = 60.0
_PRELOAD_SECONDS: Final = 300.0
_STOP_SECONDS: Final = 25.0
_POLL_SECONDS: Final = 0.02
_LOG_LINES: Final = 25


class ClusterFailed(OnePieceError):  # noqa: N818 - named by what happened, as all of onepiece's errors
    """A node or the fork server ended on its own; the message holds the end of its log."""


@define(eq=False)
class Cluster:
    """A running set; use ``open_cluster``."""

    logs: Path
    _process: asyncio.subprocess.Process
    http: str = ""
    """Where the set serves clients."""
    process_ids: dict[str, int] = field(factory=dict)
    preload_seconds: float = 0.0
    _folder: Path | None = None
    _reported: asyncio.Event = field(factory=asyncio.Event)
    _stopping: bool = False

    async def watch(self) -> None:
        """Take in what the fork server reports, until it is gone.

        Raises:
            ClusterFailed: Something ended that nobody had told to.
        """
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self._take_in(json.loads(line))
            self._reported.set()
        if not self._stopping:
            raise ClusterFailed(f"the fork server ended; the end of its log:\n{self._log_end(_FORK_SERVER)}")

    def _take_in(self, report: dict[str, Any]) -> None:
        match report:
            case {"folder": str(folder)}:
                self._folder = Path(folder)
            case {"started": str(name), "process_id": int(process_id)}:
                self.process_ids[name] = process_id
            case {"preloaded": float(seconds) | int(seconds)}:
                self.preload_seconds = seconds
            case {"ended": str(name), "status": int(status)}:
                if not self._stopping:
                    raise ClusterFailed(
                        f"node {name} ended with status {status}; the end of its log:\n{self._log_end(name)}"
                    )
            case _:
                raise ClusterFailed(f"the fork server reports {report!r}")

    def _log_end(self, name: str) -> str:
        try:
            lines = (self.logs / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            return str(error)
        return "\n".join(lines[-_LOG_LINES:])

    async def start(self, workers: int, workflow: str, on_phase: Callable[[str], None]) -> None:
        """Start all nodes; they join and load on their own.

        The first node needs none of the large libraries, and comes up while these are imported.
        """
        on_phase("starting the first node")
        folder = await self._until(lambda: self._folder, _START_SECONDS, "the fork server to start")
        ready_file = folder / "ready.json"
        roles = ("--roles", "proxy,manager,store", "--workflow", workflow, "--workers", str(workers))
        files = ("--state-dir", str(folder / SEED), "--ready-file", str(ready_file))
        self._start(SEED, (*roles, *files, "--http", "127.0.0.1:0"))
        self._command(preload=True)
        on_phase("importing torch and diffusers, once for all workers")
        await self._until(
            lambda: self.preload_seconds, _PRELOAD_SECONDS, "torch and diffusers to be imported"
        )
        on_phase(f"forking {workers} workers")
        await self._until(ready_file.exists, _START_SECONDS, "the first node to listen")
        seed = json.loads(ready_file.read_text(encoding="utf-8"))
        self.http = seed["http"]
        for number in range(1, workers + 1):
            name = f"worker-{number}"
            join = ("--roles", "worker", "--join", seed["address"], "--devices", "cpu:0")
            self._start(name, (*join, "--state-dir", str(folder / name)))

    def _start(self, name: str, arguments: Sequence[str]) -> None:
        common = ("--name", name, "--listen", "tcp://127.0.0.1:0")
        self._command(start=name, arguments=[*common, *arguments], log=str(self.logs / f"{name}.log"))

    def _command(self, **fields: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(fields).encode() + b"\n")

    async def _until(self, look: Callable[[], Value | None], seconds: float, what: str) -> Value:
        """Wait until ``look`` finds something, looking again after each report and now and then."""
        limit = time.monotonic() + seconds
        while True:
            found = look()
            if found:
                return found
            if time.monotonic() > limit:
                raise ClusterFailed(f"waited {seconds:.0f} s for {what}; the nodes' logs are in {self.logs}")
            self._reported.clear()
            with anyio.move_on_after(_POLL_SECONDS):
                await self._reported.wait()

    async def stop(self) -> list[str]:
        """Stop everything and say what is left of it: nothing, if all went well.

        Safe to call in any state, and more than once. A cancelled caller waits until all is stopped.
        """
        left: list[str] = []
        with anyio.CancelScope(shield=True):
            left += await self._stop()
        return left

    async def _stop(self) -> list[str]:
        self._stopping = True
        assert self._process.stdin is not None
        holdings = Holdings.of([self._process.pid, *self.process_ids.values()])
        self._process.stdin.close()
        if not self.preload_seconds and self._process.returncode is None:
            self._process.terminate()  # while it imports, it does not see the end of its input
        left = []
        with anyio.move_on_after(_STOP_SECONDS):
            await self._process.wait()
        for process_id in group_members(self._process.pid):
            left.append(f"process {process_id}, which was killed now")
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        await self._process.wait()
        if self._folder is not None and self._folder.exists():
            left.append(f"the folder {self._folder}")
        return left + holdings.left()


@contextlib.asynccontextmanager
async def open_cluster(logs: Path) -> AsyncIterator[Cluster]:
    """A fork server without nodes yet; all that was started is stopped at the end.

    Args:
        logs: An existing folder; each process writes a file there.

    Raises:
        ClusterFailed: Meanwhile something ended that nobody had told to; the body is cancelled.
    """
    with (logs / f"{_FORK_SERVER}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "stages.demo.fork_server",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            # A session of its own: Ctrl-C is for us, and we stop the nodes in order.
            start_new_session=True,
            env={**os.environ, **_SINGLE_THREADED},
        )
    cluster = Cluster(logs, process)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(cluster.watch(), name="watch the fork server")
            try:
                yield cluster
            finally:
                await cluster.stop()
    except BaseExceptionGroup as errors:
        raise _most_telling(errors) from None


_SINGLE_THREADED: Final = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""No library may start threads before the fork, and each worker is to use one core."""


def _most_telling(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure of the set if there is one, since it is why the body failed; else the body's first."""
    flat = list(_flatten(errors))
    return next((error for error in flat if isinstance(error, ClusterFailed)), flat[0])


def _flatten(errors: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in errors.exceptions:
        found += _flatten(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
