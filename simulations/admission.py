"""Admission under load: the product's own door in front of stages that are simulated as events.

One set of stages in a row, first come, first served, with service times that vary as asked for; one or
several proxies with an ``Admission`` each, which hear of stages as late as in the product (reports linger)
and of each other every half second. Requests come at random (Poisson) and are not sent again when refused.

What is measured are accepted requests: how long each took against the median of the unloaded set, and how
many finish a second against what the stages can do. The first part of a run warms up and is not counted.
"""

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Final

from attrs import define, field, frozen

from onepiece.core.admission import Admission, AdmissionRules, BudgetLimits, RequestBudget
from onepiece.core.capacity import WorkflowShape
from onepiece.errors import Overloaded
from onepiece.requests import Terms

EXCHANGE_SECONDS: Final = 0.5
"""How often proxies tell each other what they are asked for."""
_WORKFLOW: Final = "video"


@frozen
class SimStage:
    """A stage: how long it takes, how much that varies (relative), and how many run at once."""

    seconds: float
    workers: int
    spread: float = 0.0


@frozen
class Source:
    """A stream of requests: ``load`` times what the set can do, to one proxy, of one tenant."""

    load: float
    proxy: int = 0
    terms: Terms = field(factory=Terms)


@frozen
class Setting:
    """What is simulated."""

    stages: tuple[SimStage, ...]
    rules: AdmissionRules = field(factory=lambda: AdmissionRules(wait_factor=0.2))
    proxies: int = 1
    seconds: float = 400.0
    warm_seconds: float = 100.0
    timeout_seconds: float = 3600.0
    in_flight_max: int = 1000
    deaths: tuple[tuple[float, int], ...] = ()
    """When which proxy dies; what it had goes on, with the others."""
    report_seconds: float = 0.1
    """How long a stage's report lingers."""
    entry_seconds: float = 0.0
    """From the decision to let a request in until it is at its first stage."""
    hop_seconds: float = 0.0
    """From the end of a stage until its output is at the next."""
    exit_seconds: float = 0.0
    """From the end of the last stage until the proxy and the client know."""

    @property
    def rate(self) -> float:
        """What the stages can do, in requests a second."""
        return min(stage.workers / stage.seconds for stage in self.stages)


@define
class Outcome:
    """What came of the requests behind the warm-up."""

    seconds: float
    offered: int = 0
    refused: Counter[str] = field(factory=Counter)
    took: list[float] = field(factory=list)
    finished_by: Counter[str] = field(factory=Counter)
    """By tenant and priority."""

    @property
    def rate(self) -> float:
        """Finished requests a second."""
        return len(self.took) / self.seconds

    def quantile(self, share: float) -> float:
        """Of how long accepted requests took."""
        ordered = sorted(self.took)
        return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


@define
class _Request:
    uid: str
    proxy: int
    terms: Terms
    since: float
    stage: int = 0
    told: list[list[float]] = field(factory=list)
    """For each stage: when the request was queued there, begun, and done, as far as it is."""
    heard: Counter[int] = field(factory=Counter)
    """How much of that its proxy knows."""
    lingers: set[int] = field(factory=set)
    """Stages of which a report is on its way."""


