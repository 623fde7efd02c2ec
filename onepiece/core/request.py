"""The requests one proxy owns: a pure table of records.

**What it promises.** A request that was accepted ends in exactly one final state, FINISHED, FAILED or
CANCELLED, and the first event that ends it wins: whatever arrives later for it changes nothing. Once
it has ended no stage of it is left running without having been told to stop. It never waits for ever:
at its deadline at the latest it is on its way to its end, and every request has one.

**When it has ended.** With a result: when a store node says that it has it. With an error: when store nodes
have that, too. Until then the request is *ending*: nothing is sent for it any more, and nobody is told. For
if its owner died then, another one would go on with it, and it would end twice. Whatever stands in the
stores is the end, also if it is not what this table wanted stored: another owner may have been quicker.

**What it knows.** For each graph node of each request its state and the cluster node it is at, is on its
way to, or retains its output (``request_record``). So when a node dies the requests that lost something
there, and only those, are sent on from what is retained elsewhere. One that cannot be, or that has
killed too many nodes, ends in an error that says so.

**What it does not survive.** The death of the proxy itself: the records are in memory. Another proxy that
holds a copy of what was accepted *adopts* the request and learns from the nodes where it is.

::

    Accepted -> ACCEPTED --first report--> RUNNING --ResultArrived----------> FINISHED
    Adopted  ----------------------------> RUNNING                              ^
                   |                          |-- RequestBroke, CancelAsked,    | EndStands
                   +--------------------------+-- deadline, given up -----> (ending)
                                                                                | EndStands
                                                                                +--> FAILED, CANCELLED

Time is ``now``: seconds since the epoch, given with each event.
"""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from attrs import define, field

from onepiece.core.event_log import LOSSY, EventLog
from onepiece.core.owned_request import FINAL_KINDS, Ending, OwnedRequest, state_of
from onepiece.core.request_events import (
    Accepted,
    Adopted,
    CancelAsked,
    CheckpointFound,
    CheckpointMissing,
    Effect,
    EndFound,
    EndStands,
    Event,
    Headed,
    KeepError,
    NodesDied,
    OutputMissing,
    Publish,
    ReleaseRetained,
    RequestBroke,
    ResultArrived,
    Settled,
    StageLost,
    StageReported,
    StopStages,
    Tick,
)
from onepiece.core.request_record import (
    GivenUp,
    StageProgress,
)
from onepiece.errors import DeadlineExceeded, NodeLost, RequestCancelled, StageFailed, UnknownRequest
from onepiece.requests import EventKind, RequestEvent, RequestState, RequestStatus

_REPORTABLE: Final = frozenset({EventKind.QUEUED, EventKind.STAGE_STARTED, EventKind.STAGE_FINISHED, *LOSSY})
_DEAD_MAX: Final = 4096

_OfOne: TypeAlias = (
    Headed
    | StageReported
    | StageLost
    | OutputMissing
    | CheckpointFound
    | CheckpointMissing
    | ResultArrived
    | RequestBroke
    | EndFound
    | EndStands
    | CancelAsked
)


