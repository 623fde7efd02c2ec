"""Admission: whether a request may come in, decided before its body is read.

::

    offer --in flight?--> --forecast: in time? wait short?--> --fair?--> place --(stages report)--> give_back
             |                        |                          |
             +-- Overloaded ----------+--------------------------+   when to come again, and where else

A proxy holds one ``Admission``. A request takes a place when it is offered and gives it back when it has
ended, however it ended; both are idempotent by UID, so that a place is neither taken nor given back twice.
What does not get a place is refused with ``Overloaded``, which says what was full, ``retry_after_seconds``,
and the other sets that may have room.

Refused is, in this order, a request

* beyond the numbers of ``RequestBudget``: so many requests in flight at this proxy;
* whose predicted finish is behind its deadline. One alone of its kind is let in all the same: if stages have
  become quicker, only a request that runs can show it;
* that would wait for longer than ``wait_factor`` times what it takes unloaded, if that is set;
* whose flow is ahead of others that want (``fair_door``), if it would wait for more than a quarter of that.

What is not known refuses nothing: before any stage has reported a time there is only the first rule; and
where ``wait_factor`` is set, no more are let in than all the workers that the workflow's stages have.

Several proxies fill one set: each exchanges what it is asked for and what it has seen (``ProxyLoad``), and
derives from that what share of the set is its own (``proxy_shares``). It decides without asking anybody.

Nothing here waits, reads a clock, or grows with what is refused. It is no ``Machine``: it decides thousands
of times a second, and a story of that would cost more than the decisions.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from attrs import define, evolve, field, frozen

from onepiece.core.capacity import WorkflowShape
from onepiece.core.fair_door import FairDoor, Weights
from onepiece.core.forecast import Forecast, Prediction
from onepiece.core.live_times import LiveTimes, SeenTime
from onepiece.core.proxy_shares import shares
from onepiece.errors import Overloaded
from onepiece.requests import Terms

RETRY_SECONDS: Final = 1.0
"""Where nothing better is known."""
DEMAND_SECONDS: Final = 5.0
"""Over how long what a proxy is asked for is averaged."""
SHARE_SECONDS: Final = 0.1
"""How often a proxy looks whether what it is asked for changes its share."""
SEEN_TIMES_MAX: Final = 4096
"""Of another proxy: what it says beyond that is passed over."""

ADMITTED: Final = "admitted"
IN_FLIGHT: Final = "in_flight"
LATE: Final = "late"
WAIT: Final = "wait"
UNFAIR: Final = "unfair"
_OUTCOMES: Final = (ADMITTED, IN_FLIGHT, LATE, WAIT, UNFAIR)
_SHARE_MIN: Final = 0.01
"""A proxy that nobody asks has room for the first who does."""
_AHEAD: Final = 0.25
"""Who is ahead of others that want may wait for this part of what they may."""
_PLACES_KEPT: Final = 2
"""Of those that ``RequestBudget`` has, kept from who is ahead."""
_UNFAIR: Final = "the last places are for others than this request of {workflow!r}, who have got less"


@frozen
class ProxyLoad:
    """What one proxy tells the others: what it is asked for, as a part of the set, and what stages take."""

    life: str
    demand: float
    seen: tuple[SeenTime, ...]


@frozen
class AdmissionRules:
    """How a proxy admits.

    ``wait_factor``: a request may wait for so many times what it takes unloaded; None: until its deadline.
    ``elsewhere``: HTTP addresses of other sets.
    """

    wait_factor: float | None = None
    weights: Weights = field(factory=Weights)
    elsewhere: tuple[str, ...] = ()


@define
class Demand:
    """How much a proxy is asked for: seconds of the set for each second, over the last few."""

    _sum: float = 0.0
    _at: float = -math.inf

    def note(self, seconds: float, now: float) -> None:
        """A request was offered that takes so many seconds of the set."""
        self._sum = self._left(now) + seconds
        self._at = now

    def at(self, now: float) -> float:
        """The part of the set that is asked for; above 1, the set is full."""
        return self._left(now) / DEMAND_SECONDS

    def _left(self, now: float) -> float:
        return self._sum * math.exp(min(0.0, self._at - now) / DEMAND_SECONDS) if self._sum else 0.0


@define(eq=False)
class Admission:
    """The door of one proxy; see the module's text."""

    budget: "RequestBudget"
    rules: AdmissionRules = field(factory=AdmissionRules)
    life: str = ""
    """Of this proxy's node."""
    counts: dict[str, int] = field(factory=lambda: dict.fromkeys(_OUTCOMES, 0))
    """How many requests were let in, and refused for which reason, since the proxy began."""
    _times: LiveTimes = field(factory=LiveTimes)
    _forecast: Forecast = field(init=False)
    _door: FairDoor = field(factory=FairDoor)
    _demand: Demand = field(factory=Demand)
    _heard: dict[str, float] = field(factory=dict)
    """What the other proxies are asked for, by life; infinite until one has said it."""
    _shared_at: float = -math.inf
    _heard_at: float | None = None
    """When another proxy said something that the share does not follow yet."""

    def __attrs_post_init__(self) -> None:
        self._forecast = Forecast(self._times)

    # --- what the set is ------------------------------------------------------------------------

    def set_up(self, shapes: Iterable[WorkflowShape], workers: Mapping[str, int]) -> None:
        """Which workflows are served, and how many requests all instances of each stage work on at once."""
        self._times.keep_stages(workers)
        self._forecast.set_up({shape.name: shape for shape in shapes}, workers)

    def set_proxies(self, lives: Iterable[str], now: float) -> None:
        """Which proxies there are; the share of one that is gone goes to the others."""
        others = [life for life in lives if life != self.life]
        self._heard = {life: self._heard.get(life, math.inf) for life in others}
        self._times.forget_all_but(others)
        self._set_share(now)

    def hear(self, load: ProxyLoad, now: float) -> None:
        """What another proxy says; passed over if it is none of the set."""
        if load.life not in self._heard or not load.demand >= 0:
            return
        self._heard[load.life] = load.demand
        self._times.hear(load.life, load.seen[:SEEN_TIMES_MAX])
        self._forecast.note_times()
        self._heard_at = now  # a hundred proxies speak within a moment: the share is looked at once

    def load(self, now: float) -> ProxyLoad:
        """What to tell the others."""
        return ProxyLoad(self.life, self._demand.at(now), self._times.own()[:SEEN_TIMES_MAX])

    def _set_share(self, now: float) -> None:
        self._shared_at, self._heard_at = now, None
        if self._heard:
            wanted = {**self._heard, self.life: self._demand.at(now)}
            self._forecast.set_share(max(_SHARE_MIN, shares(wanted)[self.life]))
        else:
            self._forecast.set_share(1.0)

    @property
    def share(self) -> float:
        """What part of the set this proxy may fill."""
        if self._heard_at is not None:
            self._set_share(self._heard_at)
        return self._forecast.share

    # --- requests -------------------------------------------------------------------------------

    def offer(self, uid: str, workflow: str, terms: Terms, timeout_seconds: float, now: float) -> None:
        """Take a place for a request, or raise ``Overloaded``; no error if it has one."""
        if self.budget.has(uid):
            return
        load = self._forecast.load_of(workflow, terms.size_class)
        if load is not None:
            self._demand.note(load, now)
        if self._heard_at is not None or (self._heard and now >= self._shared_at + SHARE_SECONDS):
            self._set_share(now)
        path = (workflow, terms.tenant, str(terms.priority))
        weights = self.rules.weights.of(workflow, terms.tenant, terms.priority)
        cost = 1.0 if load is None else load
        try:
            self._check(workflow, terms, timeout_seconds, self._door.is_ahead(path, weights, cost, now), now)
        except _Full as full:
            self.counts[full.outcome] += 1
            if full.outcome != LATE:  # a place would not have helped
                self._door.refused(path, weights, cost, now)
            raise self._overloaded(full, workflow) from None
        self.budget.take(uid, workflow)
        self._forecast.take(uid, workflow, terms.size_class, now)
        self._door.accepted(path, weights, cost, now)
        self.counts[ADMITTED] += 1

    def adopted(self, uid: str, workflow: str, terms: Terms, now: float) -> None:
        """A request of a proxy that died is this one's now, whether or not there is a place."""
        if not self.budget.has(uid):
            self.budget.add(uid, workflow)
            self._forecast.take(uid, workflow, terms.size_class, now)

    def give_back(self, uid: str) -> None:
        """The request has ended, or did not come about; no error if it has no place."""
        self.budget.give_back(uid)
        self._forecast.drop(uid)

    def queued(self, uid: str, step: str, at: float, now: float) -> None:
        """A request is at a stage, with all its inputs."""
        self._forecast.queued(uid, step, at, now)

    def started(self, uid: str, step: str, at: float, now: float) -> None:
        """A stage has begun with a request."""
        self._forecast.started(uid, step, at, now)

    def finished(self, uid: str, step: str, at: float, now: float) -> None:
        """A stage has done its part of a request."""
        self._forecast.finished(uid, step, at, now)

    def check_invariants(self) -> None:
        """Assert what must hold between two calls."""
        assert self._forecast.in_flight == self.budget.in_flight
        self._forecast.check_invariants()

    def view(self, now: float) -> dict[str, Any]:
        """What an operator wants to see, as JSON can hold it."""
        share = self.share  # the forecast follows it
        return {
            "in_flight": self.budget.in_flight,
            "in_flight_max": self.budget.limits.total,
            "share": share,
            "proxies": 1 + len(self._heard),
            "demand": self._demand.at(now),
            "wait_factor": self.rules.wait_factor,
            "counts": dict(self.counts),
            "workflows": {name: self._workflow_view(name, now) for name in self._forecast.workflows},
        }

    def _workflow_view(self, name: str, now: float) -> dict[str, float | None]:
        prediction = self._forecast.predict(name, "", now)
        load = self._forecast.load_of(name, "")
        return {
            "in_flight": self.budget.in_flight_of(name),
            "unloaded_seconds": None if prediction is None else prediction.unloaded_seconds,
            "wait_seconds": None if prediction is None else prediction.wait_seconds,
            "requests_per_second_max": 1 / load if load else None,
        }

    def _check(self, workflow: str, terms: Terms, timeout_seconds: float, is_ahead: bool, now: float) -> None:
        try:
            self.budget.check(workflow)
        except Overloaded as error:
            raise _Full(IN_FLIGHT, error.message, RETRY_SECONDS, error.fields) from None
        limits = self.budget.limits
        if is_ahead and self.budget.in_flight + min(_PLACES_KEPT, limits.total // 8) >= limits.total:
            raise _Full(UNFAIR, _UNFAIR.format(workflow=workflow), RETRY_SECONDS)
        prediction = self._forecast.predict(workflow, terms.size_class, now)
        if prediction is None:
            self._check_workers(workflow)
            return
        self._check_deadline(prediction, workflow, terms, timeout_seconds)
        self._check_wait(prediction, workflow)
        if is_ahead and prediction.wait_seconds > _AHEAD * self._wait_max(prediction):
            raise _Full(UNFAIR, _UNFAIR.format(workflow=workflow), RETRY_SECONDS)

    def _check_workers(self, workflow: str) -> None:
        workers = self._forecast.workers_of(workflow)
        if self.rules.wait_factor is not None and self.budget.in_flight_of(workflow) >= max(1, workers):
            raise _Full(
                WAIT,
                f"nobody knows yet how long {workflow!r} takes, and its {workers} workers have requests",
                RETRY_SECONDS,
            )

    def _check_deadline(
        self, prediction: Prediction, workflow: str, terms: Terms, timeout_seconds: float
    ) -> None:
        late = prediction.finish_at - prediction.at - timeout_seconds
        if late <= 0 or not self._forecast.in_flight_of(workflow, terms.size_class):
            return
        raise _Full(
            LATE,
            f"a request of {workflow!r} takes {prediction.unloaded_seconds:.2f} s and would wait for "
            f"{prediction.wait_seconds:.2f} s, and was given {timeout_seconds:.2f} s: give it more time",
            late,
        )

    def _check_wait(self, prediction: Prediction, workflow: str) -> None:
        over = prediction.wait_seconds - self._wait_max(prediction)
        if over > 0:
            raise _Full(
                WAIT,
                f"a request of {workflow!r} would wait for {prediction.wait_seconds:.2f} s now; it takes "
                f"{prediction.unloaded_seconds:.2f} s, and may wait for {self._wait_max(prediction):.2f} s",
                over,
            )

    def _wait_max(self, prediction: Prediction) -> float:
        factor = self.rules.wait_factor
        return math.inf if factor is None else factor * prediction.unloaded_seconds

    def _overloaded(self, full: "_Full", workflow: str) -> Overloaded:
        fields = {
            "workflow": workflow,
            **full.fields,
            "reason": full.outcome,
            "retry_after_seconds": full.retry_after_seconds,
        }
        message = f"{full.message}; try again in {max(1, math.ceil(full.retry_after_seconds))} s"
        if self.rules.elsewhere:
            fields["elsewhere"] = list(self.rules.elsewhere)
            message += f", or now at {self.rules.elsewhere[0]}"
        return Overloaded(message, **fields)


class _Full(Exception):  # noqa: N818 - it never leaves this module
    """Why there is no place."""

    def __init__(
        self,
        outcome: str,
        message: str,
        retry_after_seconds: float,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.outcome, self.message = outcome, message
        self.retry_after_seconds = retry_after_seconds
        self.fields = dict(fields or {})


@frozen
class BudgetLimits:
    """At most ``total`` requests in flight at this proxy, and per workflow what is named or ``each``."""

    total: int = 256
    each: int = 128
    by_workflow: Mapping[str, int] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        assert self.total >= 0
        assert self.each >= 0
        assert all(bound >= 0 for bound in self.by_workflow.values())

    def of(self, workflow: str) -> int:
        """The bound of one workflow."""
        return self.by_workflow.get(workflow, self.each)


@define(eq=False)
class RequestBudget:
    """The requests of one proxy that are in flight."""

    limits: BudgetLimits = field(factory=BudgetLimits)
    _workflows: dict[str, str] = field(factory=dict, init=False)
    """Workflow by UID of each request in flight."""
    _counts: dict[str, int] = field(factory=dict, init=False)

    @property
    def in_flight(self) -> int:
        """How many places are taken."""
        return len(self._workflows)

    def in_flight_of(self, workflow: str) -> int:
        """How many places requests of this workflow have taken."""
        return self._counts.get(workflow, 0)

    def check(self, workflow: str) -> None:
        """Raise ``Overloaded`` if a request of this workflow would get no place now."""
        bound = self.limits.total
        if self.in_flight >= bound:
            raise Overloaded(
                f"this proxy has {self.in_flight} requests in flight; its bound is {bound}. "
                "Try again when some have ended, or at another proxy",
                in_flight=self.in_flight,
                in_flight_max=bound,
            )
        bound = self.limits.of(workflow)
        if self.in_flight_of(workflow) >= bound:
            raise Overloaded(
                f"workflow {workflow!r} has {self.in_flight_of(workflow)} requests in flight at this proxy; "
                f"its bound is {bound}. Try again when some have ended",
                workflow=workflow,
                in_flight=self.in_flight_of(workflow),
                in_flight_max=bound,
            )

    def has(self, uid: str) -> bool:
        """Whether a request has a place."""
        return uid in self._workflows

    def take(self, uid: str, workflow: str) -> None:
        """Take a place for a request; raises ``Overloaded``; no error if it has one."""
        if uid not in self._workflows:
            self.check(workflow)
        self.add(uid, workflow)

    def add(self, uid: str, workflow: str) -> None:
        """Count a request that is there, whether or not there is a place; no error if it has one."""
        if uid in self._workflows:
            assert self._workflows[uid] == workflow, f"request {uid} has changed its workflow"
            return
        self._workflows[uid] = workflow
        self._counts[workflow] = self.in_flight_of(workflow) + 1
        self._assert_counts(workflow)

    def give_back(self, uid: str) -> None:
        """The request has ended; no error if it has no place."""
        workflow = self._workflows.pop(uid, None)
        if workflow is None:
            return
        self._counts[workflow] -= 1
        if self._counts[workflow] == 0:
            del self._counts[workflow]
        self._assert_counts(workflow)

    def set_workflow_limits(self, by_workflow: Mapping[str, int]) -> None:
        """Set bounds per workflow; what is in flight beyond a lower one goes on."""
        self.limits = evolve(self.limits, by_workflow=dict(by_workflow))

    def _assert_counts(self, workflow: str) -> None:
        assert self.in_flight_of(workflow) >= 0
        assert sum(self._counts.values()) == len(self._workflows)
