"""Machines: decisions without I/O, and the story of how they came about.

A machine is a value that is told what happened and answers what to do::

    event, now  ->  handle  ->  [effect, effect, ...]

It reads no clock, draws no randomness, opens nothing and logs nothing; a driver waits for the next
event or for ``next_deadline``, calls ``handle``, and carries the effects out in their order. So a
test needs neither sleep nor mock, and a night's fault can be replayed in a debugger.

What a machine promises:

* ``now`` never runs backwards; the same events at the same moments give the same effects;
* states change only along its table; a pair that is not in the table is our own bug and raises
  ``InvalidTransition``, whose message is the story;
* ``check_invariants`` holds after each event that changed something, in production too;
* its ``story`` holds the latest events and effects, at most ``story_entries_max`` of them, together
  with a copy of the machine from before the first of these: it can always be replayed.

For the copies to be cheap and right, a machine's fields are numbers, frozen objects, further
machines, or dicts, lists and sets of frozen objects, never objects that change in place.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from typing import Any, Final, Generic, Self, TypeVar

import attrs
from attrs import define, field, frozen

EventT = TypeVar("EventT")
EffectT = TypeVar("EffectT")
StateT = TypeVar("StateT", bound=Hashable)
TriggerT = TypeVar("TriggerT", bound=Hashable)

_LINE_CHARACTERS: Final = 240


class InvalidTransition(AssertionError):  # noqa: N818 - named by what happened, as in onepiece.errors
    """A machine met an event that its table does not know in this state: a bug of ours.

    The message ends with the machine's story.
    """


class StoryDiffers(AssertionError):  # noqa: N818 - named by what happened, as in onepiece.errors
    """A replay did not give the effects that were recorded: the machine depends on something hidden."""


@frozen
class Entry(Generic[EventT, EffectT]):
    """One call of ``handle``."""

    now: float
    event: EventT
    effects: tuple[EffectT, ...]

    def lines(self) -> list[str]:
        """The event, and indented below it its effects."""
        return [f"{self.now:.3f} {_shortened(self.event)}"] + [f"    {_shortened(e)}" for e in self.effects]


@define(eq=False)
class Story(Generic[EventT, EffectT]):
    """The latest entries of one machine, in two halves so that forgetting is cheap.

    Each half begins with a copy of the machine; when the younger one is full, the older one is
    forgotten.
    """

    entries_max: int
    _older: list[Entry[EventT, EffectT]] = field(factory=list)
    _younger: list[Entry[EventT, EffectT]] = field(factory=list)
    _older_opening: "Machine[EventT, EffectT] | None" = None
    _younger_opening: "Machine[EventT, EffectT] | None" = None

    def prepare(self, machine: "Machine[EventT, EffectT]") -> None:
        """Make room for one more entry of ``machine``."""
        if self._younger_opening is None:
            self._younger_opening = machine.copy()
        elif len(self._younger) >= max(1, self.entries_max // 2):
            self._older, self._older_opening = self._younger, self._younger_opening
            self._younger, self._younger_opening = [], machine.copy()

    def append(self, entry: Entry[EventT, EffectT]) -> None:
        """Add what has just happened."""
        self._younger.append(entry)

    @property
    def entries(self) -> tuple[Entry[EventT, EffectT], ...]:
        """Oldest first."""
        return (*self._older, *self._younger)

    def replay(self) -> "Machine[EventT, EffectT]":
        """Let a copy of the machine live through the story again, and return it.

        Raises:
            StoryDiffers: The effects are not those that were recorded.
        """
        opening = self._older_opening or self._younger_opening
        if opening is None:
            raise ValueError("nothing has happened to this machine yet; there is no story to replay")
        machine = opening.copy()
        for entry in self.entries:
            effects = tuple(machine.handle(entry.event, entry.now))
            if effects != entry.effects:
                raise StoryDiffers(
                    f"at {entry.now!r} {_shortened(entry.event)} gave {effects!r}, recorded {entry.effects!r}"
                )
        return machine

    def __str__(self) -> str:
        return "\n".join(line for entry in self.entries for line in entry.lines())


@define(kw_only=True, eq=False)
class Machine(ABC, Generic[EventT, EffectT]):
    """A pure core; see the module's text for what subclasses promise."""

    story_entries_max: int = 256
    _now: float = field(default=float("-inf"), init=False)
    _story: Story[EventT, EffectT] | None = field(default=None, init=False, repr=False)

    @abstractmethod
    def _react(self, event: EventT, now: float) -> list[EffectT]:
        """Change the state and say what is to be done."""

    @abstractmethod
    def next_deadline(self, now: float) -> float | None:
        """When the machine wants to be called at the latest (with its tick); None: only on events."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Assert what must hold between two events."""

    @property
    def story(self) -> Story[EventT, EffectT]:
        """The latest events and effects."""
        if self._story is None:
            self._story = Story(self.story_entries_max)
        return self._story

    def handle(self, event: EventT, now: float) -> list[EffectT]:
        """Tell the machine what happened.

        Args:
            event: What happened.
            now: When, in seconds of the driver's monotonic clock; not before the last call's.

        Returns:
            What is to be done, in this order.

        Raises:
            InvalidTransition: The event does not fit the state; the machine must not be used further.
        """
        assert now >= self._now, f"time ran backwards, from {self._now!r} to {now!r}"
        self.story.prepare(self)
        self._now = now
        try:
            effects = self._react(event, now)
        except InvalidTransition as error:
            raise InvalidTransition(
                f"{error}\nat {now:.3f} {_shortened(event)}\nafter\n{self.story}"
            ) from error
        self.story.append(Entry(now, event, tuple(effects)))
        if self._has_changed(event, effects):
            self.check_invariants()
        return effects

    def _has_changed(self, event: EventT, effects: list[EffectT]) -> bool:
        """Whether ``event`` may have changed what the invariants are about.

        They are linear in what the machine holds; a machine that mostly hears that nothing is new
        overrides this.
        """
        return True

    def copy(self) -> Self:
        """A machine in the same state, with a story of its own that is still empty."""
        twin = object.__new__(type(self))
        for attribute in attrs.fields(type(self)):
            value = None if attribute.name == "_story" else _copied(getattr(self, attribute.name))
            object.__setattr__(twin, attribute.name, value)
        return twin


def follow(table: Mapping[tuple[StateT, TriggerT], StateT], state: StateT, trigger: TriggerT) -> StateT:
    """The state that ``trigger`` leads to from ``state``.

    Raises:
        InvalidTransition: The table has no such pair.
    """
    try:
        return table[state, trigger]
    except KeyError:
        raise InvalidTransition(f"no transition from {state!r} by {trigger!r}") from None


def _copied(value: Any) -> Any:
    if isinstance(value, Machine):
        return value.copy()
    if isinstance(value, dict | list | set):
        return value.copy()
    return value


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LINE_CHARACTERS else f"{text[: _LINE_CHARACTERS - 3]}..."
