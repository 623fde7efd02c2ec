"""What became of every request, and the verdict. Pure.

An accepted request must end in exactly one result, or in one named error::

    lost        it was accepted, and neither a result nor an error of it can be had
    duplicated  two requests stand for one key, or two proxies tell different ends of it
    corrupt     its result is not the one that follows from its inputs
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from attrs import define, field, frozen

FINISHED: Final = "finished"
QUEUED: Final = "queued"
STARTED: Final = "stage_started"
ENDED: Final = "stage_finished"


@frozen
class Happening:
    """An event of a request, as far as the ledger needs it."""

    kind: str
    stage: str | None
    node: str | None
    at: float


@define(eq=False)
class Submission:
    """One request, from its key to its end."""

    key: str
    seed: int
    uid: str | None = None
    """None until it is accepted."""
    end: str | None = None
    """``FINISHED``, or the name of the error it ended in."""
    refusals: int = 0
    """How often its submission was tried in vain before it was accepted."""
    is_corrupt: bool = False
    trouble: list[str] = field(factory=list)
    """Why it is lost, or duplicated, in words."""
    other_ends: set[str] = field(factory=set)
    """What other proxies said of its end, and under which UID."""
    events: list[Happening] = field(factory=list)
    submitted_at: float = 0.0
    ended_at: float | None = None

    @property
    def is_lost(self) -> bool:
        """Accepted, and no end can be had."""
        return self.uid is not None and self.end is None

    @property
    def is_duplicated(self) -> bool:
        """Another end than its own was told."""
        return self.end is not None and bool(self.other_ends - {self.end})


@frozen
class Kill:
    """A node was killed."""

    node: str
    at: float


@frozen
class Verdict:
    """The run in numbers."""

    submitted: int
    accepted: int
    finished: int
    failed: Counter[str]
    lost: int
    duplicated: int
    corrupt: int
    stage_runs: int
    repeated: int
    recoveries: tuple[float, ...]
    """Seconds from the death of a node to the next start of each stage that ran there, sorted."""
    latencies: tuple[float, ...]

    @property
    def holds(self) -> bool:
        """Whether the promise was kept."""
        return not (self.lost or self.duplicated or self.corrupt)


def judge(submissions: Sequence[Submission], kills: Sequence[Kill]) -> Verdict:
    """Count what became of the requests."""
    starts = [Counter(event.stage for event in each.events if event.kind == STARTED) for each in submissions]
    ended = [each for each in submissions if each.ended_at is not None]
    return Verdict(
        submitted=len(submissions),
        accepted=sum(each.uid is not None for each in submissions),
        finished=sum(each.end == FINISHED for each in submissions),
        failed=Counter(each.end for each in submissions if each.end not in {None, FINISHED}),
        lost=sum(each.is_lost for each in submissions),
        duplicated=sum(each.is_duplicated for each in submissions),
        corrupt=sum(each.is_corrupt for each in submissions),
        stage_runs=sum(sum(counted.values()) for counted in starts),
        repeated=sum(count - 1 for counted in starts for count in counted.values()),
        recoveries=tuple(sorted(recovery for each in submissions for recovery in recoveries(each, kills))),
        latencies=tuple(sorted((each.ended_at or 0.0) - each.submitted_at for each in ended)),
    )


def recoveries(submission: Submission, kills: Sequence[Kill]) -> Iterable[float]:
    """For each stage that waited or ran on a node that was killed: how long until it started elsewhere."""
    events = sorted(submission.events, key=lambda event: event.at)
    for kill in kills:
        before = [event for event in events if event.at <= kill.at]
        latest = {event.stage: event for event in before if event.kind in {QUEUED, STARTED, ENDED}}
        for stage, event in latest.items():
            if event.kind == ENDED or event.node != kill.node:
                continue
            again = (
                later.at
                for later in events
                if later.at > kill.at and (later.stage, later.kind) == (stage, STARTED)
            )
            found = next(again, None)
            if found is not None:
                yield found - kill.at


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the sorted values that ``share`` of them do not exceed; NaN of none."""
    if not values:
        return math.nan
    return values[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def spread(seconds: Sequence[float], digits: int = 1) -> str:
    """The sorted values in words: median, p99, the worst, and how many there are."""
    shares = (("p50", 0.5), ("p99", 0.99), ("worst", 1.0))
    told = ", ".join(f"{name} {percentile(seconds, share):.{digits}f} s" for name, share in shares)
    return f"{told} ({len(seconds)})"
