"""The producer as an automaton, for exploring every interleaving.

A program (``transports.ring``) is a deterministic function of the books it starts from and the
outcomes it is sent. So one *local state* is (books at the start, call, outcomes so far); it is
entered by running the product's code once, by replay, and remembered. Every further visit, from any
of the many global states in which this local state occurs, is a look-up. What is explored is
therefore the code that is shipped, at the price of a table.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from attrs import define, field, frozen

from simulations.ring_cells import HEAD_CELL, TAIL_CELL, Cells, Fetch, Lend, Step, as_step
from simulations.ring_exports import Place, books_of, offer_of
from transports.operations import Bytes, Pause
from transports.ring import Producer
from transports.ring.layout import GRANULE_BYTES
from transports.ring.offers import Exports, Lent


class ProducerBooks(NamedTuple):
    """What ``send`` depends on between two programs."""

    session: int
    tail: int
    head: int
    usable_until: float
    next_number: int
    lent: tuple[Lent, ...] = ()
    claims_due: int = 0


class ModelProducer(Producer):
    """The product's producer, whose books can be taken and given back."""

    hash_after_post_bytes = 1
    """Payload and slot are posted apart: one more place in which to die."""
    quiet_claims = 1
    """Back to swaps as soon as may be: more ways to go, in fewer states."""
    lent: tuple[Lent, ...] = ()
    """What this session lends."""

    def message_hash(self, content: bytes) -> int:
        """What an offer says of a message."""
        return self._hash_payload((content,))

    def books(self) -> ProducerBooks:
        """Everything on which ``send`` depends between two programs."""
        assert not self.in_doubt
        return ProducerBooks(
            self._session,
            self._tail,
            self._head,
            self._usable_until,
            self.next_number,
            self.lent,
            self._claims_due,
        )

    def load(self, books: ProducerBooks) -> None:
        """Continue from these books."""
        self._tail = books.tail
        self._head = books.head
        self._usable_until = books.usable_until
        self.next_number = books.next_number
        self.lent = books.lent
        self._claims_due = books.claims_due


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
        self,
        make: Callable[[int, int], ModelProducer],
        messages: Sequence[bytes],
        cells: Cells,
        *,
        pulled: Sequence[bool],
        exports: type[Exports],
        places: int,
    ) -> None:
        self._make = make
        self._messages = messages
        self._cells = cells
        self._pulled = pulled
        self._exports = exports
        self._places = places
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

    def lent(self, local: LocalProducer, place: Place) -> LocalProducer:
        """The next message is lent, and its offer is about to be sent."""
        following = local.next.get(place)
        if following is None:
            books = local.books
            length = len(self._messages[books.next_number])
            lent = (*books.lent, Lent(books.next_number, length, place.to_key()))
            following = local.next[place] = self._begin(books._replace(lent=lent), local.started)
        return following

    def looked(self, local: LocalProducer, delivered: int) -> tuple[LocalProducer, tuple[Place, ...]]:
        """The producer has read how much was delivered, between two programs; what it lends no longer."""
        exports = books_of(self._exports, self._places, local.books.lent)
        keys = exports.delivered(delivered)
        key = ("looked", delivered)
        following = local.next.get(key)
        if following is None:
            lent = tuple(each for each in local.books.lent if each.key not in keys)
            following = local.next[key] = self._begin(local.books._replace(lent=lent), local.started)
        return following, tuple(map(Place.from_key, keys))

    def _begin(self, books: ProducerBooks, now: float) -> LocalProducer:
        number = books.next_number
        if number == len(self._messages):
            done = ProducerBooks(books.session, 0, 0, 0.0, number, books.lent)
            return self._intern(done, 0.0, (), None, 0)
        if self._pulled[number] and not (books.lent and books.lent[-1].number == number):
            exports = books_of(self._exports, self._places, books.lent)
            step = Lend() if exports.has_room(len(self._messages[number])) else None
            return self._intern(books, now, (), step, 0)
        return self._enter(books, now, (), now)

    def _enter(
        self, books: ProducerBooks, started: float, outcomes: tuple[Any, ...], now: float
    ) -> LocalProducer:
        producer = self._make(books.session, 0)
        producer.load(books)
        message = self._messages[books.next_number]
        pull = self._pulled[books.next_number]
        if pull:
            message = offer_of(message, producer.message_hash(message), Place.from_key(books.lent[-1].key))
        program = producer.send((message,), kind=1, now=started, pull=pull)
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
        granules = -(-len(message) // GRANULE_BYTES) + self._cells.geometry.is_apart
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
