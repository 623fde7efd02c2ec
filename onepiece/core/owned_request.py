"""One request of a proxy: its record, and how it ends.

The record is what the owner knows beside where each stage is (``request_record``): who asked for what, until
when, which events were told, and how it ended. It holds no rules; those are in ``request``. What is shown
of it, a ``RequestStatus``, is made when somebody looks, and does not change afterwards.

An error has two forms here: the map that travels and is stored (``to_wire``), and the state that it puts
its request in, which follows from the map, so that whoever reads a stored error comes to the same state.
"""

from collections.abc import Mapping
from typing import Any, Final

from attrs import define, frozen

from onepiece.core.event_log import EventLog
from onepiece.core.request_events import Publish
from onepiece.core.request_record import StageProgress
from onepiece.errors import RequestCancelled
from onepiece.requests import EventKind, RequestEvent, RequestState, RequestStatus

FINAL_KINDS: Final = {
    RequestState.FINISHED: EventKind.FINISHED,
    RequestState.FAILED: EventKind.FAILED,
    RequestState.CANCELLED: EventKind.CANCELLED,
}
_RECORD_BYTES: Final = 2048
"""What a record takes beside its events, about."""


END_SEQUENCE: Final = (1 << 53) - 1
"""Of a final event whose place among the others is not known: behind all, and a number in JavaScript, too."""


def end_event(status: RequestStatus) -> RequestEvent:
    """The final event of a request of which no more is known than how it ended."""
    detail: Mapping[str, Any] = status.error or {
        "result_bytes": status.result_bytes,
        "content_type": status.content_type,
    }
    at = status.finished_at or status.accepted_at
    return RequestEvent(status.uid, END_SEQUENCE, FINAL_KINDS[status.state], at, detail=detail)


def state_of(error: Mapping[str, Any]) -> RequestState:
    """The state that a request ended in with this error, as of ``to_wire``."""
    is_cancelled = error.get("error") == RequestCancelled.__name__
    return RequestState.CANCELLED if is_cancelled else RequestState.FAILED


@frozen
class Ending:
    """The error that a request is about to end in, and where it came from."""

    error: Mapping[str, Any]
    stage: str | None
    node: str | None


@define
class OwnedRequest:
    """A request as it is now; ``status`` is what is shown of it, made when somebody looks."""

    uid: str
    workflow: str
    accepted_at: float
    deadline_at: float
    progress: StageProgress
    log: EventLog
    key: str | None
    state: RequestState = RequestState.ACCEPTED
    ending: Ending | None = None
    finished_at: float | None = None
    error: Mapping[str, Any] | None = None
    result_bytes: int | None = None
    content_type: str | None = None
    is_shared: bool = False
    """Another owner may have driven it, too, where neither could hear of the other."""

    @property
    def held_bytes(self) -> int:
        """What it takes in memory, about."""
        return _RECORD_BYTES + self.log.held_bytes

    @property
    def status(self) -> RequestStatus:
        """The record as it stands, unaffected by what comes later."""
        return RequestStatus(
            uid=self.uid,
            workflow=self.workflow,
            state=self.state,
            accepted_at=self.accepted_at,
            deadline_at=self.deadline_at,
            finished_at=self.finished_at,
            stages=self.progress.states(),
            error=self.error,
            result_bytes=self.result_bytes,
            content_type=self.content_type,
            key=self.key,
        )

    def publish(self, kind: EventKind, at: float, **about: Any) -> Publish:
        """Keep an event; whoever follows is to be told."""
        return Publish(self.log.add(kind, at, **about))
