"""The smallest workflow."""

from pathlib import Path

from onepiece.testing import stage_context
from stages.echo import echo, shout


async def test_shout_is_loud() -> None:
    """The stage alone, as a user would test it."""
    assert await shout.function(stage_context(), "ahoy") == "AHOY!"


def test_echo_is_one_stage() -> None:
    """One node, from the input to the output."""
    assert echo.graph.schema_text.splitlines() == [
        "workflow echo(text: str) -> str",
        "stage shout(text: str) -> str",
        "shout = shout(text=text)",
        "return shout",
    ]
    assert echo(text="ahoy").inputs == {"text": "ahoy"}


def test_echo_is_twenty_lines() -> None:
    """It stands in the README as the first thing to read."""
    path = Path(__file__).parents[2] / "stages" / "echo.py"
    assert len(path.read_text().splitlines()) <= 20
