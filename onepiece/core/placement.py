"""Placement: which actors there should be, compared with those there are.

The machine knows what the registered workflows want, has ``packing`` choose devices for what is
missing, gives orders, and follows each actor (``actors``) through its node's reports. What it
promises:

* The memory of an actor is counted on its devices until its node no longer reports it, so that no
  device is promised twice.
* What runs is not moved. Exceptions: actors on a draining node, GPU stages that run on a processor
  when a GPU joins, and actors of a workflow version that was replaced. These retire: they serve on
  until replacements are ready. (An old version makes room first if the new one fits nowhere else.)
* Orders may be lost: they are sent again at a heartbeat that does not show their effect after
  ``resend_seconds``, the order to run ``sends_max`` times.
* A stage that fails to load is tried again after a pause that doubles, on another node if there is
  one, several times in a row (``retries``); then it is given up, with a reason, until a worker joins or
  the workflows change. A failure after ``proven_seconds`` of service counts as the first one.
* Nothing is placed before ``workers_expected`` workers have joined and for ``settle_seconds`` no
  further one has, or until ``settle_limit_seconds`` after the first: otherwise the first worker to
  come up would be given everything.
* Actors of an earlier manager's life are adopted where they are still wanted, since their models are
  loaded and requests may wait in them; all other unknown actors are stopped. Ids below
  ``first_actor_id`` are those of an earlier life. After a restart placement waits
  ``adoption_seconds`` from the first worker on, so that the others can report what they run.

* A new instance is promised what its stage declares, or what one was measured to take where that is more
  (``stage_sizes``); so it is counted for those that are there. They are not moved for that.
* A move of an instance to where the load is comes in as ``MovesOrdered`` and is carried out as ``move_book``
  says; what must outlive the manager is in a ``KeepMoves`` effect before the orders that rely on it.

What it does not do: decide about such moves. That needs measured demand (``balance``).
"""

from collections.abc import Iterable, Mapping
from typing import Final

from attrs import define, evolve, field

from onepiece.core.actors import Actor, ActorLife, ActorTrigger, Unassign, describe_mismatch
from onepiece.core.balance import BalanceMachine, LookedAround
from onepiece.core.idle_devices import IdleDevices
from onepiece.core.inventory import (
    ActorReport,
    ActorState,
    NodeInfo,
    RegisteredWorkflow,
    StageNeed,
    stage_needs,
    with_inboxes,
)
from onepiece.core.moving_actors import MovingActors
from onepiece.core.packing import desired_instances, pack
from onepiece.core.pending_move import MovePhase
from onepiece.core.placement_events import (
    ActorsReported,
    DemandChanged,
    MovesOrdered,
    PlacementEffect,
    PlacementEvent,
    SendUnassign,
    TimePassed,
    WorkerChanged,
    WorkerDied,
    WorkerJoined,
    WorkflowsChanged,
)
from onepiece.core.placement_view import PlacementView, view_of
from onepiece.core.prefetches import Prefetches
from onepiece.core.retries import failures_by_node
from onepiece.core.workers import Gathering, Worker, assert_memory_fits, rooms_of

_ACTOR_ID_MAX: Final = 1 << 53
"""Beyond it a node's word is not believed."""


