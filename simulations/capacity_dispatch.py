"""Which instance a message goes to, in a simulated set: as ``RouteTable.pick`` chooses, and by what it knows.

Each node that sends counts what it has under way to each instance, and picks the one with the fewest, of
equals the one it picked longest ago. It knows nothing of what other nodes have sent there. The entry stages'
sender is the proxy. The product looks at all instances for each message; here it is the same choice among
thousands of instances for millions of messages, so what is equal lies in heaps.
"""

import heapq
from typing import Final, Generic, Protocol, TypeVar

from onepiece.core.routing import first_of

_STALE: Final = 4
"""How many entries for each instance a level may have before it is cleared of those that do not hold."""
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
    """What one node has under way to a stage's instances."""

    def __init__(self, stage: "Dispatch[InstanceT]", name: str) -> None:
        self._stage = stage
        self.name: Final = name
        self._first = first_of(name)
        self._counts: dict[int, int] = {}
        """Of those that it has picked."""
        self._picked: dict[int, int] = {}
        self._picks = 0
        self._known = 0
        """A bit for each place among the live instances: whether it was picked already."""
        self._levels: list[list[tuple[int, int, InstanceT]]] = [[]]
        """By how much is under way: when they were picked. What holds no longer is left out when met."""
        self._lowest = 0
        """All levels below it are empty."""

    def pick(self) -> InstanceT:
        """The instance with the fewest; of equals the one picked longest ago, or never."""
        live = self._stage.live
        if len(self._counts) < len(live):
            begin = self._first % len(live)
            return live[(begin + self._known_from(begin, len(live))) % len(live)]
        for count in range(self._lowest, len(self._levels)):
            level = self._levels[count]
            self._lowest = count
            while level:
                if self._is_so(count, *level[0]):
                    return level[0][-1]
                heapq.heappop(level)
        raise AssertionError("each that is live was picked, and is in the level of its count")

    def _known_from(self, place: int, count: int) -> int:
        """How many in a row, from a place on and round, were picked already."""
        ahead = _ones(self._known >> place)
        return ahead if place + ahead < count else count - place + _ones(self._known)

    def picked(self, instance: InstanceT) -> None:
        """It is the latest one now; a message goes there."""
        key = instance.actor.actor_id
        if key not in self._counts:
            self._known |= self._stage.bit(key)
        self._picks += 1
        self._picked[key] = self._picks
        self._put(instance, self._counts.get(key, 0) + 1)

    def done(self, instance: InstanceT) -> None:
        """One message is not under way any more; no error if the instance was forgotten."""
        count = self._counts.get(instance.actor.actor_id, 0)
        if count:
            self._put(instance, count - 1)

    def _put(self, instance: InstanceT, count: int) -> None:
        key = instance.actor.actor_id
        self._counts[key] = count
        while len(self._levels) <= count:
            self._levels.append([])
        self._lowest = min(self._lowest, count)
        level = self._levels[count]
        heapq.heappush(level, (self._picked[key], key, instance))
        if len(level) > _STALE * len(self._counts):
            level[:] = [entry for entry in level if self._is_so(count, *entry)]
            heapq.heapify(level)

    def _is_so(self, count: int, picked: int, key: int, _instance: InstanceT) -> bool:
        """Whether an entry still says how it is."""
        return self._counts.get(key) == count and self._picked[key] == picked

    def forget(self, actor_id: int) -> None:
        """It takes nothing any more, and those behind it have moved up."""
        self._counts.pop(actor_id, None)
        self._picked.pop(actor_id, None)
        self._known = sum(map(self._stage.bit, self._counts))


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
        """Where the inputs of a request's join are to meet: for the proxy that counts as one message."""
        proxy = self.sender(PROXY)
        instance = proxy.pick()
        proxy.picked(instance)
        return instance

    def sender(self, name: str) -> Sender[InstanceT]:
        """One node's view of them."""
        found = self._senders.get(name)
        if found is None:
            found = self._senders[name] = Sender(self, name)
        return found
