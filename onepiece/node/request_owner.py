"""The requests that this proxy owns: carries out what ``RequestTable`` decides about them.

It sends inputs, asks nodes to send what they retain, tells followers what happens, tells nodes to stop
or let go of requests that have ended. It decides nothing. ``Adopter`` finds it requests of owners that
died, ``Misdirected`` passes on what others own.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Final

from attrs import define, evolve, field, frozen

from onepiece.codec import CodecError
from onepiece.core.admission import Admission
from onepiece.core.request import RequestTable
from onepiece.core.request_events import (
    Adopted,
    CancelAsked,
    Effect,
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
from onepiece.core.request_record import Holding, Resend, RestoreCheckpoint, Sending, SendInputs
from onepiece.core.retention import OutputKey
from onepiece.errors import NotReady, OnePieceError, Overloaded
from onepiece.graph import INPUTS, WorkflowGraph
from onepiece.limits import (
    EVENTS_BYTES_PER_REQUEST_MAX,
    EVENTS_PER_REQUEST_MAX,
    FOLLOWERS_PER_REQUEST_MAX,
    RECORD_KEEP_SECONDS,
    RECORDS_BYTES_MAX,
    RECORDS_MAX,
)
from onepiece.log import get_logger
from onepiece.messages import (
    CONTROL_REGION,
    OutputHeaded,
    OutputNotHeld,
    ReleaseRequests,
    RequestErrored,
    ResendOutput,
    ResultStored,
    StageInput,
    StageProgress,
    StageReport,
    StageReports,
    StageWasLost,
    StopRequest,
)
from onepiece.node.adoption import Adopter
from onepiece.node.calls import Calls
from onepiece.node.control import ControlService
from onepiece.node.error_keeper import ErrorKeeper
from onepiece.node.misdirected import Misdirected
from onepiece.node.plans import accepted
from onepiece.node.quiet_requests import QuietRequests, says_let_go
from onepiece.node.record_keeper import RecordKeeper
from onepiece.node.request_counts import RequestCounts
from onepiece.node.restorer import Restorer
from onepiece.node.result_reader import ResultReader
from onepiece.node.stage_reports import decode_report, tell_door, told_apart
from onepiece.record_messages import RequestRecord, RequestsHeld
from onepiece.requests import EventKind, RequestEvent, RequestStatus
from onepiece.runtime.environment import Environment
from onepiece.runtime.result_deliver import Letter, ResultDeliver
from onepiece.runtime.result_targets import input_targets

_TICK_SECONDS: Final = 0.25
_STALL_SECONDS: Final = 1.5
_CANCEL_SECONDS: Final = 5.0


@define(eq=False)
class _Follower:
    """A client that follows events; woken when there are new ones."""

    wake: asyncio.Event = field(factory=asyncio.Event)


@frozen
class _Owned:
    """What a request is made of; kept until it has ended."""

    graph: WorkflowGraph
    header: StageInput
    inputs: Mapping[str, Any]
    record: RequestRecord


class RequestOwner:
    """Drives the table of one proxy."""

    def __init__(
        self,
        env: Environment,
        tasks: asyncio.TaskGroup,
        *,
        admission: Admission,
        records: RecordKeeper,
        results: ResultReader,
        calls: Calls,
    ) -> None:
        self._env = env
        self._tasks = tasks
        self._admission = admission
        self._records = records
        self._results = results
        self._calls = calls
        self._deliver = ResultDeliver(env)
        self._table = RequestTable(
            records_max=RECORDS_MAX,
            records_bytes_max=RECORDS_BYTES_MAX,
            events_max=EVENTS_PER_REQUEST_MAX,
            events_bytes_max=EVENTS_BYTES_PER_REQUEST_MAX,
            keep_seconds=RECORD_KEEP_SECONDS,
        )
        self.counts = RequestCounts()
        self._owned: dict[str, _Owned] = {}
        self._followers: dict[str, set[_Follower]] = {}
        self._settled = asyncio.Event()
        self._restorer = Restorer(env, tasks, calls, self._handle)
        self._errors = ErrorKeeper(env, calls, records)
        self.unstored: dict[str, KeepError] = {}
        """Errors that have been told and that no store node has taken yet."""
        self._misdirected = Misdirected(env, tasks, records)
        self._quiet = QuietRequests(self._table, results, self._handle, env.monotonic)
        self.adopter = Adopter(
            env,
            table=self._table,
            is_over=self.is_over,
            records=records,
            results=results,
            calls=calls,
            own=self._adopt,
            handle=self._on_message,
        )
        self._handlers: Mapping[type, Callable[[Any], None]] = {
            StageReport: self._on_report,
            StageProgress: self._on_progress,
            RequestErrored: self._on_errored,
            ResultStored: self._on_stored,
            OutputHeaded: lambda message: self._handle(Headed(message.uid, message.heading)),
            OutputNotHeld: self._on_not_held,
            StageWasLost: self._on_lost,
        }

    def attach(self, control: ControlService) -> None:
        """Receive what actors, retaining nodes and stores report."""
        control.on(StageReports, self._on_reports)
        for kind in self._handlers:
            control.on(kind, self._on_message)
        self._calls.answered_by(control, RequestsHeld, *self._restorer.answers)

    def start(self) -> None:
        """Begin what goes on beside all requests, until the proxy ends."""
        self._tasks.create_task(self.tick(), name="deadlines")
        self._tasks.create_task(self.adopter.run(), name="adoption")
        self._tasks.create_task(self._quiet.look(), name="quiet requests")

    async def tick(self) -> None:
        """End what is past its deadline, until cancelled.

        Not at once after this process stood still: it may have been declared dead meanwhile, and then it
        has no say in how the requests end that others have adopted. It hears of that very soon.
        """
        clock = self._env.monotonic
        looked_at, trusted_at = clock(), clock()
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = clock()
            if now > looked_at + _TICK_SECONDS + _STALL_SECONDS:
                trusted_at = now + _STALL_SECONDS
            looked_at = now
            if now >= trusted_at:
                self._handle(Tick())

    @property
    def table(self) -> RequestTable:
        """The records, to be read."""
        return self._table

    def is_over(self, uid: str) -> bool:
        """Whether a request has ended, and a store node has how; raises ``UnknownRequest``.

        Until then its record is needed: if this node dies, another proxy goes on from there.
        """
        return self._table.state(uid).is_final and uid not in self.unstored

    def nodes_died(self, lives: frozenset[str]) -> None:
        """Go on with what these nodes held, from what is retained elsewhere."""
        self._handle(NodesDied(lives))
        self.adopter.look()

    def disown(self) -> None:
        """This node was declared dead: others may own its requests by now."""
        for uid in self._table.live_uids():
            self._admission.give_back(uid)
            self._env.under_way.ended(uid)
        self._table.disown()
        self._owned.clear()
        self._settled.set()
        self.adopter.forget()
        for followers in self._followers.values():
            for follower in followers:
                follower.wake.set()

    async def settled(self) -> None:
        """Wait until no request is live."""
        while self._table.live_count():
            self._settled.clear()
            await self._settled.wait()

    # --- from clients --------------------------------------------------------------------------

    async def accept(self, graph: WorkflowGraph, record: RequestRecord, inputs: Mapping[str, Any]) -> str:
        """Keep a request's record and start it; returns the UID that its key stands for.

        Raises what ``RecordKeeper.keep`` raises. If it does, or if the caller is cancelled, the record may
        be there all the same, also beside another one with its key; then this proxy, or another one, drives
        the request soon.
        """
        record = evolve(record, joins=self._joins(graph, record.uid))
        uid = await self._records.keep(record, dict(inputs), self.adopter.doubt)
        if uid == record.uid:
            if record.owner_life != self._env.identity.life:
                raise NotReady(
                    f"{self._env.node_id} was declared dead while it accepted request {uid}; submit it again "
                    "with the same key",
                    uid=uid,
                )
            self._own(graph, record, inputs)
            self.counts.accepted[graph.name] += 1
            self._handle(accepted(graph, record))
        return uid

    def _adopt(
        self,
        graph: WorkflowGraph,
        record: RequestRecord,
        inputs: Mapping[str, Any],
        holdings: tuple[Holding, ...],
    ) -> None:
        self._own(graph, record, inputs)
        self.counts.adopted[graph.name] += 1
        self._admission.adopted(record.uid, record.workflow, record.terms, self._env.now())
        accepted_ = accepted(graph, record)
        self._handle(Adopted(accepted_, record.accepted_at, record.adoptions, holdings))

    def _own(self, graph: WorkflowGraph, record: RequestRecord, inputs: Mapping[str, Any]) -> None:
        header = StageInput(
            uid=record.uid,
            workflow=record.workflow,
            node="",
            source="",
            owner=self._env.control_address,
            received_at=record.accepted_at,
            deadline_at=record.deadline_at,
            sent_at=self._env.now(),
            joins=record.joins,
            terms=record.terms,
        )
        self._owned[record.uid] = _Owned(graph, header, inputs, record)
        self._env.under_way.met(record.uid, record.joins)

    def _joins(self, graph: WorkflowGraph, uid: str) -> dict[str, int]:
        """Choose for each join the actor where its inputs meet, spreading them over the actors."""
        joins: dict[str, int] = {}
        for node in graph.nodes:
            if len(graph.predecessors(node.id)) > 1:
                met = self._deliver.choose(node.stage)
                if met := met or self._env.routes.table.meeting_point(node.stage, uid):
                    joins[node.id] = met.actor_id
        return joins

    async def cancel(self, uid: str) -> RequestStatus:
        """Cancel, and wait for a moment until it has ended so; no error if the request has ended."""
        self._table.status(uid)
        self._handle(CancelAsked(uid))
        with contextlib.suppress(TimeoutError):  # no stage works for it any more; its end is told when stored
            async with asyncio.timeout(_CANCEL_SECONDS):
                await self._settled_one(uid)
        return self._table.status(uid)

    async def _settled_one(self, uid: str) -> None:
        """Wait until a request is not live here any more."""
        while self._table.is_live(uid):
            self._settled.clear()
            await self._settled.wait()

    async def events(self, uid: str, after: int) -> AsyncGenerator[RequestEvent, None]:
        """Events with ``sequence > after`` as they come; ends behind the final one."""
        self._table.status(uid)
        followers = self._followers.setdefault(uid, set())
        if len(followers) >= FOLLOWERS_PER_REQUEST_MAX:
            raise Overloaded(f"{len(followers)} clients follow request {uid} already", uid=uid)
        follower = _Follower()
        followers.add(follower)
        try:
            while True:
                follower.wake.clear()
                if not self._table.is_known(uid):
                    return  # this node was declared dead: another proxy owns it, and goes on telling
                for event in self._table.events(uid, after):
                    yield event
                    after = event.sequence
                if self._table.status(uid).state.is_final and not self._table.events(uid, after):
                    return
                await follower.wake.wait()
        finally:
            followers.discard(follower)
            if not followers:
                self._followers.pop(uid, None)

    # --- what the set reports ------------------------------------------------------------------

    def _on_reports(self, message: StageReports) -> None:
        for uid, stage, life, body in message.reports:
            if self._table.is_settled(uid, stage, life):
                continue  # it ended before this could be told
            report = decode_report(uid, body)
            if report is not None:
                self._on_message(report)

    def _on_message(self, message: Any) -> None:
        """Handle word of a request that this proxy owns; see to it that others hear of theirs."""
        uid: str = message.uid
        if self._table.is_known(uid):
            self._handlers[type(message)](message)
        elif not self.adopter.hold_back(uid, message) and not isinstance(message, StageProgress):
            self._misdirected.pass_on(uid, message)

    def _on_report(self, report: StageReport) -> None:
        for each in told_apart(report):
            self._handle(each)

    def _on_progress(self, progress: StageProgress) -> None:
        try:
            kind = EventKind(progress.kind)
        except ValueError:
            get_logger().warning("report_refused", kind=progress.kind, node=progress.node_id)
            return
        self._handle(
            StageReported(
                progress.uid,
                kind,
                progress.stage,
                progress.node_id,
                progress.life,
                progress.at,
                progress.detail,
            )
        )

    def _on_errored(self, errored: RequestErrored) -> None:
        if says_let_go(errored.error):  # whoever ended it may have stored how
            self._quiet.doubt(errored.uid)
        else:
            self._handle(RequestBroke(errored.uid, errored.stage, errored.node_id, errored.error))

    def _on_not_held(self, missing: OutputNotHeld) -> None:
        self._handle(OutputMissing(missing.uid, missing.source, missing.target))

    def _on_lost(self, lost: StageWasLost) -> None:
        self._handle(StageLost(lost.uid, lost.stage, lost.life))

    def _on_stored(self, stored: ResultStored) -> None:
        self._results.note(stored.uid, stored.node_id)
        trail = [decode_report(stored.uid, body) for body in stored.trail.values()]
        reports = [each for report in trail if isinstance(report, StageReport) for each in told_apart(report)]
        self._handle(ResultArrived(stored.uid, stored.result_bytes, stored.content_type, tuple(reports)))

    # --- carrying out --------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        sendings: list[Sending] = []
        for effect in self._table.handle(event, self._env.now()):
            if isinstance(effect, SendInputs | Resend | RestoreCheckpoint):
                sendings.append(effect)
            else:
                self._carry_out(effect)
        inputs = [each for each in sendings if isinstance(each, SendInputs)]
        for uid in dict.fromkeys(each.uid for each in inputs):
            self._send_inputs(uid, [each for each in inputs if each.uid == uid])
        for sending in sendings:
            match sending:
                case Resend():
                    self._ask_for(sending)
                case RestoreCheckpoint(uid=uid) if uid in self._owned:
                    graph = self._owned[uid].graph
                    self._restorer.restore(sending, graph.node(sending.target).stage)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Publish(event):
                self._note_times(event)
                for follower in self._followers.get(event.uid, ()):
                    follower.wake.set()
            case Settled(uid):
                self._admission.give_back(uid)
                self._env.under_way.ended(uid)
                owned = self._owned.pop(uid, None)
                if owned is not None:
                    told = self._table.events(uid, -1)
                    self.counts.note_end(owned.graph.name, owned.record.accepted_at, told)
                    if uid not in self.unstored:
                        if any(spec.checkpoint for spec in owned.graph.stages.values()):
                            self._records.drop_everywhere(uid)  # checkpoints may be on any store node
                        else:
                            self._records.drop(uid, owned.record.key)
                    if owned.record.adoptions:  # every node was told who owns it
                        self._broadcast(ReleaseRequests((uid,)))
                self._settled.set()
            case KeepError(uid):
                self._tasks.create_task(self._keep_error(effect), name=f"end {uid}")
            case StopStages(uid, reason):
                self._broadcast(StopRequest(uid, reason))
            case ReleaseRetained(uid, lives):
                self._release(uid, lives)

    def _note_times(self, event: RequestEvent) -> None:
        """Let the door know how far a request is, and how long that took."""
        tell_door(self._admission, event, self._env.now())
        if event.kind is EventKind.STAGE_FINISHED and event.stage is not None:
            self._env.under_way.done(OutputKey(event.uid, INPUTS, event.stage))

    async def _keep_error(self, wanted: KeepError) -> None:
        """An error is stored as a result is, so that every proxy can tell it, and tells the same."""
        life, uid = self._env.identity.life, wanted.uid
        kept = await self._errors.keep(wanted)
        if life != self._env.identity.life:
            return  # others own it, and find what is stored
        if not kept.is_stored:
            self.unstored[uid] = wanted
        self._handle(kept.stands)
        if not kept.is_stored:
            await self._errors.keep_late(wanted)
            if self.unstored.pop(uid, None) is wanted:
                self._records.drop_everywhere(uid)

    def _broadcast(self, message: object) -> None:
        for node in self._env.routes.table.nodes:
            self._env.outbox.post(f"{node.address}/{CONTROL_REGION}", message)

    def _release(self, uid: str, lives: frozenset[str]) -> None:
        for node in self._env.routes.table.nodes:
            if node.life in lives:
                address = f"{node.address}/{CONTROL_REGION}"
                self._env.outbox.post(address, ReleaseRequests((uid,)), lingers=True)

    def _send_inputs(self, uid: str, sendings: Sequence[SendInputs]) -> None:
        owned = self._owned.get(uid)
        if owned is None:
            return  # it has ended meanwhile

        is_wanted = functools.partial(self._table.is_live, uid)

        async def send() -> None:
            targets = dict(input_targets(owned.graph, owned.header))
            letters = {}
            for sending in sendings:
                target = targets[sending.target]
                parts, key = target.pack(owned.inputs).parts, OutputKey(uid, INPUTS, sending.target)
                letters[sending.target] = Letter(target, parts, sending.attempt, is_wanted=is_wanted, key=key)
            self._handle(Headed(uid, await self._deliver.deliver(letters)))

        self._tasks.create_task(self._or_break(uid, send()), name=f"inputs {uid}")

    async def _or_break(self, uid: str, work: Any) -> None:
        try:
            await work
        except (OnePieceError, CodecError) as error:
            self._handle(RequestBroke(uid, None, self._env.node_id, error.to_wire()))

    def _ask_for(self, sending: Resend) -> None:
        ask = ResendOutput(
            sending.uid, sending.source, sending.target, self._env.control_address, sending.attempt
        )
        nodes = [node for node in self._env.routes.table.nodes if node.life == sending.node_id]
        if nodes:
            self._env.outbox.post(f"{nodes[0].address}/{CONTROL_REGION}", ask)
        else:  # it has gone, and so has what it retained
            loop = asyncio.get_running_loop()
            loop.call_soon(self._handle, OutputMissing(sending.uid, sending.source, sending.target))
