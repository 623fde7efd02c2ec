"""What a state of the explored ring is made of, and what may be set.

A *global state* is a row of five numbers, each of a value that occurs in many states and is kept once
(``Table``): the memory, the local states of consumer and producers, what each session has posted and
what has not landed yet, and the checker's own bookkeeping.
"""

from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from attrs import frozen

from simulations.ring_cells import Group
from simulations.ring_consumer import BlindConsumer, ModelConsumer
from simulations.ring_producer import BlindProducer, ModelProducer
from transports.ring import Claims
from transports.ring.offers import Exports

NAMES: Final = "ABC"
DEAD: Final = -1
LOST: Final = -2
"""Alive, but its session is revoked: every operation fails, until it opens another one."""


@frozen
class Setting:
    """What is explored: how much of everything there is, and which faults may happen how often."""

    messages: tuple[tuple[int, ...], ...]
    """For every producer the granules of its messages; 0: one granule that is pulled."""
    slots: int = 2
    granules: int = 3
    crashes: int = 0
    suspicions: int = 0
    """Suspicions of a producer that is alive; a dead one is suspected freely."""
    cuts: int = 0
    """Connections lost by a producer that is alive."""
    damages: int = 0
    guarded: bool = False
    claims: bool = False
    """The owner executes claims."""
    hashes: bool = False
    """Without them the order of the writes alone must keep the promises."""
    deaths_noticed: bool = False
    """The wire may tell the consumer that a dead producer's connection is gone."""
    torn_reads: bool = False
    """Producers fetch tail and head one after the other, in either order."""
    torn_loads: bool = False
    """The consumer fetches a slot's body first and its commit word later (the harmful order)."""
    near_wrap: bool = False
    """Begin just before both counters wrap."""
    moduli: tuple[int, int] | None = None
    """Counters that wrap early; the model's clock then counts reservations."""
    spare_sessions: int = 1
    places: int = 1
    """What a producer may lend at a time."""
    held_pulled: int = 1
    """Pulled messages that the consumer may hold at a time."""
    checks_generation: bool = True
    """The wire compares the generation of what it has pulled with the offer's."""
    retires: bool = False
    """A session cannot be revoked: where one ends, the region's memory is replaced and all of them end."""
    retired_writes_land: bool = False
    """A mutant: late writes of a retired region reach the new one."""
    apart: bool = False
    """The payload ring is in another memory than the slots: what lands in one has no order with what lands in
    the other. A message has one granule more, for its seal."""
    claimant: type[Claims] = Claims
    exports: type[Exports] = Exports
    producer: type[ModelProducer] = BlindProducer
    consumer: type[ModelConsumer] = BlindConsumer


@frozen
class Violation:
    """A promise that was broken, and how."""

    promise: int
    what: str


class Live(NamedTuple):
    """A reservation between head and tail."""

    sequence: int
    session: int
    cells: int
    """A bit for every cell that belongs to it."""


class Ghost(NamedTuple):
    """Bookkeeping of the checker; no program sees it."""

    live: tuple[Live, ...]
    handed: tuple[int, ...]
    crashes: int
    suspicions: int
    cuts: int
    damages: int
    exported: tuple[int, ...]
    """How often each producer has lent something."""
    clock: int = 0


Memory: TypeAlias = tuple[int, ...]
Queue: TypeAlias = tuple[Group, ...] | None
"""Groups still to land; ``None``: the session is revoked (or was never opened)."""
State: TypeAlias = tuple[int, int, int, int, int]
"""Numbers of memory, consumer, producers, queues, ghost."""
Label: TypeAlias = tuple[str | int, ...]
Move: TypeAlias = tuple[Label, State | Violation]


Value = TypeVar("Value")


class Table(Generic[Value]):
    """Values that occur in many states, each kept once and known by its number."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self._numbers: dict[Value, int] = {}

    def number(self, value: Value) -> int:
        """The number of ``value``."""
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self.values)
            self.values.append(value)
        return number
