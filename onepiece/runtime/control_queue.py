"""Control messages for one ring, from when they are queued until the ring's consumer was seen to take them.

Each is taken or lost, and what was lost is counted once: whether it waited, was being sent, or lay in the
ring of a peer that is gone.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Final

from onepiece.limits import CONTROL_BATCH_BYTES_MAX, CONTROL_QUEUE_MAX


def control_frame(bodies: Iterable[bytes]) -> list[bytes]:
    """Several control messages as one ring message: each behind its length."""
    parts: list[bytes] = []
    for body in bodies:
        parts += [len(body).to_bytes(4, "little"), body]
    return parts


_OF_ITS_OWN: Final = int
"""A message that replaces none has a number for a key."""


class ControlQueue:
    """The control messages of one link."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[object, bytes] = OrderedDict()
        """By what they replace, or by a number of their own."""
        self._serial = 0
        self._leaving = 0
        """How many are in the ring message that is being sent."""
        self._sent: deque[tuple[int, int]] = deque()
        """Ring messages that were not seen to be taken, and how many each has."""

    def __len__(self) -> int:
        """How many wait to be sent."""
        return len(self._waiting)

    @property
    def has_lasting(self) -> bool:
        """Whether one waits that no newer one is going to replace."""
        return any(isinstance(key, _OF_ITS_OWN) for key in self._waiting)

    def add(self, body: bytes, replaces: object = None) -> bool:
        """Queue a message; False if the oldest one had to go for it."""
        if replaces is None:
            self._serial += 1
            replaces = self._serial
        self._waiting[replaces] = body
        if len(self._waiting) <= CONTROL_QUEUE_MAX:
            return True
        self._waiting.popitem(last=False)
        return False

    def leave(self) -> list[bytes]:
        """Take out what one ring message has room for; until ``sent`` it counts as leaving."""
        batch: list[bytes] = []
        size = 0
        while self._waiting and size < CONTROL_BATCH_BYTES_MAX:
            _, body = self._waiting.popitem(last=False)
            batch.append(body)
            size += len(body)
        self._leaving = len(batch)
        return batch

    def sent(self, number: int) -> None:
        """What was leaving is in the ring, in the message with this number."""
        self._sent.append((number, self._leaving))
        self._leaving = 0

    def taken(self, delivered: int) -> None:
        """The consumer has all ring messages below this number."""
        while self._sent and self._sent[0][0] < delivered:
            self._sent.popleft()

    def lose(self) -> int:
        """The link is over: how many were not taken; they are counted this once."""
        lost = len(self._waiting) + self._leaving + sum(count for _, count in self._sent)
        self._waiting.clear()
        self._sent.clear()
        self._leaving = 0
        return lost