@define(eq=False)
class _Run:
    setting: Setting
    rng: Random
    outcome: Outcome
    doors: list[Admission] = field(factory=list)
    now: float = 0.0
    _living: set[int] = field(factory=set)
    _events: list[tuple[float, int, Callable[[], None]]] = field(factory=list)
    _count: int = 0
    _queues: list[deque[_Request]] = field(factory=list)
    _busy: list[int] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        setting = self.setting
        names = [f"stage-{place}" for place in range(len(setting.stages))]
        workers = {name: stage.workers for name, stage in zip(names, setting.stages, strict=True)}
        self._living = set(range(setting.proxies))
        for proxy in range(setting.proxies):
            limits = BudgetLimits(total=setting.in_flight_max, each=setting.in_flight_max)
            door = Admission(RequestBudget(limits), setting.rules, life=str(proxy))
            door.set_up([WorkflowShape.line(_WORKFLOW, names)], workers)
            self.doors.append(door)
        self._tell_proxies()
        self._queues = [deque() for _ in setting.stages]
        self._busy = [0] * len(setting.stages)

    def go(self, sources: Sequence[Source]) -> None:
        end = self.setting.warm_seconds + self.setting.seconds
        for source in sources:
            self._next_of(source)
        for at, proxy in self.setting.deaths:
            self._at(at, partial(self._die, proxy))
        if self.setting.proxies > 1:
            self._exchange()
        while self._events and self._events[0][0] < end:
            self.now, _, act = heapq.heappop(self._events)
            act()

    def _at(self, moment: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (moment, self._count, act))

    @property
    def _counts(self) -> bool:
        return self.now >= self.setting.warm_seconds

    def _next_of(self, source: Source) -> None:
        if source.load > 0:
            gap = self.rng.expovariate(source.load * self.setting.rate)
            self._at(self.now + gap, lambda: self._arrive(source))

    def _arrive(self, source: Source) -> None:
        self._next_of(source)
        proxy = source.proxy if source.proxy in self._living else min(self._living)
        request = _Request(f"r{self._count}", proxy, source.terms, self.now)
        self.outcome.offered += self._counts
        try:
            self.doors[proxy].offer(
                request.uid, _WORKFLOW, source.terms, self.setting.timeout_seconds, self.now
            )
        except Overloaded as error:
            self.outcome.refused[str(error.fields["reason"])] += self._counts
            return
        self._at(self.now + self.setting.entry_seconds, partial(self._enter, request))

    def _enter(self, request: _Request) -> None:
        """It is at its next stage, and waits."""
        request.told.append([self.now])
        self._queues[request.stage].append(request)
        self._serve(request.stage)
        self._report(request, request.stage)

    def _serve(self, place: int) -> None:
        stage = self.setting.stages[place]
        while self._queues[place] and self._busy[place] < stage.workers:
            request = self._queues[place].popleft()
            self._busy[place] += 1
            request.told[place].append(self.now)
            self._at(self.now + self._seconds(stage), partial(self._done, request))
            self._report(request, place)

    def _seconds(self, stage: SimStage) -> float:
        if not stage.spread:
            return stage.seconds
        shape = 1 / stage.spread**2
        return self.rng.gammavariate(shape, stage.seconds / shape)

    def _report(self, request: _Request, place: int) -> None:
        """Let the door hear, in its time, how far a stage is by then."""
        if place not in request.lingers:
            request.lingers.add(place)
            self._at(self.now + self.setting.report_seconds, partial(self._hear, request, place))

    def _hear(self, request: _Request, place: int) -> None:
        request.lingers.discard(place)
        door, told = self.doors[request.proxy], request.told[place]
        known = request.heard[place]
        request.heard[place] = len(told)
        for tell, at in list(zip((door.queued, door.started, door.finished), told, strict=False))[known:]:
            tell(request.uid, str(place), at, self.now)

    def _done(self, request: _Request) -> None:
        place = request.stage
        self._busy[place] -= 1
        request.told[place].append(self.now)
        request.stage += 1
        if request.stage < len(self.setting.stages):
            self._report(request, place)
            self._at(self.now + self.setting.hop_seconds, partial(self._enter, request))
        else:
            self._at(self.now + self.setting.exit_seconds, partial(self._end, request))
        self._serve(place)

    def _end(self, request: _Request) -> None:
        for place in range(len(self.setting.stages)):  # the result carries what had not been reported
            self._hear(request, place)
        self.doors[request.proxy].give_back(request.uid)
        if self._counts:
            self.outcome.took.append(self.now - request.since)
            self.outcome.finished_by[f"{request.terms.tenant}/{request.terms.priority}"] += 1

    def _exchange(self) -> None:
        loads = [self.doors[proxy].load(self.now) for proxy in sorted(self._living)]
        for proxy in self._living:
            for load in loads:
                self.doors[proxy].hear(load, self.now)
        self._at(self.now + EXCHANGE_SECONDS, self._exchange)

    def _tell_proxies(self) -> None:
        for proxy in self._living:
            self.doors[proxy].set_proxies(map(str, sorted(self._living)), self.now)

    def _die(self, proxy: int) -> None:
        self._living.discard(proxy)
        self._tell_proxies()


def run(setting: Setting, sources: Sequence[Source], seed: int = 1) -> Outcome:
    """Simulate; the same seed gives the same outcome."""
    outcome = Outcome(setting.seconds)
    simulated = _Run(setting, Random(seed), outcome)  # noqa: S311 - a simulation keeps no secret
    simulated.go(sources)
    for door in simulated.doors:
        door.check_invariants()
    return outcome
