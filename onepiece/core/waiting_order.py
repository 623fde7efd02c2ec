"""The order in which an actor works: fair between flows, and within one by arrival, size and priority.

Two levels of *turns*, workflows and the tenants of each: whoever has got the least of the stage's time,
divided by its weight, is next (start-time fair queueing). Nobody saves up turns while nothing of it waits.

Within a flow each stage task has a *rank*, fixed when it arrives, and the smallest goes first::

    rank = arrival + min(SHORTER_SECONDS, SHORTER * expected seconds) - PRIORITY_SECONDS * priority

So a short one passes long ones that came a little earlier, and one with priority those that came up to
``PRIORITY_SECONDS`` earlier. Waiting is ageing: as ranks are moments, what came long enough ago has the
smallest rank, whatever comes later. What this promises:

* Equal ones go in order of arrival.
* **No starvation:** nothing is passed by anything of its flow that comes more than ``PASSED_SECONDS`` later.
* Between two flows that both wait, what they got, divided by their weights, differs by at most one stage task
  of each.

Nothing here is time: moments are given, and expected seconds are what the actor measured so far (0 where it
has measured nothing, so that then only arrivals and priorities count).
"""

import heapq
from collections.abc import Collection, Iterator, Mapping
from typing import Final, Generic, TypeVar

from attrs import define, field

from onepiece.limits import FLOWS_MAX, PRIORITY_MAX

SHORTER: Final = 4.0
SHORTER_SECONDS: Final = 60.0
"""The most by which a short one may pass a long one."""
PRIORITY_SECONDS: Final = 30.0
PASSED_SECONDS: Final = SHORTER_SECONDS + 2 * PRIORITY_MAX * PRIORITY_SECONDS

Item = TypeVar("Item")


def rank(arrived_at: float, expected_seconds: float, priority: int) -> float:
    """See the module's text; the smallest goes first."""
    assert expected_seconds >= 0
    assert -PRIORITY_MAX <= priority <= PRIORITY_MAX
    return arrived_at + min(SHORTER_SECONDS, SHORTER * expected_seconds) - PRIORITY_SECONDS * priority


@define(eq=False)
class Turns:
    """Whose turn it is among names that have something waiting."""

    weights: Mapping[str, float] = field(factory=dict)
    _now: float = 0.0
    """In work per weight: where the one that was last served began."""
    _done: dict[str, float] = field(factory=dict)

    def first(self, waiting: Collection[str]) -> str:
        """Of these the one that got least; the first of equals."""
        if len(waiting) == 1:
            return next(iter(waiting))
        return min(waiting, key=lambda name: max(self._now, self._done.get(name, 0.0)))

    def served(self, name: str, cost: float) -> None:
        """It has got so much."""
        begin = max(self._now, self._done.get(name, 0.0))
        self._now = begin
        self._done[name] = begin + cost / self.weights.get(name, 1.0)
        if len(self._done) > FLOWS_MAX:  # names may be made up: those that are least ahead are forgotten
            self._now = min(self._done.values())
            self._done = {each: done for each, done in self._done.items() if done > self._now}

    def left(self, name: str) -> None:
        """Nothing of it waits: it is remembered only as long as it is ahead."""
        if self._done.get(name, 0.0) <= self._now:
            self._done.pop(name, None)


@define(eq=False)
class _Flow(Generic[Item]):
    """What waits of one tenant of a workflow, by rank and then in order of arrival here."""

    heap: list[tuple[float, int, float, Item]] = field(factory=list)


@define(eq=False)
class _Workflow(Generic[Item]):
    turns: Turns
    flows: dict[str, _Flow[Item]] = field(factory=dict)


@define(eq=False)
class WaitingOrder(Generic[Item]):
    """What waits for a worker; see the module's text."""

    workflow_weights: Mapping[str, float] = field(factory=dict)
    tenant_weights: Mapping[str, float] = field(factory=dict)
    _turns: Turns = field(init=False)
    _workflows: dict[str, _Workflow[Item]] = field(factory=dict)
    _count: int = 0
    _length: int = 0

    def __attrs_post_init__(self) -> None:
        self._turns = Turns(self.workflow_weights)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Item]:
        for workflow in self._workflows.values():
            for flow in workflow.flows.values():
                for entry in flow.heap:
                    yield entry[-1]

    def add(self, item: Item, workflow: str, tenant: str, ranked: float, cost: float) -> None:
        """Let an item wait; ``cost`` is what it will count for its flow."""
        of_workflow = self._workflows.get(workflow)
        if of_workflow is None:
            of_workflow = self._workflows[workflow] = _Workflow(Turns(self.tenant_weights))
        flow = of_workflow.flows.get(tenant)
        if flow is None:
            flow = of_workflow.flows[tenant] = _Flow()
        self._count += 1
        self._length += 1
        heapq.heappush(flow.heap, (ranked, self._count, cost, item))

    def pull(self) -> Item | None:
        """Take out what is next; None if nothing waits."""
        if not self._workflows:
            return None
        name = self._turns.first(self._workflows)
        workflow = self._workflows[name]
        tenant = workflow.turns.first(workflow.flows)
        _, _, cost, item = heapq.heappop(workflow.flows[tenant].heap)
        self._length -= 1
        self._turns.served(name, cost)
        workflow.turns.served(tenant, cost)
        self._drop_empty(name, tenant)
        return item

    def remove(self, workflow: str, tenant: str, item: Item) -> bool:
        """Take out an item that waits; says whether it did."""
        found = self._workflows.get(workflow)
        flow = found.flows.get(tenant) if found else None
        if flow is None:
            return False
        kept = [entry for entry in flow.heap if entry[-1] is not item]
        if len(kept) == len(flow.heap):
            return False
        self._length -= len(flow.heap) - len(kept)
        heapq.heapify(kept)
        flow.heap = kept
        self._drop_empty(workflow, tenant)
        return True

    def _drop_empty(self, name: str, tenant: str) -> None:
        workflow = self._workflows[name]
        if not workflow.flows[tenant].heap:
            del workflow.flows[tenant]
            workflow.turns.left(tenant)
        if not workflow.flows:
            del self._workflows[name]
            self._turns.left(name)
