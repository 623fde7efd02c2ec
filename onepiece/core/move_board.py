"""The board: where actors are and what they are worth, while ``moves`` is choosing.

It is filled once from what is known of the set, and each chosen move is carried out on it, so that the next
one is chosen as if that had taken place. What it promises: a device that two actors share is never given
or taken; memory is counted on every device; nothing but ``carry_out`` changes where actors are. It is fast
for ten thousand actors: the candidates of a giver for a taker are ranked once, and as nothing that happens
here makes one better, only the first of them is looked at again.
"""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from attrs import define, field, frozen

from onepiece.core.capacity import CapacityModel, Demand
from onepiece.core.inventory import DeviceKind

_BISECTIONS: Final = 30


@frozen
class DeviceInfo:
    """A device that may take actors."""

    node_id: str
    device: str
    kind: DeviceKind
    memory_bytes: int


@frozen
class PlacedActor:
    """An actor of the set; ``is_settled``: it serves, and is neither loading nor about to end."""

    actor_id: int
    stage: str
    node_id: str
    devices: tuple[str, ...]
    is_settled: bool = True


@frozen
class StageLimits:
    """What an operator wants of a stage whatever the load."""

    instances_min: int = 1
    instances_max: int | None = None
    per_node_max: int | None = None

    def __attrs_post_init__(self) -> None:
        assert self.instances_min >= 1
        assert self.instances_max is None or self.instances_max >= self.instances_min
        assert self.per_node_max is None or self.per_node_max >= 1

    def clamped(self, instances: int) -> int:
        """The nearest number of instances that is allowed."""
        least = max(instances, self.instances_min)
        return least if self.instances_max is None else min(least, self.instances_max)


@frozen
class Load:
    """What was offered in a window of ``seconds``."""

    demands: tuple[Demand, ...]
    seconds: float


@frozen
class Work:
    """What the load asks of each stage, and how sure that is."""

    total: Mapping[str, float]
    """How many workers of a stage are busy."""
    rates: Mapping[str, float]
    """Stage tasks a second."""
    parts: Mapping[str, Sequence[float]]
    """Each demand's share of a stage's work."""
    counted: Sequence[float]
    """How many requests there were of each demand."""

    @classmethod
    def of(cls, model: CapacityModel, load: Load) -> "Work":
        """What this load asks."""
        demands = load.demands
        each = [model.work([demand]) for demand in demands]
        total = model.work(demands)
        rates: dict[str, float] = {}
        for demand in demands:
            for stage, visits in model.shape(demand.workflow).visits.items():
                rates[stage] = rates.get(stage, 0.0) + demand.rate * visits
        parts = {stage: [work.get(stage, 0.0) / total[stage] for work in each] for stage in total}
        return cls(total, rates, parts, [demand.rate * load.seconds for demand in demands])

    def equal_requests(self, stage: str) -> float:
        """How many requests that all ask the same of the stage would vary as much as these do."""
        shares = zip(self.parts.get(stage, ()), self.counted, strict=False)
        relative_variance = sum(share * share / count for share, count in shares if count > 0)
        return 1 / relative_variance if relative_variance else 0.0

    def chance(self, stage: str, other: str) -> float:
        """How far chance alone moves the ratio of two stages' work: its relative standard deviation.

        Requests come by themselves, so that of n about the root of n more or less come. What asks the same of
        both stages does not change their ratio.
        """
        none = [0.0] * len(self.counted)
        pairs = zip(self.parts.get(stage, none), self.parts.get(other, none), self.counted, strict=True)
        return math.sqrt(sum((one - two) ** 2 / count for one, two, count in pairs if count > 0))


Place: TypeAlias = tuple[str, tuple[str, ...], tuple[int, ...]]
"""Node, devices, and the actors that are there now."""


Key: TypeAlias = tuple[str, str]
"""Node and device."""


