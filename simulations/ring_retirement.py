"""Where a session cannot be revoked its region is retired: what a copy of the memory may look like.

The owner copies the region while posted writes go on landing, in no promised order. So each piece that is
under way may be in the copy or not, whatever became of the others, and the copy may hold a commit word
without its payload. After it nothing of any session lands in memory that is read.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations

from simulations.ring_cells import Piece
from simulations.ring_state import Memory, Queue


def copies(memory: Memory, queues: Sequence[Queue]) -> Iterator[Memory]:
    """Every memory that a copy may be."""
    pieces = [piece for queue in queues if queue for group in queue for piece in group]
    for count in range(len(pieces) + 1):
        for seen in combinations(pieces, count):
            yield _with(memory, seen)


def _with(memory: Memory, pieces: Sequence[Piece]) -> Memory:
    changed = list(memory)
    for cell, number in pieces:
        changed[cell] = number
    return tuple(changed)
