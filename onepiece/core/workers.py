"""Workers as placement sees them: who they are, when they have gathered, what room they have."""

from collections.abc import Iterable

from attrs import frozen

from onepiece.core.actors import Actor
from onepiece.core.inventory import DeviceKind, NodeInfo
from onepiece.core.packing import Room
from onepiece.core.placement_events import PlacementConfig


@frozen
class Worker:
    """A living node that runs actors."""

    node: NodeInfo
    suspect: bool = False
    draining: bool = False

    @property
    def takes_new(self) -> bool:
        """New actors may be placed on it."""
        return not self.suspect and not self.draining

    @property
    def has_gpu(self) -> bool:
        """Any of its devices is a GPU."""
        return any(device.kind is DeviceKind.GPU for device in self.node.devices)

    def kind_of(self, device: str) -> DeviceKind:
        """What the device of this name is."""
        return next(known.kind for known in self.node.devices if known.name == device)


@frozen
class Gathering:
    """When workers joined; placement waits until they have gathered."""

    first_at: float | None = None
    last_at: float = 0.0

    def joined(self, now: float) -> "Gathering":
        """One more has joined."""
        return Gathering(now if self.first_at is None else self.first_at, now)

    def ends_at(self, config: PlacementConfig, count: int, *, are_known: bool) -> float | None:
        """When placement may begin with ``count`` workers if no other joins; None: nobody has joined.

        ``are_known``: an earlier manager knew them; they need time to report what they run.
        """
        if self.first_at is None:
            return None
        limit = self.first_at + config.settle_limit_seconds
        if count < config.workers_expected:
            return limit
        settled = self.last_at + config.settle_seconds
        if are_known:
            settled = max(settled, self.first_at + config.adoption_seconds)
        return min(limit, settled)


def rooms_of(workers: Iterable[Worker], actors: Iterable[Actor], *, only_taking: bool = False) -> list[Room]:
    """The devices of the workers (or of those that take new actors), and what is on each."""
    held: dict[tuple[str, str], list[Actor]] = {}
    for actor in actors:
        for device in actor.devices:
            held.setdefault((actor.node_id, device), []).append(actor)
    rooms: list[Room] = []
    for worker in workers:
        if only_taking and not worker.takes_new:
            continue
        for known in worker.node.devices:
            on_it = held.get((worker.node.node_id, known.name), [])
            rooms.append(
                Room(
                    node_id=worker.node.node_id,
                    device=known.name,
                    kind=known.kind,
                    memory_bytes=known.memory_bytes,
                    used_bytes=sum(actor.memory_bytes for actor in on_it),
                    stages=tuple(actor.stage for actor in on_it),
                )
            )
    return rooms


def assert_memory_fits(workers: Iterable[Worker], actors: Iterable[Actor]) -> None:
    """Assert that each actor is on devices its node has, and that none of them is promised twice."""
    actors = list(actors)
    rooms = {(room.node_id, room.device): room for room in rooms_of(workers, actors)}
    assert all(room.used_bytes <= room.memory_bytes for room in rooms.values())
    assert all((actor.node_id, device) in rooms for actor in actors for device in actor.devices)
