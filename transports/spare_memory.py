"""Memory for messages that are pulled, used again when nobody refers to it any more.

Pages that a process has already cost a third of fresh ones, which the system zeroes, and takes back, for each
message. Whoever holds a view keeps its memory, in whatever thread; when the last one is gone the memory
comes back here, or, where enough lies here, goes back to the system.
"""

import ctypes
import weakref
from collections import OrderedDict, deque
from typing import Any, Final

from attrs import frozen

from transports.region_memory import fresh_memory

_STEPS: Final = 8
"""Lengths between two powers of two, so that at most an eighth is not used."""


@frozen
class Taken:
    """Memory for one message."""

    view: memoryview
    _way_back: "weakref.finalize[..., Any] | None"

    def never_again(self) -> None:
        """Something may go on writing to it, though nobody here refers to it: it is not used again."""
        if self._way_back is not None:
            self._way_back.detach()


class SpareMemory:
    """What one receiver pulls into.

    Args:
        bytes_max: How much may lie here; half of it is the longest piece that is used again.
    """

    def __init__(self, bytes_max: int) -> None:
        self._half = bytes_max // 2
        """Of it each of two heaps may have: what lies here in order, and what has only just come back."""
        self._spare: OrderedDict[int, list[memoryview]] = OrderedDict()
        """By length; what was used last is last."""
        self.bytes = 0
        self._back: deque[memoryview] = deque()
        """What has come back and was not looked at; filled from any thread, also in a ``take``."""

    def take(self, size_bytes: int) -> "Taken":
        """Memory of this length, whatever lies in it; raises ``OSError`` where there is none."""
        length = _rounded(size_bytes)
        if not size_bytes or length > self._half:
            return Taken(fresh_memory(size_bytes), None)
        self._look()
        waiting = self._spare.get(length)
        if waiting:
            memory = waiting.pop()
            self.bytes -= length
            self._spare.move_to_end(length)
        else:
            memory = fresh_memory(length)
        lent = (ctypes.c_ubyte * length).from_buffer(memory)
        way_back = weakref.finalize(lent, self._come_back, memory)
        way_back.atexit = False
        return Taken(memoryview(lent).cast("B")[:size_bytes], way_back)

    def _come_back(self, memory: memoryview) -> None:
        # Several threads may do so at once, and exceed the bound by what each of them has.
        if sum(map(len, tuple(self._back))) + len(memory) <= self._half:
            self._back.append(memory)

    def _look(self) -> None:
        while self._back:
            memory = self._back.popleft()
            self._spare.setdefault(len(memory), []).append(memory)
            self._spare.move_to_end(len(memory))
            self.bytes += len(memory)
        while self.bytes > self._half:
            length, waiting = next(iter(self._spare.items()))
            if waiting:
                waiting.pop()
                self.bytes -= length
            else:
                del self._spare[length]


def _rounded(size_bytes: int) -> int:
    step = max(1 << 12, 1 << max(0, size_bytes.bit_length() - 1) >> _STEPS.bit_length() - 1)
    return -(-size_bytes // step) * step
