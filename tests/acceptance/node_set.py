"""Sets of real node processes for acceptance tests: started, watched, ended, and nothing left behind.

::

    with start_set("stages.synthetic:diamond", workers=4) as a_set:
        a_set.wait_ready()
        a_set.api().submit("diamond")

Leaving the block sends SIGTERM to all and then looks for what may have stayed: a process of one of the
nodes' sessions, a port that still listens, a file in shared memory that a node had open, a file in
the nodes' temporary directory. Each process dies with the test process, whatever kills that.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from attrs import define, field

import onepiece
from onepiece.node.state_directory import remove_abandoned
from tests.acceptance.http_api import Api
from transports import Address

READY_SECONDS: Final = 600.0 if "ONEPIECE_EMULATED" in os.environ else 90.0
"""For what should take a few seconds; machines that run other things at once, or are emulated, are slow."""
STARVED_SECONDS: Final = 600.0
"""For one of many starts, on a machine where 90 s were not enough: a node got a twentieth of a processor."""
END_SECONDS: Final = 60.0
DEVICE: Final = "cpu:0=4GiB"

_ROOT: Final = Path(onepiece.__path__[0]).parent
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_TCP_LISTEN: Final = "0A"

T = TypeVar("T")


def eventually(look: Callable[[], T | None], what: str, seconds: float = READY_SECONDS) -> T:
    """What ``look`` returns, once that is true; fails with ``what`` if it never is."""
    give_up_at = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < give_up_at, f"after {seconds} s still not: {what}"
        time.sleep(0.02)


def node_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a node: ours, without settings of nodes, and with this checkout's packages."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ONEPIECE_")}
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | dict(extra or {})


def run_node(
    *options: str,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_seconds: float = END_SECONDS,
) -> "subprocess.CompletedProcess[str]":
    """Run a node that is to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "onepiece.node", *options],
        env=node_environment(environment),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )


