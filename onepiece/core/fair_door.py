"""A fair door: who gets the places of a set that is full, by weight and not by insistence.

A *flow* is a path of names: a workflow, a tenant in it, a priority of that tenant. Each has done so much
*work*: the seconds of the set that its accepted requests took, divided by its weight. A flow *wants* if it
was refused within the last ``WANT_SECONDS``. Of flows with the same parent, one whose work is more than
``LEAD_REQUESTS`` of its own requests ahead of the least that wants is *ahead*. Who is ahead gets a place only
where little or no waiting is left (``admission``); who is behind may take it a while before it becomes free,
and so comes first. There is no queue at the door: whoever is refused comes again.

What this promises:

* Nobody wants, nobody is ahead: a set with room for all accepts all.
* A worker that is idle is kept for nobody: fairness costs no throughput.
* Of flows that want all the time the one with the least work is never ahead, however much more often the
  others ask. Priorities are weights, too: a lower one gets less, and never nothing.
* Having wanted little saves nothing up: who comes to want more begins at most ``LEAD_REQUESTS`` behind the
  others.
* It is bounded: ``FLOWS_MAX`` flows of one parent are told apart, the rest share one.

What it does not do: give a flow its share that asks so seldom that others, who are ahead, find a worker idle
in between. The shorter the wait that is allowed, the more often a flow has to ask for its share.
"""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from attrs import define, field, frozen

from onepiece.limits import FLOWS_MAX

WANT_SECONDS: Final = 5.0
LEAD_REQUESTS: Final = 2.0
CREDIT_SECONDS: Final = 30.0
"""Who was not refused for so long has got all it wanted."""
IDLE_SECONDS: Final = 60.0
REST: Final = "(others)"
_LOOKS_AGAIN: Final = 256
"""So many newcomers share the rest before it is looked again for flows that can be forgotten."""
PRIORITY_WEIGHT: Final = 4.0
"""A level of priority is worth so many times the one below."""


@frozen
class Weights:
    """How much more one gets than another, by name; 1 for what is not named."""

    workflows: Mapping[str, float] = field(factory=dict)
    tenants: Mapping[str, float] = field(factory=dict)

    def of(self, workflow: str, tenant: str, priority: int) -> tuple[float, float, float]:
        """The weights along a flow's path."""
        return (
            self.workflows.get(workflow, 1.0),
            self.tenants.get(tenant, 1.0),
            PRIORITY_WEIGHT**priority,
        )


@define(eq=False)
class _Flow:
    """One name, and those below it."""

    work: float = 0.0
    refused_at: float = -math.inf
    seen_at: float = 0.0
    level: float = 0.0
    """The work of its children where the last accepted one began: newcomers begin there."""
    children: "dict[str, _Flow]" = field(factory=dict)
    wanting: list[tuple[float, str]] = field(factory=list)
    """Work and name of children that want, as a heap; some entries are out of date."""
    newcomers: int = 0

    def wants(self, now: float) -> bool:
        """It was refused lately."""
        return now < self.refused_at + WANT_SECONDS

    def least_wanting(self, now: float) -> float | None:
        """The least work of a child that wants."""
        while self.wanting:
            work, name = self.wanting[0]
            child = self.children.get(name)
            if child is not None and child.wants(now) and child.work == work:
                return work
            heapq.heappop(self.wanting)
        return None

    def push(self, name: str, now: float) -> None:
        """A child that wants has the work that it has now."""
        child = self.children[name]
        if not self.wanting or self.wanting[0] != (child.work, name):
            heapq.heappush(self.wanting, (child.work, name))
        if len(self.wanting) > 4 * FLOWS_MAX:
            self.wanting = [(each.work, key) for key, each in self.children.items() if each.wants(now)]
            heapq.heapify(self.wanting)

    def known(self, name: str) -> str:
        """The name under which a child is counted."""
        return name if name in self.children or len(self.children) < FLOWS_MAX else REST

    def child(self, given: str, now: float) -> "tuple[str, _Flow]":
        """The child of a name, or the rest's; made if there is none."""
        name = self.known(given)
        if name != given:
            self.newcomers += 1
            if self.newcomers % _LOOKS_AGAIN == 1:
                self._forget_idle(now)
            name = self.known(given)
        found = self.children.get(name)
        if found is None:
            found = self.children[name] = _Flow(work=self.level)
        found.seen_at = now
        return name, found

    def _forget_idle(self, now: float) -> None:
        for name, child in list(self.children.items()):
            if name != REST and not child.wants(now) and now > child.seen_at + IDLE_SECONDS:
                del self.children[name]


@define(eq=False)
class FairDoor:
    """See the module's text. A path has as many names as it has weights."""

    _root: _Flow = field(factory=_Flow)

    def is_ahead(self, path: Sequence[str], weights: Sequence[float], cost: float, now: float) -> bool:
        """Whether a request of this flow, of so many seconds of the set, has to let others come first."""
        flow = self._root
        for given, weight in zip(path, weights, strict=True):
            name = flow.known(given)
            child = flow.children.get(name)
            work = flow.level if child is None else child.work
            least = flow.least_wanting(now)
            if least is not None and work > least + LEAD_REQUESTS * cost / weight:
                return True
            if child is None:
                return False
            flow = child
        return False

    def accepted(self, path: Sequence[str], weights: Sequence[float], cost: float, now: float) -> None:
        """A request of this flow has a place, and takes so many seconds of the set."""
        for flow, name, child, step in self._down(path, weights, cost, now):
            flow.level = max(flow.level, child.work)
            child.work += step
            if child.wants(now):
                flow.push(name, now)

    def refused(self, path: Sequence[str], weights: Sequence[float], cost: float, now: float) -> None:
        """A request of this flow got no place."""
        for flow, name, child, _ in self._down(path, weights, cost, now):
            child.refused_at = now
            flow.push(name, now)

    def work(self, path: Sequence[str]) -> float:
        """The work of a flow; 0.0 if it is not known."""
        flow = self._root
        for name in path:
            if name not in flow.children:
                return 0.0
            flow = flow.children[name]
        return flow.work

    def _down(
        self, path: Sequence[str], weights: Sequence[float], cost: float, now: float
    ) -> Iterator[tuple[_Flow, str, _Flow, float]]:
        """Parent, name, child, and the work of one request, from the root down."""
        flow = self._root
        for given, weight in zip(path, weights, strict=True):
            name, child = flow.child(given, now)
            step = cost / weight
            if now > child.refused_at + CREDIT_SECONDS:  # it got all it wanted
                child.work = max(child.work, flow.level - LEAD_REQUESTS * step)
            yield flow, name, child, step
            flow = child
