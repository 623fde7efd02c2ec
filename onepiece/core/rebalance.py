"""Rebalancing: when instances move to where the load is.

The machine is told how many requests were offered, what actors and devices there are and what service times
were measured; ``moves.decide`` chooses, and this adds patience:

* The load is that of the last minute, or of a longer window if the shorter one does not say enough for a
  move (``windows_seconds``): many requests make it quick, few make it slow. The shorter ones must agree.
  A window that is not even half over says nothing.
* A stage must have been too busy in every look for ``sustain_seconds`` before anything moves.
* While moves take place (an actor is not settled), nothing else is decided, for at most
  ``settle_seconds_max``: an actor that never gets ready must not hold up the set for ever.
* For ``rest_seconds`` a stage that gave takes from no donor, and one that took does not give; further moves
  the same way are free. Together with what a move must gain, that is why a steady load near the border of
  two choices moves nothing to and fro.
* Requests of workflows and size classes that were not measured are passed over; stages that serve such
  ones (``held``) do not give.
* Where nothing moves, a stage gives back the instances that it has not needed in any look for
  ``release_seconds`` (``give_back`` says which these are, by all windows: else what a long one remembers
  would take them again). A stage that gets or loses an instance begins anew, and so do all after moves.
  What is given back is taken again as any idle device is, without a donor's rest.

    quiet --too busy--> waiting --still so--> moving --all settled--> quiet
                           | no longer            | for too long
                           +------> quiet         +------> quiet

How an order is carried out is placement's matter: ``DemandChanged`` with the instances of a decision
makes it drain the donors and start the new actors where there is room then.
"""

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Self, TypeAlias

from attrs import define, evolve, field, frozen

from onepiece.core.actors import Actor, ActorLife
from onepiece.core.capacity import CapacityModel, Demand
from onepiece.core.give_back import GiveBackPolicy, SpareInstances, chosen
from onepiece.core.machine import Machine, follow
from onepiece.core.move_board import DeviceInfo, KeptBoard, Load, PlacedActor, StageLimits
from onepiece.core.moves import Decision, MovePolicy, decide
from onepiece.core.workers import Worker

_INTERVALS_MAX: Final = 4096


@frozen
class RebalancePolicy:
    """Patience; see the module's text."""

    windows_seconds: tuple[float, ...] = (60.0, 300.0, 1200.0)
    sustain_seconds: float = 10.0
    rest_seconds: float = 120.0
    settle_seconds_max: float = 1800.0
    release_seconds: float = 300.0
    moves: MovePolicy = field(factory=MovePolicy)
    give_back: GiveBackPolicy | None = field(factory=GiveBackPolicy)
    """None: nothing is ever given back."""

    def __attrs_post_init__(self) -> None:
        assert self.windows_seconds[0] > 0
        assert self.windows_seconds == tuple(sorted(self.windows_seconds))
        assert self.sustain_seconds >= 0
        assert self.rest_seconds >= 0
        assert self.settle_seconds_max > 0
        assert self.release_seconds >= 0


# --- events ------------------------------------------------------------------------------------


@frozen
class TimesMeasured:
    """These are the service times now, and what an operator wants of each stage.

    ``held`` are stages of which it is known that the model misses some of their load.
    """

    model: CapacityModel
    limits: Mapping[str, StageLimits] = field(factory=dict)
    held: frozenset[str] = frozenset()


@frozen
class SetChanged:
    """These are the devices of nodes that take new actors, and all actors."""

    devices: tuple[DeviceInfo, ...]
    actors: tuple[PlacedActor, ...]

    @classmethod
    def of(cls, workers: Iterable[Worker], actors: Iterable[Actor]) -> Self:
        """The set as placement has it; an actor that is ending only takes room until it is gone."""
        workers = tuple(workers)
        draining = {worker.node.node_id for worker in workers if worker.draining}
        devices = tuple(
            DeviceInfo(worker.node.node_id, device.name, device.kind, device.memory_bytes)
            for worker in workers
            if worker.takes_new
            for device in worker.node.devices
        )
        placed = tuple(
            PlacedActor(
                actor.actor_id,
                "" if actor.life is ActorLife.STOPPING else actor.stage,
                actor.node_id,
                actor.devices,
                is_settled=actor.life is ActorLife.READY and actor.node_id not in draining,
            )
            for actor in actors
        )
        return cls(devices, placed)


