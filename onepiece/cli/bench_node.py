"""A node in a process of its own, with all roles, for a benchmark to send requests to."""

import asyncio
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import onepiece
from onepiece.errors import OnePieceError

__all__ = ["ends_with_sigterm", "serving_node"]

_START_SECONDS: Final = 60.0
_REQUEST_SECONDS: Final = 60.0
_SIGTERM_STATUS: Final = 128 + signal.SIGTERM


@asynccontextmanager
async def serving_node(
    module: str, probe: Any, first_input: object, *arguments: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, Path]]:
    """A node that serves workflows: its process, where its proxy listens, and its state directory.

    Args:
        module: What to serve, as ``--workflow`` takes it; several are separated by commas.
        probe: A workflow of them; the node serves when a request for it has ended.
        first_input: What that request is given.
        arguments: Further ones for the node.

    Raises:
        RuntimeError: The node ended before it served.
        TimeoutError: It did not serve within a minute.

    Cancelled: the process is ended, and its directory removed.
    """
    with tempfile.TemporaryDirectory(prefix="onepiece-bench-") as name:
        ready = Path(name) / "ready.json"
        served = [argument for each in module.split(",") for argument in ("--workflow", each)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "onepiece.cli.bench_hop_process", "node", *served),
            *("--devices", "cpu:0", "--state-dir", f"{name}/state", "--ready-file", str(ready)),
            *("--log-level", "warning", "--http", "127.0.0.1:0", *arguments),
            stdin=asyncio.subprocess.PIPE,  # it ends with us
        )
        try:
            yield process, await _ready(process, ready, probe(first_input)), Path(name) / "state"
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _ready(process: asyncio.subprocess.Process, ready: Path, call: Any) -> str:
    async with asyncio.timeout(_START_SECONDS):
        while (url := _url_in(ready)) is None:
            if process.returncode is not None:
                raise RuntimeError(f"the node ended with status {process.returncode} before it was ready")
            await asyncio.sleep(0.05)
        async with onepiece.connect(url) as client:
            while True:
                try:
                    await (await client.submit(call, timeout=_REQUEST_SECONDS)).result()
                except OnePieceError as error:
                    if not error.retryable:
                        raise
                    await asyncio.sleep(0.1)
                else:
                    return url


def _url_in(ready: Path) -> str | None:
    return str(json.loads(ready.read_text(encoding="utf-8"))["http"]) if ready.exists() else None


@contextmanager
def ends_with_sigterm() -> Iterator[None]:
    """Within, SIGTERM ends the process as an interrupt does: what was begun is cleaned up, then it exits."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(_SIGTERM_STATUS)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