@define
class RequestTable:
    """The records of one proxy, bounded: ended ones are forgotten, oldest first.

    Nodes are named by their *life* here (``routing.life_of``): one that comes back is another.

    Args:
        records_max: How many ended requests are kept; live ones are never dropped, the budget of the
            proxy bounds those.
        records_bytes_max: How many bytes they may take, about.
        events_max: How many events are kept for one request; beyond it old progress is dropped.
        events_bytes_max: How many bytes they may take, about.
        keep_seconds: How long an ended request's record is kept.
        lives_max: How many nodes one stage of one request may cost.
        resends_max: How often inputs are sent to one stage again.
        owners_max: How many owners one request may cost. A stage that takes its node along takes the count of
            such deaths along, too, if its owner is on that node.
    """

    records_max: int
    records_bytes_max: int
    events_max: int
    events_bytes_max: int
    keep_seconds: float
    lives_max: int = 2
    resends_max: int = 8
    owners_max: int = 5
    _live: dict[str, OwnedRequest] = field(factory=dict)
    _dead: "OrderedDict[str, None]" = field(factory=OrderedDict)
    """The latest dead nodes: what they are still reported to have is lost."""
    _ended: "OrderedDict[str, OwnedRequest]" = field(factory=OrderedDict)
    _ended_bytes: int = 0
    _keys: dict[str, str] = field(factory=dict)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; events about unknown or ended requests have no effect."""
        match event:
            case Accepted():
                return self._accept(event, now)
            case Adopted():
                return self._adopt(event, now)
            case NodesDied():
                return self._lose(event.node_ids)
            case Tick():
                self._forget(now)
                return self._expire(now)
            case _:
                record = self._live.get(event.uid)
                return self._note_late(event) if record is None else self._advance(record, event, now)

    def _note_late(self, event: _OfOne) -> list[Effect]:
        """A stage that could not be stopped in time, or ran twice, is done: nobody needs what came out."""
        ended = self._ended.get(event.uid)
        return [] if ended is None else self._release_late(ended, event)

    def _release_late(self, record: OwnedRequest, event: _OfOne) -> list[Effect]:
        """Nodes that have something of it only now, or again, are told to let go of that.

        A stage was done behind the order to stop; or it runs a second time, since what it takes was sent
        again though it had arrived, and goes on to nodes that nobody has told of the end.
        """
        match event:
            case Headed():
                late = set(event.heading.values())
            case StageReported() if record.progress.knows(event.stage):
                late = set(event.heading.values())
                if event.kind is EventKind.STAGE_FINISHED or event.life not in record.progress.node_ids():
                    late.add(event.life)
            case _:
                late = set()
        for life in late:
            record.progress.note(life)
        return [ReleaseRetained(event.uid, frozenset(late))] if late else []

    def _advance(self, record: OwnedRequest, event: _OfOne, now: float) -> list[Effect]:
        if record.ending is not None:
            if isinstance(event, EndStands):
                return self._conclude(record, record.ending, event, now)
            return self._release_late(record, event)
        match event:
            case Headed():
                record.progress.head(event.heading, self._dead)
                return self._go_on(record)
            case StageReported():
                return self._report(record, event)
            case StageLost() if record.progress.knows(event.stage):
                record.progress.lose_stage(event.stage, event.node_id)
                return self._go_on(record)
            case OutputMissing() if record.progress.knows(event.source):
                record.progress.lose_output(event.source, event.target)
                return self._go_on(record)
            case CheckpointFound():
                record.progress.await_checkpoint(event.source, event.target, event.life, self._dead)
                return self._go_on(record)
            case CheckpointMissing():
                record.progress.lose_checkpoint(event.source, event.target)
                return self._go_on(record)
            case ResultArrived():
                return self._finish(record, event, now)
            case EndFound():  # another owner was quicker, without this one's hearing of it
                return self._conclude(record, Ending({}, None, None), event.stands, now)
            case RequestBroke():
                return self._fail(record, event.error, stage=event.stage, node=event.node_id)
            case CancelAsked():
                error = RequestCancelled(f"request {record.uid} was cancelled", uid=record.uid)
                return self._fail(record, error.to_wire())
            case _:
                return []  # it names a stage that the workflow does not have

    def next_deadline(self) -> float | None:
        """When a ``Tick`` is due: the earliest deadline of a live request."""
        return min((record.deadline_at for record in self._live.values()), default=None)

    def uid_of_key(self, key: str) -> str | None:
        """The request that was accepted under this idempotency key, if it is still known."""
        return self._keys.get(key)

    def status(self, uid: str) -> RequestStatus:
        """Raises ``UnknownRequest``."""
        return self._record(uid).status

    def may_stand_otherwise(self, uid: str) -> bool:
        """Whether another owner may have ended the request, too; the stores then know which end stands.

        Raises ``UnknownRequest``.
        """
        record = self._record(uid)
        return record.is_shared and record.state.is_final

    def events(self, uid: str, after: int) -> list[RequestEvent]:
        """The kept events with ``sequence > after``; raises ``UnknownRequest``."""
        return self._record(uid).log.after(after)

    def statuses(self, *, limit: int, state: str | None) -> list[RequestStatus]:
        """The newest first."""
        records = itertools.chain(reversed(self._live.values()), reversed(self._ended.values()))
        wanted = (record for record in records if state is None or record.state.value == state)
        newest = heapq.nlargest(limit, wanted, key=lambda record: (record.accepted_at, record.uid))
        return [record.status for record in newest]

    def is_known(self, uid: str) -> bool:
        """The request is known here, whether or not it has ended."""
        return uid in self._live or uid in self._ended

    def event_count(self, uid: str) -> int:
        """How many events a request has had; raises ``UnknownRequest``."""
        return self._record(uid).log.next_sequence

    def is_live(self, uid: str) -> bool:
        """The request is known and has not ended."""
        return uid in self._live

    def is_settled(self, uid: str, stage: str, life: str) -> bool:
        """The request has ended with what this stage put out in this life of a node: of that all is known."""
        record = self._ended.get(uid)
        return record is not None and record.progress.was_done_by(stage, life)

    def state(self, uid: str) -> RequestState:
        """Raises ``UnknownRequest``."""
        return self._record(uid).state

    def live_uids(self) -> tuple[str, ...]:
        """Requests that have not ended."""
        return tuple(self._live)

    def disown(self) -> None:
        """Forget the live requests: this proxy was declared dead, and others may own them by now."""
        for uid in self.live_uids():
            record = self._live.pop(uid)
            self._forget_key(record)
        for record in self._ended.values():
            record.is_shared = True

    @property
    def ended_count(self) -> int:
        """Ended requests that are kept."""
        return len(self._ended)

    @property
    def ended_bytes(self) -> int:
        """What they take in memory, about."""
        return self._ended_bytes

    def live_count(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def check_invariants(self) -> None:
        """What holds between any two events."""
        assert not self._live.keys() & self._ended.keys()
        assert len(self._ended) <= self.records_max
        assert self._ended_bytes == sum(record.held_bytes for record in self._ended.values())
        assert self._ended_bytes <= self.records_bytes_max
        for uid, record in (*self._live.items(), *self._ended.items()):
            status = record.status
            assert uid == status.uid
            assert status.state.is_final == (uid in self._ended)
            assert status.state.is_final == (status.finished_at is not None)
            events = record.log.after(-1)
            finals = [event for event in events if event.kind in FINAL_KINDS.values()]
            assert len(finals) == status.state.is_final
            sequences = [event.sequence for event in events]
            assert sequences == sorted(set(sequences))
        for key, uid in self._keys.items():
            assert self._record(uid).status.key == key

    def _record(self, uid: str) -> OwnedRequest:
        record = self._live.get(uid) or self._ended.get(uid)
        if record is None:
            raise UnknownRequest(
                f"no request {uid!r} is known here; it may have ended long ago, or another proxy took it",
                uid=uid,
            )
        return record

    def _accept(self, event: Accepted, now: float) -> list[Effect]:
        record = self._add(event, RequestState.ACCEPTED, now)
        return [record.publish(EventKind.ACCEPTED, now), *self._go_on(record)]

    def _adopt(self, event: Adopted, now: float) -> list[Effect]:
        record = self._add(event.accepted, RequestState.RUNNING, event.accepted_at)
        # Beyond any number that the earlier owner's events had: no request has one each millisecond.
        record.log.next_sequence = 1000 + max(0, int((now - event.accepted_at) * 1000))
        record.progress.adopt(event.holdings, event.adoptions)
        record.is_shared = True
        told = record.publish(EventKind.ACCEPTED, event.accepted_at)
        if event.adoptions >= self.owners_max:
            error = NodeLost(
                f"request {record.uid} has cost {event.adoptions} nodes that owned it, one after the other; "
                "its input may kill nodes that work on it: submit it again if they died of something else",
                uid=record.uid,
            )
            return [told, *self._fail(record, error.to_wire())]
        return [told, *self._go_on(record)]

    def _add(self, accepted: Accepted, state: RequestState, accepted_at: float) -> OwnedRequest:
        uid = accepted.uid
        assert uid not in self._live
        assert uid not in self._ended
        progress = StageProgress(uid, accepted.plan, self.lives_max, self.resends_max)
        record = self._live[uid] = OwnedRequest(
            uid=uid,
            workflow=accepted.workflow,
            accepted_at=accepted_at,
            deadline_at=accepted.deadline_at,
            progress=progress,
            log=EventLog(uid, self.events_max, self.events_bytes_max),
            key=accepted.key,
            state=state,
        )
        if accepted.key is not None:
            self._keys.setdefault(accepted.key, uid)
        return record

    def _go_on(self, record: OwnedRequest) -> list[Effect]:
        """Send what the request needs, or end it if that cannot be."""
        sendings = record.progress.advance()
        if isinstance(sendings, GivenUp):
            return self._give_up(record, sendings)
        return list(sendings)

    def _give_up(self, record: OwnedRequest, why: GivenUp) -> list[Effect]:
        uid = record.uid
        kind = StageFailed if why.is_poison else NodeLost
        advice = "the input kills the stage" if why.is_poison else "submit it again"
        error = kind(f"{why.stage} of request {uid}: {why.reason}; {advice}", uid=uid, stage=why.stage)
        return self._fail(record, error.to_wire(), stage=why.stage)

    def _report(self, record: OwnedRequest, event: StageReported) -> list[Effect]:
        told = self._note(record, event)
        if told is None:
            return []
        return [told, *self._go_on(record)] if event.kind is EventKind.STAGE_FINISHED else [told]

    def _note(self, record: OwnedRequest, event: StageReported) -> Publish | None:
        """Take in what a stage said; None if that is no news."""
        if event.kind not in _REPORTABLE or not record.progress.knows(event.stage):
            return None  # a stage neither accepts a request nor ends one
        if event.life in self._dead:
            return None
        is_news = record.progress.report(event.stage, event.kind, event.life)
        record.progress.head(event.heading, self._dead)
        if not is_news:
            return None
        record.state = RequestState.RUNNING
        return record.publish(
            event.kind, event.at, stage=event.stage, node=event.node_id, detail=event.detail
        )

    def _finish(self, record: OwnedRequest, event: ResultArrived, now: float) -> list[Effect]:
        told = [note for report in event.reports if (note := self._note(record, report)) is not None]
        record.progress.finish()
        record.result_bytes = event.result_bytes
        record.content_type = event.content_type
        detail = {"result_bytes": event.result_bytes, "content_type": event.content_type}
        return [*told, *self._end(record, RequestState.FINISHED, None, now, detail=detail)]

    def _fail(
        self,
        record: OwnedRequest,
        error: Mapping[str, Any],
        *,
        stage: str | None = None,
        node: str | None = None,
    ) -> list[Effect]:
        """Have the request end in an error: no stage is to work for it, whatever stands in the end."""
        record.ending = Ending(error, stage, node)
        return [KeepError(record.uid, record.workflow, error), StopStages(record.uid, error)]

    def _conclude(self, record: OwnedRequest, ending: Ending, stands: EndStands, now: float) -> list[Effect]:
        """The request has ended, in what stands."""
        if stands.error is None:
            arrived = ResultArrived(record.uid, stands.result_bytes, stands.content_type)
            return self._finish(record, arrived, now)
        state = state_of(stands.error)
        return self._end(record, state, stands.error, now, stage=ending.stage, node=ending.node)

    def _end(
        self,
        record: OwnedRequest,
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
        final = record.publish(FINAL_KINDS[state], now, stage=stage, node=node, detail=detail or error or {})
        effects: list[Effect] = [final, Settled(record.uid, record.workflow, state)]
        if record.ending is None:
            effects.append(ReleaseRetained(record.uid, frozenset(record.progress.node_ids())))
        self._ended[record.uid] = self._live.pop(record.uid)
        self._ended_bytes += record.held_bytes
        self._forget(now)
        return effects

    def _lose(self, node_ids: frozenset[str]) -> list[Effect]:
        for node_id in node_ids:
            self._dead[node_id] = None
        while len(self._dead) > _DEAD_MAX:
            self._dead.popitem(last=False)
        effects: list[Effect] = []
        for record in list(self._live.values()):
            if record.ending is not None:
                continue
            given_up = record.progress.lose_nodes(node_ids)
            if given_up is not None:
                effects += self._give_up(record, given_up)
            else:
                effects += self._go_on(record)
        return effects

    def _expire(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for record in list(self._live.values()):
            if now < record.deadline_at or record.ending is not None:
                continue
            open_stages = record.progress.open_stages()
            error = DeadlineExceeded(
                f"request {record.uid} missed its deadline after {now - record.accepted_at:.1f} s, in "
                f"{', '.join(open_stages) or 'no stage yet'}; allow more time or fewer steps",
                uid=record.uid,
                stages=open_stages,
            )
            effects += self._fail(record, error.to_wire())
        return effects

    def _forget_key(self, record: OwnedRequest) -> None:
        """Another request may have it: store nodes out of each other's reach give a key twice."""
        if record.key is not None and self._keys.get(record.key) == record.uid:
            del self._keys[record.key]

    def _forget(self, now: float) -> None:
        """Drop ended records that are too old or too many; they stand in order of their end."""
        while self._ended:
            record = next(iter(self._ended.values()))
            finished_at = record.finished_at
            assert finished_at is not None
            is_within = len(self._ended) <= self.records_max and self._ended_bytes <= self.records_bytes_max
            if is_within and now - finished_at <= self.keep_seconds:
                return
            del self._ended[record.uid]
            self._ended_bytes -= record.held_bytes
            self._forget_key(record)
