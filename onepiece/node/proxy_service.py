"""The proxy of one node: what clients ask, answered from the requests it owns and the results stored.

It implements ``Frontend`` for the HTTP side: admission, readiness, the list of nodes, and everything
about requests, which ``RequestOwner`` drives.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

from attrs import evolve

from onepiece.core.admission import AdmissionRules
from onepiece.core.membership import NodeState
from onepiece.core.owned_request import END_SEQUENCE, end_event
from onepiece.core.placement_view import PlacementView
from onepiece.core.routing import NodeRoute, RouteEpoch
from onepiece.errors import (
    InvalidInput,
    NotReady,
    OnePieceError,
    OwnedElsewhere,
    ResultGone,
    UnknownNode,
    UnknownRequest,
    UnknownWorkflow,
)
from onepiece.graph import WorkflowGraph
from onepiece.ids import uid_time
from onepiece.messages import CONTROL_REGION, AskPlacement, DrainingSet, PlacementShown, SetDraining
from onepiece.node.calls import Calls
from onepiece.node.control import ControlService
from onepiece.node.door import Door
from onepiece.node.frontend import NodeView, Readiness
from onepiece.node.leftovers import EndedRequests
from onepiece.node.member import Member
from onepiece.node.record_keeper import RecordKeeper
from onepiece.node.request_owner import RequestOwner
from onepiece.node.result_reader import RemoteResult, ResultReader
from onepiece.record_messages import RequestRecord
from onepiece.requests import RequestEvent, RequestState, RequestStatus, Terms
from onepiece.runtime.environment import Environment

_TOLD_SECONDS: Final = 5.0
_NO_TABLE: Final = RouteEpoch(0, 0)


class ProxyService:
    """Requests, from their acceptance to their end."""

    def __init__(
        self,
        env: Environment,
        tasks: asyncio.TaskGroup,
        *,
        requests_max: int,
        rules: AdmissionRules,
        timeout_seconds: float,
        copies: int,
    ) -> None:
        self._env = env
        self._timeout_seconds = timeout_seconds
        self._tasks = tasks
        self._door = Door(env, requests_max, rules)
        self._calls = Calls(env)
        self._results = ResultReader(env, self._calls)
        self._records = RecordKeeper(env, self._calls, copies)
        self.owner = RequestOwner(
            env,
            tasks,
            admission=self._door.admission,
            records=self._records,
            results=self._results,
            calls=self._calls,
        )
        self._ended_requests = EndedRequests(env, tasks, self.owner.is_over, self._records)
        self.draining = False
        self._leader: Callable[[], str] = lambda: env.control_address
        self.heartbeat_ages: Callable[[], Mapping[str, float]] = dict
        """Seconds since each node was heard, where this node's manager knows it."""

    def attach(self, control: ControlService) -> None:
        """Receive what actors and stores report."""
        self.owner.attach(control)
        self._door.attach(control)
        self._ended_requests.attach(control)
        self._calls.answered_by(
            control, DrainingSet, PlacementShown, *{*self._records.answers, *self._results.answers}
        )

    def start(self, member: Member) -> None:
        """Begin what goes on beside all requests, until the proxy ends."""
        self._leader = lambda: member.leader
        member.offered = lambda: self._door.offered
        self.owner.start()
        self._tasks.create_task(self._door.exchange(), name="proxy loads")

    # --- what clients ask ----------------------------------------------------------------------

    def workflows(self) -> Mapping[str, WorkflowGraph]:
        """The registered workflows by name."""
        return self._env.routes.graphs

    def admission(self) -> Mapping[str, Any]:
        """What the door lets in and why it refuses, for JSON."""
        return self._door.view()

    def take_place(
        self,
        workflow: str,
        body_bytes: int | None,
        *,
        timeout_seconds: float | None,
        key: str | None,
        terms: Terms,
    ) -> str | None:
        """Take a place before the body is read, or raise ``Rejected``; None if the key is known here.

        ``body_bytes`` does not matter here: the bytes of all bodies have a budget of their own.
        """
        if key is not None and self.owner.table.uid_of_key(key) is not None:
            return None
        self._check_served(workflow)
        return self._door.offer(workflow, terms, timeout_seconds or self._timeout_seconds)

    def leave_place(self, place: str | None) -> None:
        """Nothing comes of the request; no error if the place is taken no more."""
        if place is not None:
            self._door.admission.give_back(place)

    def _check_served(self, workflow: str) -> WorkflowGraph:
        if self._env.routes.table.epoch == _NO_TABLE:
            raise NotReady(f"{self._env.node_id} has just started and has not heard from the manager yet")
        if self._node_of_life(self._env.identity.life) is None:
            # Others would take what it accepts for orphaned, and adopt it: two owners for one request.
            raise NotReady(f"{self._env.node_id} has begun a new life and is not back in the set yet")
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

    async def set_draining(self, node: str, *, draining: bool) -> NodeView:
        """Have a node take no new work, or take some again; its view behind that.

        Raises ``UnknownNode``, ``NodeUnreachable`` if it does not answer, ``NotReady`` if it is stopping.
        """
        what = f"{node} was told to {'drain' if draining else 'resume'}"
        view = await self._asked_itself(node, draining, what)
        if draining:
            return view if view.state == NodeState.DRAINED else evolve(view, state=NodeState.DRAINING)
        return evolve(view, state=NodeState.ALIVE)

    async def node(self, name: str) -> NodeView:
        """One member, with what it waits for if it drains; raises as ``set_draining``."""
        return await self._asked_itself(name, None, f"{name} was asked what it holds")

    async def _asked_itself(self, node: str, draining: bool | None, what: str) -> NodeView:
        """The node's view from the routes, and what the node itself says that it waits for."""
        views = {view.node: view for view in self.nodes()}
        view = views.get(node)
        if view is None:
            raise UnknownNode(
                f"no node {node!r} is in the set; there are: {', '.join(sorted(views))}", node=node
            )
        reply_to = self._env.control_address
        answer = await self._calls.ask(
            DrainingSet,
            lambda call: self._env.outbox.post(
                f"{view.address}/{CONTROL_REGION}", SetDraining(call, reply_to, draining)
            ),
            what=what,
            timeout_seconds=_TOLD_SECONDS,
        )
        if answer.error is not None:
            raise OnePieceError.from_wire(answer.error)
        return evolve(view, waits_for=answer.waits_for)

    async def placement(self) -> PlacementView:
        """What the manager wants to run where, what does, and the moves.

        Raises ``NodeUnreachable`` if it does not answer.
        """
        reply_to = self._env.control_address
        answer = await self._calls.ask(
            PlacementShown,
            lambda call: self._env.outbox.post(self._leader(), AskPlacement(call, reply_to)),
            what="the manager was asked for the placement",
            timeout_seconds=_TOLD_SECONDS,
        )
        return answer.view

    async def submit(
        self,
        workflow: str,
        inputs: Mapping[str, Any],
        *,
        timeout_seconds: float | None,
        key: str | None,
        terms: Terms | None = None,
        place: str | None = None,
    ) -> RequestStatus:
        """Accept a request: its record is kept on store nodes before this returns."""
        terms = terms or Terms()
        try:
            if key is not None and (known := self.owner.table.uid_of_key(key)) is not None:
                self.leave_place(place)
                return self._same_request(known, workflow, key)
            graph = self._check_served(workflow)
            if place is None:
                place = self._door.offer(workflow, terms, timeout_seconds or self._timeout_seconds)
            return await self._accept(graph, inputs, timeout_seconds, key, terms, place)
        except BaseException:
            self.leave_place(place)
            raise

    async def _accept(
        self,
        graph: WorkflowGraph,
        inputs: Mapping[str, Any],
        timeout_seconds: float | None,
        key: str | None,
        terms: Terms,
        uid: str,
    ) -> RequestStatus:
        """Keep the request's record, under the UID that has its place, and begin."""
        now = self._env.now()
        record = RequestRecord(
            call=0,
            uid=uid,
            workflow=graph.name,
            owner=self._env.control_address,
            owner_life=self._env.identity.life,
            key=key,
            accepted_at=now,
            deadline_at=now + (timeout_seconds or self._timeout_seconds),
            terms=terms,
        )
        holder = await self.owner.accept(graph, record, inputs)
        if holder != uid:
            self.leave_place(uid)
            return await self._known_elsewhere(holder, graph.name, key)
        return self.owner.table.status(uid)

    def _same_request(self, uid: str, workflow: str, key: str) -> RequestStatus:
        status = self.owner.table.status(uid)
        if status.workflow != workflow:
            raise InvalidInput(
                f"the key {key!r} was used for a request of {status.workflow}; a key stands for one request",
                field="key",
            )
        return status

    async def _known_elsewhere(self, uid: str, workflow: str, key: str | None) -> RequestStatus:
        """The key stands for a request that another proxy accepted."""
        try:
            return self._same_request(uid, workflow, key or "")
        except UnknownRequest:
            pass
        try:
            return await self._ended(uid)
        except OnePieceError:  # it runs, or its result is gone: what is known is that it was accepted
            accepted_at = uid_time(uid)
            return RequestStatus(uid, workflow, RequestState.RUNNING, accepted_at, None, None, {}, key=key)

    async def status(self, uid: str) -> RequestStatus:
        """A request's record; of one that this proxy does not own and that has ended, what is stored.

        Raises ``OwnedElsewhere`` for one that has not ended, ``NotReady`` while its owner is not known,
        ``ResultGone`` if it ended and was fetched, and ``UnknownRequest``.
        """
        return await self._end_elsewhere(uid) or self.owner.table.status(uid)

    async def _end_elsewhere(self, uid: str) -> RequestStatus | None:
        """How a request has ended, if what this proxy itself knows of it is not the end that stands."""
        try:
            known = self.owner.table.status(uid)
        except UnknownRequest:
            return await self._ended(uid)
        if not self.owner.table.may_stand_otherwise(uid):
            return None
        stands = await self._as_it_stands(known)
        return None if stands is known else stands

    async def _as_it_stands(self, known: RequestStatus) -> RequestStatus:
        """How a request ended that two proxies may have driven: one here, one cut off, both until its end."""
        try:
            stored = await self._results.describe(known.uid)
        except (NotReady, ResultGone, UnknownRequest):
            return known
        return known if stored.state is known.state else stored

    async def _ended(self, uid: str) -> RequestStatus:
        """How a request of another proxy ended; raises as ``status`` if it has not."""
        try:
            return await self._results.describe(uid)
        except UnknownRequest:
            record = await self._records.find(uid)
        if record is None:  # it may have ended in between
            return await self._results.describe(uid)
        owner = self._node_of_life(record.owner_life)
        if owner is None or owner.http is None or owner.life == self._env.identity.life:
            raise NotReady(
                f"the owner of request {uid} ({record.owner_life}) is gone; another proxy is about to go on "
                "with it",
                uid=uid,
            )
        raise OwnedElsewhere(f"request {uid} is owned by {owner.node_id}; ask {owner.http}", http=owner.http)

    def _node_of_life(self, life: str) -> NodeRoute | None:
        return next((node for node in self._env.routes.table.nodes if node.life == life), None)

    def requests(self, *, limit: int, state: str | None) -> Sequence[RequestStatus]:
        """Newest first."""
        return self.owner.table.statuses(limit=limit, state=state)

    async def events(self, uid: str, after: int) -> AsyncGenerator[RequestEvent, None]:
        """Events with ``sequence > after`` as they come; ends behind the final one.

        Of a request that this proxy does not own and that has ended there is the final one, also where that
        is another than this proxy's own; raises as
        ``status`` otherwise.
        """
        end = await self._end_elsewhere(uid)
        if end is not None:
            if after < END_SEQUENCE:
                yield end_event(end)
            return
        async with aclosing(self.owner.events(uid, after)) as events:
            async for event in events:
                yield event

    async def cancel(self, uid: str) -> RequestStatus:
        """Cancel; no error if the request has ended. Raises as ``status``."""
        try:
            return await self.owner.cancel(uid)
        except UnknownRequest:
            return await self._ended(uid)

    # --- results -------------------------------------------------------------------------------

    async def result(self, uid: str) -> RemoteResult:
        """Open the result; raises the request's error if it ended in one.

        A request that is unknown here may be another proxy's, or of before a restart: then the stores
        are asked.
        """
        try:
            status = self.owner.table.status(uid)
        except UnknownRequest:
            return await self._result_elsewhere(uid)
        if status.error is not None:
            raise OnePieceError.from_wire(status.error)
        if status.state is not RequestState.FINISHED:
            raise NotReady(f"request {uid} is {status.state.value}: its result is not there yet", uid=uid)
        return await self._results.open(uid)

    async def _result_elsewhere(self, uid: str) -> RemoteResult:
        try:
            return await self._results.open(uid)
        except UnknownRequest:
            await self._ended(uid)
        return await self._results.open(uid)  # it has ended in between

    async def purge(self, uid: str) -> None:
        """Drop a fetched result."""
        await self._results.purge(uid)
