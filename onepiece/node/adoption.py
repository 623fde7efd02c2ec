"""Adoption: requests whose owner died get another one.

Each proxy asks the store nodes now and then, and at once when a node died, for records of requests whose
owner is not alive. Of the living proxies rendezvous hashing picks the one that adopts each::

    orphaned --seen twice--> has it ended? --no--> take over the record --> ask every node what it has of it
                                  |                       | refused            |
                                  +--yes--> let go        +--> look again      +--> go on from there

An owner counts as dead if it was missing at two looks in a row: a proxy that has just joined may be in
the stores' records before it is in this node's routes. What is reported of a request between the question
who has it and the answers is held back, and handled once the request is owned: else it would be known
as it was, for ever.

A record may name this proxy as the owner of a request that it does not drive: it was accepted while the
answer of a store node got lost, or two proxies took it over at once. Such requests are *doubtful*; they
are looked at again until somebody drives them.

A request that was accepted for another version of its workflow, which does not fit this one, is adopted to
be ended in ``SchemaMismatch``. One whose workflow is not registered any more, or cannot be used here, waits
for that until its deadline; then whoever would adopt it takes it over to end it in ``DeadlineExceeded``.
"""

import asyncio
import copy
from collections.abc import Callable, Mapping
from typing import Any, Final

from attrs import evolve

from onepiece.codec import CodecError, Wire, materialise, unpack
from onepiece.core.request import RequestTable
from onepiece.core.request_events import KeepError
from onepiece.core.request_record import Holding
from onepiece.core.routing import rendezvous
from onepiece.errors import DeadlineExceeded, NotReady, OnePieceError, SchemaMismatch, UnknownRequest
from onepiece.graph import INPUTS, WorkflowGraph
from onepiece.log import get_logger
from onepiece.messages import CONTROL_REGION, STORE, ReleaseRequests, RequestErrored, StopRequest
from onepiece.node.calls import Calls
from onepiece.node.error_keeper import ErrorKeeper
from onepiece.node.record_keeper import RecordKeeper
from onepiece.node.result_reader import ResultReader
from onepiece.record_messages import AdoptRequests, RequestRecord, RequestsHeld
from onepiece.runtime.environment import Environment

_SCAN_SECONDS: Final = 2.0
_HELD_SECONDS: Final = 3.0
_AT_ONCE: Final = 16
"""Requests that are being adopted at a time."""
_HELD_BACK_MAX: Final = 1024
"""Messages about one request while it is adopted; its stages say far less in that time."""

Own = Callable[[WorkflowGraph, RequestRecord, Mapping[str, Any], tuple[Holding, ...]], None]
"""Drives a request from now on."""