@define(eq=False)
class NodeProcess:
    """One node: a process in a session of its own."""

    name: str
    process: "subprocess.Popen[bytes]"
    log_path: Path
    ready_path: Path
    options: tuple[str, ...] = ()
    """As it was started with."""
    was_signalled: bool = False
    was_killed: bool = False
    _ready: Mapping[str, Any] = field(factory=dict)
    _shared_files: set[str] = field(factory=set)

    @property
    def pid(self) -> int:
        """The process."""
        return self.process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    @property
    def address(self) -> str:
        """Where nodes reach it."""
        return str(self.wait_listening()["address"])

    @property
    def http(self) -> str:
        """Where clients reach it."""
        return str(self.wait_listening()["http"])

    @property
    def metrics(self) -> str:
        """Where its metrics are read."""
        found = self.wait_listening()
        return str(found["metrics"] or f"{found['http']}/metrics")

    @property
    def node_id(self) -> str:
        """Its name in the set."""
        return str(self.wait_listening()["node"])

    @property
    def ports(self) -> set[int]:
        """What it listens on, as far as it has said so."""
        places = [self._ready.get(name) for name in ("address", "http", "metrics")]
        return {Address.parse(place.removesuffix("/metrics")).port for place in places if place}

    def wait_listening(self, seconds: float = READY_SECONDS) -> Mapping[str, Any]:
        """Wait for its ready file; what that says."""
        if not self._ready:
            eventually(
                lambda: self.ready_path.exists() or not self.is_running, f"{self.name} listens", seconds
            )
            assert self.is_running, f"{self.name} ended with status {self.process.returncode}:\n{self.log()}"
            self._ready = json.loads(self.ready_path.read_text())
        return self._ready

    def log(self) -> str:
        """What it has written so far."""
        return self.log_path.read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process."""
        self.was_signalled = True
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it as the kernel does when memory is out: no word to anybody."""
        self.note_shared_files()
        self.signal(signal.SIGKILL)
        self.wait_killed()

    def wait_killed(self) -> None:
        """Wait until it is dead, by a kill of its own."""
        self.was_signalled = self.was_killed = True
        assert self.wait() == -signal.SIGKILL

    def wait(self, seconds: float = END_SECONDS) -> int:
        """Wait until it ends; its exit status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {seconds} s:\n{self.log()}") from None

    def note_shared_files(self) -> None:
        """Remember which files in shared memory it has open or mapped."""
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{self.pid}/maps").read_text()
            self._shared_files |= {
                line.split(maxsplit=5)[5] for line in maps.splitlines() if "/dev/shm/" in line
            }
        with contextlib.suppress(OSError):
            for opened in Path(f"/proc/{self.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = str(opened.readlink())
                    if target.startswith("/dev/shm/"):
                        self._shared_files.add(target)

    def leftovers(self) -> list[str]:
        """What stayed of it after its end, in words."""
        found = [f"process {pid} of {self.name}" for pid in processes_of_session(self.pid)]
        found += [f"port {port} of {self.name} listens" for port in sorted(self.ports & listening_ports())]
        found += [f"{path} of {self.name}" for path in sorted(self._shared_files) if Path(path).exists()]
        if self.ready_path.exists() and not self.was_killed:
            found.append(f"the ready file of {self.name}")
        return found


@define(eq=False)
class NodeSet:
    """Node processes that belong together; the others join the seed, by default the first one started."""

    directory: Path
    nodes: list[NodeProcess] = field(factory=list)
    """All that were ever started."""
    _seed: NodeProcess | None = None
    expected_statuses: tuple[int, ...] = (0,)
    _apis: dict[str, Api] = field(factory=dict)

    @property
    def temporary(self) -> Path:
        """Where the nodes make temporary files."""
        return self.directory / "tmp"

    @property
    def seed(self) -> NodeProcess:
        """The node that the others join."""
        assert self._seed is not None
        return self._seed

    @property
    def workers(self) -> list[NodeProcess]:
        """All that run but the seed."""
        return [node for node in self.nodes if node.is_running and node is not self._seed]

    def api(self, node: NodeProcess | None = None) -> Api:
        """A client for the proxy of a node, by default the seed's."""
        url = (node or self.seed).http
        if url not in self._apis:
            self._apis[url] = Api(url)
        return self._apis[url]

    def named(self, node_id: str) -> NodeProcess:
        """The process of the node with this name in the set."""
        return next(node for node in self.nodes if node.is_running and node.node_id == node_id)

    def forget(self, killed: NodeProcess) -> None:
        """See that nothing stayed of a node that was killed; its ports may be another's when the set ends."""
        assert not killed.leftovers()
        self.nodes.remove(killed)

    def start(
        self,
        *options: str,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        as_seed: bool = False,
    ) -> NodeProcess:
        """Start a node with these command-line options; does not wait for it."""
        name = f"node-{len(list(self.directory.glob('*.log')))}"
        log_path, ready_path = self.directory / f"{name}.log", self.directory / f"{name}.ready.json"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "onepiece.node", "--ready-file", str(ready_path), *options],
                env=node_environment({"TMPDIR": str(self.temporary)} | dict(environment or {})),
                cwd=cwd or self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, and no lock is taken
            )
        node = NodeProcess(name, process, log_path, ready_path, options)
        self.nodes.append(node)
        if as_seed or self._seed is None:
            self._seed = node
        return node

    def start_again(self, ended: NodeProcess) -> NodeProcess:
        """Start a node in the place of one that has ended: the same options and ports."""
        assert not ended.is_running
        places = ["--listen", ended.address]
        if ended.wait_listening()["http"] is not None:
            places += ["--http", ended.http.removeprefix("http://")]
        return self.start(*ended.options, *places, as_seed=ended is self._seed)

    def start_worker(self, *options: str, environment: Mapping[str, str] | None = None) -> NodeProcess:
        """Start a worker that joins the seed."""
        joining = ("--roles", "worker", "--join", self.seed.address, "--devices", DEVICE)
        return self.start(*joining, *options, environment=environment)

    def wait_ready(self, node: NodeProcess | None = None) -> None:
        """Wait until every stage is loaded somewhere, as a node's proxy sees it."""
        api = self.api(node)
        eventually(lambda: self._all_run() and api.readiness()["ready"], "ready")

    def _all_run(self) -> bool:
        for node in self.nodes:
            by_itself = not node.is_running and not node.was_signalled
            assert not by_itself, f"{node.name} ended with {node.process.returncode}:\n{node.log()}"
        return True

    def logs(self, lines: int = 40) -> str:
        """The ends of all logs."""
        texts = []
        for path in sorted(self.directory.glob("*.log")):
            tail = path.read_text(errors="replace").splitlines()[-lines:]
            texts.append("\n".join([f"--- {path.name}", *tail]))
        return "\n".join(texts)

    def stop(self) -> None:
        """End all nodes in order; asserts that they ended well and in time, and left nothing."""
        for node in self.nodes:
            if node.is_running:
                node.wait_listening()  # before that nobody listens to signals either
                node.note_shared_files()
                node.signal(signal.SIGTERM)
        running = [node for node in self.nodes if node.process.returncode is None]
        statuses = {node.name: node.wait() for node in running}
        wrong = {name: status for name, status in statuses.items() if status not in self.expected_statuses}
        assert not wrong, f"exit statuses {wrong}:\n{self.logs()}"
        self.check_nothing_left()

    def check_nothing_left(self) -> None:
        """Assert that nothing is left of the nodes, all of which have ended."""
        if any(node.was_killed for node in self.nodes):
            remove_abandoned(self.temporary)  # as the next node does that starts
        left = [text for node in self.nodes for text in node.leftovers()]
        left += [str(path) for path in self.temporary.iterdir()]
        assert not left, f"left behind: {left}\n{self.logs()}"

    def close(self) -> None:
        """End whatever still runs, without a word."""
        for api in self._apis.values():
            api.close()
        for node in self.nodes:
            if node.is_running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(node.pid, signal.SIGKILL)
                node.process.wait()


live_sets: Final[list[NodeSet]] = []
"""So that the report of a failed test can show their logs."""


@contextlib.contextmanager
def open_set(directory: Path) -> Iterator[NodeSet]:
    """A set without nodes; leaving the block stops what was started, and checks that nothing is left."""
    directory.mkdir(parents=True, exist_ok=True)
    a_set = NodeSet(directory)
    a_set.temporary.mkdir()
    live_sets.append(a_set)
    try:
        yield a_set
        a_set.stop()
    finally:
        a_set.close()
        live_sets.remove(a_set)


@contextlib.contextmanager
def start_set(
    *workflows: str,
    directory: Path,
    workers: int = 4,
    options: Sequence[str] = (),
    worker_options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[NodeSet]:
    """A seed (proxy, manager, store) and workers, ready to serve ``workflows`` (``module:name``)."""
    with open_set(directory) as a_set:
        named = [part for workflow in workflows for part in ("--workflow", workflow)]
        roles = ("--roles", "proxy,manager,store", "--workers", str(workers))
        a_set.start(*roles, *named, *options, environment=environment)
        for _ in range(workers):
            a_set.start_worker(*worker_options, environment=environment)
        a_set.wait_ready()
        yield a_set


def processes_of_session(session: int) -> list[int]:
    """The processes that were started in the session of a node, itself included."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # pid (name) state ppid pgrp session ...; the name may hold spaces and parentheses
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def listening_ports() -> set[int]:
    """The TCP ports on which somebody on this machine listens."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _TCP_LISTEN:
                    found.add(int(fields[1].rpartition(":")[2], 16))
    return found


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
