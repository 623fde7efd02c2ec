"""Where a node keeps its state, and that nothing of it outlives the node for long."""

import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from onepiece.errors import ConfigError
from onepiece.node.state_directory import holding, next_incarnation, open_state_directory

HOLD = """
import sys
from onepiece.node.state_directory import open_state_directory
with open_state_directory(None) as path:
    print(path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory of this test's own."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def hold(temporary: Path) -> tuple["subprocess.Popen[str]", Path]:
    """A process that holds a temporary directory, and that directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env=os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: "subprocess.Popen[str]") -> None:
    """Kill the process and close its pipes."""
    process.kill()
    process.communicate()


def test_given_directory_is_made_and_stays(tmp_path: Path) -> None:
    """A directory that was named is made with its parents, and is left in place."""
    path = tmp_path / "a" / "b"
    with open_state_directory(path) as found:
        assert found == path
        (path / "kept").write_text("x")
    assert (path / "kept").exists()


def test_directory_that_cannot_be_made(tmp_path: Path) -> None:
    """The error names the option and the path."""
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(ConfigError, match=r"--state-dir '.*file/below'"),
        open_state_directory(tmp_path / "file" / "below"),
    ):
        pass


def test_temporary_directory_goes_with_its_node(temporary: Path) -> None:
    """Without a name there is a temporary directory, removed with all that is in it."""
    with open_state_directory(None) as path:
        assert path.parent == temporary
        (path / "deep").mkdir()
        (path / "deep" / "file").write_text("x")
    assert list(temporary.iterdir()) == []


def test_directory_of_a_living_node_stays(temporary: Path) -> None:
    """A node that starts leaves it alone, and removes it when its holder was killed (faults 39, 67)."""
    holder, held = hold(temporary)
    try:
        with open_state_directory(None) as own:
            assert held.exists()
            assert own != held
    finally:
        end(holder)
    assert held.exists(), "who is killed cannot tidy up"
    with open_state_directory(None):
        assert not held.exists()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [3, pytest.param(100, marks=pytest.mark.full)])
def test_many_killed_holders(temporary: Path, count: int) -> None:
    """Nodes that start at once remove what others left, and not each other's (faults 39, 67)."""
    holders = [hold(temporary) for _ in range(count)]
    for holder, held in holders:
        end(holder)
        assert held.exists()
    barrier = threading.Barrier(4, timeout=30)

    def start(_: int) -> None:
        barrier.wait()
        with open_state_directory(None) as own:
            barrier.wait()
            assert own.exists()
            assert not any(held.exists() for _, held in holders)
            barrier.wait()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(start, range(4)))
    assert list(temporary.iterdir()) == []


def test_other_files_stay(temporary: Path) -> None:
    """Only directories that nodes made are removed, and no link is followed."""
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (temporary / "onepiece-node-file").write_text("a file")
    (temporary / "onepiece-node-link").symlink_to(elsewhere)
    with open_state_directory(None):
        pass
    assert elsewhere.exists()
    assert (temporary / "onepiece-node-file").exists()
    assert (temporary / "onepiece-node-link").is_symlink()


def test_incarnations_grow_also_where_the_clock_was_set_back(tmp_path: Path) -> None:
    """A node that starts again in its directory is newer than it was, whatever its clock says."""
    assert next_incarnation(tmp_path, 5000) == 5000
    assert next_incarnation(tmp_path, 1000) == 5001
    assert next_incarnation(tmp_path, 9000) == 9000


def test_incarnation_without_a_usable_directory(tmp_path: Path) -> None:
    """A note that cannot be read or written keeps no node from starting: then the clock alone decides."""
    (tmp_path / "incarnation").write_text("no number")
    assert next_incarnation(tmp_path, 7) == 7
    assert next_incarnation(tmp_path / "nowhere", 7) == 7


def test_a_given_directory_is_one_nodes(tmp_path: Path) -> None:
    """A second one is told, and leaves the first one's files alone; whoever comes later has it."""
    state = tmp_path / "new" / "state"
    with holding(state):
        (state / "retained").mkdir()
        with pytest.raises(ConfigError, match="in use by another node"), holding(state):
            pytest.fail("two nodes have it")
        assert (state / "retained").is_dir()
    with holding(state), holding(None):
        pass


def test_a_directory_that_cannot_be_made_is_told_of_where_it_is_opened(tmp_path: Path) -> None:
    """The words are those of opening it."""
    (tmp_path / "file").touch()
    with holding(tmp_path / "file" / "below"):
        pass
