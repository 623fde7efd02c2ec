"""What stages tell an owner: in order, in few messages, and nothing that a newer report says too."""

import pytest

from onepiece.codec import decode_control
from onepiece.limits import CONTROL_BATCH_BYTES_MAX
from onepiece.messages import StageProgress, StageReport, StageReports
from onepiece.requests import EventKind
from onepiece.runtime.reports import Report, ReportQueue

QUEUED = StageReport("u", "denoise", "n", "n.1", 1, 1.0)
STARTED = StageReport("u", "denoise", "n", "n.1", 1, 1.0, 2.0)
FINISHED = StageReport("u", "denoise", "n", "n.1", 1, 1.0, 2.0, 3.0, {"device": "cpu:0"}, {"decode": "m"})


def progress(step: int, kind: EventKind = EventKind.PROGRESS) -> StageProgress:
    """A step of the same run."""
    return StageProgress("u", kind.value, "denoise", "n", "n.1", 2.0 + step / 100, {"step": step})


def sent(*reports: Report) -> list[object]:
    """What arrives if these are queued in this order."""
    queue = ReportQueue()
    for report in reports:
        queue.add(report)
    messages = [decode_control(body) for body in queue.take()]
    assert len(queue) == 0
    assert list(queue.take()) == []
    rows: list[tuple[str, str, str, bytes]] = []
    for message in messages:
        assert isinstance(message, StageReports)
        rows += message.reports
    found = [decode_control(body) for *_, body in rows]
    told = [each for each in found if isinstance(each, StageReport | StageProgress)]
    assert [row[:3] for row in rows] == [(each.uid, each.stage, each.life) for each in told]
    return found


@pytest.mark.parametrize(
    ("reports", "arrives"),
    [
        pytest.param([QUEUED, STARTED, FINISHED], [FINISHED], id="a short run costs one report"),
        pytest.param([QUEUED, STARTED], [STARTED], id="the newest state says the older ones"),
        pytest.param(
            [STARTED, progress(1), progress(2)], [STARTED, progress(2)], id="newer progress replaces older"
        ),
        pytest.param(
            [STARTED, progress(1), FINISHED], [STARTED, progress(1), FINISHED], id="progress stays in between"
        ),
        pytest.param(
            [progress(1), progress(1, EventKind.PREVIEW), progress(2)],
            [progress(2), progress(1, EventKind.PREVIEW)],
            id="kinds of progress do not replace each other",
        ),
        pytest.param(
            [STARTED, StageReport("v", "denoise", "n", "n.1", 1, 1.0), FINISHED],
            [FINISHED, StageReport("v", "denoise", "n", "n.1", 1, 1.0)],
            id="requests do not replace each other",
        ),
    ],
)
def test_a_newer_report_replaces_what_it_makes_needless(reports: list[Report], arrives: list[Report]) -> None:
    """What one run tells arrives in order, without what a later report says as well."""
    assert sent(*reports) == arrives


def test_messages_have_a_bounded_size() -> None:
    """Reports beyond a batch's size go into further messages, none of them lost."""
    large = {"data": b"x" * (CONTROL_BATCH_BYTES_MAX // 2 + 1)}
    reports = [StageProgress(f"u{number}", "preview", "s", "n", "n.1", 1.0, large) for number in range(3)]
    queue = ReportQueue()
    for report in reports:
        queue.add(report)
    messages = list(queue.take())
    assert len(messages) == 3
    assert sent(*reports) == reports


def test_a_report_that_cannot_be_written_costs_itself_only() -> None:
    """A stage that reports something without a form on the wire loses that report, and no other's."""
    bad = StageProgress("u", "progress", "denoise", "n", "n.1", 1.0, {"object": object()})
    assert sent(QUEUED, bad) == [QUEUED]
