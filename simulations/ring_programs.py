"""The ring's own programs as automata, for exploring every interleaving of them.

A program (``transports.ring``) is a deterministic function of the books it starts from and the
outcomes it is sent. So one *local state* is (books at the start, call, outcomes so far); it is
entered by running the product's code once, by replay, and remembered. Every further visit, from any
of the many global states in which this local state occurs, is a look-up. What is explored is
therefore the code that is shipped, at the price of a table.

Memory is seen as *cells*: the words, the slots' commit words and bodies, the payload granules. The
content of a cell is the number of a byte string in ``Cells.values``; 0 stands for zeroes.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from attrs import define, evolve, field, frozen

from transports.operations import (
    Bytes,
    Chain,
    CompareAndSwap,
    Fence,
    Guarded,
    Load,
    Operation,
    Pause,
    Program,
    Read,
    Store,
    Write,
)
from transports.ring import Consumer, Delivery, Geometry, Producer
from transports.ring.consumer import Passed
from transports.ring.layout import (
    BODY_END,
    BODY_START,
    GRANULE_BITS,
    GRANULE_BYTES,
    SLOT_BYTES,
    TAIL_OFFSET,
)
from transports.ring.sessions import Identity, Session

GENERATION: Final = 7
LEASE_SECONDS: Final = 2.0
"""Snapshots may be used for half of it: one unit of the model's clock."""
LATE: Final = 1e9
"""A moment at which every lease is over."""

TAIL_CELL: Final = 0
HEAD_CELL: Final = 1

Piece: TypeAlias = tuple[int, int]
"""A cell and its new content."""
Group: TypeAlias = tuple[Piece, ...]
"""The pieces of one write: they may land in any order."""


class SmallCounters(Geometry):
    """A geometry whose counters wrap early, so that a wrap is within reach of an exploration."""

    def with_moduli(self, sequence_modulus: int, granule_modulus: int) -> "SmallCounters":
        """This geometry with other moduli; each must be a multiple of its ring's length."""
        assert sequence_modulus % self.slot_count == 0
        assert granule_modulus % self.granule_count == 0
        self._derive("sequence_modulus", sequence_modulus)
        self._derive("granule_modulus", granule_modulus)
        return self


class Cells:
    """Which cell stands where, and which byte strings the numbers in cells mean."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.values: list[bytes] = [b""]
        self._numbers: dict[bytes, int] = {}
        self._spans: list[tuple[int, int]] = [(TAIL_OFFSET, 8), (geometry.head_offset, 8)]
        for session in range(1, geometry.session_count + 1):
            self._spans.append((geometry.delivered_offset(session), 8))
        self.first_slot = len(self._spans)
        for slot in range(geometry.slot_count):
            offset = geometry.slot_offset(slot)
            self._spans.append((offset, BODY_START))
            self._spans.append((offset + BODY_START, BODY_END - BODY_START))
        self.first_granule = len(self._spans)
        for granule in range(geometry.granule_count):
            self._spans.append((geometry.payload_offset(granule), GRANULE_BYTES))
        self._at = {offset: cell for cell, (offset, _) in enumerate(self._spans)}
        self.count = len(self._spans)

    def number(self, value: Bytes) -> int:
        """The number of a byte string."""
        data = bytes(value)
        if not any(data):
            return 0
        known = self._numbers.get(data)
        if known is None:
            known = self._numbers[data] = len(self.values)
            self.values.append(data)
        return known

    def word(self, number: int) -> int:
        """The word that a cell's number means."""
        return int.from_bytes(self.values[number], "little")

    def in_range(self, offset: int, length: int) -> tuple[int, ...]:
        """The cells that a read of this range fetches."""
        end = offset + length
        return tuple(
            cell for cell, (start, size) in enumerate(self._spans) if start >= offset and start + size <= end
        )

    def image(self, offset: int, length: int, cells: Sequence[int], numbers: Sequence[int]) -> bytes:
        """The bytes of a range whose cells hold these numbers."""
        image = bytearray(length)
        for cell, number in zip(cells, numbers, strict=True):
            if number:
                start = self._spans[cell][0] - offset
                value = self.values[number]
                image[start : start + len(value)] = value
        return bytes(image)

    def pieces(self, offset: int, data: bytes) -> Group:
        """The pieces in which a write lands."""
        if offset < self.geometry.payload_start:
            return ((self._at[offset], self.number(data)),)
        return tuple(
            (self._at[offset + start], self.number(data[start : start + GRANULE_BYTES]))
            for start in range(0, len(data), GRANULE_BYTES)
        )

    def group(self, write: Write) -> Group:
        """A posted write as a group."""
        return self.pieces(write.offset, b"".join(write.buffers))

    def describe(self, cell: int) -> str:
        """The cell in words."""
        if cell == TAIL_CELL:
            return "tail"
        if cell == HEAD_CELL:
            return "head"
        if cell < self.first_slot:
            return f"delivered word of session {cell - HEAD_CELL}"
        if cell < self.first_granule:
            slot, body = divmod(cell - self.first_slot, 2)
            return f"{'body' if body else 'commit word'} of slot {slot}"
        return f"payload granule {cell - self.first_granule}"


