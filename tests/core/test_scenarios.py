from pathlib import Path

import pytest

from tests.core.scenario import parse, play, render

_FILES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.stem)
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    """Each command of the file has exactly the outcome that the file shows."""
    blocks = play(path)
    if request.config.getoption("--rewrite-scenarios", default=False):
        path.write_text(render(blocks))
    assert render(blocks) == path.read_text()


@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.stem)
def test_file_is_in_normal_form(path: Path) -> None:
    """Parsing and rendering a file gives the same file, so that rewriting changes outcomes only."""
    assert render(parse(path.read_text())) == path.read_text()
