"""The double ring in a world where anything that may happen can happen next.

A *global state* is the memory, the local state of the consumer and of every producer, what each
session has posted and what has not landed yet, and a little bookkeeping by which the promises are
checked. A *transition* is one operation of one program, one piece of a posted write that lands, or
one fault:

* a producer dies, between any two of its steps; what it has posted may still land, at any time;
* a connection is cut: nothing of that session lands any more, and the consumer is told;
* the consumer suspects: its lease is over, rightly or not, at any moment at which a lease runs;
* a piece of payload lands damaged (only where the hashes are on).

A producer whose session was fenced or cut and that is alive opens another one under its identity
and sends again what the consumer has not had.

The model is pessimistic where the contract says nothing: a swap, a claim or a read overtakes the writes that
were posted before it, the pieces of one write land in any order, and a producer's steps are not
bounded in time. It is exact in what the contract promises: writes of a session land in their order,
and nothing lands behind a fence. Where the payload ring lies apart (``apart``), writes into it keep their
order among themselves, and so do those into the region; between the two there is none.

One reduction is made. Posting a chain only moves writes into the session's own queue, which nobody
sees before they land; so it is done in the same transition as the swap in front of it, and the
states in which the producer dies between the two are entered explicitly. Every other action
commutes with the posting: a fence empties the queue, whether the chain was posted before it or is
refused after it.

Checked in every transition: promises 1, 2, 3 and 5 of the ring. ``simulations.explore`` adds 4.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Final

from simulations.ring_cells import (
    HEAD_CELL,
    TAIL_CELL,
    Fetch,
    Group,
    Lend,
    Piece,
    Post,
    Put,
    Reserve,
    Revoke,
    Swap,
    Take,
)
from simulations.ring_consumer import (
    Call,
    LocalConsumer,
    Poll,
    Release,
)
from simulations.ring_producer import LocalProducer
from simulations.ring_pulls import PullingWorld
from simulations.ring_state import (
    DEAD,
    LOST,
    NAMES,
    Ghost,
    Live,
    Memory,
    Move,
    Queue,
    State,
    Violation,
)
from simulations.ring_world import replaced
from transports.operations import EXPIRED
from transports.ring.invariants import broken_positions
from transports.ring.layout import POSITION_MASK, pack_position, unpack_position

_POLL: Final = Poll()
_LATE_POLL: Final = Poll(late=True)


class RingModel(PullingWorld):
    """All transitions of one setting."""

    # The beginning and the end.

    def initial(self) -> State:
        """Everybody is connected, nothing was sent."""
        setting, geometry = self.setting, self.geometry
        sequence = geometry.sequence_modulus - 1 if setting.near_wrap else 0
        end = geometry.granule_modulus - 1 if setting.near_wrap else 0
        consumer = setting.consumer(geometry)
        word = pack_position(0, sequence, end)
        consumer.start_at(word)
        memory = [0] * self.cells.count
        memory[TAIL_CELL] = memory[HEAD_CELL] = self.cells.number(word.to_bytes(8, "little"))
        everybody = []
        queues: list[Queue] = [None] * (geometry.session_count + 1)
        for producer in range(self.count):
            session, first_number = consumer.open_session(NAMES[producer])
            queues[session] = ()
            everybody.append(self.producers[producer].connected(session, first_number, 0.0).number)
        none = (0,) * self.count
        ghost = Ghost((), none, setting.crashes, setting.suspicions, setting.cuts, setting.damages, none)
        return (
            self.memories.number(tuple(memory)),
            self.consumer.idle(consumer).number,
            self.everybody.number(tuple(everybody)),
            self.queues.number(tuple(queues)),
            self.ghosts.number(ghost),
        )

    def finished(self, state: State) -> bool:
        """Every message of everybody alive was handed over and released, and the ring is empty."""
        memory = self.memories.values[state[0]]
        consumer = self.consumer.all[state[1]]
        ghost = self.ghosts.values[state[4]]
        if consumer.call is not None or consumer.held or ghost.live:
            return False
        _, sequence, _ = unpack_position(self.cells.word(memory[TAIL_CELL]))
        if consumer.cursor != sequence:
            return False
        return all(
            local == DEAD or (handed == len(messages) and not self._lends(producer, local))
            for producer, (local, handed, messages) in enumerate(
                zip(self.everybody.values[state[2]], ghost.handed, self.setting.messages, strict=True)
            )
        )

    # Transitions.

    def moves(self, state: State) -> Iterator[Move]:
        """Everything that may happen next."""
        yield from self._landings(state)
        yield from self._consumer_moves(state)
        for producer, number in enumerate(self.everybody.values[state[2]]):
            if number != DEAD:
                yield from self._producer_moves(state, producer, number)
        yield from self._connection_moves(state)

    def _landings(self, state: State) -> Iterator[Move]:
        queues = self.queues.values[state[3]]
        ghost = self.ghosts.values[state[4]]
        for session, queue in enumerate(queues):
            if not queue:
                continue
            for place, piece in self._next_pieces(queue):
                rest = tuple(other for other in queue[place] if other != piece)
                following = (*queue[:place], *((rest,) if rest else ()), *queue[place + 1 :])
                after = self.queues.number(replaced(queues, session, following))
                yield ("land", session, piece[0]), self._landed(state, session, piece, after, state[4])
                if ghost.damages and piece[0] >= self.cells.first_granule:
                    damaged = (piece[0], self.cells.number(b"damaged"))
                    less = self.ghosts.number(ghost._replace(damages=ghost.damages - 1))
                    yield (
                        ("damage", session, piece[0]),
                        self._landed(state, session, damaged, after, less),
                    )

    def _next_pieces(self, queue: tuple[Group, ...]) -> Iterator[tuple[int, Piece]]:
        """What of a session may land next: of the oldest write; where there are two memories, of either's."""
        places = [0]
        if self.setting.apart:
            first = self.cells.is_payload(queue[0])
            others = (place for place, group in enumerate(queue) if self.cells.is_payload(group) != first)
            places.extend(islice(others, 1))
        for place in places:
            for piece in queue[place]:
                yield place, piece

    def _landed(self, state: State, session: int, piece: Piece, queues: int, ghost: int) -> State | Violation:
        violation = self._judge.landing(
            session,
            piece[0],
            self.consumer.all[state[1]].held,
            self.ghosts.values[state[4]].live,
        )
        if violation is not None:
            return violation
        memory = self.memories.values[state[0]]
        return (self._put(memory, piece), state[1], state[2], queues, ghost)

    # The consumer.

    def _consumer_moves(self, state: State) -> Iterator[Move]:
        local = self.consumer.all[state[1]]
        if local.call is not None:
            if isinstance(local.step, Take):
                yield from self._take(state, local, local.step)
            elif isinstance(local.step, Revoke) and self.setting.retires:
                yield from self._retire(state, local, local.step)
            else:
                yield ("consume",), self._consumer_step(state, local)
            if isinstance(local.step, Revoke | Take):
                for delivery in local.held:
                    released, pieces = self.consumer.release_at_fence(local, delivery.sequence)
                    after: State | Violation = state
                    for piece in pieces:
                        assert not isinstance(after, Violation)
                        after = self._stored(after, local, piece, released)
                    yield ("release", delivery.sequence), after
            return
        yield ("poll",), self._call(state, local, _POLL)
        if local.waits:
            ghost = self._suspecting(state, local)
            if ghost is not None:
                yield ("suspect",), self._call((*state[:4], ghost), local, _LATE_POLL)
        for delivery in local.held:
            yield ("release", delivery.sequence), self._call(state, local, Release(delivery.sequence))

    def _suspecting(self, state: State, local: LocalConsumer) -> int | None:
        """The ghost after a suspicion; ``None`` if no wrong one is left."""
        ghost = self.ghosts.values[state[4]]
        if not self._may_still_commit(state, local, ghost):
            return state[4]
        if not ghost.suspicions:
            return None
        return self.ghosts.number(ghost._replace(suspicions=ghost.suspicions - 1))

    def _may_still_commit(self, state: State, local: LocalConsumer, ghost: Ghost) -> bool:
        reserver = next((e.session for e in ghost.live if e.sequence == local.cursor), None)
        if reserver is None:
            return True
        queue = self.queues.values[state[3]][reserver]
        if queue is None:
            return False
        commit = self.cells.first_slot + local.cursor % self.setting.slots * 2
        if not queue and self.memories.values[state[0]][commit]:
            return False
        return any(
            number >= 0 and self.producers[producer].all[number].books.session == reserver
            for producer, number in enumerate(self.everybody.values[state[2]])
        )

    def _call(self, state: State, local: LocalConsumer, call: Call) -> State | Violation:
        called = self.consumer.call(local, call)
        if called.step is None:
            return self._entered(state, called)
        return self._consumer_step(state, called)

    def _consumer_step(self, state: State, local: LocalConsumer) -> State | Violation:
        step = local.step
        if isinstance(step, Fetch):
            memory = self.memories.values[state[0]]
            if local.half is not None:
                (commit,) = self._seen(memory, step.cells)
                outcome = (commit, local.half.body if commit else 0)
                return self._entered(state, self.consumer.after(local.half.local, outcome))
            if self.setting.torn_loads and self._is_slot(step.cells):
                half = self.consumer.half(local, memory[step.cells[1]])
                return self._entered(state, half)
            return self._entered(state, self.consumer.after(local, self._seen(memory, step.cells)))
        if isinstance(step, Put):
            return self._stored(state, local, step.piece, self.consumer.after(local, None))
        assert isinstance(step, Revoke)
        for session in step.sessions:
            state = self._revoked(state, session)
        return self._entered(state, self.consumer.after(local, None))

    def _is_slot(self, cells: tuple[int, ...]) -> bool:
        return self.cells.first_slot <= cells[0] < self.cells.first_granule

    def _seen(self, memory: Memory, cells: tuple[int, ...]) -> tuple[int, ...]:
        """What a load fetches, without what the consumer demonstrably does not look at.

        A slot without a commit word is not read further, and a consumer without hashes does not
        look at the payload (the checker does, when it is handed over).
        """
        if cells[0] >= self.cells.first_granule:
            looks = self.setting.hashes or self.setting.apart or self._pulls
            return tuple([memory[cell] if looks else 0 for cell in cells])
        if self._is_slot(cells) and not memory[cells[0]]:
            return (0,) * len(cells)
        return tuple([memory[cell] for cell in cells])

    def _stored(
        self, state: State, local: LocalConsumer, piece: Piece, after: LocalConsumer
    ) -> State | Violation:
        cell, number = piece
        ghost_number = state[4]
        ghost = self.ghosts.values[ghost_number]
        memory = self._put(self.memories.values[state[0]], piece)
        if cell == HEAD_CELL:
            _, head, _ = unpack_position(self.cells.word(number))
            live = ghost.live
            while live and live[0].sequence != head:
                memory = self._emptied(memory, live[0])
                live = live[1:]
            ghost_number = self.ghosts.number(ghost._replace(live=live))
        elif cell < self.cells.first_slot and number:
            identity = local.identities.get(cell - HEAD_CELL)
            violation = self._judge.acknowledgement(identity, self.cells.word(number), ghost.handed)
            if violation is not None:
                return violation
        if cell == HEAD_CELL:
            tail = self.cells.word(self.memories.values[memory][TAIL_CELL]) & POSITION_MASK
            for what in broken_positions(self.geometry, self.cells.word(number), after.cursor_word, tail):
                return Violation(5, what)
        return self._entered((memory, state[1], state[2], state[3], ghost_number), after)

    def _emptied(self, memory: int, entry: Live) -> int:
        """Memory that was given back loses its content, so that nobody can live on it.

        With hashes or seals it keeps it: there a stale copy of the same bytes makes a difference.
        """
        before = self.memories.values[memory]
        slot = self.cells.first_slot + entry.sequence % self.setting.slots * 2
        if self.setting.hashes or self.setting.apart or before[slot]:
            return memory
        return self.memories.number(
            tuple([0 if entry.cells >> cell & 1 else number for cell, number in enumerate(before)])
        )

    # A producer.

    def _producer_moves(self, state: State, producer: int, number: int) -> Iterator[Move]:
        ghost = self.ghosts.values[state[4]]
        unfinished = ghost.handed[producer] < len(self.setting.messages[producer])
        if ghost.crashes and unfinished:
            yield ("crash", producer), self._crashed(state, producer)
        if number == LOST:
            if unfinished:
                yield from self._reconnection(state, producer)
            return
        local = self.producers[producer].all[number]
        step = local.step
        if isinstance(step, Fetch):
            memory = self.memories.values[state[0]]
            if self.setting.torn_reads and local.half is None:
                for kind, cell in (("read-tail", TAIL_CELL), ("read-head", HEAD_CELL)):
                    half = self.producers[producer].half(local, cell, memory[cell])
                    yield (kind, producer), self._with_producer(state, producer, half.number)
                return
            outcome = tuple([memory[cell] for cell in step.cells])
            after = self.producers[producer].after(local, outcome, self._now(ghost))
            yield ("read", producer), self._with_producer(state, producer, after.number)
        elif isinstance(step, Swap):
            yield from self._swap(state, producer, local, step)
        elif isinstance(step, Reserve):
            yield from self._claim(state, producer, local, step)
        elif isinstance(step, Lend):
            yield ("lend", producer), self._lend(state, producer, local)
        if local.books.lent and not local.outcomes and local.half is None:
            yield from self._look(state, producer, local)

    def _now(self, ghost: Ghost) -> float:
        return float(ghost.clock)

    def _crashed(self, state: State, producer: int) -> State:
        ghost = self.ghosts.values[state[4]]
        less = self.ghosts.number(ghost._replace(crashes=ghost.crashes - 1))
        memory = self._withdrawn(state[0], producer, range(self.setting.places))
        return self._with_producer((memory, *state[1:4], less), producer, DEAD)

    def _swap(self, state: State, producer: int, local: LocalProducer, swap: Swap) -> Iterator[Move]:
        programs = self.producers[producer]
        ghost = self.ghosts.values[state[4]]
        now = self._now(ghost)
        memory = self.memories.values[state[0]]
        found = memory[TAIL_CELL]
        if now > swap.not_after:
            after = programs.after(local, EXPIRED, now)
            yield ("expire", producer), self._with_producer(state, producer, after.number)
            return
        after = programs.after(local, self.cells.word(found), now + (found == swap.expected) * self._tick)
        if found != swap.expected:
            yield ("lose", producer), self._with_producer(state, producer, after.number)
            return
        yield from self._won(state, producer, local, swap, after)

    def _claim(self, state: State, producer: int, local: LocalProducer, step: Reserve) -> Iterator[Move]:
        memory = self.memories.values[state[0]]
        claimed, _ = self.executed(memory, local.books.session, step.length)
        now = self._now(self.ghosts.values[state[4]]) + claimed.taken * self._tick
        after = self.producers[producer].after(local, claimed, now)
        if claimed.taken:
            yield from self._won(state, producer, local, self.as_swap(state, local, step), after)
        else:
            yield ("refused", producer), self._with_producer(state, producer, after.number)

    def as_swap(self, state: State, local: LocalProducer, step: Swap | Reserve) -> Swap:
        """The swap that a claim in this state is, if it takes place."""
        if isinstance(step, Swap):
            return step
        memory = self.memories.values[state[0]]
        _, tail = self.executed(memory, local.books.session, step.length)
        return Swap(memory[TAIL_CELL], tail, self._now(self.ghosts.values[state[4]]), ())

    def _won(
        self, state: State, producer: int, local: LocalProducer, swap: Swap, after: LocalProducer
    ) -> Iterator[Move]:
        """The tail is replaced; what is posted behind it goes with it."""
        programs = self.producers[producer]
        memory, ghost = self.memories.values[state[0]], self.ghosts.values[state[4]]
        reservation = self._reservation(swap, local)
        if any(entry.cells & reservation.cells for entry in ghost.live):
            yield (
                ("win", producer),
                Violation(5, "a reservation takes what still belongs to another one"),
            )
            return
        ghost = ghost._replace(live=(*ghost.live, reservation), clock=ghost.clock + self._tick)
        state = (
            self._put(memory, (TAIL_CELL, swap.desired)),
            state[1],
            state[2],
            self._posted(state[3], reservation.session, swap.groups),
            self.ghosts.number(ghost),
        )
        while isinstance(after.step, Post):
            if ghost.crashes:
                yield ("win-crash", producer), self._crashed(state, producer)
            queues = self._posted(state[3], reservation.session, after.step.groups)
            state = (*state[:3], queues, state[4])
            after = programs.after(after, None, float(ghost.clock))
        yield ("win", producer), self._with_producer(state, producer, after.number)

    @property
    def _tick(self) -> int:
        return 0 if self.setting.moduli is None else 1

    def _reservation(self, swap: Swap, local: LocalProducer) -> Live:
        _, sequence, _ = unpack_position(self.cells.word(swap.expected))
        _, _, end = unpack_position(self.cells.word(swap.desired))
        slot = self.cells.first_slot + sequence % self.setting.slots * 2
        cells = 1 << slot | 1 << slot + 1
        for back in range(1, local.granules + 1):
            cells |= 1 << self.cells.first_granule + (end - back) % self.setting.granules
        return Live(sequence, local.books.session, cells)

    def _posted(self, queues: int, session: int, groups: tuple[Group, ...]) -> int:
        before = self.queues.values[queues]
        queue = before[session]
        assert queue is not None
        return self.queues.number(replaced(before, session, queue + groups))

    # Connections.

    def _reconnection(self, state: State, producer: int) -> Iterator[Move]:
        local = self.consumer.all[state[1]]
        if not (local.call is None or isinstance(local.step, Revoke | Take)) or not local.can_open:
            return
        if NAMES[producer] in local.identities.values():
            return
        opened = self.consumer.open(local, NAMES[producer])
        ghost = self.ghosts.values[state[4]]
        if opened.first_number > ghost.handed[producer]:
            yield (
                ("reconnect", producer),
                Violation(3, f"{NAMES[producer]} is told of {opened.first_number} messages handed over"),
            )
            return
        connected = self.producers[producer].connected(opened.session, opened.first_number, self._now(ghost))
        before = self.queues.values[state[3]]
        queue = before[opened.session] or ()
        queues = self.queues.number(replaced(before, opened.session, queue))
        memory = self._withdrawn(state[0], producer, range(self.setting.places))
        after = (memory, opened.local.number, state[2], queues, state[4])
        yield ("reconnect", producer), self._with_producer(after, producer, connected.number)

    def _connection_moves(self, state: State) -> Iterator[Move]:
        local = self.consumer.all[state[1]]
        if not (local.call is None or isinstance(local.step, Revoke | Take)):
            return
        ghost = self.ghosts.values[state[4]]
        queues = self.queues.values[state[3]]
        everybody = self.everybody.values[state[2]]
        for session, identity in local.identities.items():
            if queues[session] is None:
                continue
            alive = everybody[NAMES.index(identity)] != DEAD
            if alive and not ghost.cuts:
                continue
            if not alive and not self.setting.deaths_noticed:
                continue
            less = self.ghosts.number(ghost._replace(cuts=ghost.cuts - alive))
            closed = self.consumer.close(local, session)
            after = (state[0], closed.number, *state[2:4], less)
            if self.setting.retires:
                for other in closed.identities:
                    closed = self.consumer.close(closed, other)
                for ended in self._with_other_memory((state[0], closed.number, *after[2:])):
                    yield ("cut", session), ended
            else:
                yield ("cut", session), self._revoked(after, session)
