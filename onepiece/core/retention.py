"""What one node retains of outputs it has computed, until the stages that take them are done.

An output is *held* from the moment it is computed until it is released: by the actor that took it,
once that one has handed on its own output (``Consumed``), or by the owner, once the request has ended.
While it is held it can be sent again, to another actor, as often as its owner asks.

Held bytes are bounded twice. Beyond ``memory_bytes_max`` the oldest outputs are *spilled* to disk, and stages
take no new work while that is behind; beyond ``bytes_max`` in all they take none either (``has_room`` is
false): back-pressure, never a drop. Where the disk takes nothing only ``bytes_max`` counts. An output that
is complete is always taken in, even past the bound, since refusing it would lose what was computed; so the
bound may be exceeded by what the workers of one node compute at once.

::

    (computed) --hold--> in memory --too much--> being spilled --written--> on disk
                             |                       |                        |
                             +---- Consumed, request ended: released ---------+
"""

import enum
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeAlias, TypeVar

from attrs import define, field, frozen

Message = TypeVar("Message")


@frozen
class OutputKey:
    """One output on its way along one edge."""

    uid: str
    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.uid}/{self.source}/{self.target}"


class Place(enum.Enum):
    """Where a held output lies."""

    MEMORY = "memory"
    SPILLING = "spilling"
    DISK = "disk"


@frozen
class Spill:
    """Write the output to disk, then say ``spilled`` (or ``spill_failed``)."""

    key: OutputKey


@frozen
class Unspill:
    """Remove the output from the disk: nobody needs it any more."""

    key: OutputKey


RetentionEffect: TypeAlias = Spill | Unspill


@define
class _Held(Generic[Message]):
    message: Message | None
    length: int
    place: Place = Place.MEMORY


@define
class RetentionTable(Generic[Message]):
    """The outputs held by one node.

    Args:
        memory_bytes_max: Beyond it outputs are spilled.
        bytes_max: Beyond it no new work is taken.
    """

    memory_bytes_max: int
    bytes_max: int
    memory_bytes: int = 0
    disk_bytes: int = 0
    spilling_bytes: int = 0
    """Those of ``memory_bytes`` that are being written to disk."""
    _held: "OrderedDict[OutputKey, _Held[Message]]" = field(factory=OrderedDict)
    _by_uid: dict[str, set[OutputKey]] = field(factory=dict)

    @property
    def held_bytes(self) -> int:
        """Bytes of all outputs held."""
        return self.memory_bytes + self.disk_bytes

    @property
    def has_room(self) -> bool:
        """Whether stages may take new work."""
        waits_for_disk = self.memory_bytes > self.memory_bytes_max and self.spilling_bytes > 0
        return self.held_bytes < self.bytes_max and not waits_for_disk

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, key: OutputKey, message: Message, length: int) -> list[RetentionEffect]:
        """Retain an output; one that is computed a second time replaces the first."""
        effects = self.release(key)
        self._held[key] = _Held(message, length)
        self._by_uid.setdefault(key.uid, set()).add(key)
        self.memory_bytes += length
        return [*effects, *self._spills()]

    def _spills(self) -> list[RetentionEffect]:
        effects: list[RetentionEffect] = []
        excess = self.memory_bytes - self.memory_bytes_max
        if excess <= 0:
            return effects
        excess -= self.spilling_bytes
        for key, held in self._held.items():
            if excess <= 0:
                break
            if held.place is Place.MEMORY:
                held.place = Place.SPILLING
                self.spilling_bytes += held.length
                excess -= held.length
                effects.append(Spill(key))
        return effects

    def spilled(self, key: OutputKey) -> list[RetentionEffect]:
        """The output is on disk; if it was released meanwhile it is to be removed there."""
        held = self._held.get(key)
        if held is None:
            return [Unspill(key)]
        if held.place is not Place.SPILLING:
            return []  # it was computed again meanwhile; what was written will be written over
        held.place = Place.DISK
        held.message = None
        self.memory_bytes -= held.length
        self.spilling_bytes -= held.length
        self.disk_bytes += held.length
        return []

    def spill_failed(self, key: OutputKey) -> None:
        """The disk did not take it: it stays in memory, where it counts against the bound."""
        held = self._held.get(key)
        if held is not None and held.place is Place.SPILLING:
            held.place = Place.MEMORY
            self.spilling_bytes -= held.length

    def exchange(self, key: OutputKey, old: Message, new: Message) -> None:
        """The same bytes lie elsewhere now; nothing if ``old`` is not what is held in memory."""
        held = self._held.get(key)
        if held is not None and held.message is old:
            held.message = new

    def find(self, key: OutputKey) -> "tuple[Place, Message | None] | None":
        """Where the output lies, and the message if it is in memory; None if it is not held."""
        held = self._held.get(key)
        return None if held is None else (held.place, held.message)

    def release(self, key: OutputKey) -> list[RetentionEffect]:
        """The output is needed no longer; no error if it is not held."""
        held = self._held.pop(key, None)
        if held is None:
            return []
        keys = self._by_uid[key.uid]
        keys.discard(key)
        if not keys:
            del self._by_uid[key.uid]
        if held.place is Place.DISK:
            self.disk_bytes -= held.length
            return [Unspill(key)]
        self.memory_bytes -= held.length
        if held.place is Place.SPILLING:
            self.spilling_bytes -= held.length
        return []

    def release_request(self, uid: str) -> list[RetentionEffect]:
        """Nothing of the request is needed any longer."""
        effects: list[RetentionEffect] = []
        for key in list(self._by_uid.get(uid, ())):
            effects += self.release(key)
        return effects

    def sources_of(self, uid: str) -> tuple[str, ...]:
        """The graph nodes of a request whose outputs are held."""
        return tuple(sorted({key.source for key in self._by_uid.get(uid, ())}))

    def entries(self) -> Iterator[tuple[OutputKey, Place, int]]:
        """What is held, where, and its bytes, oldest first."""
        for key, held in self._held.items():
            yield key, held.place, held.length

    def keys(self) -> tuple[OutputKey, ...]:
        """What is held, oldest first."""
        return tuple(self._held)

    def uids(self) -> tuple[str, ...]:
        """The requests with something held."""
        return tuple(self._by_uid)

    def keys_of(self, uid: str) -> tuple[OutputKey, ...]:
        """What is held of one request."""
        return tuple(self._by_uid.get(uid, ()))

    def check_invariants(self) -> None:
        """The sums are those of what is held."""
        on_disk = sum(held.length for held in self._held.values() if held.place is Place.DISK)
        in_all = sum(held.length for held in self._held.values())
        assert self.disk_bytes == on_disk
        assert self.memory_bytes == in_all - on_disk
        spilling = sum(held.length for held in self._held.values() if held.place is Place.SPILLING)
        assert self.spilling_bytes == spilling
        assert {key for keys in self._by_uid.values() for key in keys} == set(self._held)
        assert all((held.message is None) == (held.place is Place.DISK) for held in self._held.values())
