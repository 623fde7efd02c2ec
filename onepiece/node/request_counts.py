"""How the requests of one proxy began and ended, counted: for its metrics."""

from collections import Counter, defaultdict
from collections.abc import Container, Sequence
from typing import Final

from attrs import define, field

from onepiece.core.admission import IN_FLIGHT, LATE, UNFAIR, WAIT
from onepiece.errors import OnePieceError, Overloaded, known_name, name_of
from onepiece.metrics import Distribution
from onepiece.requests import EventKind, RequestEvent

ADMISSION_REASONS: Final = (IN_FLIGHT, LATE, WAIT, UNFAIR)
SECONDS: Final = (
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    25.0,
    50.0,
    100.0,
    250.0,
    500.0,
    1000.0,
    2500.0,
)
"""From a chain of small stages to a long film."""


@define(eq=False)
class RequestCounts:
    """By workflow, and by error or reason where there is one; since the proxy began."""

    accepted: "Counter[str]" = field(factory=Counter)
    adopted: "Counter[str]" = field(factory=Counter)
    cancelled: "Counter[str]" = field(factory=Counter)
    failed: "Counter[tuple[str, str]]" = field(factory=Counter)
    wasted_seconds: defaultdict[tuple[str, str], float] = field(factory=lambda: defaultdict(float))
    finished: defaultdict[str, Distribution] = field(
        factory=lambda: defaultdict(lambda: Distribution(SECONDS))
    )
    """Seconds from acceptance to result."""

    def note_end(self, workflow: str, accepted_at: float, told: Sequence[RequestEvent]) -> None:
        """A request has ended: ``told`` are its events, of which the last is the final one."""
        end = told[-1]
        if end.kind is EventKind.FINISHED:
            self.finished[workflow].note(max(0.0, end.at - accepted_at))
            return
        error = known_name(end.detail.get("error"))
        if end.kind is EventKind.CANCELLED:
            self.cancelled[workflow] += 1
        else:
            self.failed[workflow, error] += 1
        self.wasted_seconds[workflow, error] += worked_seconds(told, end.at)


def worked_seconds(told: Sequence[RequestEvent], end: float) -> float:
    """How long stages have worked on a request until it ended, by what they reported.

    A stage that ran twice counts twice. Their nodes' clocks may differ; nothing counts less than nothing.
    """
    begun: dict[str, float] = {}
    worked = 0.0
    for event in told:
        if event.stage is None:
            continue
        if event.kind is EventKind.STAGE_STARTED:
            begun[event.stage] = event.at
        elif event.kind is EventKind.STAGE_FINISHED and event.stage in begun:
            worked += max(0.0, event.at - begun.pop(event.stage))
    return worked + sum(max(0.0, end - at) for at in begun.values())


@define(eq=False)
class RefusalCounts:
    """Submissions that came over HTTP and were refused, by workflow and reason."""

    by_reason: "Counter[tuple[str, str]]" = field(factory=Counter)

    def note(self, error: OnePieceError, known: Container[str]) -> None:
        """One was refused; its workflow is counted only if it is known, since clients may name any."""
        named = error.fields.get("workflow")
        workflow = named if isinstance(named, str) and named in known else ""
        reason = error.fields.get("reason") if isinstance(error, Overloaded) else None
        self.by_reason[workflow, reason if reason in ADMISSION_REASONS else name_of(error)] += 1
