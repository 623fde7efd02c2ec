"""The proxy of one node: owns the requests that clients submit to it.

It carries out what ``RequestTable`` decides: sends inputs to the entry stages, tells followers what
happens, tells nodes to stop work of requests that have ended, and reads results from wherever they are
stored. It implements ``Frontend`` for the HTTP side and holds no state of its own but the table, the
reads of results and the followers.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final

from attrs import define, field

from onepiece.codec import CodecError, decode_control
from onepiece.core.admission import RequestBudget
from onepiece.core.request import (
    Accepted,
    CancelAsked,
    Effect,
    Event,
    InputsSent,
    NodesDied,
    Publish,
    RequestBroke,
    RequestTable,
    ResultArrived,
    Settled,
    StageReported,
    StopStages,
    Tick,
)
from onepiece.errors import (
    InvalidInput,
    NodeLost,
    NotReady,
    OnePieceError,
    Overloaded,
    UnknownRequest,
    UnknownWorkflow,
)
from onepiece.graph import INPUTS, WorkflowGraph
from onepiece.ids import new_uid
from onepiece.limits import (
    EVENTS_PER_REQUEST_MAX,
    FOLLOWERS_PER_REQUEST_MAX,
    RECORD_KEEP_SECONDS,
    RECORDS_MAX,
)
from onepiece.log import get_logger
from onepiece.messages import (
    CONTROL_REGION,
    RequestErrored,
    ResultStored,
    StageInput,
    StageProgress,
    StageReport,
    StageReports,
    StopRequest,
)
from onepiece.node.control import ControlService
from onepiece.node.frontend import NodeView, Readiness
from onepiece.node.result_reader import RemoteResult, ResultReader
from onepiece.requests import EventKind, RequestEvent, RequestState, RequestStatus
from onepiece.runtime.environment import Environment
from onepiece.runtime.plan import GraphPlan, Plans
from onepiece.runtime.result_deliver import ResultDeliver, input_targets

_TICK_SECONDS: Final = 0.25


@define(eq=False)
class _Follower:
    """A client that follows events; woken when there are new ones."""

    wake: asyncio.Event = field(factory=asyncio.Event)


class ProxyService:
    """Requests, from their acceptance to their end."""

    def __init__(
        self,
        env: Environment,
        control_address: str,
        tasks: asyncio.TaskGroup,
        *,
        budget: RequestBudget,
        timeout_seconds: float,
    ) -> None:
        self._env = env
        self._control_address = control_address
        self._tasks = tasks
        self._budget = budget
        self._timeout_seconds = timeout_seconds
        self._deliver = ResultDeliver(env)
        self._plans = Plans()
        self._rng = random.SystemRandom()
        self._table = RequestTable(RECORDS_MAX, EVENTS_PER_REQUEST_MAX, RECORD_KEEP_SECONDS)
        self._followers: dict[str, set[_Follower]] = {}
        self._results = ResultReader(env, control_address)
        self._settled = asyncio.Event()
        self.draining = False
        self.heartbeat_ages: Callable[[], Mapping[str, float]] = dict
        """Seconds since each node was heard, where this node's manager knows it."""

    def attach(self, control: ControlService) -> None:
        """Receive what actors and stores report."""
        control.on(StageReports, self._on_reports)
        control.on(StageReport, self._on_report)
        control.on(StageProgress, self._on_progress)
        control.on(RequestErrored, self._on_errored)
        control.on(ResultStored, self._on_stored)
        self._results.attach(control)

    async def tick(self) -> None:
        """End what is past its deadline, until cancelled."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._handle(Tick())

    def nodes_died(self, node_ids: frozenset[str]) -> None:
        """End the requests that had unfinished work there."""
        self._handle(NodesDied(node_ids))

    def expelled(self) -> None:
        """The set took this node for dead, and drops the requests it owned: end them here, too."""
        why = f"{self._env.node_id} was out of reach for too long, and the set gave up its requests"
        for uid in self._table.live_uids():
            error = NodeLost(f"{why}; submit {uid} again", uid=uid, node=self._env.node_id)
            self._handle(RequestBroke(uid, None, self._env.node_id, error.to_wire()))

    @property
    def live_count(self) -> int:
        """Requests that have not ended."""
        return self._table.live_count()

    async def settled(self) -> None:
        """Wait until no request is live."""
        while self._table.live_count():
            self._settled.clear()
            await self._settled.wait()

    # --- what clients ask ----------------------------------------------------------------------

    def workflows(self) -> Mapping[str, WorkflowGraph]:
        """The registered workflows by name."""
        return self._env.routes.graphs

    def check_admission(self, workflow: str, body_bytes: int | None) -> None:
        """Raise ``Rejected`` before the body is read."""
        self._admit(workflow)

    def _admit(self, workflow: str) -> WorkflowGraph:
        graph = self._env.routes.graphs.get(workflow)
        if graph is None and workflow in self._env.routes.unusable:
            why = self._env.routes.unusable[workflow]
            raise NotReady(f"{self._env.node_id} cannot serve {workflow}: {why}", workflow=workflow)
        if graph is None:
            known = ", ".join(sorted(self._env.routes.graphs)) or "none"
            raise UnknownWorkflow(
                f"no workflow {workflow!r} is registered here; known are: {known}", workflow=workflow
            )
        if self.draining:
            raise NotReady(f"{self._env.node_id} is draining; submit to another node")
        missing = self._env.routes.table.waiting_for(workflow)
        if missing:
            raise NotReady(f"{workflow} is not ready: {'; '.join(missing)}", workflow=workflow)
        self._budget.check(workflow)
        return graph

    def readiness(self) -> Readiness:
        """Whether requests can be served now, and what is missing."""
        table = self._env.routes.table
        waiting = list(table.waiting_for())
        waiting += [f"{name}: {reason}" for name, reason in self._env.routes.unusable.items()]
        if not table.workflows:
            waiting.append("no workflow is registered yet")
        ready = not waiting and not self.draining
        return Readiness(ready=ready, live=True, draining=self.draining, waiting_for=waiting)

    def nodes(self) -> Sequence[NodeView]:
        """The members of the set, as of the newest route table."""
        table = self._env.routes.table
        ages = self.heartbeat_ages()
        actors: dict[str, list[Mapping[str, Any]]] = {}
        for actor in table.actors:
            view = {
                "actor": actor.actor_id,
                "stage": actor.stage,
                "devices": list(actor.devices),
                "state": actor.state.value,
                "error": actor.error,
            }
            actors.setdefault(actor.node_id, []).append(view)
        return [
            NodeView(
                node=node.node_id,
                incarnation=node.incarnation,
                address=node.address,
                http=node.http,
                roles=node.roles,
                state=node.state,
                devices=[device.name for device in node.devices],
                actors=actors.get(node.node_id, []),
                process_id=node.process_id,
                heartbeat_age_seconds=ages.get(node.node_id),
            )
            for node in table.nodes
        ]

    async def submit(
        self, workflow: str, inputs: Mapping[str, Any], *, timeout_seconds: float | None, key: str | None
    ) -> RequestStatus:
        """Accept a request and send its inputs on their way."""
        if key is not None and (known := self._table.uid_of_key(key)) is not None:
            return self._same_request(known, workflow, key)
        graph = self._admit(workflow)
        now = self._env.now()
        uid = new_uid(now, self._rng)
        deadline_at = now + (timeout_seconds or self._timeout_seconds)
        self._budget.take(uid, workflow)
        plan = self._plans.of(graph)
        self._handle(Accepted(uid, workflow, tuple(plan.nodes), deadline_at, key))
        header = StageInput(
            uid=uid,
            workflow=workflow,
            node="",
            source=INPUTS,
            owner=self._control_address,
            received_at=now,
            deadline_at=deadline_at,
            sent_at=now,
            joins=self._joins(plan, uid),
        )
        self._tasks.create_task(self._send_inputs(plan, header, inputs))
        return self._table.status(uid)

    def _same_request(self, uid: str, workflow: str, key: str) -> RequestStatus:
        status = self._table.status(uid)
        if status.workflow != workflow:
            raise InvalidInput(
                f"the key {key!r} was used for a request of {status.workflow}; a key stands for one request",
                field="key",
            )
        return status

    def _joins(self, plan: GraphPlan, uid: str) -> dict[str, int]:
        """Choose for each join the actor where its inputs meet, spreading them over the actors."""
        joins: dict[str, int] = {}
        for node in plan.joins:
            actor = self._deliver.choose(node.stage)
            actor = actor or self._env.routes.table.meeting_point(node.stage, uid)
            if actor is not None:
                joins[node.node] = actor.actor_id
        return joins

    async def _send_inputs(self, plan: GraphPlan, header: StageInput, inputs: Mapping[str, Any]) -> None:
        try:
            targets = input_targets(plan.entries, header)
            packed = {name: target.pack(inputs) for name, target in targets.items()}
            heading = await self._deliver.deliver(targets, packed)
        except OnePieceError as error:
            self._handle(RequestBroke(header.uid, None, self._env.node_id, error.to_wire()))
            return
        except Exception:  # noqa: BLE001 - a bug of ours must end this request, not the node
            get_logger().exception("inputs_not_sent", uid=header.uid)
            lost = OnePieceError(
                f"the inputs of {header.uid} could not be sent; the proxy's log has the cause"
            )
            self._handle(RequestBroke(header.uid, None, self._env.node_id, lost.to_wire()))
            return
        self._handle(InputsSent(header.uid, heading))

    def status(self, uid: str) -> RequestStatus:
        """Raises ``UnknownRequest``."""
        return self._table.status(uid)

    def requests(self, *, limit: int, state: str | None) -> Sequence[RequestStatus]:
        """Newest first."""
        return self._table.statuses(limit=limit, state=state)

    async def events(self, uid: str, after: int) -> AsyncIterator[RequestEvent]:
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
                for event in self._table.events(uid, after):
                    yield event
                    after = event.sequence
                if self._table.state(uid).is_final and not self._table.events(uid, after):
                    return
                await follower.wake.wait()
        finally:
            followers.discard(follower)
            if not followers:
                self._followers.pop(uid, None)

    async def cancel(self, uid: str) -> RequestStatus:
        """Cancel; no error if the request has ended."""
        self._table.status(uid)
        self._handle(CancelAsked(uid))
        return self._table.status(uid)

    # --- results -------------------------------------------------------------------------------

    async def result(self, uid: str) -> RemoteResult:
        """Open the result; raises the request's error if it ended in one.

        A request that is unknown here may be another proxy's, or of before a restart: then the stores
        are asked.
        """
        try:
            status = self._table.status(uid)
        except UnknownRequest:
            return await self._results.open(uid)
        if status.error is not None:
            raise OnePieceError.from_wire(status.error)
        if status.state is not RequestState.FINISHED:
            raise NotReady(f"request {uid} is {status.state.value}: its result is not there yet", uid=uid)
        return await self._results.open(uid)

    async def purge(self, uid: str) -> None:
        """Drop a fetched result."""
        await self._results.purge(uid)

    # --- what the set reports ------------------------------------------------------------------

    def _on_reports(self, message: StageReports) -> None:
        for uid, body in message.reports:
            if not self._table.is_live(uid):
                continue  # it ended before this could be told
            try:
                report = decode_control(body)
            except CodecError as error:
                get_logger().warning("report_refused", uid=uid, error=error.message)
                continue
            if isinstance(report, StageReport):
                self._on_report(report)
            elif isinstance(report, StageProgress):
                self._on_progress(report)

    def _on_report(self, report: StageReport) -> None:
        """Tell apart what a report says; the table leaves out what it knows already."""
        stage, node = report.stage, report.node_id
        self._handle(StageReported(report.uid, EventKind.QUEUED, stage, node, report.queued_at))
        if report.started_at is not None:
            self._handle(StageReported(report.uid, EventKind.STAGE_STARTED, stage, node, report.started_at))
        if report.finished_at is not None:
            self._handle(
                StageReported(
                    report.uid,
                    EventKind.STAGE_FINISHED,
                    stage,
                    node,
                    report.finished_at,
                    report.detail,
                    report.heading,
                )
            )

    def _on_progress(self, progress: StageProgress) -> None:
        try:
            kind = EventKind(progress.kind)
        except ValueError:
            get_logger().warning("report_refused", kind=progress.kind, node=progress.node_id)
            return
        self._handle(
            StageReported(progress.uid, kind, progress.stage, progress.node_id, progress.at, progress.detail)
        )

    def _on_errored(self, errored: RequestErrored) -> None:
        self._handle(RequestBroke(errored.uid, errored.stage, errored.node_id, errored.error))

    def _on_stored(self, stored: ResultStored) -> None:
        self._results.note(stored.uid, stored.node_id)
        self._on_reports(StageReports(tuple((stored.uid, report) for report in stored.trail.values())))
        self._handle(ResultArrived(stored.uid, stored.result_bytes, stored.content_type))

    def _handle(self, event: Event) -> None:
        for effect in self._table.handle(event, self._env.now()):
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Publish(event):
                for follower in self._followers.get(event.uid, ()):
                    follower.wake.set()
            case Settled(uid):
                self._budget.give_back(uid)
                self._settled.set()
            case StopStages(uid, reason):
                for node in self._env.routes.table.nodes:
                    if "worker" in node.roles:
                        self._env.outbox.post(f"{node.address}/{CONTROL_REGION}", StopRequest(uid, reason))
