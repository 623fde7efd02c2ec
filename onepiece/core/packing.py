"""Packing: on which devices new instances of stages go.

A pure function of what is wanted and what room there is. What it promises:

* Memory is never exceeded, on no device.
* What runs already stays where it is; only new instances are placed.
* A stage that wants a GPU goes on one. Where *no* node has any GPU the caller may say that all run
  on processors (``on_cpu``: laptops, tests), which then is what they are accounted on.
* Instances of one stage spread over nodes first, then over devices; the least loaded device wins
  (fewest actors, then the smallest share of memory in use); nodes on which the stage failed to
  load come last. Equal inputs give equal results.
* If the first, greedy attempt leaves something out that would fit together with the rest, a search
  finds it, for up to ``SEARCH_STEPS`` steps: packing is hard in general, and the bound is what keeps
  the NodeManager answering. What is left out is named, with its need and what each device has free.

Load is counted in actors, as nothing is known of service times here; the demand that a rebalancer
measures comes in as ``demand`` of ``desired_instances``.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from attrs import define, field, frozen

from onepiece.core.inventory import DeviceKind, RegisteredWorkflow, StageNeed, format_bytes, stage_needs

SEARCH_STEPS: Final = 5_000
"""Instances tried in the search; at worst some tenths of a second."""

SEARCH_INSTANCES_MAX: Final = 64
"""Beyond so many new instances at once the search is not worth its bound (and recursion)."""

_SHOWN_DEVICES_MAX: Final = 8


def desired_instances(
    workflows: Iterable[RegisteredWorkflow], demand: Mapping[str, int] | None = None
) -> dict[str, int]:
    """How many actors each stage should have.

    Args:
        workflows: What is registered; a stage that several share counts once.
        demand: Instances by stage where they were computed from measured load; a stage that is not
            named keeps what its definition says. At least one instance of each stage is wanted.
    """
    needs = stage_needs(workflows)
    return {stage: max(1, (demand or {}).get(stage, need.instances)) for stage, need in needs.items()}


@frozen
class Room:
    """A device that may take actors, and what is on it."""

    node_id: str
    device: str
    kind: DeviceKind
    memory_bytes: int
    used_bytes: int = 0
    stages: tuple[str, ...] = ()
    """The stage of each actor on it."""

    @property
    def free_bytes(self) -> int:
        """What is left; nothing where more is used than there should be."""
        return max(0, self.memory_bytes - self.used_bytes)


@frozen
class Chosen:
    """Where one instance goes."""

    stage: str
    node_id: str
    devices: tuple[str, ...]


@frozen
class Unplaced:
    """Instances of a stage that fit nowhere, and why."""

    stage: str
    instances: int
    message: str


@frozen
class Packing:
    """The result of ``pack``."""

    chosen: tuple[Chosen, ...]
    unplaced: tuple[Unplaced, ...]


def pack(
    needs: Mapping[str, StageNeed],
    missing: Mapping[str, int],
    rooms: Sequence[Room],
    *,
    failures: Mapping[tuple[str, str], int] | None = None,
    on_cpu: bool = False,
) -> Packing:
    """Choose devices for ``missing`` new instances of each stage.

    Args:
        needs: What one instance of each stage needs.
        missing: How many to place.
        rooms: The devices of nodes that take new actors.
        failures: How often a stage failed on a node, by (stage, node id); such nodes come last.
        on_cpu: Whether stages that want a GPU go on processors, because no node has one.
    """
    pools: dict[DeviceKind, list[StageNeed]] = {kind: [] for kind in DeviceKind}
    for stage, count in missing.items():
        need = needs[stage]
        pools[device_kind_for(need, on_cpu=on_cpu)].extend([need] * count)
    chosen: list[Chosen] = []
    left: list[StageNeed] = []
    for kind, wanted in pools.items():
        pool = _Pool.of([room for room in rooms if room.kind is kind], failures or {})
        placed, unfit = pool.place(sorted(wanted, key=_hardest_first))
        chosen += placed
        left += unfit
    return Packing(tuple(chosen), tuple(_unplaced(left, rooms, chosen, needs, on_cpu=on_cpu)))


def device_kind_for(need: StageNeed, *, on_cpu: bool) -> DeviceKind:
    """The kind of device that a stage runs on."""
    return DeviceKind.CPU if on_cpu else need.kind


def _hardest_first(need: StageNeed) -> tuple[int, int, str]:
    return (-need.device_count, -need.memory_bytes, need.stage)


@define(eq=False)
class _Slot:
    """A room while it is being filled."""

    room: Room
    order: int
    free_bytes: int
    stages: list[str]

    def load(self) -> tuple[int, float]:
        used = self.room.memory_bytes - self.free_bytes
        return len(self.stages), used / max(1, self.room.memory_bytes)


_Option: TypeAlias = tuple[_Slot, ...]


@define(eq=False)
class _Pool:
    """The devices of one kind; places only on these, so pools do not influence each other."""

    slots: list[_Slot]
    failures: Mapping[tuple[str, str], int]
    _by_node: dict[str, list[_Slot]] = field(factory=dict)
    _steps: int = 0

    @classmethod
    def of(cls, rooms: Iterable[Room], failures: Mapping[tuple[str, str], int]) -> "_Pool":
        ordered = sorted(rooms, key=lambda room: (room.node_id, room.device))
        pool = cls([_Slot(r, n, r.free_bytes, list(r.stages)) for n, r in enumerate(ordered)], failures)
        for slot in pool.slots:
            pool._by_node.setdefault(slot.room.node_id, []).append(slot)
        return pool

    def place(self, wanted: Sequence[StageNeed]) -> tuple[list[Chosen], list[StageNeed]]:
        """Place what fits: as a greedy choice, or by search if that leaves out what could fit."""
        placed: list[tuple[StageNeed, _Option]] = []
        left: list[StageNeed] = []
        for need in wanted:
            option = next(self._options(need), None)
            if option is None:
                left.append(need)
            else:
                self._put(need, option)
                placed.append((need, option))
        if left and self._might_fit(wanted, placed):
            found = self._place_all(wanted, placed)
            if found is not None:
                placed, left = found, []
        chosen = [
            Chosen(need.stage, option[0].room.node_id, tuple(slot.room.device for slot in option))
            for need, option in placed
        ]
        return chosen, left

    def _place_all(
        self, wanted: Sequence[StageNeed], placed: Sequence[tuple[StageNeed, _Option]]
    ) -> list[tuple[StageNeed, _Option]] | None:
        for need, option in reversed(placed):
            self._take_back(need, option)
        options = self._search(wanted)
        return None if options is None else list(zip(wanted, options, strict=True))

    def _might_fit(self, wanted: Sequence[StageNeed], placed: Sequence[tuple[StageNeed, _Option]]) -> bool:
        if len(wanted) > SEARCH_INSTANCES_MAX:
            return False
        given = sum(need.memory_bytes * len(option) for need, option in placed)
        free = sum(slot.free_bytes for slot in self.slots) + given
        largest = max((slot.room.free_bytes for slot in self.slots), default=-1)
        needed = sum(need.memory_bytes * need.device_count for need in wanted)
        return needed <= free and all(need.memory_bytes <= largest for need in wanted)

    def _search(self, wanted: Sequence[StageNeed]) -> list[_Option] | None:
        if not wanted:
            return []
        need, rest = wanted[0], wanted[1:]
        for option in self._options(need):
            self._steps += 1
            if self._steps > SEARCH_STEPS:
                return None
            self._put(need, option)
            found = self._search(rest)
            if found is not None:
                return [option, *found]
            self._take_back(need, option)
        return None

    def _options(self, need: StageNeed) -> Iterator[_Option]:
        """Where one instance may go, best first.

        Of a stage that wants several devices, each node offers one set: its least loaded ones.
        """
        options: list[_Option] = []
        for slots in self._by_node.values():
            fitting = [slot for slot in slots if slot.free_bytes >= need.memory_bytes]
            if need.device_count == 1:
                options += [(slot,) for slot in fitting]
            elif len(fitting) >= need.device_count:
                options.append(tuple(sorted(fitting, key=_Slot.load)[: need.device_count]))
        yield from sorted(options, key=lambda option: self._preference(need, option))

    def _preference(self, need: StageNeed, option: _Option) -> tuple[int, int, int, int, int, float, int]:
        node_id = option[0].room.node_id
        on_node = self._by_node[node_id]
        loads = [slot.load() for slot in option]
        return (
            self.failures.get((need.stage, node_id), 0),
            sum(slot.stages.count(need.stage) for slot in on_node),
            sum(slot.stages.count(need.stage) for slot in option),
            max(actors for actors, _ in loads),
            sum(len(slot.stages) for slot in on_node),
            max(share for _, share in loads),
            option[0].order,
        )

    def _put(self, need: StageNeed, option: _Option) -> None:
        for slot in option:
            slot.free_bytes -= need.memory_bytes
            slot.stages.append(need.stage)
            assert slot.free_bytes >= 0

    def _take_back(self, need: StageNeed, option: _Option) -> None:
        for slot in option:
            slot.free_bytes += need.memory_bytes
            slot.stages.remove(need.stage)


def _unplaced(
    left: Sequence[StageNeed],
    rooms: Sequence[Room],
    chosen: Sequence[Chosen],
    needs: Mapping[str, StageNeed],
    *,
    on_cpu: bool,
) -> Iterator[Unplaced]:
    taken: dict[tuple[str, str], int] = {}
    for choice in chosen:
        for device in choice.devices:
            key = (choice.node_id, device)
            taken[key] = taken.get(key, 0) + needs[choice.stage].memory_bytes
    for need in dict.fromkeys(left):
        kind = device_kind_for(need, on_cpu=on_cpu)
        devices = [
            f"{room.device} of {room.node_id} has "
            f"{format_bytes(room.free_bytes - taken.get((room.node_id, room.device), 0))} "
            f"of {format_bytes(room.memory_bytes)} free"
            for room in sorted(rooms, key=lambda room: (room.node_id, room.device))
            if room.kind is kind
        ]
        count = left.count(need)
        yield Unplaced(need.stage, count, _unplaced_message(need, kind, count, devices))


def _unplaced_message(need: StageNeed, kind: DeviceKind, instances: int, devices: Sequence[str]) -> str:
    each = "" if need.device_count == 1 else " each"
    wish = f"{need.device_count} {need.kind} device{'s' if need.device_count > 1 else ''} of one node"
    if kind is not need.kind:
        wish += f" (or {kind}, as no worker has a {need.kind})"
    more = f" for each of {instances} more instances" if instances > 1 else ""
    head = f"stage {need.stage} needs {format_bytes(need.memory_bytes)} on{each} {wish}{more}"
    if not devices:
        return f"{head}, and no worker that takes new actors has such a device; start one that has"
    shown = ", ".join(devices[:_SHOWN_DEVICES_MAX])
    hidden = len(devices) - _SHOWN_DEVICES_MAX
    rest = f" and {hidden} more with too little" if hidden > 0 else ""
    return f"{head}, but {shown}{rest}; add a device, or lower what the stage asks for"
