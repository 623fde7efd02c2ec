"""A request as everybody sees it: its states, its events, its status.

::

    ACCEPTED -> RUNNING -> FINISHED
        |          |-----> FAILED      (StageFailed, NodeLost, DeadlineExceeded, ...)
        |----------+-----> CANCELLED

Events of one request carry a strictly growing ``sequence``, so that a client that reconnects goes
on where it stopped. Progress and previews may be dropped (a newer one replaces an older one that was
not yet sent); all others are kept as long as the request's record.
"""

import enum
from collections.abc import Mapping
from typing import Any

from attrs import field, frozen


class RequestState(enum.Enum):
    """Where a request is in its life."""

    ACCEPTED = "accepted"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Nothing will change any more."""
        return self in {RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED}


class EventKind(enum.Enum):
    """What happened to a request."""

    ACCEPTED = "accepted"
    QUEUED = "queued"  # a stage's inputs have arrived at an actor
    STAGE_STARTED = "stage_started"
    PROGRESS = "progress"  # detail: step, total, eta_seconds
    PREVIEW = "preview"  # detail: content_type, data (bytes)
    STAGE_FINISHED = "stage_finished"  # detail: waited/transfer/compute seconds, received/sent bytes
    FINISHED = "finished"  # detail: result_bytes, content_type
    FAILED = "failed"  # detail: the error as of to_wire
    CANCELLED = "cancelled"


@frozen
class Terms:
    """What its submitter says of a request, beside its inputs and its deadline.

    ``tenant``: on whose behalf; "" is one of them. ``priority``: from -2 to 2. ``size_class``: which
    requests take about as long as this one ("480p"), for forecasts and the order in which stages work.
    """

    tenant: str = ""
    priority: int = 0
    size_class: str = ""


@frozen
class RequestEvent:
    """One thing that happened; ``at`` is wall-clock seconds since the epoch at its origin."""

    uid: str
    sequence: int
    kind: EventKind
    at: float
    stage: str | None = None
    node: str | None = None
    detail: Mapping[str, Any] = field(factory=dict)


@frozen
class RequestStatus:
    """A request's record, as ``GET /v1/requests/{uid}`` shows it."""

    uid: str
    workflow: str
    state: RequestState
    accepted_at: float
    deadline_at: float | None
    finished_at: float | None
    stages: Mapping[str, str]
    """Graph node -> pending | queued | running | finished."""
    error: Mapping[str, Any] | None = None
    result_bytes: int | None = None
    content_type: str | None = None
    key: str | None = None
