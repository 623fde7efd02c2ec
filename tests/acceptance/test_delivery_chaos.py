"""A short chaos run on real processes: the command itself must find nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.node_set import node_environment

SECONDS = 20
LIMIT_SECONDS = 280.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_chaos(tmp_path: Path) -> None:
    """Killed, stopped and cut-off nodes lose, double or damage no request (faults 3, 20, 25, 55)."""
    found = subprocess.run(
        [
            *(sys.executable, "-m", "simulations", "chaos", "--seconds", f"{SECONDS}", "--rate", "2"),
            *("--keep", str(tmp_path / "nodes")),
        ],
        env=node_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    told = dict(line.split(maxsplit=1) for line in found.stdout.splitlines() if len(line.split()) == 2)
    assert (told["lost"], told["duplicated"], told["corrupt"]) == ("0", "0", "0")
    assert int(told["accepted"]) == int(told["submitted"]) > 0
    assert "ended by itself" not in found.stdout
