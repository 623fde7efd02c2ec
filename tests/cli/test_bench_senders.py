"""``onepiece bench senders`` at a small size."""

import json

import pytest

from onepiece.cli import exits
from onepiece.cli.main import main


def test_it_measures_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    """One row for each cell, with what came through without claims and with them."""
    small = ["--senders", "3", "--bytes", "64", "--turn-ms", "0", "--rounds", "1", "--seconds", "0.3"]
    assert main(["bench", "senders", *small, "--json"]) == exits.OK
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["senders"], row["size_bytes"], row["turn_seconds"]) == (3, 64, 0.0)
    assert row["with"]["rate"] > 0
    assert row["without"]["rate"] > 0
