"""``onepiece bench moves`` at a small size."""

import json

import pytest

from onepiece.cli import exits
from onepiece.cli.main import main


def test_it_decides_on_both_loads(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing moves under the quiet load, and something under the shifted one."""
    argv = ["bench", "moves", "--nodes", "40", "--actors", "320", "--rounds", "1", "--json"]
    assert main(argv) == exits.OK
    quiet, shifted = json.loads(capsys.readouterr().out)["rows"]
    assert (quiet["load"], quiet["moves"]) == ("quiet", 0)
    assert shifted["moves"] > 0
    assert main(["bench", "moves", "--nodes", "3", "--actors", "2"]) == exits.USAGE
