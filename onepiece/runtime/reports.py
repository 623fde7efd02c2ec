"""Reports that wait for company: what stages tell one request owner, until it is sent.

A report waits for a moment, so that many share a message, and a short stage's states cost one report:

* a ``StageReport`` takes the place of the same run's earlier one, as long as nothing of the run was
  queued behind that one;
* a ``StageProgress`` takes the place of the run's earlier one of its kind.

So what one run of a stage tells arrives in the order in which it happened. Nothing is encoded before
it is sent.
"""

from collections.abc import Iterator

from onepiece.codec import CodecError, encode_control
from onepiece.limits import CONTROL_BATCH_BYTES_MAX
from onepiece.log import get_logger
from onepiece.messages import StageProgress, StageReport, StageReports

Report = StageReport | StageProgress


class ReportQueue:
    """The reports for one owner that have not been sent."""

    def __init__(self) -> None:
        self._reports: dict[int, Report] = {}
        self._places: dict[tuple[str, str, str], int] = {}
        """Run and kind -> where the report stands that the next one of this kind may replace."""
        self._serial = 0

    def __len__(self) -> int:
        return len(self._reports)

    def add(self, report: Report) -> None:
        """Queue a report, or put it in the place of one that it makes needless."""
        if isinstance(report, StageProgress):
            key = (report.uid, report.stage, report.kind)
            self._places.pop((report.uid, report.stage, ""), None)  # the run's next state stands behind it
        else:
            key = (report.uid, report.stage, "")
        place = self._places.get(key)
        if place is None:
            self._serial += 1
            place = self._places[key] = self._serial
        self._reports[place] = report

    def take(self) -> Iterator[bytes]:
        """Empty the queue into control messages of a bounded size."""
        reports, self._reports = self._reports, {}
        self._places.clear()
        rows: list[tuple[str, str, str, bytes]] = []
        size = 0
        for report in reports.values():
            try:
                body = encode_control(report)
            except CodecError as error:
                get_logger().warning("report_dropped", uid=report.uid, stage=report.stage, error=str(error))
                continue
            if rows and size + len(body) > CONTROL_BATCH_BYTES_MAX:
                yield encode_control(StageReports(tuple(rows)))
                rows, size = [], 0
            rows.append((report.uid, report.stage, report.life, body))
            size += len(body)
        if rows:
            yield encode_control(StageReports(tuple(rows)))
