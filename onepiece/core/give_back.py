"""Giving back: which instances the load does not need, so that their devices become idle.

A pure function of the load, of what was in hand, and of where actors are. What it promises:

* A stage gives back no more than leaves it at most ``utilisation_release`` busy, by every window:
  far below ``utilisation_high``, at which it would take again.
* Nor so much that chance alone would soon look like too much work: how many requests in the shortest
  window would make the stage too busy is compared with how many come on average. The probability of so many
  (of a Poisson distribution, by Chernoff's bound) must be less than that of ``confidence`` standard
  deviations.
* What is queued or runs counts, too: all that is in hand on average must find a worker each, as work that
  came long ago and is not done needs its instances.
* The pinned minimum stays, and one instance at least. An actor that shares its device with others stays, as
  giving it back would leave no idle device.
* Of a stage's actors those go first whose node has the most of it, then the newest: what is left is spread.
* Equal inputs give equal results.

For how long this must be so is ``rebalance``'s to say.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from attrs import define, frozen

from onepiece.core.capacity import CapacityModel
from onepiece.core.move_board import Board, DeviceInfo, Load, PlacedActor, StageLimits, Work
from onepiece.core.service_times import StageProfile


@frozen
class GiveBackPolicy:
    """When an instance is not needed; see the module's text."""

    utilisation_release: float = 0.6
    utilisation_high: float = 0.85
    confidence: float = 4.0

    def __attrs_post_init__(self) -> None:
        assert 0 < self.utilisation_release < self.utilisation_high
        assert self.confidence >= 0


@frozen
class GiveBack:
    """An actor that is to end, so that its devices are idle, and why."""

    stage: str
    actor_id: int
    node_id: str
    devices: tuple[str, ...]
    reason: str


@define(eq=False)
class SpareInstances:
    """How many instances of each stage could go, by what one look at the load says.

    Args:
        model: Measured service times.
        loads: Of all windows that have been seen for long enough, the shortest one first.
        in_hand: Stage tasks queued and running on average, by stage.
        counts: Instances there are.
        limits: By stage; the defaults where one is not named.
        policy: When an instance is not needed.
    """

    model: CapacityModel
    loads: Sequence[Load]
    in_hand: Mapping[str, float]
    counts: Mapping[str, int]
    limits: Mapping[str, StageLimits]
    policy: GiveBackPolicy

    def found(self) -> dict[str, int]:
        """Those stages that have any to spare."""
        if not self.loads:
            return {}
        works = [Work.of(self.model, load) for load in self.loads]
        spare = {stage: count - self._needed(stage, works) for stage, count in self.counts.items()}
        return {stage: count for stage, count in spare.items() if count > 0}

    def _needed(self, stage: str, works: Sequence[Work]) -> int:
        profile, count = self.model.stages[stage], self.counts[stage]
        limit = self.limits.get(stage) or StageLimits()
        if count <= limit.instances_min:
            return count
        choices = range(limit.instances_min, count)
        return choices.start + bisect_left(choices, True, key=lambda n: self._is_enough(profile, n, works))

    def _is_enough(self, profile: StageProfile, instances: int, works: Sequence[Work]) -> bool:
        workers = instances * profile.concurrency
        if self.in_hand.get(profile.stage, 0.0) > workers:
            return False
        shortest = self.loads[0].seconds
        for work, load in zip(works, self.loads, strict=True):
            used = work.total.get(profile.stage, 0.0) / workers
            requests = work.equal_requests(profile.stage) * shortest / load.seconds
            if used > self.policy.utilisation_release or self._could_be_chance(used, requests):
                return False
        return True

    def _could_be_chance(self, used: float, requests: float) -> bool:
        """Whether a stage that is so busy by so many requests may soon look too busy without being so."""
        if used == 0:
            return False
        ratio = self.policy.utilisation_high / used
        exponent = requests * (ratio * math.log(ratio) - ratio + 1)
        return exponent < self.policy.confidence**2 / 2


def chosen(
    model: CapacityModel,
    spare: Mapping[str, int],
    devices: Iterable[DeviceInfo],
    actors: Iterable[PlacedActor],
    most: int,
) -> tuple[GiveBack, ...]:
    """The actors that go, at most ``most`` and of each stage at most as many as it has to spare."""
    if not spare or most < 1:
        return ()
    board = Board.of(model, devices, actors, {})
    found: list[GiveBack] = []
    for stage, count in sorted(spare.items()):
        for _ in range(min(count, most - len(found))):
            actor = _next(board, stage)
            if actor is None:
                break
            del board.movable[stage][actor.actor_id]
            board.on_node[actor.node_id, stage] -= 1
            reason = f"the load needs {count} less of {board.counts[stage]}"
            found.append(GiveBack(stage, actor.actor_id, actor.node_id, actor.devices, reason))
    return tuple(found)


def _next(board: Board, stage: str) -> PlacedActor | None:
    movable = board.movable[stage].values()
    return max(movable, key=lambda a: (board.on_node[a.node_id, stage], a.actor_id), default=None)
