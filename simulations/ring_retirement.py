"""Where a session cannot be revoked its region is retired: what the memory that follows may look like.

The owner copies the region while posted writes go on landing, in no promised order. So each piece that is
under way may be in the copy or not, whatever became of the others, and the copy may hold a commit word
without its payload. After it nothing of any session lands in memory that is read.

Where the payload ring lies apart, the copy of the region is followed by the consumer's own program, which
takes over what is sealed (``transports.ring.retirement``). Between any two of its steps, and between any two
granules that it copies, puts go on landing in the old memory: of each session in their order.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from simulations.ring_cells import Cells, Group, Piece
from simulations.ring_state import Memory, Queue
from simulations.ring_world import replaced
from transports.operations import Carry, Load, Peek, Program


def copies(memory: Memory, pieces: Sequence[Piece]) -> Iterator[Memory]:
    """Every memory that a copy may be, while these pieces are under way."""
    for count in range(len(pieces) + 1):
        for seen in combinations(pieces, count):
            changed = list(memory)
            for cell, number in seen:
                changed[cell] = number
            yield tuple(changed)


def under_way(queues: Sequence[Queue]) -> list[Piece]:
    """All that was posted and has not landed."""
    return [piece for queue in queues if queue for group in queue for piece in group]


class _Node(NamedTuple):
    """A moment in which what is sealed is being taken over."""

    old: Memory
    """In its payload granules, the memory that is given up."""
    fresh: Memory
    """The copy of the region, and in its payload granules what follows."""
    puts: tuple[tuple[Group, ...], ...]
    """Of each session, into the old memory, and not yet landed."""
    outcomes: tuple[Any, ...]
    carrying: tuple[int, ...]
    """Granules that the step under way has still to copy."""


class Passage:
    """All ways in which what is sealed may be taken over.

    Args:
        cells: Of the ring.
        start: Begins the consumer's program.
    """

    def __init__(self, cells: Cells, start: Callable[[], Program[None]]) -> None:
        self._cells = cells
        self._start = start

    def ends(self, memory: Memory, copy: Memory, queues: Sequence[Queue]) -> Iterator[Memory]:
        """Every memory that may be there in the end.

        Args:
            memory: What there is now.
            copy: What the copy of the region has become.
            queues: What is under way.
        """
        first, last = self._cells.first_granule, self._cells.first_export
        fresh = (*copy[:first], *(0 for _ in range(first, last)), *copy[last:])
        puts = tuple(
            tuple(group for group in queue or () if self._cells.is_payload(group)) for queue in queues
        )
        begin = _Node(memory, fresh, puts, (), ())
        known, waiting, ended = {begin}, [begin], set[Memory]()
        while waiting:
            node = waiting.pop()
            following = self._step(node)
            if following is None:
                if node.fresh not in ended:
                    ended.add(node.fresh)
                    yield node.fresh
                continue
            for after in (following, *_landings(node)):
                if after not in known:
                    known.add(after)
                    waiting.append(after)

    def _step(self, node: _Node) -> _Node | None:
        """What the program does next; ``None``: it has ended."""
        if node.carrying:
            cell, *rest = node.carrying
            fresh = replaced(node.fresh, cell, node.old[cell])
            outcomes = node.outcomes if rest else (*node.outcomes, None)
            return node._replace(fresh=fresh, outcomes=outcomes, carrying=tuple(rest))
        program = self._start()
        try:
            operation = next(program)
            for outcome in node.outcomes:
                operation = program.send(outcome)
        except StopIteration:
            return None
        match operation:
            case Load(offset, length):
                cells = self._cells.in_range(offset, length)
                image = self._cells.image(offset, length, cells, [node.fresh[cell] for cell in cells])
                return node._replace(outcomes=(*node.outcomes, image))
            case Peek(offset, length):
                cell, place = self._cells.sealed(offset), self._cells.apart + offset
                image = self._cells.image(place, length, (cell,), (node.old[cell],))
                return node._replace(outcomes=(*node.outcomes, image))
            case Carry(offset, length):
                return node._replace(carrying=self._cells.in_range(self._cells.apart + offset, length))
            case _:
                raise AssertionError(f"taking over does not use {operation!r}")


def _landings(node: _Node) -> Iterator[_Node]:
    for session, queue in enumerate(node.puts):
        for piece in queue[0] if queue else ():
            rest = tuple(other for other in queue[0] if other != piece)
            puts = replaced(node.puts, session, (*((rest,) if rest else ()), *queue[1:]))
            yield node._replace(old=replaced(node.old, *piece), puts=puts)
