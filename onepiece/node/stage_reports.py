"""What actors report of the stages of a request, as the table of its owner takes it, and then the door."""

from onepiece.codec import CodecError, decode_control
from onepiece.core.admission import Admission
from onepiece.core.request_events import StageReported
from onepiece.log import get_logger
from onepiece.messages import StageProgress, StageReport
from onepiece.requests import EventKind, RequestEvent


def decode_report(uid: str, body: bytes) -> StageReport | StageProgress | None:
    """What an actor wrote of a stage; None, and logged, if it is nothing of the kind."""
    try:
        report = decode_control(body)
    except CodecError as error:
        get_logger().warning("report_refused", uid=uid, error=error.message)
        return None
    return report if isinstance(report, StageReport | StageProgress) else None


def told_apart(report: StageReport) -> list[StageReported]:
    """The moments that a report tells of; the table leaves out what it knows already."""
    moments = (
        (EventKind.QUEUED, report.queued_at),
        (EventKind.STAGE_STARTED, report.started_at),
        (EventKind.STAGE_FINISHED, report.finished_at),
    )
    told = []
    for kind, at in moments:
        if at is not None:
            is_end = kind is EventKind.STAGE_FINISHED
            detail, heading = (report.detail, report.heading) if is_end else ({}, {})
            told.append(
                StageReported(
                    report.uid, kind, report.stage, report.node_id, report.life, at, detail, heading
                )
            )
    return told


def tell_door(door: Admission, event: RequestEvent, now: float) -> None:
    """Let the door know how far a stage is with a request; of other events it wants to know nothing."""
    if event.stage is None:
        return
    match event.kind:
        case EventKind.QUEUED:
            door.queued(event.uid, event.stage, event.at, now)
        case EventKind.STAGE_STARTED:
            door.started(event.uid, event.stage, event.at, now)
        case EventKind.STAGE_FINISHED:
            door.finished(event.uid, event.stage, event.at, now)
