"""Balance: what nodes report of their work becomes demand and service times, and these become moves.

It is told each heartbeat and looks every ``look_seconds``. What it promises:

* Service times are those that were measured (``run_times``), by size class: where the mix of classes shifts,
  so does what is asked of each stage. What a load takes is that of the latest ones. A
  workflow with a stage that has not finished any run yet is no demand so far, and a stage of which nothing
  was measured neither gives nor takes.
* A stage of which such a workflow was asked for gives nothing either, as its load is not known whole.
* Counters grow for as long as an actor (or a proxy's process) lives, so that a heartbeat that is lost loses
  nothing, and one that comes late or twice counts nothing twice. Of a proxy that was not known, only what
  comes from then on is counted, as when that was offered is not known.
* What is held is bounded by the actors, nodes and workflows there are.
* ``ADVISE`` finds the same moves and orders none; ``OFF`` looks at nothing.

After a restart all of it is measured anew.
"""

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from attrs import define, evolve, field, frozen

from onepiece.core.actors import Actor, ActorLife
from onepiece.core.capacity import CapacityModel, WorkflowShape
from onepiece.core.give_back import GiveBack
from onepiece.core.inventory import ActorReport, DeviceKind, RegisteredWorkflow, StageNeed
from onepiece.core.machine import Machine
from onepiece.core.move_board import DeviceInfo, PlacedActor, StageLimits
from onepiece.core.moves import Decision, Move, MovePolicy
from onepiece.core.rebalance import (
    RebalanceMachine,
    RebalancePolicy,
    RequestsCounted,
    SetChanged,
    TimesMeasured,
)
from onepiece.core.run_times import RunTimes
from onepiece.core.service_times import ANY_SIZE, StageProfile, Timing
from onepiece.core.workers import Worker, rooms_of

Kind: TypeAlias = tuple[str, str]
"""Workflow and size class."""
_NOBODY: Final = ""
"""The stage of an actor that is about to end: it takes room, and is nobody's instance any more."""


class RebalanceMode(enum.StrEnum):
    """Whether moves are carried out, only told, or not looked for."""

    OFF = "off"
    ADVISE = "advise"
    ON = "on"


def patience(window_seconds: float, moves_max: int = 4) -> RebalancePolicy:
    """The policy whose shortest window is this; all of its other times are in proportion to it."""
    return RebalancePolicy(
        windows_seconds=(window_seconds, 5 * window_seconds, 20 * window_seconds),
        sustain_seconds=window_seconds / 6,
        rest_seconds=2 * window_seconds,
        release_seconds=5 * window_seconds,
        moves=MovePolicy(horizon_seconds=5 * window_seconds, moves_max=moves_max),
    )


@frozen
class BalanceConfig:
    """Settings of rebalancing."""

    mode: RebalanceMode = RebalanceMode.ADVISE
    look_seconds: float = 5.0
    policy: RebalancePolicy = field(factory=lambda: patience(60.0))

    def __attrs_post_init__(self) -> None:
        assert 0 < self.look_seconds <= self.policy.windows_seconds[0] / 2


# --- events and effects --------------------------------------------------------------------------


@frozen
class NodeTold:
    """A heartbeat: what the actors of a node have done, and what its proxy was asked for."""

    node_id: str
    incarnation: int
    actors: tuple[ActorReport, ...]
    offered: Mapping[str, Mapping[str, int]]
    """By workflow and size class."""


@frozen
class LookedAround:
    """It is time to look, at these workflows, workers and actors.

    ``moving`` are actors that take part in a move, ``given_back`` those that end without a successor;
    ``on_cpu``: stages that want a GPU run on processors.
    """

    workflows: tuple[RegisteredWorkflow, ...]
    needs: Mapping[str, StageNeed]
    workers: Iterable[Worker]
    actors: Iterable[Actor]
    moving: frozenset[int]
    limits: Mapping[str, StageLimits]
    on_cpu: bool
    given_back: frozenset[int] = frozenset()


BalanceEvent: TypeAlias = NodeTold | LookedAround


@frozen
class ProposeMoves:
    """These moves are worth it now, or these instances are not needed."""

    moves: tuple[Move, ...]
    gives_back: tuple[GiveBack, ...] = ()


