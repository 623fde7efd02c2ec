"""Reports that wait for company: what stages tell one request owner, until it is sent.

A report waits for a moment, so that many share a message, and so that a short run costs one report. For
that the queue holds the run itself, which is written down as it is when it is sent. A
``StageProgress`` takes the place of the run's earlier one of its kind; and since it belongs between the
run's states, the state before it is written down as it is when progress comes.

So what one run of a stage tells arrives in the order in which it happened. Nothing is encoded before
it is sent.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from attrs import define, field

from onepiece.codec import CodecError, encode_control
from onepiece.limits import CONTROL_BATCH_BYTES_MAX
from onepiece.log import get_logger
from onepiece.messages import StageProgress, StageReport, StageReports

_NOTHING: Final[Mapping[str, Any]] = {}


@define(eq=False)
class StageRun:
    """One run of a stage for one request, as it goes on."""

    uid: str
    stage: str
    node_id: str
    actor_id: int
    queued_at: float
    started_at: float | None = None
    finished_at: float | None = None
    detail: Mapping[str, Any] = _NOTHING
    heading: Mapping[str, str] = _NOTHING
    waits_in: list[Any] | None = field(default=None, init=False, repr=False)
    """The queue's list in which it waits to be told, and where in it; the queue's own business."""
    place: int = field(default=0, init=False, repr=False)

    def report(self) -> StageReport:
        """How far it has come."""
        return StageReport(
            self.uid,
            self.stage,
            self.node_id,
            self.actor_id,
            self.queued_at,
            self.started_at,
            self.finished_at,
            self.detail,
            self.heading,
        )

    def progress(self, kind: str, at: float, detail: Mapping[str, Any]) -> StageProgress:
        """Something it tells of itself."""
        return StageProgress(self.uid, kind, self.stage, self.node_id, at, detail)


class ReportQueue:
    """The reports for one owner that have not been sent."""

    def __init__(self) -> None:
        self._waiting: list[StageRun | StageReport | StageProgress] = []
        self._progress: dict[tuple[str, str, str], int] = {}
        """Run and kind -> where the progress stands that the next one of this kind replaces."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, run: StageRun) -> None:
        """Tell how far a run has come by the time the queue is emptied."""
        if run.waits_in is not self._waiting:
            run.waits_in, run.place = self._waiting, len(self._waiting)
            self._waiting.append(run)

    def add_progress(self, run: StageRun, progress: StageProgress) -> None:
        """Tell something about a run that goes on."""
        if run.waits_in is self._waiting:
            self._waiting[run.place] = run.report()
            run.waits_in = None
        key = (progress.uid, progress.stage, progress.kind)
        place = self._progress.get(key)
        if place is None:
            self._progress[key] = len(self._waiting)
            self._waiting.append(progress)
        else:
            self._waiting[place] = progress

    def take(self) -> Iterator[bytes]:
        """Empty the queue into control messages of a bounded size."""
        waiting, self._waiting = self._waiting, []
        self._progress.clear()
        rows: list[tuple[str, bytes]] = []
        size = 0
        for each in waiting:
            try:
                body = encode_control(each.report() if isinstance(each, StageRun) else each)
            except CodecError as error:
                get_logger().warning("report_dropped", uid=each.uid, stage=each.stage, error=str(error))
                continue
            if rows and size + len(body) > CONTROL_BATCH_BYTES_MAX:
                yield encode_control(StageReports(tuple(rows)))
                rows, size = [], 0
            rows.append((each.uid, body))
            size += len(body)
        if rows:
            yield encode_control(StageReports(tuple(rows)))
