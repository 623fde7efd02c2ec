"""An etcd of one member: the real server, in a process of its own."""

import base64
import contextlib
import http.client
import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from attrs import define

_START_SECONDS: Final = 30.0
_CALL_SECONDS: Final = 5.0

NO_ETCD: Final = "no etcd on this machine; Debian has it as etcd-server"


def has_etcd() -> bool:
    """Whether this machine has the server."""
    return shutil.which("etcd") is not None


@define(eq=False)
class EtcdServer:
    """A running etcd; it listens on the loopback alone."""

    process: "subprocess.Popen[bytes]"
    port: int
    scheme: str

    @property
    def member(self) -> str:
        """Where it serves clients."""
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def coordination(self) -> str:
        """What nodes are told."""
        return f"{'etcds' if self.scheme == 'https' else 'etcd'}://127.0.0.1:{self.port}"

    def leader(self, prefix: str) -> tuple[str, int] | None:
        """Who leads the set with this prefix: its control address, and the revision at which that came about.

        None if nobody leads. Raises ``OSError`` where etcd does not answer; without TLS alone.
        """
        asked = {"key": base64.b64encode(f"{prefix}leader".encode()).decode()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_CALL_SECONDS)
        with contextlib.closing(connection):
            connection.request("POST", "/v3/kv/range", json.dumps(asked))
            found = json.loads(connection.getresponse().read()).get("kvs", [])
        return (
            (base64.b64decode(found[0]["value"]).decode(), int(found[0]["create_revision"]))
            if found
            else None
        )

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """It accepts connections and answers nothing."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def run_etcd(directory: Path, *options: str, scheme: str = "http") -> Iterator[EtcdServer]:
    """Start it with its data in this directory; returns once it serves."""
    port, peer_port = _free_ports()
    client, peer = f"{scheme}://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    with (directory / "etcd.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - found by its name, with our options
            [
                *("etcd", "--name", "one", "--data-dir", str(directory / "data")),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", f"one={peer}", *options),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    server = EtcdServer(process, port, scheme)
    try:
        _wait_serving(server, directory / "etcd.log")
        yield server
    finally:
        process.kill()
        process.wait()


def _wait_serving(server: EtcdServer, log: Path) -> None:
    give_up_at = time.monotonic() + _START_SECONDS
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port), 1):
            return
        assert server.process.poll() is None, log.read_text(errors="replace")
        assert time.monotonic() < give_up_at, log.read_text(errors="replace")
        time.sleep(0.02)


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]
