"""What stages tell an owner: in order, in few messages, and nothing that a newer report says too."""

from collections.abc import Sequence

import pytest

from onepiece.codec import decode_control
from onepiece.limits import CONTROL_BATCH_BYTES_MAX
from onepiece.messages import StageProgress, StageReport, StageReports
from onepiece.requests import EventKind
from onepiece.runtime.reports import ReportQueue, StageRun

PROGRESS = EventKind.PROGRESS.value
PREVIEW = EventKind.PREVIEW.value


class Telling:
    """A run of a stage that tells of itself into a queue."""

    def __init__(self, queue: ReportQueue, uid: str = "u") -> None:
        self.queue = queue
        self.run = StageRun(uid, "denoise", "n", 1, 1.0)

    def queued(self) -> "Telling":
        """Its inputs are there."""
        self.queue.add(self.run)
        return self

    def started(self) -> "Telling":
        """It runs."""
        self.run.started_at = 2.0
        self.queue.add(self.run)
        return self

    def finished(self) -> "Telling":
        """Its outputs are sent."""
        self.run.finished_at, self.run.detail, self.run.heading = 3.0, {"device": "cpu:0"}, {"decode": "m"}
        self.queue.add(self.run)
        return self

    def progress(self, step: int, kind: str = PROGRESS) -> "Telling":
        """It has got so far."""
        self.queue.add_progress(self.run, self.run.progress(kind, 2.0 + step / 100, {"step": step}))
        return self


def sent(queue: ReportQueue) -> list[StageReport | StageProgress]:
    """What arrives of what was queued."""
    rows: list[tuple[str, bytes]] = []
    for body in queue.take():
        message = decode_control(body)
        assert isinstance(message, StageReports)
        rows += message.reports
    assert len(queue) == 0
    assert list(queue.take()) == []
    found: list[StageReport | StageProgress] = []
    for uid, body in rows:
        report = decode_control(body)
        assert isinstance(report, StageReport | StageProgress)
        assert report.uid == uid
        found.append(report)
    return found


def told(reports: Sequence[StageReport | StageProgress]) -> list[str]:
    """Reports as words."""
    words = []
    for report in reports:
        if isinstance(report, StageProgress):
            words.append(f"{report.kind} {report.detail['step']}")
        elif report.finished_at is not None:
            words.append("finished")
        else:
            words.append("queued" if report.started_at is None else "started")
    return words


def test_a_short_run_costs_one_report() -> None:
    """The newest state says the older ones; what it cost and where it went come with it."""
    queue = ReportQueue()
    Telling(queue).queued().started().finished()
    [report] = sent(queue)
    assert report == StageReport("u", "denoise", "n", 1, 1.0, 2.0, 3.0, {"device": "cpu:0"}, {"decode": "m"})


@pytest.mark.parametrize(
    ("tell", "arrives"),
    [
        pytest.param(lambda it: it.queued().started(), ["started"], id="states"),
        pytest.param(
            lambda it: it.started().progress(1).progress(2), ["started", "progress 2"], id="newer progress"
        ),
        pytest.param(
            lambda it: it.started().progress(1).finished(),
            ["started", "progress 1", "finished"],
            id="progress stays between states",
        ),
        pytest.param(
            lambda it: it.progress(1).progress(1, PREVIEW).progress(2),
            ["progress 2", "preview 1"],
            id="kinds do not replace each other",
        ),
    ],
)
def test_a_newer_report_replaces_what_it_makes_needless(tell: object, arrives: list[str]) -> None:
    """What one run tells arrives in order, without what a later report says as well."""
    queue = ReportQueue()
    assert callable(tell)
    tell(Telling(queue))
    assert told(sent(queue)) == arrives


def test_what_was_sent_is_not_changed_by_what_comes_later() -> None:
    """A run that goes on after its report was sent is reported again, once."""
    queue = ReportQueue()
    it = Telling(queue).started()
    assert told(sent(queue)) == ["started"]
    it.progress(1)
    it.finished()
    assert told(sent(queue)) == ["progress 1", "finished"]


def test_requests_do_not_replace_each_other() -> None:
    """Two runs of one stage are told of apart, in the order in which they were first queued."""
    queue = ReportQueue()
    first = Telling(queue).started()
    Telling(queue, "v").queued()
    first.finished()
    reports = sent(queue)
    assert [report.uid for report in reports] == ["u", "v"]
    assert told(reports) == ["finished", "queued"]


def test_messages_have_a_bounded_size() -> None:
    """Reports beyond a batch's size go into further messages, none of them lost."""
    queue = ReportQueue()
    for number in range(3):
        run = StageRun(f"u{number}", "denoise", "n", 1, 1.0)
        data = {"step": number, "data": b"x" * (CONTROL_BATCH_BYTES_MAX // 2 + 1)}
        queue.add_progress(run, run.progress(PREVIEW, 1.0, data))
    messages = list(queue.take())
    assert len(messages) == 3
    assert all(len(message) <= CONTROL_BATCH_BYTES_MAX for message in messages)


def test_a_report_that_cannot_be_written_costs_itself_only() -> None:
    """A stage that reports something without a form on the wire loses that report, and no other's."""
    queue = ReportQueue()
    it = Telling(queue).queued()
    queue.add_progress(it.run, it.run.progress(PROGRESS, 1.0, {"object": object()}))
    assert told(sent(queue)) == ["queued"]
