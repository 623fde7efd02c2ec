"""What every transition of the explored ring is made of: the tables of states, and the changes to them."""

from typing import TypeVar

from simulations.ring_cells import (
    GENERATION,
    HEAD_CELL,
    LEASE_SECONDS,
    TAIL_CELL,
    Cells,
    Piece,
    SmallCounters,
)
from simulations.ring_consumer import (
    ConsumerPrograms,
    LocalConsumer,
)
from simulations.ring_judge import Judge
from simulations.ring_producer import ModelProducer, ProducerPrograms
from simulations.ring_state import (
    LOST,
    NAMES,
    Ghost,
    Memory,
    Queue,
    Setting,
    State,
    Table,
    Violation,
)
from transports.operations import Claimed
from transports.ring.layout import GRANULE_BYTES, HEAD_OFFSET, TAIL_OFFSET, WORD


class RingWorld:
    """The programs and the values of one setting."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.count = len(setting.messages)
        sessions = self.count + setting.spare_sessions
        head_bytes = GRANULE_BYTES if setting.apart else 0
        geometry = SmallCounters(setting.slots, setting.granules * GRANULE_BYTES, sessions, head_bytes)
        if setting.moduli is not None:
            geometry = geometry.with_moduli(*setting.moduli)
        self.geometry = geometry
        self._pulls = any(0 in messages for messages in setting.messages)
        self.cells = Cells(geometry, self.count, setting.places if self._pulls else 0)
        self.memories: Table[Memory] = Table()
        self.everybody: Table[tuple[int, ...]] = Table()
        self.queues: Table[tuple[Queue, ...]] = Table()
        self.ghosts: Table[Ghost] = Table()
        self._judge = Judge(setting, self.cells)
        self._claimant = setting.claimant(geometry)
        pulled_bytes_max = setting.held_pulled * GRANULE_BYTES if self._pulls else 0
        self.consumer = ConsumerPrograms(lambda: setting.consumer(geometry, pulled_bytes_max), self.cells)
        self.producers = [
            ProducerPrograms(
                self._make_producer,
                contents,
                self.cells,
                pulled=[not granules for granules in messages],
                exports=setting.exports,
                places=setting.places,
            )
            for contents, messages in zip(self._judge.contents, setting.messages, strict=True)
        ]

    def _make_producer(self, session: int, first_number: int) -> ModelProducer:
        return self.setting.producer(
            self.geometry,
            session=session,
            generation=GENERATION,
            first_number=first_number,
            lease_seconds=LEASE_SECONDS,
            guarded_bytes_max=1 << 20 if self.setting.guarded else 0,
            claims=self.setting.claims,
        )

    def executed(self, memory: Memory, session: int, length: int) -> tuple[Claimed, int]:
        """What the product's claimant answers, and the tail that it leaves.

        The session's own word is not among what the model's producers depend on, and left out.
        """
        region = bytearray(self.geometry.slots_start)
        for offset, cell in ((TAIL_OFFSET, TAIL_CELL), (HEAD_OFFSET, HEAD_CELL)):
            WORD.pack_into(region, offset, self.cells.word(memory[cell]))
        claimed = self._claimant(region, session, length)
        return claimed, self.cells.number(region[TAIL_OFFSET : TAIL_OFFSET + WORD.size])

    def _put(self, memory: Memory, piece: Piece) -> int:
        cell, number = piece
        return self.memories.number((*memory[:cell], number, *memory[cell + 1 :]))

    def _revoked(self, state: State, session: int) -> State:
        """Nothing of ``session`` lands from here on."""
        queues = replaced(self.queues.values[state[3]], session, None)
        everybody = tuple(
            LOST if number >= 0 and self.producers[producer].all[number].books.session == session else number
            for producer, number in enumerate(self.everybody.values[state[2]])
        )
        return (
            state[0],
            state[1],
            self.everybody.number(everybody),
            self.queues.number(queues),
            state[4],
        )

    def _entered(self, state: State, local: LocalConsumer) -> State | Violation:
        ghost_number = state[4]
        for delivery in local.handed:
            ghost = self.ghosts.values[ghost_number]
            violation = self._judge.hand_over(delivery, self.memories.values[state[0]], ghost.handed)
            if violation is not None:
                return violation
            producer = NAMES.index(delivery.identity)
            handed = replaced(ghost.handed, producer, ghost.handed[producer] + 1)
            ghost_number = self.ghosts.number(ghost._replace(handed=handed))
        return (state[0], local.number, state[2], state[3], ghost_number)

    def _with_producer(self, state: State, producer: int, number: int) -> State:
        everybody = replaced(self.everybody.values[state[2]], producer, number)
        return (state[0], state[1], self.everybody.number(everybody), state[3], state[4])


Item = TypeVar("Item")


def replaced(items: tuple[Item, ...], place: int, item: Item) -> tuple[Item, ...]:
    """``items`` with another one at ``place``."""
    return (*items[:place], item, *items[place + 1 :])
