"""Files that are read in advance: which, how much of them, and that it ends when it should."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onepiece.errors import DefinitionError
from onepiece.runtime import read_ahead as module
from onepiece.runtime.read_ahead import free_bytes, read_ahead, reading_ahead
from tests.runtime.rig import until

_PLENTY = 1 << 40


def _weights(directory: Path) -> Callable[[], list[Any]]:
    (directory / "model" / "parts").mkdir(parents=True)
    (directory / "model" / "parts" / "one").write_bytes(b"1" * 1000)
    (directory / "model" / "two").write_bytes(b"2" * 200)
    (directory / "alone").write_bytes(b"3" * 30)
    return lambda: [directory / "model", str(directory / "alone")]


def test_files_and_all_that_is_in_directories_are_read(tmp_path: Path) -> None:
    """As far as the bound goes, and until it is stopped."""
    name = _weights(tmp_path)
    assert read_ahead(name, _PLENTY, lambda: False) == 1230
    assert read_ahead(name, 1100, lambda: False) == 1100
    assert read_ahead(name, 0, lambda: False) == 0
    assert read_ahead(name, _PLENTY, lambda: True) == 0
    assert free_bytes() > 0


def test_it_stops_before_its_next_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a file, too."""
    monkeypatch.setattr(module, "_PIECE_BYTES", 100)
    name, asked = _weights(tmp_path), iter([False] * 3 + [True] * 9)
    assert read_ahead(name, _PLENTY, lambda: next(asked)) == 300


@pytest.mark.parametrize(("paths", "error"), [([7], DefinitionError), (["/no/such/file"], OSError)])
def test_what_is_no_file_is_an_error(paths: list[Any], error: type[Exception]) -> None:
    """Of its kind; it is raised to whoever waits."""
    with pytest.raises(error):
        read_ahead(lambda: paths, _PLENTY, lambda: False)
    with pytest.raises(error):
        asyncio.run(reading_ahead(lambda: paths, 60.0))


async def test_a_name_that_blocks_holds_up_nobody(tmp_path: Path) -> None:
    """Neither whoever cancels it, nor who waits for no longer than the bound."""
    begun, go_on, over = threading.Event(), threading.Event(), threading.Event()
    weights = _weights(tmp_path)

    def blocks() -> list[Any]:
        begun.set()
        go_on.wait()
        over.set()
        return weights()

    reading = asyncio.create_task(reading_ahead(blocks, 60.0))
    await until(begun.is_set)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    with pytest.raises(TimeoutError):
        await reading_ahead(blocks, 0.01)
    go_on.set()
    await until(over.is_set)


async def test_it_reads_beside_the_loop(tmp_path: Path) -> None:
    """And says how much."""
    assert await reading_ahead(_weights(tmp_path), 60.0) == 1230