@frozen
class RequestsCounted:
    """So many requests were offered, refused ones included, in the ``seconds`` that ended now.

    ``requests`` are by workflow and size class; ``in_hand`` are stage tasks queued and running now, by stage.
    """

    requests: Mapping[tuple[str, str], int]
    seconds: float = field()
    in_hand: Mapping[str, int] = field(factory=dict)

    @seconds.validator
    def _is_a_length(self, _attribute: object, seconds: float) -> None:
        assert seconds > 0


RebalanceEvent: TypeAlias = TimesMeasured | SetChanged | RequestsCounted


# --- effects -----------------------------------------------------------------------------------


@frozen
class OrderMoves:
    """Carry these moves out."""

    decision: Decision


RebalanceEffect: TypeAlias = OrderMoves


# --- the machine -------------------------------------------------------------------------------


@frozen
class _Calm:
    """Since when a stage, with so many instances, has had at least so many to spare."""

    since: float
    instances: int
    spare: int


class _Phase(enum.Enum):
    QUIET = "quiet"
    WAITING = "waiting"
    MOVING = "moving"


class _Sign(enum.Enum):
    BUSY = "busy"
    CALM = "calm"
    ORDERED = "ordered"
    SETTLED = "settled"


_TRANSITIONS: Final = {
    (_Phase.QUIET, _Sign.BUSY): _Phase.WAITING,
    (_Phase.QUIET, _Sign.CALM): _Phase.QUIET,
    (_Phase.WAITING, _Sign.BUSY): _Phase.WAITING,
    (_Phase.WAITING, _Sign.CALM): _Phase.QUIET,
    (_Phase.WAITING, _Sign.ORDERED): _Phase.MOVING,
    (_Phase.MOVING, _Sign.SETTLED): _Phase.QUIET,
}


