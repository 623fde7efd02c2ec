"""What happened in a run: a story for people, and a hash that says whether two runs were the same."""

import hashlib
import re
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from simulations.loop import VirtualLoop

STORY_LINES_MAX: Final = 4000

_MEMORY_ADDRESS: Final = re.compile(r"0x[0-9a-f]+")


class Trace:
    """Everything that is worth telling, in order; and everything that was sent, in one number."""

    def __init__(self, loop: VirtualLoop, *, aloud: bool = False) -> None:
        self._loop = loop
        self._aloud = aloud
        self._hash = hashlib.blake2b(digest_size=8)
        self._story: deque[str] = deque(maxlen=STORY_LINES_MAX)
        self.problems: list[str] = []
        """Broken promises, in words."""
        self.moves = 0
        """Instances that have moved, as managers have logged it."""

    @property
    def digest(self) -> str:
        """The same in two runs exactly if all that was told and sent is the same."""
        return self._hash.hexdigest()

    def arrived(self, source: str, target: str) -> None:
        """Something has got from one host to another."""
        self._hash.update(f"{self._loop.now!r} {source} {target}".encode())

    def tell(self, who: str, what: str) -> None:
        """Add a line to the story."""
        line = f"{self._loop.now:10.4f} {who:<10} {_MEMORY_ADDRESS.sub('0x', what)}"
        self._hash.update(line.encode())
        self._story.append(line)
        if self._aloud:
            print(line)

    def take_log(self, event: Mapping[str, Any]) -> None:
        """Add what a node has logged."""
        fields = {key: value for key, value in event.items() if key not in {"event", "level", "exception"}}
        told = " ".join(f"{key}={value}" for key, value in fields.items())
        who = self._loop.current.name
        self.tell(who, f"{event['level']:<7} {event['event']} {told}"[:400])
        if "exception" in event:
            self.tell(who, str(event["exception"]))
        self.moves += event["event"] == "move_done"
        if event["event"] in BUGS:
            self.fail(f"{who} logged {event['event']}: {told}\n{event.get('exception', '')}")

    def take_exception(self, context: dict[str, Any]) -> None:
        """Note what nobody caught."""
        error = context.get("exception")
        text = f"{self._loop.current.name}: {context.get('message')}: {error!r}"
        if isinstance(error, BaseException):
            text += "".join(f"\n  {each}" for each in _lines_of(error))
        self.fail(text)

    def fail(self, what: str) -> None:
        """A promise is broken."""
        self.problems.append(f"at {self._loop.now:.4f}: {_MEMORY_ADDRESS.sub('0x', what)}")
        self.tell("checker", f"BROKEN: {what}")

    def story(self, words: tuple[str, ...] = (), lines: int = 120) -> list[str]:
        """The latest lines; with ``words`` the latest of those that hold one of them."""
        chosen = [line for line in self._story if not words or any(word in line for word in words)]
        return chosen[-lines:]


BUGS: Final = frozenset({"control_handler_failed", "actor_crashed", "control_queue_overflow"})
"""Log events that are bugs of ours whatever happened to the nodes."""


def _lines_of(error: BaseException) -> list[str]:
    found = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        found.append(f"{code.co_filename.rpartition('/')[2]}:{trace.tb_lineno} {code.co_qualname}")
        trace = trace.tb_next
    return found
