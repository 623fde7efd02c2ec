from collections.abc import Mapping

import pytest
from attrs import define, field

from onepiece.core.machine import InvalidTransition, Machine, StoryDiffers, follow

_TABLE: Mapping[tuple[str, str], str] = {("shut", "open"): "open", ("open", "shut"): "shut"}


@define(kw_only=True, eq=False)
class _Door(Machine[str, str]):
    """A machine small enough to see through; ``forgets`` makes it depend on what is not its state."""

    state: str = "shut"
    seen: list[str] = field(factory=list)
    inner: "_Door | None" = None

    def _react(self, event: str, now: float) -> list[str]:
        self.state = follow(_TABLE, self.state, event)
        self.seen.append(event)
        return [f"{self.state} at {now}"]

    def next_deadline(self, now: float) -> float | None:
        return None

    def check_invariants(self) -> None:
        assert len(self.seen) < 1000


_hidden = [0]


class _Forgetful(_Door):
    def _react(self, event: str, now: float) -> list[str]:
        _hidden[0] += 1
        return [str(_hidden[0])]


def _swing(door: _Door, times: int) -> None:
    for n in range(times):
        door.handle(("open", "shut")[n % 2], float(n))


def test_effects_are_those_of_the_table() -> None:
    """An event moves the machine along its table, and the effects come back in order."""
    door = _Door()
    assert door.handle("open", 1.0) == ["open at 1.0"]
    assert door.state == "open"


def test_unknown_pair_is_refused_with_the_story() -> None:
    """A pair that is not in the table names state, trigger, the event in hand, and what led to it."""
    door = _Door()
    door.handle("open", 1.0)
    with pytest.raises(InvalidTransition, match="'open' by 'open'") as caught:
        door.handle("open", 2.0)
    assert "2.000 'open'" in str(caught.value)
    assert "1.000 'open'\n    'open at 1.0'" in str(caught.value)


def test_time_never_runs_backwards() -> None:
    """A driver that passes an earlier moment is wrong, and is told."""
    door = _Door()
    door.handle("open", 2.0)
    with pytest.raises(AssertionError, match="backwards"):
        door.handle("shut", 1.0)


@pytest.mark.parametrize("times", [1, 7, 8, 9, 50])
def test_story_is_bounded_and_can_always_be_replayed(times: int) -> None:
    """However long a machine lives, its story has few entries and leads to its present state."""
    door = _Door(story_entries_max=8)
    _swing(door, times)
    assert min(times, 4) <= len(door.story.entries) <= 8
    replayed = door.story.replay()
    assert isinstance(replayed, _Door)
    assert (replayed.state, replayed.seen) == (door.state, door.seen)


def test_replay_notices_a_hidden_dependence() -> None:
    """A machine whose effects depend on something outside it does not replay, and that is said."""
    door = _Forgetful()
    door.handle("open", 1.0)
    with pytest.raises(StoryDiffers, match="recorded"):
        door.story.replay()


def test_empty_story_says_so() -> None:
    """There is nothing to replay before the first event."""
    with pytest.raises(ValueError, match="nothing has happened"):
        _Door().story.replay()


def test_copy_shares_nothing_that_changes() -> None:
    """A copy, and a machine inside it, live on their own."""
    door = _Door(inner=_Door())
    twin = door.copy()
    _swing(door, 3)
    assert door.inner is not None
    _swing(door.inner, 1)
    assert twin.seen == []
    assert twin.inner is not None
    assert twin.inner.seen == []
    assert twin.story.entries == ()
