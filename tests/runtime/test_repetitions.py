"""What is said again and again is said ever less often, and what is new at once."""

from itertools import pairwise

from onepiece._repetitions import PAUSE_SECONDS_MAX, SUBJECTS_MAX, Repetitions


def test_the_same_words_come_ever_less_often() -> None:
    """Half a second apart for ten minutes: the first, then after pauses that double up to a bound."""
    repetitions = Repetitions()
    said = {}
    for half_seconds in range(1200):
        now = half_seconds / 2
        left_out = repetitions.worth_saying("a", "nobody there", now)
        if left_out is not None:
            said[now] = left_out
    moments = list(said)
    assert moments[:5] == [0.0, 2.0, 6.0, 14.0, 30.0]
    assert {after - before for before, after in pairwise(moments[5:])} == {PAUSE_SECONDS_MAX}
    assert sum(said.values()) + len(said) >= 1200 - 2 * PAUSE_SECONDS_MAX
    assert said[2.0] == 3


def test_news_is_said_at_once() -> None:
    """Other words, another subject, or the same words about what was well in between."""
    repetitions = Repetitions()
    assert repetitions.worth_saying("a", "nobody there", 0.0) == 0
    assert repetitions.worth_saying("a", "nobody there", 0.1) is None
    assert repetitions.worth_saying("a", "it says no", 0.2) == 0
    assert repetitions.worth_saying("b", "it says no", 0.3) == 0
    repetitions.is_well("a")
    assert repetitions.worth_saying("a", "it says no", 0.4) == 0


def test_subjects_are_bounded() -> None:
    """The oldest is forgotten, and would be news."""
    repetitions = Repetitions()
    for number in range(SUBJECTS_MAX + 1):
        assert repetitions.worth_saying(f"{number}", "gone", 0.0) == 0
    assert repetitions.worth_saying("1", "gone", 0.0) is None
    assert repetitions.worth_saying("0", "gone", 0.0) == 0
