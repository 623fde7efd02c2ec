"""Prefetches: what the manager has nodes read in advance, for moves whose new instance must wait.

It keeps which orders were given and what nodes say of them. What it promises:

* An order has a number that no other one of any manager has (``PrefetchNumber``), so that what is said of an
  earlier one is not taken for it; it is sent again until the node's heartbeats show it.
* It is over when the node says so, or after ``PREFETCH_SECONDS_MAX`` and a little: a node that does not know
  of prefetches does not hold up a move.
* What is not wanted any more, as its move was abandoned or the new instance loads, is taken back once.
* It is bounded by the moves under way, and by the nodes there are.
"""

from collections.abc import Iterable
from typing import Final, TypeAlias

from attrs import define, field, frozen

from onepiece.limits import PREFETCH_SECONDS_MAX

_GRACE_SECONDS: Final = 10.0

PrefetchNumber: TypeAlias = tuple[int, int]
"""The manager's epoch, and a count of its own."""


@frozen
class Prefetch:
    """Order to a node: read in advance what the stage's ``prefetch`` names."""

    stage: str
    module: str
    digest: str
    number: PrefetchNumber
    manager_epoch: int


@frozen
class StopPrefetch:
    """Order to a node: that is not wanted any more."""

    stage: str
    manager_epoch: int


@frozen
class PrefetchReport:
    """What a node says of the latest order for a stage."""

    stage: str
    number: PrefetchNumber
    is_over: bool = False


@define
class _Ordered:
    number: PrefetchNumber
    begun_at: float
    sent_at: float
    is_known: bool = False
    is_over: bool = False


@define(eq=False)
class Prefetches:
    """The orders that were given, by node and stage; see the module's text."""

    resend_seconds: float
    _ordered: dict[tuple[str, str], _Ordered] = field(factory=dict)
    _count: int = 0

    def number_to_send(self, node_id: str, stage: str, epoch: int, now: float) -> PrefetchNumber | None:
        """The number of the order that is to be sent now; None: none is."""
        ordered = self._ordered.get((node_id, stage))
        if ordered is None:
            self._count += 1
            ordered = self._ordered[node_id, stage] = _Ordered((epoch, self._count), now, now)
            return ordered.number
        if ordered.is_known or now < ordered.sent_at + self.resend_seconds:
            return None
        ordered.sent_at = now
        return ordered.number

    def told(self, node_id: str, reports: Iterable[PrefetchReport]) -> bool:
        """What a node says; says whether anything is over by that."""
        by_stage = {report.stage: report for report in reports}
        is_news = False
        for (node, stage), ordered in self._ordered.items():
            report = by_stage.get(stage)
            is_shown = node == node_id and report is not None and report.number == ordered.number
            if node == node_id:
                ordered.is_known = is_shown
            if is_shown and report is not None and report.is_over and not ordered.is_over:
                ordered.is_over = is_news = True
        return is_news

    def is_over(self, node_id: str, stage: str, now: float) -> bool:
        """Whether nothing is to be waited for any more."""
        ordered = self._ordered.get((node_id, stage))
        return ordered is not None and (ordered.is_over or now >= ordered.begun_at + _limit())

    def unwanted(self, wanted: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Forget, and return, the orders for other nodes and stages than these."""
        kept = set(wanted)
        gone = [key for key in self._ordered if key not in kept]
        for key in gone:
            del self._ordered[key]
        return gone

    def next_deadline(self) -> float | None:
        """When an order is to be sent again, or has taken too long."""
        moments = [
            moment
            for ordered in self._ordered.values()
            if not ordered.is_over
            for moment in (
                ordered.begun_at + _limit(),
                *(() if ordered.is_known else (ordered.sent_at + self.resend_seconds,)),
            )
        ]
        return min(moments, default=None)


def _limit() -> float:
    return PREFETCH_SECONDS_MAX + _GRACE_SECONDS
