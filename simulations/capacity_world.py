"""A set of many GPUs as discrete events: requests, instances, moves; the decisions are the product's own.

What decides is the code that would decide in a set: ``RebalanceMachine`` what moves, ``FinishModel`` who
is admitted, ``WaitingOrder`` what an instance works on next, the planner what there is at first. What is
modelled: stages take random times of the measured mean and spread (gamma distributed); a message goes to
the instance to which its sender's node has the fewest under way (``capacity_dispatch``); the inputs of a
join meet at instances in turn; batches form where the profile has any, in order of arrival. A donor finishes
what it holds; the new instance loads beside it where the memory is enough, else behind it.

What is not: the network but for constant times (``Delays``), failures, retries, priorities, and instances
that slow each other down on one device.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any, Final, NamedTuple, TypeAlias

from attrs import define, evolve, field, frozen

from onepiece.core.capacity import CapacityModel, Demand
from onepiece.core.finish import FinishModel
from onepiece.core.inventory import DeviceKind
from onepiece.core.live_times import LiveTimes
from onepiece.core.move_board import DeviceInfo, PlacedActor, StageLimits
from onepiece.core.moves import Move
from onepiece.core.rebalance import (
    OrderMoves,
    RebalanceMachine,
    RebalancePolicy,
    RequestsCounted,
    SetChanged,
    TimesMeasured,
)
from onepiece.core.waiting_order import WaitingOrder, rank
from onepiece.errors import ConfigError
from simulations.capacity_dispatch import PROXY, Dispatch, Sender
from simulations.capacity_record import Record
from simulations.capacity_steps import Way
from simulations.capacity_trace import Arrival

_TICK_SECONDS: Final = 10.0


@frozen
class Delays:
    """What passes beside the stages' own times, in seconds; only ``turn`` keeps a worker busy."""

    entry: float = 0.0
    """From the arrival of a request until the inputs are at its first stages."""
    hop: float = 0.0
    """From the end of one stage until its output is at the next."""
    exit: float = 0.0
    """From the end of the last stage until the client has the result."""
    turn: float = 0.0
    """From the end of a stage until its worker begins with what waits."""
    news: float = 0.0
    """From the end of a stage until the node that sent its input has heard of it."""
    proxy_news: float = 0.0
    """The same where that was the proxy."""


@frozen
class Place:
    """An instance that is there at first, and where."""

    stage: str
    node_id: str
    devices: tuple[str, ...]


@frozen
class WorldOptions:
    """What the set is, and how it is run."""

    gpus: int
    per_node: int = 8
    gpu_bytes: int = 80 << 30
    moves: bool = True
    timeout_seconds: float | None = None
    """A request that is predicted to take longer is refused; None: all are accepted."""
    delays: Delays = field(factory=Delays)
    places: tuple[Place, ...] = ()
    """Where instances are at first; made up if there are none here. Each is on devices of its own."""
    policy: RebalancePolicy = field(factory=RebalancePolicy)
    limits: Mapping[str, StageLimits] = field(factory=dict)
    seed: int = 0


@define(eq=False, slots=True)
class _Request:
    arrived_at: float
    demand: int
    missing: list[int]
    """For each step: how many of those that it comes after have not ended."""
    left: int
    joins: "dict[int, _Instance]"
    """Where the inputs of a step with several sources are to meet."""


class _Task(NamedTuple):
    """A stage task, on its way to an instance or there."""

    request: _Request
    step: int
    sender: "Sender[_Instance]"
    instance: "_Instance"


_Line: TypeAlias = "deque[_Task] | WaitingOrder[_Task]"
"""What waits at an instance: batches form in order of arrival, else it is as the RequestScheduler has it."""


@define(eq=False, slots=True)
class _Instance:
    actor: PlacedActor
    free: int
    queue: _Line
    times: LiveTimes = field(factory=LiveTimes)
    outstanding: int = 0
    drains: bool = False
    successor: "_Instance | None" = None
    """Loads, or takes over, once this one has ended."""


