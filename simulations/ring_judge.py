"""Whether what happens in the explored ring is what its promises say.

The judge knows what every producer sends, byte for byte, and asks no program for its opinion. Each
method returns the promise that is broken, or ``None``.
"""

from collections.abc import Sequence

from simulations.ring_cells import Cells
from simulations.ring_state import NAMES, Live, Memory, Setting, Violation
from transports.ring import Delivery
from transports.ring.layout import GRANULE_BYTES


class Judge:
    """The messages of one setting, and the judgement on them."""

    def __init__(self, setting: Setting, cells: Cells) -> None:
        self._cells = cells
        self.contents = [
            [_content(name, number, granules or 1) for number, granules in enumerate(messages)]
            for name, messages in zip(NAMES, setting.messages, strict=False)
        ]
        """What each producer sends."""
        start = cells.payload_start
        self._expected = [
            [tuple(number for _, number in cells.pieces(start, content)) for content in contents]
            for contents in self.contents
        ]

    def hand_over(self, delivery: Delivery, memory: Memory, handed: tuple[int, ...]) -> Violation | None:
        """Promises 1 and 2: this is the next message of its producer, whole."""
        producer = NAMES.index(delivery.identity)
        if delivery.content is None:
            found = tuple(memory[cell] for cell in self._cells_of(delivery))
        else:
            found = (self._cells.number(delivery.content),)
        expected = self._expected[producer]
        if delivery.number >= len(expected) or found != expected[delivery.number]:
            return Violation(2, f"{_name(delivery)} is handed over with bytes that are not its own")
        if delivery.number == handed[producer]:
            return None
        early = delivery.number > handed[producer]
        when = f"before {delivery.identity}.{handed[producer]}" if early else "again"
        return Violation(1, f"{_name(delivery)} is handed over {when}")

    def landing(
        self, session: int, cell: int, held: Sequence[Delivery], live: Sequence[Live]
    ) -> Violation | None:
        """Promises 2 and 5: what is held does not change, and writes land in their own reservation."""
        where = self._cells.describe
        for delivery in held:
            if cell in self._cells_of(delivery):
                return Violation(2, f"{where(cell)} changes while the consumer holds {_name(delivery)} there")
        if any(entry.session == session and entry.cells >> cell & 1 for entry in live):
            return None
        return Violation(5, f"a write of session {session} lands in {where(cell)}, which it does not own")

    def acknowledgement(
        self, identity: str | None, counted: int, handed: tuple[int, ...]
    ) -> Violation | None:
        """Promise 3: what is counted was handed over."""
        if identity is None or counted <= handed[NAMES.index(identity)]:
            return None
        return Violation(3, f"{counted} messages of {identity} are acknowledged, not all handed over")

    def _cells_of(self, delivery: Delivery) -> tuple[int, ...]:
        if delivery.content is not None:
            return ()
        return self._cells.in_range(self._cells.apart + delivery.offset, delivery.length)


def _content(name: str, number: int, granules: int) -> bytes:
    return b"".join(f"{name}.{number}.{granule}".encode().ljust(GRANULE_BYTES) for granule in range(granules))


def _name(delivery: Delivery) -> str:
    return f"{delivery.identity}.{delivery.number}"
