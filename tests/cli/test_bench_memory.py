"""The memory benchmark: its arithmetic, and one short run against a node of its own."""

import json

import pytest

from onepiece.cli.bench_memory import Sample, line_of, read_status, run, slope

STATUS = """Name:\tpython
VmRSS:\t  300 kB
RssAnon:\t  100 kB
RssFile:\t   50 kB
RssShmem:\t    7 kB
"""


def sample(requests: int, anonymous: int) -> Sample:
    """A sample of which the rest does not matter."""
    return Sample(requests=requests, seconds=1.0, anonymous=anonymous, file=0, shared=0, disk=0)


def test_kinds_of_memory_are_told_apart() -> None:
    """What the process owns counts apart from pages of files, in bytes."""
    assert read_status(STATUS) == {"anonymous": 102400, "file": 51200, "shared": 7168}


def test_the_slope_is_that_of_the_second_half() -> None:
    """What is allocated once, at the start, is no slope; a leak is one, whatever came before."""
    flat = [sample(0, 0), sample(10, 5000), sample(20, 9000), sample(30, 9000), sample(40, 9000)]
    assert slope(flat) == 0.0
    leak = [sample(0, 0), sample(10, 0), sample(20, 9000), sample(30, 10_000), sample(40, 11_000)]
    assert slope(leak) == pytest.approx(100.0)
    assert slope(leak[:1]) == 0.0


def test_a_line_has_sizes_in_mebibytes() -> None:
    """One sample, one line."""
    assert line_of(sample(10, 3 << 20)).split() == ["10", "1", "3.0", "0.0", "0.0", "0.0"]


@pytest.mark.acceptance
@pytest.mark.timeout(120)
def test_a_short_run_counts_every_request(capsys: pytest.CaptureFixture[str]) -> None:
    """Each request ends, finished or cancelled; each sample has been taken."""
    assert run(["--requests", "40", "--cancelled", "0.25", "--samples", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["finished"] + told["cancelled"] == 40
    assert told["finished"] >= 30
    assert told["failed"] == 0
    assert [each["requests"] for each in told["samples"]] == [0, 10, 20, 30, 40]
    assert all(each["anonymous"] > 1 << 20 for each in told["samples"])