class World:
    """The set; ``run`` lets a trace pass through it."""

    def __init__(
        self,
        model: CapacityModel,
        demands: Sequence[Demand],
        instances: Mapping[str, int],
        options: WorldOptions,
    ) -> None:
        self.record: Record = Record(tuple(instances), options.gpus)
        self._model = model
        self._demands = demands
        self._options = options
        self._random = Random(options.seed)  # noqa: S311 - a simulation is to be repeatable
        self._events: list[tuple[float, int, Callable[[Any, float], None], Any]] = []
        """When, in which order, and what is then called with what."""
        self._count = 0
        self._times: dict[tuple[str, str, int], tuple[float, float]] = {}
        self._dispatch: dict[str, Dispatch[_Instance]] = {stage: Dispatch() for stage in model.stages}
        self._finish = FinishModel(model)
        self._present: dict[str, dict[tuple[str, str], int]] = {stage: {} for stage in model.stages}
        self._instances: dict[int, _Instance] = {}
        self._serving: dict[str, int] = dict.fromkeys(model.stages, 0)
        self._ways = [Way.of(model, demand) for demand in demands]
        self._kinds = [(demand.workflow, demand.size_class) for demand in demands]
        self._offered = [0] * len(demands)
        self._machine = RebalanceMachine(policy=options.policy)
        self._machine.handle(TimesMeasured(model, options.limits), 0.0)
        self._devices = self._place(instances)
        self._tell_set(0.0)

    # --- running

    def run(self, trace: Iterable[Arrival], seconds: float) -> Record:
        """Let the trace arrive, and ``seconds`` pass; what is not done then is not counted as finished."""
        coming = iter(trace)
        next_arrival = next(coming, None)
        next_tick = _TICK_SECONDS
        events = self._events
        while True:
            at = next_arrival[0] if next_arrival is not None else math.inf
            first = events[0][0] if events else math.inf
            now = min(at, first, next_tick)
            if now > seconds:
                return self.record
            if first <= at and first <= next_tick:
                _, _, happen, what = heapq.heappop(events)
                happen(what, now)
            elif at <= next_tick:
                assert next_arrival is not None
                self._arrive(next_arrival[1], now)
                next_arrival = next(coming, None)
            else:
                self._tick(now)
                next_tick += _TICK_SECONDS

    def _at(self, moment: float, happen: Callable[[Any, float], None], what: object) -> None:
        self._count += 1
        heapq.heappush(self._events, (moment, self._count, happen, what))

    # --- requests

    def _arrive(self, number: int, now: float) -> None:
        self._offered[number] += 1
        timeout = self._options.timeout_seconds
        if timeout is not None:
            predicted = self._finish.seconds(*self._kinds[number], self._serving, self._present)
            if predicted > timeout:
                self.record.refused(now)
                return
        self.record.accepted(now)
        way = self._ways[number]
        request = _Request(now, number, list(way.sources), len(way.steps), self._joins(way))
        for place in way.entries:
            self._send(request, place, PROXY, self._options.delays.entry, now)

    def _joins(self, way: Way) -> dict[int, _Instance]:
        return {
            place: self._dispatch[stage].meeting() for place, stage in way.joins if self._dispatch[stage].live
        }

    def _count_present(self, stage: str, number: int, by: int) -> None:
        if self._options.timeout_seconds is None:
            return  # nobody is asked
        present, kind = self._present[stage], self._kinds[number]
        present[kind] = present.get(kind, 0) + by

    def _send(self, request: _Request, place: int, sender: str, seconds: float, now: float) -> None:
        """Choose an instance, and let the message be there after so many seconds."""
        step = self._ways[request.demand].steps[place]
        dispatch = self._dispatch[step.stage]
        sending = dispatch.sender(sender)
        instance = request.joins.get(place) if step.is_join else None
        if instance is None or instance.drains:
            instance = self._random.choice(dispatch.live) if step.is_join else sending.pick()
        sending.picked(instance)
        instance.outstanding += 1
        self._count_present(step.stage, request.demand, 1)
        task = _Task(request, place, sending, instance)
        if seconds:
            self._at(now + seconds, self._arrive_at, task)
        else:
            self._arrive_at(task, now)

    def _arrive_at(self, task: _Task, now: float) -> None:
        instance = task.instance
        queue = instance.queue
        if isinstance(queue, deque):
            queue.append(task)
        else:
            workflow, size_class = self._kinds[task.request.demand]
            name = self._ways[task.request.demand].steps[task.step].name
            seen = instance.times.mean_seconds(name, size_class)
            ranked = rank(now, 0.0 if seen is None else seen, 0)
            queue.add(task, workflow, "", ranked, 1.0 if seen is None else seen)
        if instance.free:
            self._start(instance, now)

    def _start(self, instance: _Instance, now: float) -> None:
        stage = instance.actor.stage
        tasks = self._next_tasks(instance)
        size_class = self._kinds[tasks[0].request.demand][1]
        mean, shape = self._time_of(stage, size_class, len(tasks))
        seconds = self._random.gammavariate(shape, mean / shape) if shape else mean
        instance.free -= 1
        self.record.busy(stage, now, seconds, len(instance.actor.devices))
        self._at(now + seconds, self._end, _Run(instance, tasks, seconds))

    def _next_tasks(self, instance: _Instance) -> list[_Task]:
        queue = instance.queue
        if not isinstance(queue, deque):
            task = queue.pull()
            assert task is not None
            return [task]
        tasks = [queue.popleft()]
        size_class = self._demands[tasks[0].request.demand].size_class
        limit = self._model.stages[instance.actor.stage].batch_limit(size_class)
        while len(tasks) < limit and queue:
            if self._demands[queue[0].request.demand].size_class != size_class:
                break
            tasks.append(queue.popleft())
        return tasks

    def _time_of(self, stage: str, size_class: str, batch: int) -> tuple[float, float]:
        """The mean, and the shape of a gamma distribution with the measured spread; 0 if there is none."""
        key = (stage, size_class, batch)
        found = self._times.get(key)
        if found is None:
            timing = self._model.stages[stage].timing(size_class, batch)
            mean, spread = timing.mean_seconds, timing.spread_seconds
            found = self._times[key] = (mean, (mean / spread) ** 2 if spread else 0.0)
        return found

    def _end(self, run: "_Run", now: float) -> None:
        instance, tasks, seconds = run
        delays = self._options.delays
        stage, node_id = instance.actor.stage, instance.actor.node_id
        instance.outstanding -= len(tasks)
        for task in tasks:
            request, place, sender, _ = task
            demand = request.demand
            self._hear(sender, instance, now)
            step = self._ways[demand].steps[place]
            if place in request.joins:
                self._hear(self._dispatch[stage].sender(PROXY), request.joins[place], now)
            if not isinstance(instance.queue, deque):
                instance.times.note(step.name, self._kinds[demand][1], seconds)
            self._count_present(stage, demand, -1)
            request.left -= 1
            if not request.left:
                done_at = now + delays.exit
                self.record.finished(done_at, done_at - request.arrived_at, demand)
            for after in step.after:
                request.missing[after] -= 1
                if not request.missing[after]:
                    self._send(request, after, node_id, delays.hop, now)
        if delays.turn:
            self._at(now + delays.turn, self._turn, instance)
        else:
            self._turn(instance, now)

    def _hear(self, sender: "Sender[_Instance]", instance: _Instance, now: float) -> None:
        """Let a sender hear, in its time, that an instance is done with one of its messages."""
        delays = self._options.delays
        news = delays.proxy_news if sender.name == PROXY else delays.news
        if news:
            self._at(now + news, _heard, (sender, instance))
        else:
            sender.done(instance)

    def _turn(self, instance: _Instance, now: float) -> None:
        """A worker is free."""
        instance.free += 1
        if instance.queue:
            self._start(instance, now)
        elif instance.drains and not instance.outstanding and self._is_idle(instance):
            self._gone(instance, now)

    def _is_idle(self, instance: _Instance) -> bool:
        return instance.free == self._model.stages[instance.actor.stage].concurrency

    # --- the set

    def _place(self, instances: Mapping[str, int]) -> tuple[DeviceInfo, ...]:
        """All instances, each on devices of its own; those on processors have one made for each."""
        options = self._options
        gpus = [
            DeviceInfo(
                f"node-{n // options.per_node:05}",
                f"cuda:{n % options.per_node}",
                DeviceKind.GPU,
                options.gpu_bytes,
            )
            for n in range(options.gpus)
        ]
        if options.places:
            return self._place_at(options.places)
        by_node: dict[str, list[str]] = {}
        for device in gpus:
            by_node.setdefault(device.node_id, []).append(device.device)
        processors: list[DeviceInfo] = []
        widest = sorted(instances, key=lambda stage: (-self._model.stages[stage].devices, stage))
        for stage in widest:
            profile = self._model.stages[stage]
            for _ in range(instances[stage]):
                if profile.kind is DeviceKind.CPU:
                    made = DeviceInfo(
                        "processors", f"cpu:{len(processors)}", DeviceKind.CPU, profile.memory_bytes
                    )
                    processors.append(made)
                    self._add(stage, made.node_id, (made.device,))
                    continue
                node_id = next((name for name, free in by_node.items() if len(free) >= profile.devices), None)
                if node_id is None:
                    raise ConfigError(
                        f"no node has {profile.devices} GPUs left for an instance of {stage}; give nodes "
                        "more (--per-node), or the set more (--gpus)"
                    )
                free = by_node[node_id]
                self._add(stage, node_id, tuple(free[: profile.devices]))
                by_node[node_id] = free[profile.devices :]
                if not by_node[node_id]:
                    del by_node[node_id]
        for instance in list(self._instances.values()):
            self._ready(instance, 0.0, tells=False)
        return (*gpus, *processors)

    def _place_at(self, places: Sequence[Place]) -> tuple[DeviceInfo, ...]:
        """Where they are told to be; each device has what memory it needs."""
        devices = []
        for place in places:
            profile = self._model.stages[place.stage]
            self._add(place.stage, place.node_id, place.devices)
            devices += [
                DeviceInfo(place.node_id, name, profile.kind, self._options.gpu_bytes)
                for name in place.devices
            ]
        for instance in list(self._instances.values()):
            self._ready(instance, 0.0, tells=False)
        return tuple(devices)

    def _add(self, stage: str, node_id: str, devices: tuple[str, ...]) -> _Instance:
        actor_id = len(self._instances) + 1 + self.record.ended_actors
        actor = PlacedActor(actor_id, stage, node_id, devices, is_settled=False)
        profile = self._model.stages[stage]
        queue: _Line = deque() if profile.batch_max > 1 else WaitingOrder()
        instance = _Instance(actor, profile.concurrency, queue)
        self._instances[actor_id] = instance
        return instance

    def _ready(self, instance: _Instance, now: float, *, tells: bool = True) -> None:
        """It has loaded; whoever it is to replace drains now, if he did not go before."""
        instance.actor = evolve(instance.actor, is_settled=True)
        stage = instance.actor.stage
        self._dispatch[stage].add(instance)
        self._serving[stage] += 1
        for other in list(self._instances.values()) if tells else ():
            if other.successor is instance:
                other.successor = None
                self._drain(other, now)
        if tells:
            self._tell_set(now)

    def _drain(self, instance: _Instance, now: float) -> None:
        if instance.drains:
            return
        instance.drains = True
        self._dispatch[instance.actor.stage].remove(instance)
        self._serving[instance.actor.stage] -= 1
        if not instance.outstanding and self._is_idle(instance):
            self._gone(instance, now)

    def _gone(self, instance: _Instance, now: float) -> None:
        del self._instances[instance.actor.actor_id]
        self.record.ended_actors += 1
        if instance.successor is not None:
            self._load(instance.successor, now)
        self._tell_set(now)

    def _load(self, instance: _Instance, now: float) -> None:
        self._at(now + self._model.stages[instance.actor.stage].load_seconds, self._loaded, instance)

    def _loaded(self, instance: _Instance, now: float) -> None:
        self._ready(instance, now)

    def _tick(self, now: float) -> None:
        counts = {
            (demand.workflow, demand.size_class): self._offered[number]
            for number, demand in enumerate(self._demands)
        }
        self._offered = [0] * len(self._demands)
        self.record.sample(now, self._serving)
        if not self._options.moves:
            return
        in_hand = {stage: sum(present.values()) for stage, present in self._present.items()}
        for effect in self._machine.handle(RequestsCounted(counts, _TICK_SECONDS, in_hand), now):
            assert isinstance(effect, OrderMoves)
            for move in effect.decision.moves:
                self._carry_out(move, now)
            for give in effect.decision.gives_back:
                self.record.gave_back(now, give)
                self._drain(self._instances[give.actor_id], now)
            self._tell_set(now)

    def _carry_out(self, move: Move, now: float) -> None:
        self.record.moved(now, move)
        new = self._add(move.stage, move.node_id, move.devices)
        donors = [self._instances[actor_id] for actor_id in move.replaces]
        for donor in donors:
            donor.successor = new
            donor.actor = evolve(donor.actor, is_settled=False)
        if not donors or move.is_beside:
            self._load(new, now)
            return
        for donor in donors:
            self._drain(donor, now)

    def _tell_set(self, now: float) -> None:
        if self._options.moves:
            actors = tuple(_seen(instance) for instance in self._instances.values())
            self._machine.handle(SetChanged(self._devices, actors), now)


def _seen(instance: _Instance) -> PlacedActor:
    """As the rebalancer is told: one that is given back only takes room until it is gone."""
    is_given_back = instance.drains and instance.successor is None
    return evolve(instance.actor, stage="") if is_given_back else instance.actor


class _Run(NamedTuple):
    """An instance's worker is busy with tasks, for so long."""

    instance: _Instance
    tasks: list[_Task]
    seconds: float


def _heard(both: "tuple[Sender[_Instance], _Instance]", _now: float) -> None:
    sender, instance = both
    sender.done(instance)
