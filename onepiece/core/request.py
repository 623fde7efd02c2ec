"""The requests one proxy owns: a pure table of records.

**What it promises.** A request that was accepted ends in exactly one final state, FINISHED, FAILED or
CANCELLED, and the first event that ends it wins: whatever arrives later for it changes nothing. Once
it has ended no stage of it is left running without having been told to stop. It never waits for ever:
it ends at its deadline at the latest, and every request has one.

**What it knows.** For each graph node of each request the state (pending, queued, running, finished)
and the cluster node it is at or on its way to. So when a node dies, exactly the requests that had
unfinished work there end in ``NodeLost``.

**What it does not survive.** The death of the proxy itself: the records are in memory.

::

    Accepted -> ACCEPTED --first report--> RUNNING --ResultArrived--> FINISHED
                   |                          |----- RequestBroke, NodesDied, deadline --> FAILED
                   +--------------------------+----- CancelAsked --> CANCELLED

Time is ``now``: seconds since the epoch, given with each event.
"""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from attrs import define, field, frozen

from onepiece.errors import DeadlineExceeded, NodeLost, RequestCancelled, UnknownRequest
from onepiece.requests import EventKind, RequestEvent, RequestState, RequestStatus

PENDING: Final = "pending"
QUEUED: Final = "queued"
RUNNING: Final = "running"
FINISHED: Final = "finished"

_ORDER: Final = {PENDING: 0, QUEUED: 1, RUNNING: 2, FINISHED: 3}
_STAGE_STATES: Final = {
    EventKind.QUEUED: QUEUED,
    EventKind.STAGE_STARTED: RUNNING,
    EventKind.STAGE_FINISHED: FINISHED,
}
_LOSSY: Final = {EventKind.PROGRESS, EventKind.PREVIEW}
_REPORTABLE: Final = _STAGE_STATES.keys() | _LOSSY
_FINAL_KINDS: Final = {
    RequestState.FINISHED: EventKind.FINISHED,
    RequestState.FAILED: EventKind.FAILED,
    RequestState.CANCELLED: EventKind.CANCELLED,
}


@frozen
class Accepted:
    """A request was admitted; ``heading`` says to which node each entry stage's inputs go."""

    uid: str
    workflow: str
    stages: tuple[str, ...]
    deadline_at: float
    key: str | None = None


@frozen
class InputsSent:
    """The workflow's inputs are on their way to these nodes."""

    uid: str
    heading: Mapping[str, str]


@frozen
class StageReported:
    """An actor said something about a stage of the request."""

    uid: str
    kind: EventKind
    stage: str
    node_id: str
    at: float
    detail: Mapping[str, Any] = field(factory=dict)
    heading: Mapping[str, str] = field(factory=dict)


@frozen
class ResultArrived:
    """The result is durable."""

    uid: str
    result_bytes: int
    content_type: str


@frozen
class RequestBroke:
    """Somebody could not go on with it."""

    uid: str
    stage: str | None
    node_id: str | None
    error: Mapping[str, Any]


@frozen
class CancelAsked:
    """A client wants it stopped."""

    uid: str


@frozen
class NodesDied:
    """These nodes are gone with all they held."""

    node_ids: frozenset[str]


@frozen
class Tick:
    """Time has passed."""


Event: TypeAlias = (
    Accepted | InputsSent | StageReported | ResultArrived | RequestBroke | CancelAsked | NodesDied | Tick
)


@frozen
class Publish:
    """Tell whoever follows the request."""

    event: RequestEvent


@frozen
class StopStages:
    """Tell every node that may hold work of the request to drop it."""

    uid: str
    reason: Mapping[str, Any]


@frozen
class Settled:
    """The request has ended; its place in the budget is free."""

    uid: str
    workflow: str
    state: RequestState


Effect: TypeAlias = Publish | StopStages | Settled


@define
class _Record:
    """A request as it is now; ``status`` is what is shown of it, made when somebody looks."""

    uid: str
    workflow: str
    accepted_at: float
    deadline_at: float
    stages: dict[str, str]
    key: str | None
    state: RequestState = RequestState.ACCEPTED
    finished_at: float | None = None
    error: Mapping[str, Any] | None = None
    result_bytes: int | None = None
    content_type: str | None = None
    locations: dict[str, str] = field(factory=dict)
    events: list[RequestEvent] = field(factory=list)
    next_sequence: int = 0

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
            stages=dict(self.stages),
            error=self.error,
            result_bytes=self.result_bytes,
            content_type=self.content_type,
            key=self.key,
        )


