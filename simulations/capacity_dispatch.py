"""Which instance a message goes to, in a simulated set: as ``ResultDeliver`` chooses, and by what it knows.

Each node that sends counts what it has under way to each instance, and picks the one with the fewest, in turn
among equals. It knows nothing of what other nodes have sent there. The entry stages' sender is the proxy.
"""

from collections import OrderedDict
from collections.abc import Callable
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


class _Sender(Generic[InstanceT]):
    """What one node has under way to a stage's instances; those it has nothing to are not listed."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self._levels: list[OrderedDict[int, InstanceT]] = [OrderedDict()]
        self._place = 0

    def pick(self, live: list[InstanceT]) -> InstanceT:
        """The instance with the fewest; of equals one that has not had a turn for long."""
        if len(self.counts) < len(live):
            return self.in_turn(live, lambda instance: instance.actor.actor_id not in self.counts)
        lowest = next(level for level in self._levels[1:] if level)
        return next(iter(lowest.values()))

    def in_turn(self, live: list[InstanceT], suits: Callable[[InstanceT], bool]) -> InstanceT:
        """The next one that suits, of which there is one."""
        while True:
            self._place += 1
            instance = live[self._place % len(live)]
            if suits(instance):
                return instance

    def change(self, instance: InstanceT, by: int) -> None:
        """More or fewer are under way to it; no error if it was forgotten."""
        key = instance.actor.actor_id
        before = self.counts.get(key, 0)
        if before:
            del self._levels[before][key]
        elif by < 0:
            return
        after = before + by
        while len(self._levels) <= after:
            self._levels.append(OrderedDict())
        if after:
            self.counts[key] = after
            self._levels[after][key] = instance
        else:
            del self.counts[key]

    def forget(self, actor_id: int) -> None:
        """It takes nothing any more."""
        count = self.counts.pop(actor_id, 0)
        if count:
            del self._levels[count][actor_id]


class Dispatch(Generic[InstanceT]):
    """The ready instances of a stage, and what each sender has under way to them."""

    def __init__(self) -> None:
        self.live: list[InstanceT] = []
        """In the order in which they became ready."""
        self._senders: dict[str, _Sender[InstanceT]] = {}

    def add(self, instance: InstanceT) -> None:
        """It takes work from now on."""
        self.live.append(instance)

    def remove(self, instance: InstanceT) -> None:
        """It takes none any more."""
        self.live.remove(instance)
        for sender in self._senders.values():
            sender.forget(instance.actor.actor_id)

    def fewest(self, sender: str) -> InstanceT:
        """Where ``sender`` has the fewest messages under way."""
        return self._sender(sender).pick(self.live)

    def meeting(self) -> InstanceT:
        """Where the inputs of a request's join are to meet: the proxy has nothing under way there itself."""
        return self._sender(PROXY).in_turn(self.live, lambda _instance: True)

    def change(self, sender: str, instance: InstanceT, by: int) -> None:
        """A message of ``sender`` goes to an instance, or it has heard that one is done."""
        self._sender(sender).change(instance, by)

    def _sender(self, name: str) -> _Sender[InstanceT]:
        found = self._senders.get(name)
        if found is None:
            found = self._senders[name] = _Sender()
        return found
