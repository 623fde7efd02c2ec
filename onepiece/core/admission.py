"""Admission: how many requests may be under way, decided before a body is read.

A proxy holds one ``RequestBudget``. A request takes a place when it is accepted and gives it back
when it has ended, however it ended; both are idempotent by UID, so that a place is neither taken nor
given back twice. What does not get a place is refused with ``Overloaded``, which names the bound.

The bounds are numbers of requests. A capacity model that predicts when a request would finish sets
them by ``set_workflow_limits``; nothing else here changes then.
"""

from collections.abc import Mapping

from attrs import define, evolve, field, frozen

from onepiece.errors import Overloaded


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

    def take(self, uid: str, workflow: str) -> None:
        """Take a place for a request; raises ``Overloaded``; no error if it has one."""
        if uid in self._workflows:
            assert self._workflows[uid] == workflow, f"request {uid} has changed its workflow"
            return
        self.check(workflow)
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