class Adopter:
    """Finds requests that nobody drives, and has this proxy drive its share."""

    def __init__(
        self,
        env: Environment,
        *,
        table: RequestTable,
        is_over: Callable[[str], bool],
        records: RecordKeeper,
        results: ResultReader,
        calls: Calls,
        own: Own,
        handle: Callable[[object], None],
    ) -> None:
        self._env = env
        self._table = table
        self._is_over = is_over
        self._records = records
        self._results = results
        self._calls = calls
        self._own = own
        self._handle = handle
        self._errors = ErrorKeeper(env, calls, records)
        self._wake = asyncio.Event()
        self._suspected: frozenset[str] = frozenset()
        self._doubtful: set[str] = set()
        self._refused: set[str] = set()
        """Doubtful requests that some store node says another proxy has taken over, under the same number."""
        self._held_back: dict[str, list[object]] = {}
        """What came about requests that are being adopted."""

    def look(self) -> None:
        """Look soon: a node died."""
        self._wake.set()

    def doubt(self, uid: str) -> None:
        """A record may name this proxy as owner though it does not drive the request."""
        self._doubtful.add(uid)

    def _settle(self, uid: str) -> None:
        """It is known who drives a request, or that nobody has to."""
        self._doubtful.discard(uid)
        self._refused.discard(uid)

    def forget(self) -> None:
        """This node begins a new life: its doubts are those of a dead owner, and others look after them."""
        self._doubtful.clear()
        self._refused.clear()

    def hold_back(self, uid: str, message: object) -> bool:
        """Keep a message about a request that is being adopted; False if it is not."""
        held_back = self._held_back.get(uid)
        if held_back is not None and len(held_back) < _HELD_BACK_MAX:
            held_back.append(message)
        return held_back is not None

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(_SCAN_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            await self._scan()

    async def _scan(self) -> None:
        proxies = {node.node_id: node for node in self._env.routes.table.nodes if "proxy" in node.roles}
        if self._env.node_id not in proxies or self._env.routes.are_new:
            return  # a store node that knows how a request ended may still be joining
        living = frozenset({node.life for node in proxies.values()} | {self._env.identity.life})
        found = await self._records.orphans(sorted(living))
        mine = {uid: record for uid, record in found.items() if rendezvous(uid, proxies) == self._env.node_id}
        chosen = {uid: record for uid, record in mine.items() if uid in self._suspected}
        self._suspected = frozenset(mine)
        for orphan in chosen.values():
            if self._knows(orphan.uid) and self._is_over(orphan.uid):
                self._records.drop_everywhere(orphan.uid)  # a store node was away when it ended here
        for uid in list(self._doubtful):
            record = await self._doubted(uid, living)
            if record is not None:
                chosen[uid] = record
        room = asyncio.Semaphore(_AT_ONCE)

        async def adopt(record: RequestRecord) -> None:
            async with room:
                if record.workflow in self._env.routes.graphs:
                    await self._adopt(record)
                elif self._env.now() >= record.deadline_at:
                    await self._end_unregistered(record)

        await asyncio.gather(*(adopt(record) for record in chosen.values() if not self._knows(record.uid)))

    def _knows(self, uid: str) -> bool:
        return self._table.is_known(uid)

    async def _doubted(self, uid: str, living: frozenset[str]) -> RequestRecord | None:
        """The record of a doubtful request if this proxy is to drive it."""
        if self._knows(uid):
            self._settle(uid)
            return None
        try:
            record = await self._records.find(uid)
        except NotReady:
            return None
        if record is None or (record.owner_life != self._env.identity.life and record.owner_life in living):
            self._settle(uid)  # it has ended, or another proxy drives it
            return None
        return record

    def _taken_over(self, record: RequestRecord) -> RequestRecord:
        """The record as it is once this proxy owns the request."""
        life = self._env.identity.life
        # An attempt that did not get to its end is tried again under the same number, unless another
        # proxy has that: what is counted is owners that a request has cost.
        adoptions = record.adoptions + (record.owner_life != life or record.uid in self._refused)
        return evolve(record, owner=self._env.control_address, owner_life=life, adoptions=adoptions)

    async def _end_unregistered(self, record: RequestRecord) -> None:
        """End a request that nothing here can drive, and whose deadline has passed; or try again later."""
        uid, record = record.uid, self._taken_over(record)
        error = DeadlineExceeded(
            f"request {uid} passed its deadline: its owner is gone, and its workflow {record.workflow!r} is "
            "not registered any more, or cannot be used; register it and submit the request again",
            uid=uid,
            workflow=record.workflow,
        )
        self.doubt(uid)  # until it is known to have ended: the record names this proxy from here on
        try:
            if not await self._has_ended(uid):
                if not await self._records.take_over(record):
                    self._refused.add(uid)
                    return
                kept = await self._errors.keep(KeepError(uid, record.workflow, error.to_wire()))
                if not kept.is_stored:
                    return
        except OnePieceError as why:
            get_logger().warning("request_not_adopted", request=uid, error=why.message)
            return
        get_logger().warning("request_ended_unregistered", request=uid, workflow=record.workflow)
        self._records.drop_everywhere(uid)
        self._broadcast(StopRequest(uid, error.to_wire()))
        self._broadcast(ReleaseRequests((uid,)))
        self._settle(uid)

    async def _adopt(self, record: RequestRecord) -> None:
        uid, life, record = record.uid, self._env.identity.life, self._taken_over(record)
        self._held_back[uid] = []
        try:
            if await self._has_ended(uid):
                self._records.drop_everywhere(uid)
                self._broadcast(ReleaseRequests((uid,)))
                self._settle(uid)
                return
            self.doubt(uid)  # until it is owned: the record may say so in one place, and not in another
            if not await self._records.take_over(record):
                self._refused.add(uid)
                return
            graph = self._env.routes.graphs[record.workflow]
            kept = unpack(memoryview(await self._records.body(uid, record.key)), RequestRecord)
            inputs, error = inputs_for(graph, uid, kept.values)
            holdings = await self._who_holds(uid)
            error = error or _strange(graph, uid, kept.header.joins, holdings)
            if life != self._env.identity.life or self._knows(uid):
                return
            get_logger().info("request_adopted", request=uid, workflow=record.workflow, held=len(holdings))
            if error is None:
                self._own(graph, evolve(record, joins=kept.header.joins), inputs, holdings)
            else:  # owned all the same: somebody has to tell its client how it ends
                self._own(graph, record, inputs, ())
                self._handle(RequestErrored(uid, None, self._env.node_id, error.to_wire()))
            self._settle(uid)
        except (OnePieceError, KeyError) as error:
            get_logger().warning("request_not_adopted", request=uid, error=str(error))
        finally:
            for message in self._held_back.pop(uid):
                self._handle(message)

    async def _has_ended(self, uid: str) -> bool:
        """Whether a result or an error of it is stored; raises ``NotReady`` if that is not known."""
        try:
            await self._results.describe(uid)
        except UnknownRequest:
            return False
        except NotReady:
            raise
        except OnePieceError:  # it was there, and is gone
            return True
        return True

    async def _who_holds(self, uid: str) -> tuple[Holding, ...]:
        """Ask every living node what it has of a request, and to report to this owner from now on."""

        async def ask(address: str, name: str) -> RequestsHeld | None:
            try:
                return await self._calls.ask(
                    RequestsHeld,
                    lambda call: self._env.outbox.post(
                        address, AdoptRequests(call, self._env.control_address, (uid,))
                    ),
                    what=f"{name} was asked what it has of request {uid}",
                    timeout_seconds=_HELD_SECONDS,
                )
            except OnePieceError:
                return None  # it is dying; what it has is lost with it

        nodes = self._env.routes.table.nodes
        answers = await asyncio.gather(
            *(ask(f"{node.address}/{CONTROL_REGION}", node.node_id) for node in nodes)
        )
        return tuple(
            Holding(answer.life, each.active, each.retained, each.checkpoints)
            for answer in answers
            if answer is not None
            for each in answer.held
            if each.uid == uid
        )

    def _broadcast(self, message: object) -> None:
        for node in self._env.routes.table.nodes:
            self._env.outbox.post(f"{node.address}/{CONTROL_REGION}", message)


def inputs_for(
    graph: WorkflowGraph, uid: str, kept: Mapping[str, Wire]
) -> tuple[dict[str, Any], SchemaMismatch | None]:
    """The inputs of a request that an earlier owner accepted, and why they are none of this workflow's.

    It may have been changed since: a node that begins with a new version finds what the old one accepted.
    """
    inputs: dict[str, Any] = {}
    for parameter in graph.inputs:
        if parameter.name in kept:
            try:
                inputs[parameter.name] = materialise(kept[parameter.name], parameter.type)
            except CodecError as error:
                return inputs, _mismatch(graph, uid, f"its input {parameter.name!r}: {error.message}")
        elif parameter.required:
            return inputs, _mismatch(graph, uid, f"it has no input {parameter.name!r}")
        else:
            inputs[parameter.name] = copy.deepcopy(parameter.default)  # it may be a list
    unknown = sorted(kept.keys() - inputs.keys())
    if unknown:
        return inputs, _mismatch(graph, uid, f"its input {unknown[0]!r} is unknown now")
    return inputs, None


def _strange(
    graph: WorkflowGraph, uid: str, joins: Mapping[str, int], holdings: tuple[Holding, ...]
) -> SchemaMismatch | None:
    """Why what nodes have of the request is none of this workflow's."""
    known = {node.id for node in graph.nodes} | {INPUTS, STORE}
    held = {
        name for each in holdings for name in (*each.active, *each.retained, *each.checkpoints)
    } | joins.keys()
    strange = sorted(held - known)
    return _mismatch(graph, uid, f"it has been to {strange[0]!r}, which is unknown now") if strange else None


def _mismatch(graph: WorkflowGraph, uid: str, why: str) -> SchemaMismatch:
    return SchemaMismatch(
        f"request {uid} was accepted for another version of {graph.name}: {why}; submit it again",
        uid=uid,
        workflow=graph.name,
    )