@define(kw_only=True, eq=False)
class RebalanceMachine(Machine[RebalanceEvent, RebalanceEffect]):
    """When instances move; see the module's text."""

    story_entries_max: int = 16  # its events hold the whole set
    policy: RebalancePolicy = field(factory=RebalancePolicy)
    _model: CapacityModel | None = field(default=None, init=False)
    _limits: Mapping[str, StageLimits] = field(factory=dict, init=False)
    _held: frozenset[str] = field(default=frozenset(), init=False)
    _calm: dict[str, _Calm] = field(factory=dict, init=False)
    _devices: tuple[DeviceInfo, ...] = field(default=(), init=False)
    _actors: tuple[PlacedActor, ...] = field(default=(), init=False)
    _board: KeptBoard = field(factory=KeptBoard, init=False)
    _counted: list[tuple[float, RequestsCounted]] = field(factory=list, init=False)
    _phase: _Phase = field(default=_Phase.QUIET, init=False)
    _since: float = field(default=0.0, init=False)
    """When the phase began."""
    _gave_until: dict[str, float] = field(factory=dict, init=False)
    _took_until: dict[str, float] = field(factory=dict, init=False)
    _is_carried_out: bool = field(default=True, init=False)
    """The set has been heard of since the last order."""
    latest: Decision | None = field(default=None, init=False)
    """What the last look found, for whoever asks why nothing moves."""

    def next_deadline(self, now: float) -> float | None:
        """None: it only looks when requests were counted."""
        return None

    def check_invariants(self) -> None:
        """The window is bounded and in order."""
        assert len(self._counted) <= _INTERVALS_MAX
        moments = [at for at, _ in self._counted]
        assert moments == sorted(moments)

    def _react(self, event: RebalanceEvent, now: float) -> list[RebalanceEffect]:
        match event:
            case TimesMeasured(model, limits, held):
                self._model, self._limits, self._held = model, limits, held
                self._board.clear()
            case SetChanged(devices, actors):
                self._devices, self._actors, self._is_carried_out = devices, actors, True
                self._board.clear()
            case RequestsCounted():
                self._counted.append((now, event))
                return self._look(now)
        return []

    def _look(self, now: float) -> list[RebalanceEffect]:
        begin = now - self.policy.windows_seconds[-1]
        self._counted = [each for each in self._counted if each[0] > begin][-_INTERVALS_MAX:]
        if self._phase is _Phase.MOVING:
            is_settled = self._is_carried_out and all(actor.is_settled for actor in self._actors)
            if not is_settled and now < self._since + self.policy.settle_seconds_max:
                return []
            self._become(_Sign.SETTLED, now)
            self._calm.clear()
        self._gave_until = {stage: until for stage, until in self._gave_until.items() if until > now}
        self._took_until = {stage: until for stage, until in self._took_until.items() if until > now}
        loads = self._loads(now)
        decision = self._decide(loads)
        if decision is None:
            return []
        self._become(_Sign.BUSY if decision.moves else _Sign.CALM, now)
        if not decision.moves:
            return self._give_back(decision, loads, now)
        self.latest = decision
        if now < self._since + self.policy.sustain_seconds:
            return []
        self._become(_Sign.ORDERED, now)
        self._is_carried_out = False
        self._rest(decision, now)
        return [OrderMoves(decision)]

    def _give_back(self, decision: Decision, loads: Sequence[Load], now: float) -> list[RebalanceEffect]:
        """What has not been needed for long enough, beside a decision that moves nothing."""
        self.latest = decision
        policy, model = self.policy.give_back, self._model
        if policy is None or model is None:
            return []
        counts = Counter(actor.stage for actor in self._actors)
        counted = [each for at, each in self._counted if at > now - max(self.policy.release_seconds, 1e-9)]
        spare = SpareInstances(
            model,
            loads,
            _averages([each.in_hand for each in counted]),
            {stage: counts[stage] for stage in model.stages if stage not in self._held},
            self._limits,
            policy,
        ).found()
        self._calm = {stage: self._still_calm(stage, counts[stage], n, now) for stage, n in spare.items()}
        due = {
            stage: calm.spare
            for stage, calm in self._calm.items()
            if now >= calm.since + self.policy.release_seconds
        }
        gives_back = chosen(model, due, self._devices, self._actors, self.policy.moves.moves_max)
        self.latest = evolve(decision, gives_back=gives_back)
        if not gives_back or not self._is_carried_out:
            return []
        self._is_carried_out = False
        return [OrderMoves(self.latest)]

    def _still_calm(self, stage: str, instances: int, spare: int, now: float) -> _Calm:
        before = self._calm.get(stage)
        if before is None or before.instances != instances:
            return _Calm(now, instances, spare)
        return evolve(before, spare=min(before.spare, spare))

    def _loads(self, now: float) -> list[Load]:
        """The load by each window that has been seen for long enough, the shortest one first."""
        loads: list[Load] = []
        for window in self.policy.windows_seconds:
            counted = [each for at, each in self._counted if at > now - window]
            seconds = sum(each.seconds for each in counted)
            if seconds < window / 2:
                break
            if self._model is not None:
                loads.append(Load(_demands(self._model, counted, seconds), seconds))
        return loads

    def _decide(self, loads: Sequence[Load]) -> Decision | None:
        """What the shortest window says that says enough for a move; None: nothing is known yet."""
        if self._model is None or not loads:
            return None
        return decide(
            self._model,
            loads,
            self._devices,
            self._actors,
            self._limits,
            self.policy.moves,
            self._gave_until,
            self._took_until.keys() | self._held,
            self._board,
        )

    def _rest(self, decision: Decision, now: float) -> None:
        stages = {actor.actor_id: actor.stage for actor in self._actors}
        until = now + self.policy.rest_seconds
        for move in decision.moves:
            if move.replaces:
                self._took_until[move.stage] = until
            for actor_id in move.replaces:
                self._gave_until[stages[actor_id]] = until

    def _become(self, sign: _Sign, now: float) -> None:
        after = follow(_TRANSITIONS, self._phase, sign)
        if after is not self._phase:
            self._phase, self._since = after, now


def _averages(in_hand: Sequence[Mapping[str, int]]) -> dict[str, float]:
    totals: Counter[str] = Counter()
    for each in in_hand:
        totals.update(each)
    return {stage: total / len(in_hand) for stage, total in totals.items()}


def _demands(model: CapacityModel, counted: Iterable[RequestsCounted], seconds: float) -> tuple[Demand, ...]:
    """The load of a window, of workflows that were measured."""
    totals: dict[tuple[str, str], int] = {}
    for each in counted:
        for key, count in each.requests.items():
            if _is_measured(model, *key):
                totals[key] = totals.get(key, 0) + count
    return tuple(Demand(name, count / seconds, size) for (name, size), count in sorted(totals.items()))


def _is_measured(model: CapacityModel, workflow: str, size_class: str) -> bool:
    shape = model.workflows.get(workflow)
    return shape is not None and all(size_class in model.stages[s].size_classes for s in shape.visits)
