"""The book of moves: those under way, the instances that are wanted meanwhile, and how they ended.

::

                   room beside, or idle devices              ready
    (ordered) ------------------------------> warming up -------------> done     the old ones are stopped then
        |                                       ^    |
        | no room beside                 gone   |    | failed, node died or drains, workflows changed
        +--> prefetching --> draining the old --+    +-----------------> abandoned
                  |                   |   no room, node died ...            ^
                  +-------------------+-------------------------------------+

An actor that is given back ends, and its devices are idle then::

    (ordered) --> giving back --gone--> given back
                       |
                       +----workflows changed----> abandoned

What it promises:

* The new one counts towards the instances of its stage from the moment it is started, the old one until it
  is told to stop; so nothing else is placed or stopped in their stead meanwhile.
* A move that is abandoned leaves both stages with the instances they had before it; placement then heals
  what is missing, wherever there is room.
* The book is a value. Whoever stores it goes on with the same moves after a restart: a new actor is known by
  its id, and one that is not there any more ends its move.
"""

from collections.abc import Mapping
from typing import Final, Self, TypeAlias

from attrs import evolve, field, frozen

from onepiece.core.actors import Actor, ActorLife
from onepiece.core.give_back import GiveBack
from onepiece.core.inventory import StageNeed
from onepiece.core.moves import Move
from onepiece.core.packing import Room
from onepiece.core.pending_move import EndedMove, MovePhase, PendingMove
from onepiece.core.workers import Worker

PENDING_MAX: Final = 64
ENDED_MAX: Final = 32


# --- what comes next ---------------------------------------------------------------------------


@frozen
class Wait:
    """Nothing can be done yet."""


@frozen
class Fetch:
    """The node reads in advance what the new one will load; the old ones serve meanwhile."""


@frozen
class StopOld:
    """The actors that are to make room have not been told so (any more)."""


@frozen
class StartNew:
    """There is room now."""


@frozen
class Switch:
    """The new one is ready: the old ones go."""


@frozen
class Release:
    """The actors that were to end are gone: their devices are idle."""


@frozen
class Abandon:
    """It cannot be finished."""

    reason: str


Step: TypeAlias = Wait | Fetch | StopOld | StartNew | Switch | Release | Abandon


def next_step(
    move: PendingMove,
    actors: Mapping[int, Actor],
    workers: Mapping[str, Worker],
    needs: Mapping[str, StageNeed],
    rooms: Mapping[tuple[str, str], Room],
    *,
    is_fetched: bool = False,
) -> Step:
    """What a move waits for.

    Args:
        move: The move.
        actors: All there are, by id.
        workers: The living ones, by node.
        needs: Of all stages that are wanted.
        rooms: The devices of all workers, by node and device.
        is_fetched: Whether there is nothing to be read in advance any more.
    """
    if move.phase is MovePhase.GIVING_BACK:
        return _of_given_back(move, actors, needs)
    worker = workers.get(move.node_id)
    if move.stage not in needs or (move.donor is not None and move.donor not in needs):
        return Abandon("no registered workflow uses the stage any more")
    if worker is None:
        return Abandon(f"{move.node_id} is gone")
    if worker.draining:
        return Abandon(f"{move.node_id} drains")
    if move.new_id is not None:
        return _of_new(actors.get(move.new_id), move)
    old = [actors[actor_id] for actor_id in move.replaces if actor_id in actors]
    if move.phase is MovePhase.PREFETCHING and old and not is_fetched:
        return Fetch()
    if move.phase in {MovePhase.PREFETCHING, MovePhase.DRAINING} and old:
        return StopOld() if any(actor.life is not ActorLife.STOPPING for actor in old) else Wait()
    if worker.suspect:
        return Wait()
    if not has_room(move, needs[move.stage], rooms):
        return Abandon(f"{', '.join(move.devices)} of {move.node_id} has no room for it any more")
    return StartNew()


def _of_given_back(move: PendingMove, actors: Mapping[int, Actor], needs: Mapping[str, StageNeed]) -> Step:
    if move.stage not in needs:
        return Abandon("no registered workflow uses the stage any more")
    old = [actors[actor_id] for actor_id in move.replaces if actor_id in actors]
    if not old:
        return Release()
    return StopOld() if any(actor.life is not ActorLife.STOPPING for actor in old) else Wait()


def has_room(move: PendingMove, need: StageNeed, rooms: Mapping[tuple[str, str], Room]) -> bool:
    """Whether an instance fits on the devices of a move as they are."""
    found = [rooms.get((move.node_id, device)) for device in move.devices]
    return len(found) == need.device_count and all(
        room is not None and room.free_bytes >= need.memory_bytes for room in found
    )


def _of_new(new: Actor | None, move: PendingMove) -> Step:
    if new is None or new.stage != move.stage or new.node_id != move.node_id:
        return Abandon("the new actor is gone")
    if new.life is ActorLife.READY:
        return Switch()
    if new.life in {ActorLife.ASSIGNED, ActorLife.LOADING}:
        return Wait()
    return Abandon(new.error or new.stop_reason or f"the new actor is {new.life}")


# --- the book ----------------------------------------------------------------------------------


