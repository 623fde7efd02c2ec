"""Ctrl-C while a program imports what it needs."""

import asyncio
import os
import signal
import sys

import pytest

from onepiece._program import INTERRUPTED, is_ours

IMPORTS_END = b"onepiece.context"
"""The first module that the package imports of its own; many are still to come then."""


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/usr/bin/onepiece", "nodes"], ["python", "/usr/bin/onepiece", "nodes"]),
        (["onepiece-node"], ["python", "onepiece-node"]),
        (["-m"], ["python", "-m", "onepiece.node"]),
        (["-m", "--roles", "-m"], ["python", "-X", "dev", "-m", "onepiece.node", "--roles", "-m"]),
        (["-m", "nodes"], ["python", "-Im", "onepiece.cli", "nodes"]),
        (["-m"], ["python", "-monepiece.cli"]),
    ],
)
def test_programs_of_ours(argv: list[str], command: list[str]) -> None:
    """Scripts by their name, modules by what the interpreter was told to run."""
    assert is_ours(argv, command)


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        ([], ["python"]),
        ([""], ["python"]),
        (["-c", "onepiece"], ["python", "-c", "import onepiece", "onepiece"]),
        (["their.py", "onepiece"], ["python", "their.py", "onepiece"]),
        (["-m", "onepiece.node"], ["python", "-m", "theirs", "onepiece.node"]),
        (["-m"], ["python", "-m", "onepiece.runtime.isolated_child"]),
    ],
)
def test_programs_of_others(argv: list[str], command: list[str]) -> None:
    """Whoever imports the package keeps its signals."""
    assert not is_ours(argv, command)


@pytest.mark.parametrize("module", ["onepiece.node", "onepiece.cli"])
async def test_interrupted_while_it_imports(module: str) -> None:
    """It ends with its exit code, and there is no traceback."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-X", "importtime", "-m", module, "--help"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stderr is not None
    await process.stderr.readuntil(IMPORTS_END)
    process.send_signal(signal.SIGINT)
    said = await process.stderr.read()
    assert await process.wait() == INTERRUPTED
    assert b"Traceback" not in said
