"""Which instance a message goes to, in a simulated set: as ``ResultDeliver`` chooses, and by what it knows.

Each node that sends counts what it has under way to each instance, and picks the one with the fewest, in turn
among equals. It knows nothing of what other nodes have sent there. The entry stages' sender is the proxy.
"""

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

PROXY = ""
"""The sender of a request's inputs."""


class _Actor(Protocol):
    @property
    def actor_id(self) -> int: ...


class _Instance(Protocol):
    @property
    def actor(self) -> _Actor: ...


InstanceT = TypeVar("InstanceT", bound=_Instance)


class Sender(Generic[InstanceT]):
    """What one node has under way to a stage's instances; those it has nothing to are not listed."""

    def __init__(self, stage: "Dispatch[InstanceT]") -> None:
        self._stage = stage
        self._counts: dict[int, int] = {}
        self._levels: list[OrderedDict[int, InstanceT]] = [OrderedDict()]
        self._busy = 0
        """A bit for each place among the live instances: whether anything is under way there."""
        self._place = 0

    def pick(self) -> InstanceT:
        """The instance with the fewest; of equals one that has not had a turn for long."""
        live = self._stage.live
        if len(self._counts) == len(live):
            lowest = next(level for level in self._levels[1:] if level)
            return next(iter(lowest.values()))
        self._place += 1
        self._place += self._busy_from(self._place % len(live), len(live))
        return live[self._place % len(live)]

    def _busy_from(self, place: int, count: int) -> int:
        """How many in a row, from a place on and round, have something under way."""
        ahead = _ones(self._busy >> place)
        return ahead if place + ahead < count else count - place + _ones(self._busy)

    def in_turn(self) -> InstanceT:
        """The next one, whatever is under way to it."""
        self._place += 1
        return self._stage.live[self._place % len(self._stage.live)]

    def change(self, instance: InstanceT, by: int) -> None:
        """One more or one fewer is under way to it; no error if it was forgotten."""
        key = instance.actor.actor_id
        before = self._counts.get(key, 0)
        if before:
            del self._levels[before][key]
        elif by < 0:
            return
        else:
            self._busy |= self._stage.bit(key)
        after = before + by
        if after:
            if len(self._levels) <= after:
                self._levels.append(OrderedDict())
            self._counts[key] = after
            self._levels[after][key] = instance
        else:
            del self._counts[key]
            self._busy ^= self._stage.bit(key)

    def forget(self, actor_id: int) -> None:
        """It takes nothing any more, and those behind it have moved up."""
        count = self._counts.pop(actor_id, 0)
        if count:
            del self._levels[count][actor_id]
        self._busy = sum(map(self._stage.bit, self._counts))


def _ones(bits: int) -> int:
    """How many of the lowest bits are set in a row."""
    return (~bits & (bits + 1)).bit_length() - 1


class Dispatch(Generic[InstanceT]):
    """The ready instances of a stage, and what each sender has under way to them."""

    def __init__(self) -> None:
        self.live: list[InstanceT] = []
        """In the order in which they became ready."""
        self._bits: dict[int, int] = {}
        """By actor: the bit of its place."""
        self._senders: dict[str, Sender[InstanceT]] = {}

    def add(self, instance: InstanceT) -> None:
        """It takes work from now on."""
        self._bits[instance.actor.actor_id] = 1 << len(self.live)
        self.live.append(instance)

    def remove(self, instance: InstanceT) -> None:
        """It takes none any more."""
        self.live.remove(instance)
        self._bits = {each.actor.actor_id: 1 << place for place, each in enumerate(self.live)}
        for sender in self._senders.values():
            sender.forget(instance.actor.actor_id)

    def bit(self, actor_id: int) -> int:
        """Of the place of a live instance."""
        return self._bits[actor_id]

    def meeting(self) -> InstanceT:
        """Where the inputs of a request's join are to meet: the proxy has nothing under way there itself."""
        return self.sender(PROXY).in_turn()

    def sender(self, name: str) -> Sender[InstanceT]:
        """One node's view of them."""
        found = self._senders.get(name)
        if found is None:
            found = self._senders[name] = Sender(self)
        return found