@frozen
class MoveBook:
    """See the module's text."""

    demand: Mapping[str, int] = field(factory=dict)
    """Instances by stage where they are not those of its definition."""
    pending: tuple[PendingMove, ...] = ()
    ended: tuple[EndedMove, ...] = ()
    done: int = 0
    given_back: int = 0
    abandoned: int = 0

    def with_demand(self, instances: Mapping[str, int]) -> Self:
        """So many instances are wanted."""
        return evolve(self, demand=dict(instances))

    def order(
        self,
        move: Move,
        actors: Mapping[int, Actor],
        rooms: Mapping[tuple[str, str], Room],
        need: StageNeed,
        serving: Mapping[str, int],
    ) -> Self:
        """Begin a move; the same book if it does not fit what there is any more.

        ``serving`` says how many actors of a stage count towards what is wanted now.
        """
        old = [actors.get(actor_id) for actor_id in move.replaces]
        is_taken = {each for pending in self.pending for each in pending.replaces}
        if (
            len(self.pending) >= PENDING_MAX
            or any(each is None or each.life is not ActorLife.READY for each in old)
            or not is_taken.isdisjoint(move.replaces)
            or any((move.node_id, device) not in rooms for device in move.devices)
        ):
            return self
        donor = old[0].stage if old and old[0] is not None else None
        pending = PendingMove(
            move.stage,
            move.node_id,
            move.devices,
            move.replaces,
            donor,
            MovePhase.WARMING,
            is_beside=True,
            reason=move.reason,
        )
        demand = {move.stage: serving.get(move.stage, 0)}
        if not has_room(pending, need, rooms):
            if donor is None:
                return self
            pending = evolve(pending, phase=MovePhase.PREFETCHING, is_beside=False)
        if donor is not None:
            demand[donor] = serving.get(donor, 0)
        return evolve(self, demand={**self.demand, **demand}, pending=(*self.pending, pending))

    def give_back(
        self, give: GiveBack, actors: Mapping[int, Actor], serving: Mapping[str, int], instances_min: int
    ) -> Self:
        """Begin to give an actor back; the same book if that is not as it was, or would leave too few."""
        actor = actors.get(give.actor_id)
        if (
            len(self.pending) >= PENDING_MAX
            or actor is None
            or actor.life is not ActorLife.READY
            or actor.stage != give.stage
            or any(give.actor_id in pending.replaces for pending in self.pending)
            or serving.get(give.stage, 0) <= max(1, instances_min)
        ):
            return self
        pending = PendingMove(
            give.stage,
            give.node_id,
            give.devices,
            (give.actor_id,),
            give.stage,
            MovePhase.GIVING_BACK,
            is_beside=False,
            reason=give.reason,
        )
        demand = {**self.demand, give.stage: serving[give.stage] - 1}
        return evolve(self, demand=demand, pending=(*self.pending, pending))

    def released(self, move: PendingMove, now: float) -> Self:
        """The devices are idle."""
        return evolve(self._closed(move, now, None, {}), given_back=self.given_back + 1)

    def draining(self, move: PendingMove) -> tuple[Self, PendingMove]:
        """What was to be read in advance is: the old ones are told to stop."""
        if move.phase is not MovePhase.PREFETCHING or move.donor is None:
            return self, move
        after = evolve(move, phase=MovePhase.DRAINING)
        pending = tuple(after if each is move else each for each in self.pending)
        demand = self._changed({move.donor: -len(move.replaces)})
        return evolve(self, demand=demand, pending=pending), after

    def started(self, move: PendingMove, new_id: int) -> Self:
        """The new actor was ordered."""
        after = evolve(move, new_id=new_id, phase=MovePhase.WARMING)
        pending = tuple(after if each is move else each for each in self.pending)
        return evolve(self, demand=self._changed({move.stage: 1}), pending=pending)

    def switched(self, move: PendingMove, now: float) -> Self:
        """The new actor serves; the old ones are told to stop."""
        changes = {move.donor: -len(move.replaces)} if move.is_beside and move.donor is not None else {}
        return evolve(self._closed(move, now, None, changes), done=self.done + 1)

    def abandon(self, move: PendingMove, reason: str, now: float) -> Self:
        """Both stages should have what they had before."""
        changes = {move.stage: -1} if move.new_id is not None else {}
        if move.donor is not None and not move.is_beside and move.phase is not MovePhase.PREFETCHING:
            changes[move.donor] = len(move.replaces)
        return evolve(self._closed(move, now, reason, changes), abandoned=self.abandoned + 1)

    def of(self, before: Mapping[str, StageNeed], needs: Mapping[str, StageNeed], now: float) -> Self:
        """What is left when workflows change: stages that are new, or other than they were, begin anew."""
        after = self
        for move in self.pending:
            if move.phase is MovePhase.GIVING_BACK and needs.get(move.stage) == before.get(move.stage):
                continue
            after = after.abandon(move, "the workflows changed", now)
        kept = {
            stage: count
            for stage, count in after.demand.items()
            if stage in needs and needs[stage] == before.get(stage)
        }
        return evolve(after, demand=kept)

    def _changed(self, changes: Mapping[str, int]) -> Mapping[str, int]:
        return {**self.demand, **{stage: self.demand.get(stage, 1) + by for stage, by in changes.items()}}

    def _closed(self, move: PendingMove, now: float, problem: str | None, changes: Mapping[str, int]) -> Self:
        return evolve(
            self,
            demand=self._changed(changes),
            pending=tuple(each for each in self.pending if each is not move),
            ended=(*self.ended, EndedMove(move, now, problem))[-ENDED_MAX:],
        )
