"""What an actor knows of the process, or the processes, that its stage runs in.

``IsolatedProcess`` is one helper process; ``RankGroup`` several of them that work on each call together.
Who loads a stage, runs stage tasks on it or watches over it need not know which of the two it has.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from onepiece.errors import OnePieceError
from onepiece.requests import EventKind
from onepiece.runtime.isolated_channel import IsolatedCall, IsolatedError, IsolatedReturn

Progress = Callable[[EventKind, Mapping[str, Any]], None]


class ProcessEnded(Exception):  # noqa: N818 - named by what has happened
    """A helper process is over; the text says how: ``was killed by SIGSEGV``."""

    def __init__(self, how: str, rank: int | None = None) -> None:
        super().__init__(how)
        self.rank = rank
        """Of the process, if it was one of several."""


class StageNotLoaded(Exception):  # noqa: N818 - named by what has happened
    """The stage's module or setup raised in the helper process; the text says what."""


@frozen
class Answer:
    """A call's last word, and the values with it, which still lie as they came."""

    header: IsolatedReturn | IsolatedError
    values: Mapping[str, Any]
    length: int
    """Bytes of the message."""


class StageProcess(ABC):
    """Where a loaded stage's code runs, outside of the node."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """It has ended, or is about to: it takes no calls any more."""

    @property
    @abstractmethod
    def has_worked(self) -> bool:
        """Whether it was given any call."""

    @property
    @abstractmethod
    def is_dirty(self) -> bool:
        """A call has left it in doubt: it should be given no further one."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """What it has taken of its device (each rank of its own) at most; 0 if that is not known."""

    @property
    def hangs(self) -> str:
        """Which part of it holds up the others, for the error of a call that takes too long."""
        return ""

    @abstractmethod
    async def over(self) -> str:
        """Wait until it has ended, or has been given up; returns how."""

    @abstractmethod
    async def unload(self) -> None:
        """Let calls that are under way end, then the rest of the setup run, and it exit, within a bound."""

    @abstractmethod
    async def call(
        self,
        header: Callable[[int], IsolatedCall],
        values: Mapping[str, Any],
        size: int,
        *,
        progress: Progress,
        on_sent: Callable[[], None],
        stopped: Callable[[], OnePieceError | None],
    ) -> Answer:
        """Run the stage's body there.

        Args:
            header: Makes the call's header from its number.
            values: The arguments; may lie in memory that is given back later.
            size: About how many bytes they are.
            progress: Told what the body reports.
            on_sent: Called when ``values`` are needed no longer.
            stopped: Asked on cancellation why the call is to stop.

        Raises:
            ProcessEnded: It ended before it answered.
            CodecError: The arguments cannot be sent.

        If the caller is cancelled, the call is stopped, and its end is waited for; if that takes longer
        than a bound, the process is ended.
        """
