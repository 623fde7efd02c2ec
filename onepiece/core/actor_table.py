"""The actors that placement follows, and the single steps of it: orders, failures, and what is forgotten.

What it promises: an id is never used twice, and is reserved before an order names it; whatever changes an
actor counts as a change of what is published; each actor that fails is remembered with its reason.
"""

from typing import Final

from attrs import define, evolve, field

from onepiece.core.actors import Actor, ActorLife, ActorTrigger, Assign, Unassign
from onepiece.core.inventory import ActorReport, RegisteredWorkflow, StageNeed, shortened, users_of
from onepiece.core.machine import Machine
from onepiece.core.packing import Chosen, Room
from onepiece.core.placement_events import (
    ActorFailed,
    KeepSizes,
    PlacementConfig,
    PlacementEffect,
    PlacementEvent,
    ReserveActorIds,
    SendAssign,
    SendUnassign,
    StageExceeded,
)
from onepiece.core.retries import Trouble
from onepiece.core.stage_sizes import StageSizes
from onepiece.core.workers import Worker, rooms_of

_ID_BLOCK: Final = 64
"""Ids reserved beyond the need, so that few writes are needed."""


@define(kw_only=True, eq=False)
class ActorTable(Machine[PlacementEvent, PlacementEffect]):
    """What ``PlacementMachine`` knows of actors and workers, and what it does to a single one."""

    config: PlacementConfig = field(factory=PlacementConfig)
    manager_epoch: int
    first_actor_id: int
    workflows: tuple[RegisteredWorkflow, ...] = ()
    _next_actor_id: int = field(init=False)
    _reserved_below: int = field(init=False)
    _needs: dict[str, StageNeed] = field(factory=dict, init=False)
    _workers: dict[str, Worker] = field(factory=dict, init=False)
    _actors: dict[int, Actor] = field(factory=dict, init=False)
    _troubles: dict[str, Trouble] = field(factory=dict, init=False)
    sizes: StageSizes = field(factory=StageSizes)
    """What instances were measured to take."""
    _is_dirty: bool = field(default=False, init=False)
    """What should be is to be compared with what is."""
    revision: int = field(default=0, init=False)
    """Grows with each change of actors, workers or problems."""

    # --- single steps

    def _move(self, actor: Actor, trigger: ActorTrigger, now: float) -> None:
        moved = actor.moved(trigger, now)
        if moved is not actor:
            self._put(moved)
            self._is_dirty = True

    def _put(self, actor: Actor) -> Actor:
        self._actors[actor.actor_id] = actor
        self.revision += 1
        return actor

    def _forget(self, actor: Actor) -> None:
        del self._actors[actor.actor_id]
        self._is_dirty = True

    def _fail(self, actor: Actor, reason: str, now: float) -> list[PlacementEffect]:
        reason = shortened(reason)
        effects = self._record_failure(actor, reason, now)
        return effects + self._stop(evolve(actor, error=reason), reason, now)

    def _record_failure(self, actor: Actor, reason: str, now: float) -> list[PlacementEffect]:
        ready_since = actor.ready_since
        is_proven = ready_since is not None and now - ready_since >= self.config.proven_seconds
        earlier = None if is_proven else self._troubles.get(actor.stage)
        where = f"actor {actor.actor_id} on {actor.node_id} ({', '.join(actor.devices)})"
        trouble = self.config.retries.after_failure(earlier, f"{where}: {reason}", actor.node_id, now)
        self._troubles[actor.stage] = trouble
        self._is_dirty = True
        return [ActorFailed(actor.actor_id, actor.stage, actor.node_id, reason)]

    def _stop(self, actor: Actor, reason: str, now: float) -> list[PlacementEffect]:
        self._is_dirty = True
        stopping = evolve(actor.moved(ActorTrigger.STOPPED, now), stop_reason=reason)
        return [self._order_stop(stopping, now)]

    def _order_stop(self, actor: Actor, now: float) -> SendUnassign:
        self._put(evolve(actor, ordered_at=now))
        order = Unassign(actor.actor_id, actor.stop_reason, self.manager_epoch)
        return SendUnassign(actor.node_id, actor.incarnation, order)

    def _order_start(self, actor: Actor, now: float) -> SendAssign:
        users = users_of(actor.stage, self.workflows)
        workflow = next((each for each in users if each.name == actor.workflow), users[0])
        self._put(evolve(actor, ordered_at=now, workflow=workflow.name, digest=workflow.digest))
        order = Assign(
            actor_id=actor.actor_id,
            stage=actor.stage,
            workflow=workflow.name,
            module=workflow.module,
            digest=workflow.digest,
            devices=actor.devices,
            memory_bytes=actor.memory_bytes,
            manager_epoch=self.manager_epoch,
        )
        return SendAssign(actor.node_id, actor.incarnation, order)

    def _reserve(self, below: int) -> list[PlacementEffect]:
        if below <= self._reserved_below:
            return []
        self._reserved_below = below + _ID_BLOCK
        return [ReserveActorIds(self._reserved_below)]

    def _new_actor(self, chosen: Chosen, now: float) -> Actor:
        actor_id = self._next_actor_id
        self._next_actor_id += 1
        workflow = users_of(chosen.stage, self.workflows)[0]
        return Actor(
            actor_id=actor_id,
            stage=chosen.stage,
            workflow=workflow.name,
            digest=workflow.digest,
            node_id=chosen.node_id,
            incarnation=self._workers[chosen.node_id].node.incarnation,
            devices=chosen.devices,
            memory_bytes=self._needs[chosen.stage].memory_bytes,
            life=ActorLife.ASSIGNED,
            ordered_at=now,
        )

    def rooms(self, *, only_taking: bool = False) -> list[Room]:
        """The devices of all workers (or of those that take new actors), with what is on them."""
        actors = [self._sized(actor) for actor in self._actors.values()]
        return rooms_of(self._workers.values(), actors, only_taking=only_taking)

    def _rooms(self, *, only_taking: bool = False) -> dict[tuple[str, str], Room]:
        return {(room.node_id, room.device): room for room in self.rooms(only_taking=only_taking)}

    def _sized(self, actor: Actor) -> Actor:
        """With what instances of its stage were measured to take, if that is more than was promised."""
        need = self._needs.get(actor.stage)
        if need is None or actor.stage not in self.sizes.seen:
            return actor
        return evolve(actor, memory_bytes=max(actor.memory_bytes, self.sizes.wanted_bytes(need)))

    def _sized_needs(self) -> dict[str, StageNeed]:
        """What new instances need, as declared and as measured."""
        if not self.sizes.seen:
            return dict(self._needs)
        return self.sizes.needs(self._needs, rooms_of(self._workers.values(), ()))

    def _note_size(self, actor: Actor, report: ActorReport) -> list[PlacementEffect]:
        """Take up what an actor was measured to take."""
        before, need = self.sizes, self._needs[actor.stage]
        self.sizes = before.told(actor.stage, report.work.memory_bytes)
        if self.sizes is before:
            return []
        seen = self.sizes.seen[actor.stage]
        effects: list[PlacementEffect] = [KeepSizes(self.sizes.seen)]
        if seen > need.memory_bytes:
            effects.append(StageExceeded(actor.stage, actor.node_id, need.memory_bytes, seen))
        return effects

    # --- queries

    def _is_due(self, actor: Actor, now: float) -> bool:
        return now >= actor.ordered_at + self.config.resend_seconds

    def _count_ready(self, stage: str) -> int:
        return sum(a.stage == stage and a.life is ActorLife.READY for a in self._actors.values())

    def _count_serving(self, stage: str) -> int:
        return sum(actor.stage == stage and actor.serves for actor in self._actors.values())

    def _digests(self, stage: str) -> set[str]:
        return {workflow.digest for workflow in users_of(stage, self.workflows)}

    def _falls_back(self) -> bool:
        """GPU stages run on processors, as no worker has any GPU."""
        return self.config.allow_cpu_fallback and not any(w.has_gpu for w in self._workers.values())