# What a local state is about to do.


@frozen
class Fetch:
    """``Read`` or ``Load``: the outcome is the numbers in these cells."""

    cells: tuple[int, ...]
    offset: int
    length: int


@frozen
class Swap:
    """``CompareAndSwap`` of the tail, with the groups that follow it in a ``Guarded``."""

    expected: int
    desired: int
    not_after: float
    groups: tuple[Group, ...]


@frozen
class Post:
    """``Chain``."""

    groups: tuple[Group, ...]


@frozen
class Put:
    """``Store``."""

    piece: Piece


@frozen
class Revoke:
    """``Fence``."""

    sessions: tuple[int, ...]


Step: TypeAlias = Fetch | Swap | Post | Put | Revoke


def as_step(operation: Operation, cells: Cells) -> Step:
    """An operation of a program in terms of cells."""
    match operation:
        case Read(offset, length) | Load(offset, length):
            return Fetch(cells.in_range(offset, length), offset, length)
        case CompareAndSwap():
            return _as_swap(operation, (), cells)
        case Guarded(swap, chain):
            return _as_swap(swap, chain.writes, cells)
        case Chain(writes):
            return Post(tuple(cells.group(write) for write in writes))
        case Store(offset, data):
            ((cell, number),) = cells.pieces(offset, bytes(data))
            return Put((cell, number))
        case Fence(sessions):
            return Revoke(sessions)
        case _:
            raise AssertionError(f"the ring's programs do not use {operation!r}")


def _as_swap(swap: CompareAndSwap, writes: Sequence[Write], cells: Cells) -> Swap:
    assert swap.offset == TAIL_OFFSET
    return Swap(
        cells.number(swap.expected.to_bytes(8, "little")),
        cells.number(swap.desired.to_bytes(8, "little")),
        swap.not_after,
        tuple(cells.group(write) for write in writes),
    )


# The producer.


class ProducerBooks(NamedTuple):
    """What ``send`` depends on between two programs."""

    session: int
    tail: int
    head: int
    usable_until: float
    next_number: int


class ModelProducer(Producer):
    """The product's producer, whose books can be taken and given back."""

    hash_after_post_bytes = 1
    """Payload and slot are posted apart: one more place in which to die."""

    def books(self) -> ProducerBooks:
        """Everything on which ``send`` depends between two programs."""
        assert not self.in_doubt
        return ProducerBooks(self._session, self._tail, self._head, self._usable_until, self.next_number)

    def load(self, books: ProducerBooks) -> None:
        """Continue from these books."""
        self._tail = books.tail
        self._head = books.head
        self._usable_until = books.usable_until
        self.next_number = books.next_number


class BlindProducer(ModelProducer):
    """Without hashes: what must hold by the order of the writes alone."""

    def _hash_payload(self, payload: Sequence[Bytes]) -> int:
        return 0


@frozen(eq=False)
class Half:
    """A read of which one word was fetched and the other not yet."""

    local: "LocalProducer"
    """Before the read."""
    cell: int
    number: int


@define(eq=False)
class LocalProducer:
    """One local state of one producer."""

    number: int
    books: ProducerBooks
    started: float
    outcomes: tuple[Any, ...]
    step: Step | None
    """``None``: everything was sent."""
    granules: int
    """Payload granules of the message that is being sent."""
    half: "Half | None" = None
    """Set while one read is half done."""
    next: dict[Any, "LocalProducer"] = field(factory=dict)