# --- the machine -------------------------------------------------------------------------------


@define(kw_only=True, eq=False)
class BalanceMachine(Machine[BalanceEvent, ProposeMoves]):
    """From reports to moves; see the module's text."""

    story_entries_max: int = 16
    config: BalanceConfig = field(factory=BalanceConfig)
    _times: RunTimes = field(factory=RunTimes, init=False)
    _load_told: dict[int, float] = field(factory=dict, init=False)
    """By actor: what it said last that its load took."""
    _loads: dict[str, float] = field(factory=dict, init=False)
    _concurrency: dict[str, int] = field(factory=dict, init=False)
    _offered: dict[str, tuple[int, Mapping[Kind, int]]] = field(factory=dict, init=False)
    """By node: its incarnation, and what its proxy had been asked for."""
    _counts: dict[Kind, int] = field(factory=dict, init=False)
    """Requests by workflow and size class since the last look."""
    _in_hand: dict[int, int] = field(factory=dict, init=False)
    """By actor: the stage tasks that are queued and running there."""
    _asked_for: set[str] = field(factory=set, init=False)
    """The workflows that any request came for."""
    rates: dict[str, float] = field(factory=dict, init=False)
    """Requests a second between the last two looks, by workflow, or ``workflow/class`` where one is named."""
    _rebalance: RebalanceMachine = field(init=False)
    _looked_at: float | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._rebalance = RebalanceMachine(policy=self.config.policy)

    @property
    def latest(self) -> Decision | None:
        """What the last look found."""
        return self._rebalance.latest

    def timing(self, stage: str) -> Timing | None:
        """What was measured of a stage."""
        return self._times.timing(stage)

    def load_seconds(self, stage: str) -> float | None:
        """What it takes to load the stage."""
        return self._loads.get(stage)

    def next_deadline(self, now: float) -> float | None:
        """When to look again; None if it never does."""
        if self.config.mode is RebalanceMode.OFF:
            return None
        return now if self._looked_at is None else self._looked_at + self.config.look_seconds

    def check_invariants(self) -> None:
        """Nothing was counted backwards."""
        assert all(count >= 0 for count in self._counts.values())
        self._times.check_invariants()

    def _react(self, event: BalanceEvent, now: float) -> list[ProposeMoves]:
        match event:
            case NodeTold():
                self._on_told(event)
                return []
            case LookedAround():
                return self._look(event, now)

    # --- what is heard

    def _on_told(self, event: NodeTold) -> None:
        if self.config.mode is RebalanceMode.OFF:
            return
        for report in event.actors:
            self._take_work(report)
        offered = {(name, each): n for name, of in event.offered.items() for each, n in of.items()}
        known = self._offered.get(event.node_id)
        if known is not None and known[0] > event.incarnation:
            return
        if known is not None and known[0] == event.incarnation:
            for kind, count in offered.items():
                more = max(0, count - known[1].get(kind, 0))
                self._counts[kind] = self._counts.get(kind, 0) + more
            if any(count < known[1].get(kind, 0) for kind, count in offered.items()):
                return  # an older heartbeat
        if offered or known is not None:
            self._offered[event.node_id] = (event.incarnation, offered)

    def _take_work(self, report: ActorReport) -> None:
        took = report.work.load_seconds
        self._in_hand[report.actor_id] = report.queued + report.running
        if took is not None and took != self._load_told.get(report.actor_id):
            self._load_told[report.actor_id] = took
            self._loads[report.stage] = (self._loads.get(report.stage, took) + took) / 2
        self._concurrency[report.stage] = max(1, report.work.concurrency)
        self._times.take(report)

    # --- what is seen

    def _look(self, seen: LookedAround, now: float) -> list[ProposeMoves]:
        actors = tuple(seen.actors)
        self._forget(seen, actors)
        before, self._looked_at = self._looked_at, now
        counts, self._counts = self._counts, {}
        if before is None or now <= before:
            return []
        names = {workflow.name for workflow in seen.workflows}
        seconds = now - before
        self.rates = dict.fromkeys(sorted(names), 0.0)
        for (name, size_class), count in sorted(counts.items()):
            if name in names:
                self.rates[f"{name}/{size_class}" if size_class else name] = count / seconds
        self._asked_for = (self._asked_for | {name for (name, _), count in counts.items() if count}) & names
        placed = tuple(_placed(actor, seen) for actor in actors)
        model = self._model(seen)
        self._rebalance.handle(TimesMeasured(model, seen.limits, self._held(seen, model)), now)
        self._rebalance.handle(SetChanged(_devices(seen), placed), now)
        requests = self._known_kinds({kind: count for kind, count in counts.items() if kind[0] in names})
        in_hand: Counter[str] = Counter()
        for actor in actors:
            in_hand[actor.stage] += self._in_hand.get(actor.actor_id, 0)
        orders = self._rebalance.handle(RequestsCounted(requests, seconds, in_hand), now)
        if self.config.mode is not RebalanceMode.ON:
            return []
        return [ProposeMoves(order.decision.moves, order.decision.gives_back) for order in orders]

    def _known_kinds(self, counts: Mapping[Kind, int]) -> dict[Kind, int]:
        """A class that no stage has finished a run of counts as any."""
        known, found = self._times.classes(), Counter[Kind]()
        for (name, size_class), count in counts.items():
            found[name, size_class if size_class in known else ANY_SIZE] += count
        return dict(found)

    def _held(self, seen: LookedAround, model: CapacityModel) -> frozenset[str]:
        """Stages whose load is not known whole: a workflow that is asked for has not been measured."""
        unknown = [each for each in seen.workflows if each.name not in model.workflows]
        return frozenset(stage for each in unknown if each.name in self._asked_for for stage in each.path)

    def _forget(self, seen: LookedAround, actors: Iterable[Actor]) -> None:
        """Keep what belongs to the actors, stages and nodes that there are."""
        there = {actor.actor_id for actor in actors}
        self._times.keep(there, seen.needs.keys())
        self._load_told = {actor_id: took for actor_id, took in self._load_told.items() if actor_id in there}
        self._in_hand = {actor_id: count for actor_id, count in self._in_hand.items() if actor_id in there}
        for table in (self._loads, self._concurrency):
            for stage in table.keys() - seen.needs.keys():
                del table[stage]

    def forget_node(self, node_id: str) -> None:
        """A node is gone."""
        self._offered.pop(node_id, None)

    def _model(self, seen: LookedAround) -> CapacityModel:
        classes = sorted(self._times.classes())
        profiles = {}
        for stage, need in seen.needs.items():
            timings = [self._times.timing(stage, size_class) for size_class in classes]
            measured = [timing for timing in timings if timing is not None]
            if measured:
                profiles[stage] = self._profile(need, measured, on_cpu=seen.on_cpu)
        shapes = [
            WorkflowShape.line(workflow.name, workflow.path)
            for workflow in seen.workflows
            if profiles.keys() >= set(workflow.path)
        ]
        return CapacityModel.of(profiles.values(), shapes)

    def _profile(self, need: StageNeed, timings: Iterable[Timing], *, on_cpu: bool) -> StageProfile:
        return StageProfile(
            need.stage,
            tuple(evolve(timing, devices=need.device_count) for timing in timings),
            kind=DeviceKind.CPU if on_cpu else need.kind,
            devices=need.device_count,
            concurrency=self._concurrency.get(need.stage, 1),
            memory_bytes=need.memory_bytes,
            load_seconds=self._loads.get(need.stage, 0.0),
        )


def _placed(actor: Actor, seen: LookedAround) -> PlacedActor:
    """What is given back only takes room: whatever else is to be decided need not wait for its end."""
    is_ending = actor.life in {ActorLife.STOPPING, ActorLife.RETIRING}
    is_given_back = actor.actor_id in seen.given_back
    return PlacedActor(
        actor.actor_id,
        _NOBODY if is_ending else actor.stage,
        actor.node_id,
        actor.devices,
        is_settled=is_given_back or (actor.life is ActorLife.READY and actor.actor_id not in seen.moving),
    )


def _devices(seen: LookedAround) -> tuple[DeviceInfo, ...]:
    return tuple(
        DeviceInfo(room.node_id, room.device, room.kind, room.memory_bytes)
        for room in rooms_of(seen.workers, (), only_taking=True)
    )