@define
class RequestTable:
    """The records of one proxy, bounded: ended ones are forgotten, oldest first.

    Args:
        records_max: How many ended requests are kept; live ones are never dropped, the budget of the
            proxy bounds those.
        events_max: How many events are kept for one request; beyond it old progress is dropped.
        keep_seconds: How long an ended request's record is kept.
    """

    records_max: int
    events_max: int
    keep_seconds: float
    _live: dict[str, _Record] = field(factory=dict)
    _ended: "OrderedDict[str, _Record]" = field(factory=OrderedDict)
    _keys: dict[str, str] = field(factory=dict)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; events about unknown or ended requests have no effect."""
        match event:
            case Accepted():
                return self._accept(event, now)
            case NodesDied():
                return self._lose(event.node_ids, now)
            case Tick():
                self._forget(now)
                return self._expire(now)
            case _:
                record = self._live.get(event.uid)
                return [] if record is None else self._advance(record, event, now)

    def _advance(
        self,
        record: _Record,
        event: InputsSent | StageReported | ResultArrived | RequestBroke | CancelAsked,
        now: float,
    ) -> list[Effect]:
        match event:
            case InputsSent():
                self._head(record, event.heading)
                return []
            case StageReported():
                return self._report(record, event)
            case ResultArrived():
                return self._finish(record, event, now)
            case RequestBroke():
                return self._fail(record, event.error, now, stage=event.stage, node=event.node_id)
            case CancelAsked():
                error = RequestCancelled(f"request {record.uid} was cancelled", uid=record.uid)
                return self._end(record, RequestState.CANCELLED, error.to_wire(), now)

    def next_deadline(self) -> float | None:
        """When a ``Tick`` is due: the earliest deadline of a live request."""
        return min((record.deadline_at for record in self._live.values()), default=None)

    def uid_of_key(self, key: str) -> str | None:
        """The request that was accepted under this idempotency key, if it is still known."""
        return self._keys.get(key)

    def status(self, uid: str) -> RequestStatus:
        """Raises ``UnknownRequest``."""
        return self._record(uid).status

    def events(self, uid: str, after: int) -> list[RequestEvent]:
        """The kept events with ``sequence > after``; raises ``UnknownRequest``."""
        return [event for event in self._record(uid).events if event.sequence > after]

    def statuses(self, *, limit: int, state: str | None) -> list[RequestStatus]:
        """The newest first."""
        records = itertools.chain(reversed(self._live.values()), reversed(self._ended.values()))
        wanted = (record for record in records if state is None or record.state.value == state)
        newest = heapq.nlargest(limit, wanted, key=lambda record: (record.accepted_at, record.uid))
        return [record.status for record in newest]

    def is_live(self, uid: str) -> bool:
        """The request is known and has not ended."""
        return uid in self._live

    def state(self, uid: str) -> RequestState:
        """Raises ``UnknownRequest``."""
        return self._record(uid).state

    def live_uids(self) -> list[str]:
        """The requests that have not ended, oldest first."""
        return list(self._live)

    def live_count(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def check_invariants(self) -> None:
        """What holds between any two events."""
        assert not self._live.keys() & self._ended.keys()
        assert len(self._ended) <= self.records_max
        for uid, record in (*self._live.items(), *self._ended.items()):
            status = record.status
            assert uid == status.uid
            assert status.state.is_final == (uid in self._ended)
            assert status.state.is_final == (status.finished_at is not None)
            finals = [event for event in record.events if event.kind in _FINAL_KINDS.values()]
            assert len(finals) == status.state.is_final
            sequences = [event.sequence for event in record.events]
            assert sequences == sorted(set(sequences))
        for key, uid in self._keys.items():
            assert self._record(uid).status.key == key

    def _record(self, uid: str) -> _Record:
        record = self._live.get(uid) or self._ended.get(uid)
        if record is None:
            raise UnknownRequest(
                f"no request {uid!r} is known here; it may have ended long ago, or another proxy took it",
                uid=uid,
            )
        return record

    def _accept(self, event: Accepted, now: float) -> list[Effect]:
        assert event.uid not in self._live
        assert event.uid not in self._ended
        stages = dict.fromkeys(event.stages, PENDING)
        record = _Record(event.uid, event.workflow, now, event.deadline_at, stages, event.key)
        self._live[event.uid] = record
        if event.key is not None:
            self._keys[event.key] = event.uid
        return [self._emit(record, EventKind.ACCEPTED, now)]

    def _head(self, record: _Record, heading: Mapping[str, str]) -> None:
        """Note where work is on its way to, unless the stage has reported from somewhere already."""
        for stage, node_id in heading.items():
            if record.stages.get(stage, PENDING) == PENDING:
                record.locations[stage] = node_id

    def _report(self, record: _Record, event: StageReported) -> list[Effect]:
        known = record.stages.get(event.stage)
        if known is None or event.kind not in _REPORTABLE:
            return []  # a stage neither accepts a request nor ends one
        self._head(record, event.heading)
        state = _STAGE_STATES.get(event.kind)
        is_news = state is None or _ORDER[state] > _ORDER[known]
        is_there = record.locations.get(event.stage) == event.node_id
        if not is_news and (is_there or known == FINISHED == state):
            return []  # told twice: each report says all, and so does what comes with the result
        record.locations[event.stage] = event.node_id
        record.state = RequestState.RUNNING
        if state is not None and is_news:
            record.stages[event.stage] = state
        return [
            self._emit(
                record, event.kind, event.at, stage=event.stage, node=event.node_id, detail=event.detail
            )
        ]

    def _finish(self, record: _Record, event: ResultArrived, now: float) -> list[Effect]:
        record.result_bytes = event.result_bytes
        record.content_type = event.content_type
        record.stages = dict.fromkeys(record.stages, FINISHED)
        detail = {"result_bytes": event.result_bytes, "content_type": event.content_type}
        return self._end(record, RequestState.FINISHED, None, now, detail=detail)

    def _fail(
        self,
        record: _Record,
        error: Mapping[str, Any],
        now: float,
        *,
        stage: str | None = None,
        node: str | None = None,
    ) -> list[Effect]:
        return self._end(record, RequestState.FAILED, error, now, stage=stage, node=node)

    def _end(
        self,
        record: _Record,
        state: RequestState,
        error: Mapping[str, Any] | None,
        now: float,
        *,
        stage: str | None = None,
        node: str | None = None,
        detail: Mapping[str, Any] | None = None,
    ) -> list[Effect]:
        assert state.is_final
        record.state, record.finished_at, record.error = state, now, error
        final = self._emit(
            record, _FINAL_KINDS[state], now, stage=stage, node=node, detail=detail or error or {}
        )
        effects: list[Effect] = [final, Settled(record.uid, record.workflow, state)]
        if error is not None:
            effects.append(StopStages(record.uid, error))
        self._ended[record.uid] = self._live.pop(record.uid)
        self._forget(now)
        return effects

    def _lose(self, node_ids: frozenset[str], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for record in list(self._live.values()):
            for stage, node_id in record.locations.items():
                unfinished = record.stages.get(stage, PENDING) != FINISHED
                if node_id in node_ids and unfinished:
                    uid = record.uid
                    error = NodeLost(
                        f"node {node_id} died while it held {stage} of request {uid}; submit it again",
                        uid=uid,
                        stage=stage,
                        node=node_id,
                    )
                    effects += self._fail(record, error.to_wire(), now, stage=stage, node=node_id)
                    break
        return effects

    def _expire(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for record in list(self._live.values()):
            if now < record.deadline_at:
                continue
            open_stages = [stage for stage, state in record.stages.items() if state in {QUEUED, RUNNING}]
            error = DeadlineExceeded(
                f"request {record.uid} missed its deadline after {now - record.accepted_at:.1f} s, in "
                f"{', '.join(open_stages) or 'no stage yet'}; allow more time or fewer steps",
                uid=record.uid,
                stages=open_stages,
            )
            effects += self._fail(record, error.to_wire(), now)
        return effects

    def _forget(self, now: float) -> None:
        """Drop ended records that are too old or too many; they stand in order of their end."""
        while self._ended:
            record = next(iter(self._ended.values()))
            finished_at = record.finished_at
            assert finished_at is not None
            if len(self._ended) <= self.records_max and now - finished_at <= self.keep_seconds:
                return
            del self._ended[record.uid]
            if record.key is not None:
                del self._keys[record.key]

    def _emit(
        self,
        record: _Record,
        kind: EventKind,
        at: float,
        *,
        stage: str | None = None,
        node: str | None = None,
        detail: Mapping[str, Any] | None = None,
    ) -> Publish:
        event = RequestEvent(
            uid=record.uid,
            sequence=record.next_sequence,
            kind=kind,
            at=at,
            stage=stage,
            node=node,
            detail=detail or {},
        )
        record.next_sequence += 1
        if len(record.events) >= self.events_max:
            record.events = [kept for kept in record.events if kept.kind not in _LOSSY]
        record.events.append(event)
        return Publish(event)