class ProducerPrograms:
    """The local states of one identity."""

    def __init__(
        self, make: Callable[[int, int], ModelProducer], messages: Sequence[bytes], cells: Cells
    ) -> None:
        self._make = make
        self._messages = messages
        self._cells = cells
        self._known: dict[Any, LocalProducer] = {}
        self.all: list[LocalProducer] = []

    def connected(self, session: int, first_number: int, now: float) -> LocalProducer:
        """A new session that has just been opened."""
        return self._begin(self._make(session, first_number).books(), now)

    def after(self, local: LocalProducer, outcome: Any, now: float) -> LocalProducer:
        """The local state behind an outcome; ``now`` is the time at which the outcome came."""
        if local.half is not None:
            (rest,) = outcome
            tail_first = local.half.cell == TAIL_CELL
            outcome = (local.half.number, rest) if tail_first else (rest, local.half.number)
            local = local.half.local
        key = (outcome, now)
        following = local.next.get(key)
        if following is None:
            following = local.next[key] = self._run(local, outcome, now)
        return following

    def half(self, local: LocalProducer, cell: int, number: int) -> LocalProducer:
        """One word of a read has been fetched; the other follows later."""
        key = ("half", cell, number)
        following = local.next.get(key)
        if following is None:
            assert isinstance(local.step, Fetch)
            rest = tuple(other for other in local.step.cells if other != cell)
            step = Fetch(rest, local.step.offset, local.step.length)
            following = LocalProducer(
                len(self.all), local.books, local.started, local.outcomes, step, local.granules
            )
            following.half = Half(local, cell, number)
            local.next[key] = following
            self.all.append(following)
        return following

    def _run(self, local: LocalProducer, outcome: Any, now: float) -> LocalProducer:
        if isinstance(local.step, Fetch):
            step = local.step
            outcome = self._cells.image(step.offset, step.length, step.cells, outcome)
        return self._enter(local.books, local.started, (*local.outcomes, outcome), now)

    def _begin(self, books: ProducerBooks, now: float) -> LocalProducer:
        if books.next_number == len(self._messages):
            done = ProducerBooks(books.session, 0, 0, 0.0, books.next_number)
            return self._intern(done, 0.0, (), None, 0)
        return self._enter(books, now, (), now)

    def _enter(
        self, books: ProducerBooks, started: float, outcomes: tuple[Any, ...], now: float
    ) -> LocalProducer:
        producer = self._make(books.session, 0)
        producer.load(books)
        message = self._messages[books.next_number]
        program = producer.send((message,), kind=1, now=started)
        try:
            operation = next(program)
            for outcome in outcomes:
                operation = program.send(outcome)
        except StopIteration:
            return self._begin(producer.books(), now)
        if isinstance(operation, Pause):
            # A program that pauses holds nothing but its books: going on and starting again are the
            # same, except for the count of attempts, by which only the driver's waiting depends.
            return self._begin(producer.books(), now)
        step = as_step(operation, self._cells)
        if isinstance(step, Fetch):
            # The delivered word is read with them, but ``send`` does not depend on it.
            step = Fetch((TAIL_CELL, HEAD_CELL), step.offset, step.length)
        granules = -(-len(message) // GRANULE_BYTES)
        return self._intern(books, started, outcomes, step, granules)

    def _intern(
        self,
        books: ProducerBooks,
        started: float,
        outcomes: tuple[Any, ...],
        step: Step | None,
        granules: int,
    ) -> LocalProducer:
        key = (books, started, outcomes)
        local = self._known.get(key)
        if local is None:
            local = LocalProducer(len(self.all), books, started, outcomes, step, granules)
            self._known[key] = local
            self.all.append(local)
        return local


# The consumer.


class ConsumerBooks(NamedTuple):
    """What a consumer has written down, in a form that can be compared."""

    head: int
    cursor: int
    waits: bool
    passed: tuple[tuple[int, bool], ...]
    held: tuple[tuple[int, int | None], ...]
    identities: tuple[tuple[str, int, int | None], ...]
    sessions: tuple[tuple[int, str, bool, int | None], ...]
    closing: tuple[int, ...]
    free: tuple[int, ...]
    deliveries: tuple[Delivery, ...]


class ModelConsumer(Consumer):
    """The product's consumer, whose books can be taken and given back."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(
            geometry, generation=GENERATION, lease_seconds=LEASE_SECONDS, slowest_bytes_per_second=1.0
        )
        self.deliveries: dict[int, Delivery] = {}
        self.handed: list[Delivery] = []

    def start_at(self, position: int) -> None:
        """Begin somewhere else than at 0, for instance just before the counters wrap."""
        self._head = self._cursor = position

    def _enter(self, delivery: Delivery, identity: Identity, passed: Passed) -> None:
        super()._enter(delivery, identity, passed)
        self.deliveries[delivery.sequence] = delivery
        self.handed.append(delivery)

    def books(self) -> ConsumerBooks:
        """Everything that distinguishes two consumers, except the value of a running deadline."""
        table = self._table
        places = {id(passed): place for place, passed in enumerate(self._passed)}
        return ConsumerBooks(
            self._head,
            self._cursor,
            self._deadline is not None,
            tuple((passed.after, passed.released) for passed in self._passed),
            tuple((sequence, places.get(id(passed))) for sequence, passed in sorted(self._held.items())),
            tuple(
                (name, known.next_number, known.session) for name, known in sorted(table.identities.items())
            ),
            tuple(
                (number, session.identity.name, session.open, session.bound)
                for number, session in sorted(table.sessions.items())
            ),
            tuple(table.closing),
            tuple(table.free),
            tuple(self.deliveries[sequence] for sequence in sorted(self._held)),
        )

    def load(self, books: ConsumerBooks) -> None:
        """Continue from these books; a running lease began at 0."""
        self._head = books.head
        self._cursor = books.cursor
        self._deadline = LEASE_SECONDS if books.waits else None
        passed = [Passed(after, released) for after, released in books.passed]
        self._passed.extend(passed)
        self._held = {
            sequence: Passed(0, released=True) if place is None else passed[place]
            for sequence, place in books.held
        }
        table = self._table
        table.identities = {
            name: Identity(name, number, session) for name, number, session in books.identities
        }
        table.sessions = {
            number: Session(table.identities[name], is_open, bound)
            for number, name, is_open, bound in books.sessions
        }
        table.closing = list(books.closing)
        table.free = deque(books.free)
        self.deliveries = {delivery.sequence: delivery for delivery in books.deliveries}


class BlindConsumer(ModelConsumer):
    """Without hashes: what must hold by the order of the writes alone."""

    def _hash_payload(self, payload: Sequence[Bytes]) -> int:
        return 0


@frozen(cache_hash=True)
class Poll:
    """The consumer looks at its cursor; ``late``: every lease is over."""

    late: bool = False


@frozen
class Release:
    """The consumer gives a message back."""

    sequence: int


@frozen
class Open:
    """A producer connects."""

    identity: str


@frozen
class Close:
    """A connection is lost."""

    session: int


Call: TypeAlias = Poll | Release


@frozen(eq=False)
class HalfLoad:
    """A load of a slot of which the body was fetched and the commit word not yet."""

    local: "LocalConsumer"
    """Before the load."""
    body: int


@define(eq=False)
class LocalConsumer:
    """One local state of the consumer."""

    number: int
    books: ConsumerBooks
    call: Call | None
    outcomes: tuple[Any, ...]
    step: Step | None
    """``None``: between two calls."""
    handed: tuple[Delivery, ...]
    """What was handed over on the way into this state, since the last operation."""
    held: tuple[Delivery, ...]
    waits: bool
    cursor_word: int
    cursor: int
    """The sequence that comes next."""
    can_open: bool
    identities: dict[int, str]
    """Who has which open session."""
    half: HalfLoad | None = None
    next: dict[Any, "LocalConsumer"] = field(factory=dict)


@frozen
class Opened:
    """The consumer's answer to a producer that connects."""

    local: LocalConsumer
    session: int
    first_number: int


class ConsumerPrograms:
    """The local states of the consumer."""

    def __init__(self, make: Callable[[], ModelConsumer], cells: Cells) -> None:
        self._make = make
        self._cells = cells
        self._known: dict[Any, LocalConsumer] = {}
        self._opened: dict[tuple[LocalConsumer, str], Opened] = {}
        self._released: dict[tuple[LocalConsumer, int], tuple[LocalConsumer, tuple[Piece, ...]]] = {}
        self.all: list[LocalConsumer] = []

    def idle(self, consumer: ModelConsumer) -> LocalConsumer:
        """The local state of a consumer between two calls."""
        return self._intern(consumer, consumer.books(), None, (), None)

    def call(self, local: LocalConsumer, call: Call) -> LocalConsumer:
        """An idle consumer starts a program."""
        following = local.next.get(call)
        if following is None:
            following = local.next[call] = self._enter(local.books, call, ())
        return following

    def half(self, local: LocalConsumer, body: int) -> LocalConsumer:
        """The body of a slot has been fetched, its commit word follows later."""
        key = ("half", body)
        following = local.next.get(key)
        if following is None:
            assert isinstance(local.step, Fetch)
            step = Fetch(local.step.cells[:1], local.step.offset, local.step.length)
            following = evolve(
                local,
                number=len(self.all),
                step=step,
                handed=(),
                half=HalfLoad(local, body),
                next={},
            )
            local.next[key] = following
            self.all.append(following)
        return following

    def after(self, local: LocalConsumer, outcome: Any) -> LocalConsumer:
        """The local state behind an outcome (cell numbers, or ``None``)."""
        following = local.next.get(outcome)
        if following is None:
            value = outcome
            if isinstance(local.step, Fetch):
                step = local.step
                value = self._cells.image(step.offset, step.length, step.cells, outcome)
            following = self._enter(local.books, local.call, (*local.outcomes, value))
            local.next[outcome] = following
        return following

    def open(self, local: LocalConsumer, identity: str) -> Opened:
        """A producer connects while the consumer is idle or waits for a fence."""
        key = (local, identity)
        known = self._opened.get(key)
        if known is None:
            consumer, _ = self._replay(local.books, local.call, local.outcomes)
            session, first_number = consumer.open_session(identity)
            known = self._opened[key] = Opened(
                self._disturbed(local, Open(identity), consumer), session, first_number
            )
        return known

    def close(self, local: LocalConsumer, session: int) -> LocalConsumer:
        """A connection is lost while the consumer is idle or waits for a fence."""
        key = Close(session)
        following = local.next.get(key)
        if following is None:
            consumer, _ = self._replay(local.books, local.call, local.outcomes)
            consumer.close_session(session)
            following = local.next[key] = self._disturbed(local, key, consumer)
        return following

    def release_at_fence(
        self, local: LocalConsumer, sequence: int
    ) -> tuple[LocalConsumer, tuple[Piece, ...]]:
        """A message is released, in one go, while the consumer waits for a fence."""
        key = (local, sequence)
        known = self._released.get(key)
        if known is None:
            consumer, _ = self._replay(local.books, local.call, local.outcomes)
            pieces = tuple(self._drain(consumer.release(consumer.deliveries[sequence])))
            known = self._released[key] = self._disturbed(local, Release(sequence), consumer), pieces
        return known

    def _drain(self, program: Program[None]) -> Iterator[Piece]:
        for operation in program:
            step = as_step(operation, self._cells)
            assert isinstance(step, Put)
            yield step.piece

    def _disturbed(self, local: LocalConsumer, change: Any, consumer: ModelConsumer) -> LocalConsumer:
        if local.call is None:
            return self.idle(consumer)
        consumer.handed.clear()
        outcomes = (*local.outcomes, change)
        return self._intern(consumer, local.books, local.call, outcomes, local.step)

    def _enter(self, books: ConsumerBooks, call: Call | None, outcomes: tuple[Any, ...]) -> LocalConsumer:
        consumer, operation = self._replay(books, call, outcomes)
        if operation is None:
            return self._intern(consumer, consumer.books(), None, (), None)
        return self._intern(consumer, books, call, outcomes, as_step(operation, self._cells))

    def _replay(
        self, books: ConsumerBooks, call: Call | None, outcomes: tuple[Any, ...]
    ) -> tuple[ModelConsumer, Operation | None]:
        consumer = self._make()
        consumer.load(books)
        if call is None:
            return consumer, None
        program: Program[Any]
        if isinstance(call, Poll):
            program = consumer.poll(LATE if call.late else 0.0)
        else:
            program = consumer.release(consumer.deliveries[call.sequence])
        try:
            operation = next(program)
            for outcome in outcomes:
                consumer.handed.clear()
                if isinstance(outcome, Open):
                    consumer.open_session(outcome.identity)
                elif isinstance(outcome, Close):
                    consumer.close_session(outcome.session)
                elif isinstance(outcome, Release):
                    for _ in consumer.release(consumer.deliveries[outcome.sequence]):
                        pass
                else:
                    operation = program.send(outcome)
        except StopIteration:
            return consumer, None
        return consumer, operation

    def _intern(
        self,
        consumer: ModelConsumer,
        books: ConsumerBooks,
        call: Call | None,
        outcomes: tuple[Any, ...],
        step: Step | None,
    ) -> LocalConsumer:
        handed = tuple(consumer.handed)
        key = (books, call, outcomes, handed)
        local = self._known.get(key)
        if local is None:
            now = consumer.books()
            local = LocalConsumer(
                len(self.all),
                books,
                call,
                outcomes,
                step,
                handed,
                now.deliveries,
                now.waits,
                now.cursor,
                now.cursor >> GRANULE_BITS,
                bool(now.free),
                {number: name for number, name, is_open, _ in now.sessions if is_open},
            )
            self._known[key] = local
            self.all.append(local)
        return local


assert SLOT_BYTES == BODY_END + 8
