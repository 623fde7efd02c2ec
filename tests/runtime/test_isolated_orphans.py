"""A helper process does not outlive its node."""

import os
import signal
import subprocess
import sys

import pytest

from tests.runtime.isolated_stages import break_down
from tests.runtime.rig import is_alive, rig, until
from tests.tidy.sources import ROOT


@pytest.mark.parametrize("how", ["sleep", "hold the interpreter"])
async def test_a_helper_dies_with_its_node(how: str) -> None:
    """The node is killed, and can tell nobody: the kernel does, even of one that takes no notice."""
    command = [sys.executable, "-m", "tests.runtime.isolated_parent", how]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as node:  # noqa: ASYNC220 - short
        assert node.stdout is not None
        helper = int(node.stdout.readline())
        assert is_alive(helper)
        node.kill()
    await until(lambda: not is_alive(helper))


async def test_a_terminals_interrupt_is_not_for_helpers() -> None:
    """Ctrl-C reaches the node, which drains; its stages go on meanwhile."""
    async with rig(break_down) as rigged:
        helper = rigged.process.process_id
        os.kill(helper, signal.SIGINT)
        assert await rigged.value(fault="none") == helper
        assert os.getsid(helper) != os.getsid(0)
