"""``onepiece dev``: the whole system in one process, from the command line."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

import onepiece
from onepiece.cli import exits
from onepiece.cli.main import main

pytestmark = pytest.mark.acceptance

ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(Path(onepiece.__path__[0]).parent), os.environ.get("PYTHONPATH", "")]),
}
OWN_STAGES = """
from onepiece import Cpu, StageContext, stage, workflow

@stage(resources=Cpu(count=2), merge="".join)
async def reverse(ctx: StageContext[None], text: str) -> str:
    half = len(text) // 2
    return (text[half:], text[:half])[ctx.rank][::-1]

@workflow
def turn(text: str) -> str:
    return reverse(text)
"""


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


@asynccontextmanager
async def dev(directory: Path, *argv: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """``onepiece dev`` in a directory; killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "onepiece.cli", "dev", *argv],
        cwd=directory,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_file_of_ones_own_is_served_and_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A module of the current directory runs, says how to try it, answers, and ends on Ctrl-C with 0.

    One of its stages works on two devices at once, which it finds here.
    """
    (tmp_path / "my_stages.py").write_text(OWN_STAGES)
    http = f"127.0.0.1:{free_port()}"
    async with dev(tmp_path, "my_stages:turn", "--http", http) as process:
        assert process.stderr is not None
        with anyio.fail_after(50):
            while not (line := (await process.stderr.readline()).decode()).startswith("try:"):
                assert line, "it ended"
            assert line.split() == ["try:", "onepiece", "submit", "turn", "--input", "text=..."]
            argv = ["submit", "turn", "--input", "text=ahoy", "--server", f"http://{http}"]
            for _ in range(2):
                assert await to_thread.run_sync(main, argv) == 0
                assert capsys.readouterr().out == "yoha\n"
            process.send_signal(signal.SIGINT)
            rest = (await process.stderr.read()).decode()
            assert await process.wait() == 0
        assert "Traceback" not in rest


async def test_ctrl_c_does_not_wait_for_an_import(tmp_path: Path) -> None:
    """One that never returns; nothing is served yet, so nothing has to be drained."""
    (tmp_path / "endless.py").write_text(
        "import sys, threading\nprint('imports', file=sys.stderr, flush=True)\nthreading.Event().wait()\n"
    )
    async with dev(tmp_path, "endless:flow", "--http", "127.0.0.1:0") as process:
        assert process.stderr is not None
        with anyio.fail_after(50):
            assert await process.stderr.readline() == b"imports\n"
            process.send_signal(signal.SIGINT)
            assert await process.stderr.read() == b""
            assert await process.wait() == 0


async def test_a_free_port_is_named_when_it_is_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With port 0 it says which port it became, and answers there."""
    async with dev(tmp_path, "stages.echo:echo", "--http", "127.0.0.1:0") as process:
        assert process.stderr is not None
        with anyio.fail_after(50):
            while not (line := (await process.stderr.readline()).decode()).startswith("ready:"):
                assert line, "it ended"
        argv = ["submit", "echo", "--input", "text=ahoy", "--server", line.split()[1]]
        assert await to_thread.run_sync(main, argv) == 0
        assert capsys.readouterr().out == "AHOY!\n"


async def test_anothers_port_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    """Where another set answers at the address, that is the error, and nothing is called ready."""
    async with dev(tmp_path, "stages.echo:echo", "--http", "127.0.0.1:0") as first:
        assert first.stderr is not None
        with anyio.fail_after(50):
            while not (line := (await first.stderr.readline()).decode()).startswith("ready:"):
                assert line, "it ended"
            taken = line.split()[1].removeprefix("http://")
            async with dev(tmp_path, "stages.echo:echo", "--http", taken) as second:
                _, told = await second.communicate()
    assert second.returncode == exits.USAGE
    assert b"ready:" not in told
    assert taken.rpartition(":")[2] in told.decode()
    assert b"Traceback" not in told


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["stages.echo:eco"], "it has: echo"),
        (["stages.ehco:echo"], "No module named"),
        (["stages.echo"], "module:attribute"),
        (["stages.echo:echo", "--http", "nonsense"], "HOST:PORT"),
        (["stages.echo:echo", "--listen", "nonsense"], "nonsense"),
        (["stages.echo:echo", "--http", "203.0.113.7:80"], "203.0.113.7"),
        (["stages.echo:echo", "--listen", "tcp://0.0.0.0:0"], "no secret"),
    ],
)
async def test_what_cannot_be_served_is_told(tmp_path: Path, argv: list[str], words: str) -> None:
    """One line that names the mistake, and exit code 2."""
    if "--http" not in argv:
        argv = [*argv, "--http", f"127.0.0.1:{free_port()}"]
    async with dev(tmp_path, *argv) as process:
        with anyio.fail_after(50):
            _, told = await process.communicate()
    assert process.returncode == exits.USAGE, told.decode()
    assert words in told.decode()
    assert b"Traceback" not in told
