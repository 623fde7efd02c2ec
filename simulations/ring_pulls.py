"""Transitions of the explored ring around large messages, and around regions that are retired."""

from collections.abc import Iterable, Iterator

from simulations.ring_cells import (
    HEAD_CELL,
    Revoke,
    Take,
)
from simulations.ring_consumer import (
    LocalConsumer,
)
from simulations.ring_exports import Place, free_place, lending, withdrawing
from simulations.ring_producer import LocalProducer
from simulations.ring_retirement import Passage, copies, under_way
from simulations.ring_state import (
    Memory,
    Move,
    Queue,
    State,
    Violation,
)
from simulations.ring_world import RingWorld, replaced
from transports.ring.layout import GRANULE_BYTES


class PullingWorld(RingWorld):
    """Lending, pulling and taking back; copies of a region instead of a fence."""

    # Pulling, and what is pulled from.

    def _take(self, state: State, local: LocalConsumer, take: Take) -> Iterator[Move]:
        """The two readings of a pull."""
        place = Place.from_key(take.key)
        header, granule = self.cells.export_cells(place.producer, place.at)
        memory = self.memories.values[state[0]]
        ghost = self.ghosts.values[state[4]]
        if take.seen is None:
            seen = self.consumer.glimpse(local, memory[granule])
            yield ("glimpse",), self._entered(state, seen)
            if ghost.damages:
                damaged = self.consumer.glimpse(local, self.cells.number(b"damaged"))
                less = self.ghosts.number(ghost._replace(damages=ghost.damages - 1))
                yield ("glimpse-damaged",), self._entered((*state[:4], less), damaged)
            return
        content: bytes | None = self.cells.values[take.seen].ljust(GRANULE_BYTES, b"\0")
        if self.setting.checks_generation and self.cells.values[memory[header]] != bytes([place.generation]):
            content = None
        yield ("pull",), self._entered(state, self.consumer.pulled(local, content))

    def _lend(self, state: State, producer: int, local: LocalProducer) -> State:
        ghost = self.ghosts.values[state[4]]
        generation = ghost.exported[producer] + 1
        place = Place(producer, free_place(self.setting.places, local.books.lent), generation)
        memory = state[0]
        content = self._judge.contents[producer][local.books.next_number]
        for piece in lending(self.cells, place, content):
            memory = self._put(self.memories.values[memory], piece)
        counted = self.ghosts.number(ghost._replace(exported=replaced(ghost.exported, producer, generation)))
        after = self.producers[producer].lent(local, place)
        return self._with_producer((memory, *state[1:4], counted), producer, after.number)

    def _lends(self, producer: int, number: int) -> bool:
        """A producer that has a session lends something in it."""
        return number >= 0 and bool(self.producers[producer].all[number].books.lent)

    def _look(self, state: State, producer: int, local: LocalProducer) -> Iterator[Move]:
        """The producer reads how much was delivered, and takes back what it need not lend any more."""
        delivered = self.cells.word(self.memories.values[state[0]][HEAD_CELL + local.books.session])
        after, done = self.producers[producer].looked(local, delivered)
        if done:
            memory = self._withdrawn(state[0], producer, [place.at for place in done])
            yield ("look", producer), self._with_producer((memory, *state[1:]), producer, after.number)

    def _withdrawn(self, memory: int, producer: int, indices: Iterable[int]) -> int:
        if not self._pulls:
            return memory
        for index in indices:
            for piece in withdrawing(self.cells, producer, index):
                memory = self._put(self.memories.values[memory], piece)
        return memory

    # A region that is retired.

    def _retire(self, state: State, local: LocalConsumer, revoke: Revoke) -> Iterator[Move]:
        """Instead of a fence: other memory, and no session is left."""
        for session in local.identities:
            if session not in revoke.sessions:
                local = self.consumer.close(local, session)
        for after in self._with_other_memory((state[0], local.number, *state[2:])):
            if not isinstance(after, Violation):
                after = self._entered(after, self.consumer.after(local, None))
            yield ("retire",), after

    def _with_other_memory(self, state: State) -> Iterator[State | Violation]:
        """Every state in which the region's memory is a copy and all sessions have ended."""
        queues = self.queues.values[state[3]]
        local, live = self.consumer.all[state[1]], self.ghosts.values[state[4]].live
        sessions = [session for session, queue in enumerate(queues) if queue is not None]
        for session in sessions:
            for cell, _ in under_way(queues[session : session + 1]):
                # It may still land in the old memory, which those who hold a message go on reading.
                violation = self._judge.landing(session, cell, local.held, live)
                if violation is not None:
                    yield violation
                    return
        for memory in self._other_memories(local, self.memories.values[state[0]], queues):
            after: State = (self.memories.number(memory), *state[1:])
            for session in sessions:
                after = self._revoked(after, session)
            yield after if not self.setting.retired_writes_land else (*after[:3], state[3], after[4])

    def _other_memories(
        self, local: LocalConsumer, memory: Memory, queues: tuple[Queue, ...]
    ) -> Iterator[Memory]:
        """Copies of the region; with what was taken over of the payload, where that lies apart."""
        pieces = under_way(queues)
        if not self.setting.apart:
            yield from copies(memory, pieces)
            return
        passage = Passage(self.cells, lambda: self.consumer.carry_over(local))
        in_region = [piece for piece in pieces if piece[0] < self.cells.first_granule]
        for copy in copies(memory, in_region):
            yield from passage.ends(memory, copy, queues)