@define(eq=False)
class Board:
    """Who is where, while moves are being chosen."""

    model: CapacityModel
    limits: Mapping[str, StageLimits]
    devices: dict[Key, DeviceInfo]
    taken_bytes: dict[Key, int] = field(factory=dict)
    guests: dict[Key, int] = field(factory=dict)
    """How many actors are on a device."""
    idle: dict[str, list[str]] = field(factory=dict)
    """Devices that nobody uses, by node."""
    works: list["Work"] = field(factory=list)
    """From the window that decides to the shortest one."""
    movable: dict[str, dict[int, PlacedActor]] = field(factory=dict)
    """By stage: the actors that have their devices for themselves."""
    counts: dict[str, int] = field(factory=dict)
    on_node: dict[Key, int] = field(factory=dict)
    """How many instances of a stage are on a node, by node and stage."""
    queues: dict[tuple[str, str], list[tuple[int, int, int, int]]] = field(factory=dict)
    """By taker and giver: its actors, with their ranks when they were last looked at."""
    gains: dict[str, float] = field(factory=dict)
    """What ``reachable_gain`` has found by the window that decides."""
    gave: set[str] = field(factory=set)
    gives: set[str] = field(factory=set)
    """Those that give in the decision that is being made."""
    took: set[str] = field(factory=set)

    @classmethod
    def of(
        cls,
        model: CapacityModel,
        devices: Iterable[DeviceInfo],
        actors: Iterable[PlacedActor],
        limits: Mapping[str, StageLimits],
    ) -> "Board":
        """The set as it is."""
        known = {(each.node_id, each.device): each for each in devices}
        board = cls(model, limits, known)
        board.counts = dict.fromkeys(model.stages, 0)
        board.movable = {stage: {} for stage in model.stages}
        taken, guests, on_node = board.taken_bytes, board.guests, board.on_node
        ours = [actor for actor in actors if board.admit(actor)]
        for actor in ours:
            stage, node_id = actor.stage, actor.node_id
            need = model.stages[stage].memory_bytes
            for device in actor.devices:
                taken[node_id, device] = taken.get((node_id, device), 0) + need
            board.counts[stage] += 1
            on_node[node_id, stage] = on_node.get((node_id, stage), 0) + 1
            keys = [(node_id, device) for device in actor.devices]
            if actor.is_settled and all(guests[key] == 1 and key in known for key in keys):
                board.movable[stage][actor.actor_id] = actor
        for node_id, device in sorted(known.keys() - guests.keys()):
            board.idle.setdefault(node_id, []).append(device)
        return board

    def begin(self, gave: Iterable[str], took: Iterable[str]) -> None:
        """Nothing has been chosen yet, and of these stages is known what they have given or taken lately."""
        self.gave, self.took = set(gave), set(took)
        self.gives.clear()
        self.works.clear()

    def admit(self, actor: PlacedActor) -> bool:
        """Count it where it is; says whether its stage is known."""
        for device in actor.devices:
            key = (actor.node_id, device)
            self.guests[key] = self.guests.get(key, 0) + 1
        return actor.stage in self.model.stages

    def limit(self, stage: str) -> StageLimits:
        """What the operator wants of it."""
        return self.limits.get(stage) or StageLimits()

    @property
    def work(self) -> "Work":
        """That of the window that decides."""
        return self.works[0]

    def does_harm(self, stage: str, donor: str) -> bool:
        """Whether by any window the busier of the two would not be less busy."""
        return any(
            max(self.used(stage, 1, work), self.used(donor, -1, work)) >= self.used(stage, 0, work)
            for work in self.works
        )

    def reachable_gain(self, stage: str, donors: Sequence[str]) -> float:
        """By what share the stage was too busy, if the donors gave all that is good for the busiest of all.

        That is the gain of many moves together: of a hundred instances one more makes little difference.
        """
        if stage in self.gains:
            return self.gains[stage]
        busy = self.used(stage)
        low, high = 0.0, busy
        if math.isinf(busy) or busy == 0:
            return math.inf
        for _ in range(_BISECTIONS):
            level = (low + high) / 2
            need = math.ceil(self._instances(stage, level) - self.counts[stage])
            if sum(self._spare(donor, level) for donor in donors) >= need:
                high = level
            else:
                low = level
        self.gains[stage] = busy / high - 1
        return self.gains[stage]

    def _instances(self, stage: str, level: float) -> float:
        """How many are just so busy."""
        return self.work.total.get(stage, 0.0) / (level * self.model.stages[stage].concurrency)

    def _spare(self, donor: str, level: float) -> int:
        """How many it can give without being busier than ``level``."""
        least = max(self._instances(donor, level), self.limit(donor).instances_min)
        return max(0, min(math.floor(self.counts[donor] - least), len(self.movable[donor])))

    def used(self, stage: str, more: int = 0, by: "Work | None" = None) -> float:
        """How busy the stage is, or would be with ``more`` instances."""
        work = (by or self.work).total.get(stage, 0.0)
        workers = (self.counts[stage] + more) * self.model.stages[stage].concurrency
        return work / workers if workers > 0 else float("inf") if work else 0.0

    def neediest(self, blocked: set[str], bound: float) -> str | None:
        """The busiest stage that is busier than ``bound``; first of all one below its pinned minimum."""
        needs = []
        for stage, count in self.counts.items():
            limit = self.limit(stage)
            if stage in blocked or (limit.instances_max is not None and count >= limit.instances_max):
                continue
            is_below = count < limit.instances_min and (stage in self.work.total or stage in self.limits)
            if is_below or self.used(stage) > bound:
                needs.append((is_below, self.used(stage), stage))
        return max(needs)[2] if needs else None

    def idle_place(self, stage: str) -> Place | None:
        """Idle devices of one node for an instance; of the node with the fewest of the stage."""
        profile = self.model.stages[stage]
        best: tuple[int, str] | None = None
        for node_id, names in self.idle.items():
            if len(names) < profile.devices or not self._is_allowed(stage, node_id):
                continue
            fitting = sum(self._is_fit(stage, node_id, name) for name in names)
            rank = (self.on_node.get((node_id, stage), 0), node_id)
            if fitting >= profile.devices and (best is None or rank < best):
                best = rank
        if best is None:
            return None
        fit = [name for name in self.idle[best[1]] if self._is_fit(stage, best[1], name)]
        return best[1], tuple(fit[: profile.devices]), ()

    def donors(self, stage: str) -> list[str]:
        """Stages that may give, from the one that is least busy once it has given."""
        able = [
            donor
            for donor, movable in self.movable.items()
            if donor != stage
            and movable
            and donor not in self.took
            and self.counts[donor] > self.limit(donor).instances_min
        ]
        return sorted(able, key=lambda donor: (self.used(donor, -1), donor))

    def donor_place(self, stage: str, donor: str) -> Place | None:
        """An actor of the donor whose devices do; of the node with the fewest of the stage, the newest."""
        wanted, movable = self.model.stages[stage].devices, self.movable[donor]
        queue = self.queues.get((stage, donor))
        if queue is None:
            queue = self.queues[stage, donor] = [
                (*self._rank(actor, stage), actor_id) for actor_id, actor in movable.items()
            ]
            heapq.heapify(queue)
        while queue:
            actor_id = queue[0][-1]
            actor = movable.get(actor_id)
            fit = [] if actor is None else self._fit_devices(stage, actor)
            if actor is None or len(fit) < wanted:
                heapq.heappop(queue)
            elif (now := (*self._rank(actor, stage), actor_id)) != queue[0]:
                heapq.heapreplace(queue, now)
            else:
                return actor.node_id, tuple(fit[:wanted]), (actor_id,)
        return None

    def _fit_devices(self, stage: str, actor: PlacedActor) -> list[str]:
        """The actor's devices on which the stage could be in its place."""
        if not self._is_allowed(stage, actor.node_id):
            return []
        return [name for name in actor.devices if self._is_fit(stage, actor.node_id, name)]

    def _rank(self, actor: PlacedActor, stage: str) -> tuple[int, int, int]:
        """Where an actor stands among those that could make room for ``stage``."""
        node_id, on_node = actor.node_id, self.on_node
        return on_node.get((node_id, stage), 0), -on_node[node_id, actor.stage], -actor.actor_id

    def fits_beside(self, stage: str, node_id: str, devices: Iterable[str]) -> bool:
        """Whether the memory is enough for it and for what is there."""
        need = self.model.stages[stage].memory_bytes
        return all(
            self.devices[node_id, device].memory_bytes - self.taken_bytes.get((node_id, device), 0) >= need
            for device in devices
        )

    def carry_out(self, stage: str, place: Place) -> None:
        """Count an instance of the stage as being there, in place of who was."""
        node_id, devices, replaces = place
        self.counts[stage] += 1
        self.took.add(stage)
        self.on_node[node_id, stage] = self.on_node.get((node_id, stage), 0) + 1
        if not replaces:
            self.idle[node_id] = [name for name in self.idle[node_id] if name not in devices]
        for actor_id in replaces:
            donor = next(each for each, actors in self.movable.items() if actor_id in actors)
            gone = self.movable[donor].pop(actor_id)
            self.counts[donor] -= 1
            self.gives.add(donor)
            self.on_node[gone.node_id, donor] -= 1
            for device in gone.devices:
                self.taken_bytes[gone.node_id, device] -= self.model.stages[donor].memory_bytes
        need = self.model.stages[stage].memory_bytes
        for device in devices:
            self.taken_bytes[node_id, device] = self.taken_bytes.get((node_id, device), 0) + need

    def _is_allowed(self, stage: str, node_id: str) -> bool:
        bound = self.limit(stage).per_node_max
        return bound is None or self.on_node.get((node_id, stage), 0) < bound

    def _is_fit(self, stage: str, node_id: str, device: str) -> bool:
        """Of the kind, and with the memory once it is alone there."""
        profile, known = self.model.stages[stage], self.devices.get((node_id, device))
        return known is not None and known.kind is profile.kind and known.memory_bytes >= profile.memory_bytes


@define(eq=False)
class KeptBoard:
    """The board of a set, which is filled again only once something has changed there."""

    _board: Board | None = None

    def of(
        self,
        model: CapacityModel,
        devices: Iterable[DeviceInfo],
        actors: Iterable[PlacedActor],
        limits: Mapping[str, StageLimits],
    ) -> Board:
        """The set as it is."""
        if self._board is None:
            self._board = Board.of(model, devices, actors, limits)
        return self._board

    def clear(self) -> None:
        """The set has changed, or moves were carried out on the board."""
        self._board = None
