"""What other systems' users have met and this one must not: the page and the tests agree on what holds it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

from tests.tidy.sources import ROOT, report, sources

_PAGE = "docs/explanation/faults.md"
_MARK = re.compile(r"\(faults? (\d+(?:(?:, | and )\d+)*)\)")
_ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
_TEST = re.compile(r"`([\w./]+(?:::\w+)?)`")


def _numbers(text: str) -> set[int]:
    return {int(number) for mark in _MARK.findall(text) for number in re.findall(r"\d+", mark)}


def _marks() -> set[tuple[int, str]]:
    """Each number with the test, conformance check or scenario that bears it."""
    found = {
        (number, f"{source.name}::{function.name}")
        for source in sources("tests", "transports/testing")
        for function in source.functions()
        for number in _numbers(ast.get_docstring(function) or "")
    }
    for scenario in sorted((ROOT / "tests/core/scenarios").glob("*.txt")):
        name = str(scenario.relative_to(ROOT))
        found |= {(number, name) for number in _numbers(scenario.read_text())}
    return found


def _rows() -> list[tuple[int, str]]:
    """Number and last column of each row."""
    return [(int(number), held_by) for number, _, _, held_by in _ROW.findall((ROOT / _PAGE).read_text())]


def test_marks_and_page_agree() -> None:
    """What a test says that it holds stands in the page, and what the page names says so itself."""
    listed = {(number, test) for number, held_by in _rows() for test in _TEST.findall(held_by)}
    marked = _marks()
    offences = [f"{test} holds fault {n}, which {_PAGE} does not say" for n, test in marked - listed]
    offences += [f"{_PAGE} names {test} for {n}, which bears no such mark" for n, test in listed - marked]
    assert not offences, report(sorted(offences))


def test_rows_are_in_order_and_complete() -> None:
    """Each number stands once, in order, and every row names a test."""
    text = (ROOT / _PAGE).read_text()
    rows = _rows()
    numbers = [number for number, _ in rows]
    assert numbers == sorted(set(numbers))
    assert len(rows) == len(re.findall(r"^\| \d", text, re.MULTILINE)), "a row has not four columns"
    assert not [number for number, held_by in rows if not _TEST.search(held_by)]


def test_a_coroutine_that_nobody_awaits_fails_its_test(tmp_path: Path) -> None:
    """With the project's own settings: a release that is called and never awaited is seen (fault 69)."""
    (tmp_path / "test_it.py").write_text(
        "async def release():\n    pass\n\n\nasync def test_it():\n    release()\n"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider"),
            *("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path / "test_it.py")),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "coroutine 'release' was never awaited" in done.stdout
