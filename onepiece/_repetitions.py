"""Which of many equal messages are worth a line in the log: the first, and then ever fewer.

A peer that cannot be reached is tried at every heartbeat, for hours if need be. What is said of it each time
hides everything else; saying it once hides that it still holds. So the same words about the same subject
are said again after pauses that double, with the number of those that were left out. Other words, or
words about a subject that was well in between, are said at once.
"""

from collections import OrderedDict
from typing import Final

from attrs import define, field

FIRST_PAUSE_SECONDS: Final = 2.0
PAUSE_SECONDS_MAX: Final = 60.0
SUBJECTS_MAX: Final = 1024


@define
class _Said:
    words: str
    again_at: float
    pause_seconds: float = FIRST_PAUSE_SECONDS
    left_out: int = 0


@define
class Repetitions:
    """What was said last of each subject; knows no clock, and keeps a bounded number of subjects."""

    _said: OrderedDict[str, _Said] = field(factory=OrderedDict, init=False)

    def worth_saying(self, subject: str, words: str, now: float) -> int | None:
        """How often this was left out since it was said last; None if it is to be left out once more.

        Args:
            subject: What it is about.
            words: What is to be said.
            now: Monotonic seconds.
        """
        said = self._said.get(subject)
        if said is None or said.words != words:
            self._said[subject] = _Said(words, now + FIRST_PAUSE_SECONDS)
            self._said.move_to_end(subject)
            while len(self._said) > SUBJECTS_MAX:
                self._said.popitem(last=False)
            return 0
        if now < said.again_at:
            said.left_out += 1
            return None
        left_out, said.left_out = said.left_out, 0
        said.pause_seconds = min(2 * said.pause_seconds, PAUSE_SECONDS_MAX)
        said.again_at = now + said.pause_seconds
        return left_out

    def is_well(self, subject: str) -> None:
        """What is said of the subject next is news."""
        self._said.pop(subject, None)
