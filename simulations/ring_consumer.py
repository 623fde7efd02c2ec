"""The consumer as an automaton, for exploring every interleaving.

A program (``transports.ring``) is a deterministic function of the books it starts from and the
outcomes it is sent. So one *local state* is (books at the start, call, outcomes so far); it is
entered by running the product's code once, by replay, and remembered. Every further visit, from any
of the many global states in which this local state occurs, is a look-up. What is explored is
therefore the code that is shipped, at the price of a table.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from attrs import define, evolve, field, frozen

from simulations.ring_cells import (
    GENERATION,
    LATE,
    LEASE_SECONDS,
    Cells,
    Fetch,
    Piece,
    Put,
    Step,
    Take,
    as_step,
)
from transports.operations import (
    Bytes,
    Operation,
    Program,
)
from transports.ring import Consumer, Delivery, Geometry
from transports.ring.consumer import Passed
from transports.ring.layout import GRANULE_BITS
from transports.ring.sessions import Identity, Session


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

    def __init__(self, geometry: Geometry, pulled_bytes_max: int = 0) -> None:
        super().__init__(
            geometry,
            generation=GENERATION,
            lease_seconds=LEASE_SECONDS,
            slowest_bytes_per_second=1.0,
            pulled_bytes_max=pulled_bytes_max,
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
        self._pulled_bytes = sum(
            delivery.length for delivery in books.deliveries if delivery.content is not None
        )


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


@frozen
class Glimpse:
    """The granule of an export was read, its header not yet."""

    number: int


@frozen
class Pulled:
    """The outcome of a pull."""

    content: bytes | None


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

    def glimpse(self, local: LocalConsumer, number: int) -> LocalConsumer:
        """The granule of what is pulled has been read; the header follows later."""
        assert isinstance(local.step, Take)
        key = Glimpse(number)
        following = local.next.get(key)
        if following is None:
            consumer, _ = self._replay(local.books, local.call, local.outcomes)
            consumer.handed.clear()
            step = Take(local.step.key, number)
            following = local.next[key] = self._intern(
                consumer, local.books, local.call, (*local.outcomes, key), step
            )
        return following

    def pulled(self, local: LocalConsumer, content: bytes | None) -> LocalConsumer:
        """A pull is over."""
        key = Pulled(content)
        following = local.next.get(key)
        if following is None:
            following = self._enter(local.books, local.call, (*local.outcomes, key))
            local.next[key] = following
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

    def carry_over(self, local: LocalConsumer) -> Program[None]:
        """Begin to take over what is whole into other memory; changes nothing that is written down."""
        consumer, _ = self._replay(local.books, local.call, local.outcomes)
        return consumer.carry_over()

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
                elif isinstance(outcome, Glimpse):
                    pass
                elif isinstance(outcome, Pulled):
                    operation = program.send(outcome.content)
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