@define(kw_only=True, eq=False)
class PlacementMachine(MovingActors):
    """Which actors there should be; see the module's text.

    Args:
        config: Patience and bounds.
        manager_epoch: Of the manager that gives the orders.
        first_actor_id: Above all ids that an earlier manager may have used; 1 if there was none.
        workflows: Those registered at the beginning.
        book: The moves that an earlier manager had under way, and what is wanted by them.
    """

    _wanted: dict[str, int] = field(factory=dict, init=False)
    _unplaced: dict[str, str] = field(factory=dict, init=False)
    _gathering: Gathering = field(factory=Gathering, init=False)
    _checked: int = field(default=-1, init=False)

    def __attrs_post_init__(self) -> None:
        self._next_actor_id = self._reserved_below = self.first_actor_id
        self._needs = self._needs_of(self.workflows)
        self._kept = self.book
        self._prefetches = Prefetches(self.config.resend_seconds)
        self._wanted = self._desired()

    def _needs_of(self, workflows: Iterable[RegisteredWorkflow]) -> dict[str, StageNeed]:
        return with_inboxes(stage_needs(workflows), self.config.inbox_bytes)

    @property
    def workers(self) -> Mapping[str, Worker]:
        """The living workers by node id."""
        return self._workers

    @property
    def actors(self) -> Mapping[int, Actor]:
        """All actors that are not gone yet, by id."""
        return self._actors

    def seen(self) -> LookedAround:
        """What rebalancing looks at."""
        moving = {move.new_id for move in self.book.pending if move.new_id is not None}
        moving |= {actor_id for move in self.book.pending for actor_id in move.replaces}
        given_back = [move for move in self.book.pending if move.phase is MovePhase.GIVING_BACK]
        return LookedAround(
            self.workflows,
            self._sized_needs(),
            tuple(self._workers.values()),
            tuple(self._actors.values()),
            frozenset(moving),
            self.config.limits,
            on_cpu=self._falls_back(),
            given_back=frozenset(actor_id for move in given_back for actor_id in move.replaces),
        )

    def view(self, balance: BalanceMachine, idle: IdleDevices, now: float) -> PlacementView:
        """What is wanted, what there is, the moves, and the devices that are idle."""
        return view_of(
            balance,
            self.book,
            self.workflows,
            self._needs,
            self._wanted,
            self._actors,
            self.config.limits,
            self.problems(),
            idle,
            self.sizes,
            now,
        )

    def problems(self) -> dict[str, str]:
        """By stage: why it has fewer ready actors than it should, in words."""
        found = dict(self._unplaced)
        for stage, trouble in self._troubles.items():
            if trouble.failures and self._count_ready(stage) < self._wanted[stage]:
                found[stage] = self.config.retries.describe(trouble)
        if not self._is_open:
            counts = f"{len(self._workers)} of {self.config.workers_expected} joined so far"
            unserved = self._wanted.keys() - {actor.stage for actor in self._actors.values()}
            found |= dict.fromkeys(sorted(unserved), f"waiting for workers, {counts}")
        return found

    def next_deadline(self, now: float) -> float | None:
        """When placement begins, a stage is tried again, or a load has taken too long."""
        deadlines = [trouble.retry_at for trouble in self._troubles.values() if trouble.retry_at is not None]
        deadlines += [at for at in (self._opens_at(), self._prefetches.next_deadline()) if at is not None]
        deadlines += [
            actor.loads_since + self.config.load_seconds_max
            for actor in self._actors.values()
            if actor.loads_since is not None
        ]
        return min(deadlines, default=None)

    def check_invariants(self) -> None:
        """Ids, homes and memory of all actors."""
        assert len(self._actors) <= self.config.actors_max
        assert self._next_actor_id <= self._reserved_below
        for actor_id, actor in self._actors.items():
            assert actor_id == actor.actor_id < self._next_actor_id
            assert actor.stage in self._needs or actor.life is ActorLife.STOPPING
            assert actor.incarnation == self._workers[actor.node_id].node.incarnation
            assert (actor.loads_since is not None) == (actor.life is ActorLife.LOADING)
        assert_memory_fits(self._workers.values(), self._actors.values())

    # --- events

    def _react(self, event: PlacementEvent, now: float) -> list[PlacementEffect]:
        effects: list[PlacementEffect] = []
        match event:
            case WorkflowsChanged():
                self.sizes = self.sizes.of(self.workflows, event.workflows)
                before, self._needs = self._needs, self._needs_of(event.workflows)
                self.workflows, self.book = event.workflows, self.book.of(before, self._needs, now)
                self._troubles.clear()
                self._is_dirty = True
            case WorkerJoined():
                effects += self._on_joined(event, now)
            case WorkerChanged(node_id, suspect, draining):
                self._workers[node_id] = Worker(self._workers[node_id].node, suspect, draining)
                self._is_dirty = True
            case WorkerDied():
                del self._workers[event.node_id]
                self._actors = {i: a for i, a in self._actors.items() if a.node_id != event.node_id}
                self._is_dirty = True
            case ActorsReported():
                self._is_dirty |= self._prefetches.told(event.node_id, event.prefetches)
                effects += self._on_reported(event.node_id, event.actors, now)
            case DemandChanged():
                self.book = self.book.with_demand(event.instances)
                self._is_dirty = True
            case MovesOrdered(moves, gives_back):
                for move in moves if self._is_open else ():
                    effects += self._order_move(move, now)
                for give in gives_back if self._is_open else ():
                    effects += self._order_give_back(give, now)
            case TimePassed():
                effects += self._end_long_loads(now)
        self._on_time(now)
        if self._is_dirty:
            self._is_dirty = False
            self.revision += 1
            effects += self._replan(now)
        return self._with_moves_kept(effects)

    def _has_changed(self, event: PlacementEvent, effects: list[PlacementEffect]) -> bool:
        before, self._checked = self._checked, self.revision
        return before != self.revision

    def _on_joined(self, event: WorkerJoined, now: float) -> list[PlacementEffect]:
        assert event.node.node_id not in self._workers, "its older incarnation died before"
        self._workers[event.node.node_id] = Worker(event.node, draining=event.draining)
        self._gathering = self._gathering.joined(now)
        self._troubles = {stage: trouble.forgiven() for stage, trouble in self._troubles.items()}
        self._is_dirty = True
        return self._on_reported(event.node.node_id, event.actors, now)

    def _on_time(self, now: float) -> None:
        opens_at = self._opens_at()
        if opens_at is not None and now >= opens_at:
            self._is_open = self._is_dirty = True
        fetch_due_at = self._prefetches.next_deadline()
        self._is_dirty |= fetch_due_at is not None and now >= fetch_due_at
        for stage, trouble in self._troubles.items():
            if trouble.is_due(now):
                self._troubles[stage] = trouble.with_pause_over()
                self._is_dirty = True

    def _end_long_loads(self, now: float) -> list[PlacementEffect]:
        effects: list[PlacementEffect] = []
        limit = self.config.load_seconds_max
        for actor in list(self._actors.values()):
            if actor.loads_since is not None and now >= actor.loads_since + limit:
                effects += self._fail(actor, f"did not finish loading within {limit:.0f} s", now)
        return effects

    def _opens_at(self) -> float | None:
        if self._is_open:
            return None
        are_known = self.first_actor_id > 1
        return self._gathering.ends_at(self.config, len(self._workers), are_known=are_known)

    # --- reports

    def _on_reported(
        self, node_id: str, actors: tuple[ActorReport, ...], now: float
    ) -> list[PlacementEffect]:
        effects = self._skip_used_ids(actors)
        reports = {report.actor_id: report for report in actors}
        for actor in [each for each in self._actors.values() if each.node_id == node_id]:
            report = reports.pop(actor.actor_id, None)
            if report is None:
                effects += self._on_absent(actor, now)
            else:
                effects += self._on_present(actor, report, now)
        for report in reports.values():
            effects += self._on_unknown(self._workers[node_id].node, report, now)
        return effects

    def _on_present(self, actor: Actor, report: ActorReport, now: float) -> list[PlacementEffect]:
        if not actor.was_reported or actor.address != report.address:
            actor = self._put(evolve(actor, was_reported=True, address=report.address))
        if actor.life is ActorLife.STOPPING:
            obeys = report.state is ActorState.DRAINING or not self._is_due(actor, now)
            return [] if obeys else [self._order_stop(actor, now)]
        if report.stage != actor.stage:
            return self._fail(actor, f"its node has an actor of {report.stage} under this id", now)
        if report.digest and report.digest != actor.digest:
            registered = next((w for w in self.workflows if w.digest == actor.digest), None)
            return self._fail(actor, describe_mismatch(actor, report, registered), now)
        effects = self._note_size(actor, report)
        match report.state:
            case ActorState.FAILED:
                effects += self._fail(actor, report.error or "it failed without saying why", now)
            case ActorState.LOADING:
                self._move(actor, ActorTrigger.REPORTED_LOADING, now)
            case ActorState.READY:
                self._move(actor, ActorTrigger.REPORTED_READY, now)
            case ActorState.DRAINING:
                pass  # The node drains; its heartbeat says so too.
        return effects

    def _on_absent(self, actor: Actor, now: float) -> list[PlacementEffect]:
        is_due = self._is_due(actor, now)
        if actor.life is ActorLife.STOPPING:
            # The order to run an actor that was never reported may still be under way.
            if actor.was_reported or is_due:
                self._forget(actor)
            return []
        if actor.was_reported:
            effects = self._record_failure(actor, "its node lost it", now)
            self._forget(actor)
            return effects
        if not is_due:
            return []
        if actor.sends >= self.config.sends_max:
            return self._fail(actor, f"its node did not take the order, sent {actor.sends} times", now)
        return [self._order_start(evolve(actor, sends=actor.sends + 1), now)]

    def _on_unknown(self, node: NodeInfo, report: ActorReport, now: float) -> list[PlacementEffect]:
        reason = self._why_not_adopted(node, report)
        if reason is not None and report.state is ActorState.DRAINING:
            return []
        if reason is not None:
            order = Unassign(report.actor_id, reason, self.manager_epoch)
            return [SendUnassign(node.node_id, node.incarnation, order)]
        memory_bytes = self._needs[report.stage].memory_bytes
        workflow = next(each for each in self.workflows if each.digest == report.digest)
        self._put(Actor.adopted(report, workflow.name, node, memory_bytes, now))
        self._is_dirty = True
        return []

    def _why_not_adopted(self, node: NodeInfo, report: ActorReport) -> str | None:
        if report.actor_id >= self.first_actor_id or report.actor_id in self._actors:
            return "it is not assigned to this node (any more)"
        if report.stage not in self._needs:
            return f"no registered workflow has a stage {report.stage!r}"
        if report.digest not in self._digests(report.stage):
            return f"it is of a version of the workflow that is not registered (digest {report.digest})"
        if report.state not in {ActorState.LOADING, ActorState.READY}:
            return f"it is {report.state}"
        if self._count_serving(report.stage) >= self._wanted[report.stage]:
            return "there are as many actors of its stage as are wanted"
        need = self._needs[report.stage]
        worker = self._workers[node.node_id]
        rooms = {room.device: room for room in rooms_of([worker], self._actors.values())}
        fits = len(set(report.devices)) == len(report.devices) == need.device_count and all(
            device in rooms and rooms[device].free_bytes >= need.memory_bytes for device in report.devices
        )
        return None if fits else f"it does not fit on {', '.join(report.devices) or 'no device'}"

    # --- what should be

    def _replan(self, now: float) -> list[PlacementEffect]:
        effects = self._advance_moves(now)
        self._wanted = self._desired()
        self._troubles = {s: trouble for s, trouble in self._troubles.items() if s in self._wanted}
        for actor in list(self._actors.values()):
            effects += self._correct(actor, now)
        for stage, count in self._wanted.items():
            serving = sorted(
                (a for a in self._actors.values() if a.stage == stage and a.serves),
                key=lambda actor: (actor.life is not ActorLife.READY, actor.actor_id),
            )
            for actor in serving[count:]:
                effects += self._stop(actor, "there are more actors of its stage than are wanted", now)
        effects += self._place_missing(now)
        effects += self._stop_replaced(now)
        return effects

    def _desired(self) -> dict[str, int]:
        wanted = desired_instances(self.workflows, self.book.demand)
        return {
            stage: limits.clamped(count) if (limits := self.config.limits.get(stage)) else count
            for stage, count in wanted.items()
        }

    # --- corrections

    def _correct(self, actor: Actor, now: float) -> list[PlacementEffect]:
        """Retire or stop an actor that should not be where it is."""
        if actor.life is ActorLife.STOPPING:
            return []
        if actor.stage not in self._wanted:
            return self._stop(actor, "no registered workflow uses its stage", now)
        reason = self._why_misplaced(actor)
        if reason is None and actor.life is ActorLife.RETIRING:
            self._move(actor, ActorTrigger.RESUMED, now)
        elif reason is not None and actor.life is ActorLife.READY:
            self._move(actor, ActorTrigger.RETIRED, now)
        elif reason is not None and actor.life is not ActorLife.RETIRING:
            return self._stop(actor, reason, now)
        return []

    def _why_misplaced(self, actor: Actor) -> str | None:
        worker = self._workers[actor.node_id]
        if worker.draining:
            return "its node drains"
        if self._is_outdated(actor):
            return "its workflow was registered in another version"
        kind = self._needs[actor.stage].kind
        if worker.kind_of(actor.devices[0]) is not kind and not self._falls_back():
            return f"its stage wants a {kind}, and there is one now"
        return None

    def _is_outdated(self, actor: Actor) -> bool:
        is_other_size = actor.memory_bytes != self._needs[actor.stage].memory_bytes
        registered = {workflow.name: workflow.digest for workflow in self.workflows}
        return is_other_size or registered.get(actor.workflow, actor.digest) != actor.digest

    def _place_missing(self, now: float) -> list[PlacementEffect]:
        self._unplaced = {}
        if not self._is_open:
            return []
        missing = {
            stage: count - self._count_serving(stage)
            for stage, count in self._wanted.items()
            if not self.config.retries.is_held_back(self._troubles.get(stage))
        }
        room_left = self.config.actors_max - len(self._actors)
        if sum(missing.values()) > room_left:
            bound = f"the set has {len(self._actors)} actors; its bound is {self.config.actors_max}"
            self._unplaced = dict.fromkeys((s for s, count in missing.items() if count), bound)
            return []
        packing = pack(
            self._sized_needs(),
            missing,
            self.rooms(only_taking=True),
            failures=failures_by_node(self._troubles),
            on_cpu=self._falls_back(),
        )
        self._unplaced = {unplaced.stage: unplaced.message for unplaced in packing.unplaced}
        effects = self._reserve(self._next_actor_id + len(packing.chosen))
        return effects + [self._order_start(self._new_actor(chosen, now), now) for chosen in packing.chosen]

    def _skip_used_ids(self, reports: Iterable[ActorReport]) -> list[PlacementEffect]:
        """Never use an id that a node has already, even if the stored state was lost."""
        used = (report.actor_id for report in reports if report.actor_id < _ACTOR_ID_MAX)
        self._next_actor_id = max(self._next_actor_id, max(used, default=0) + 1)
        return self._reserve(self._next_actor_id)

    def _stop_replaced(self, now: float) -> list[PlacementEffect]:
        effects: list[PlacementEffect] = []
        for actor in [a for a in self._actors.values() if a.life is ActorLife.RETIRING]:
            if self._count_ready(actor.stage) >= self._wanted[actor.stage]:
                effects += self._stop(actor, "its replacement is ready", now)
            elif self._is_outdated(actor) and actor.stage in self._unplaced:
                effects += self._stop(actor, "it makes room for the version that replaces it", now)
        return effects
