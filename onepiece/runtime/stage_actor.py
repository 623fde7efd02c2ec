"""The stage actor: TaskManager, RequestScheduler, TaskWorkers and ResultDeliver around one inbox.

::

    inbox (double ring) --> intake --> RequestScheduler --pull--> TaskWorkers --> ResultDeliver
                              |                                        |               |
                              +-------- reports to the request's owner +---------------+

The TaskManager is this class's ``run``: it opens the inbox, loads the stage (``setup`` up to its
``yield``) on the device's thread, says that it is ready, works until it is told to stop, finishes what
it holds, and unloads (the rest of ``setup``).

    LOADING --setup done--> READY --drain--> DRAINING --idle--> (gone)
       |                      |  ^
       |                      |  +-- loaded anew
       |                      +----- a job left the stage dirty: LOADING
       +-- setup raised --> FAILED (stays, so that the manager learns why)

Cancelling ``run`` stops at once: what is queued or runs is lost with the inbox.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

from attrs import define, evolve, field, frozen

from onepiece.codec import CodecError, Packed, encode_control, unpack
from onepiece.core.inventory import ActorReport, ActorState
from onepiece.errors import DeadlineExceeded, NodeLost, OnePieceError, SchemaMismatch, StageFailed
from onepiece.graph import StageSpec, WorkflowGraph
from onepiece.limits import (
    STOPPED_UIDS_MAX,
    WORKFLOW_PATIENCE_SECONDS,
)
from onepiece.log import get_logger
from onepiece.messages import KIND_STAGE_INPUT, RequestErrored, StageInput
from onepiece.requests import EventKind
from onepiece.runtime.devices import DeviceThreads, torch_name
from onepiece.runtime.environment import Environment
from onepiece.runtime.loaded_stage import LoadedStage
from onepiece.runtime.plan import Plans
from onepiece.runtime.reports import StageRun
from onepiece.runtime.request_scheduler import Held, Job, RequestScheduler
from onepiece.runtime.result_deliver import ResultDeliver, Target, targets_of
from onepiece.runtime.signal import Signal
from onepiece.runtime.task_worker import RunningStage, TaskWorker
from onepiece.stage import Stage
from transports import Delivery, Geometry, Receiver, open_receiver

_SLOTS: Final = 1024


@define(eq=False)
class _Running:
    header: StageInput
    context: RunningStage
    task: asyncio.Task[Any]


@frozen
class _Shipment:
    """A stage's value, cut into the messages that carry it on."""

    targets: Mapping[str, Target]
    packed: Mapping[str, Packed]
    finished_at: float
    detail: Mapping[str, Any]
    """What the run cost, as in the event ``stage_finished``."""


@define(eq=False)
class StageActor:
    """One stage on one device of this node."""

    actor_id: int
    stage: Stage[Any, Any, Any]
    threads: DeviceThreads
    env: Environment
    state: ActorState = ActorState.LOADING
    address: str = ""
    error: str | None = None
    _scheduler: RequestScheduler = field(init=False)
    _worker: TaskWorker = field(init=False)
    _plans: Plans = field(factory=Plans)
    _running: dict[tuple[str, str], _Running] = field(factory=dict)
    _in_hand: int = 0
    """Messages that are just being taken in or sent out."""
    _stopped: "OrderedDict[str, OnePieceError]" = field(factory=OrderedDict)
    _work: Signal = field(factory=Signal)
    _drain: asyncio.Event = field(factory=asyncio.Event)
    _loaded: LoadedStage | None = None
    _loaded_state: Any = None
    _reload: asyncio.Lock = field(factory=asyncio.Lock)

    def __attrs_post_init__(self) -> None:
        self._scheduler = RequestScheduler(self.env.join_bytes)
        self._worker = TaskWorker(self.stage, self.threads)

    @property
    def spec(self) -> StageSpec:
        """The stage's schema."""
        return self.stage.spec

    def report(self) -> ActorReport:
        """What the next heartbeat says of this actor."""
        return ActorReport(
            actor_id=self.actor_id,
            stage=self.stage.key,
            devices=(self.threads.name,),
            state=self.state,
            address=self.address,
            queued=self._scheduler.queued + self._scheduler.joining,
            running=len(self._running),
            error=self.error,
        )

    @property
    def is_idle(self) -> bool:
        """Nothing waits, is being joined, runs, or is on its way in or out."""
        waiting = self._scheduler.queued + self._scheduler.joining
        return not waiting and not self._running and not self._in_hand

    def drain(self) -> None:
        """Finish what is here and end; new work is still taken in until routes have changed."""
        self._drain.set()
        if self.state is not ActorState.FAILED:
            self._become(ActorState.DRAINING)

    async def run(self) -> None:
        """Live from loading to unloading; raises only what is a bug of ours."""
        geometry = Geometry(slot_count=_SLOTS, payload_bytes=self.env.inbox_bytes, session_count=_SLOTS)
        region = f"actor/{self.actor_id}"
        async with open_receiver(self.env.listener, region, geometry) as inbox:
            self.address = str(self.env.address.region(region))
            async with asyncio.TaskGroup() as tasks:
                try:
                    if await self._load(tasks):
                        await self._serve(inbox, tasks)
                    else:
                        await self._drain.wait()
                finally:
                    await self._unload()

    async def _serve(self, inbox: Receiver, tasks: asyncio.TaskGroup) -> None:
        deliver = ResultDeliver(self.env)
        workers = [
            tasks.create_task(self._intake(inbox)),
            *(tasks.create_task(self._work_on(deliver, tasks)) for _ in range(self.spec.concurrency)),
        ]
        try:
            await self._drain.wait()
            await self._until_idle(inbox)
        finally:
            self._stop_running()
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)  # the stage is unloaded next: nothing may run on it any more

    def _stop_running(self) -> None:
        """Ended with work in hand: a job that is cancelled is waited for, so its ``report`` has to raise."""
        for running in self._running.values():
            uid = running.context.uid
            reason = NodeLost(f"{self.stage.key} was ended on {self.env.node_id} during {uid}", uid=uid)
            self._stop(running, reason)

    async def _until_idle(self, inbox: Receiver) -> None:
        """Wait until nothing is left; ``inbox.depth`` counts what intake has not seen."""
        await self._work.wait_for(lambda: self.is_idle and inbox.depth == 0)

    def _become(self, state: ActorState) -> None:
        if self._drain.is_set() and state is ActorState.READY:
            state = ActorState.DRAINING
        self.state = state
        self.env.on_change()

    # --- loading -------------------------------------------------------------------------------

    async def _load(self, tasks: asyncio.TaskGroup) -> bool:
        context = self._context("", deadline_at=None, stage=self.spec.name)
        self._loaded = LoadedStage(self.stage, self.threads, tasks)
        try:
            self._loaded_state = await self._loaded.load(context)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            self.error = f"{type(error).__name__}: {error}"
            get_logger().exception("stage_load_failed", stage=self.stage.key, node=self.env.node_id)
            self._become(ActorState.FAILED)
            return False
        self.error = None
        self._become(ActorState.READY)
        return True

    async def _unload(self) -> None:
        loaded, self._loaded, self._loaded_state = self._loaded, None, None
        if loaded is not None:
            await loaded.unload()

    async def _load_anew(self, tasks: asyncio.TaskGroup) -> None:
        """A job left the stage in an unknown state: no further one runs before it is loaded again."""
        async with self._reload:
            self._become(ActorState.LOADING)
            await self._unload()
            if not await self._load(tasks):
                self._refuse_queued()

    def _refuse_queued(self) -> None:
        """The stage is gone for good: end what waits here; what comes later is refused on arrival."""
        error = self._not_loaded()
        for uid in self._scheduler.uids():
            for job in self._scheduler.drop(uid):
                self._break(job.header, error)
                job.release()

    def _not_loaded(self) -> StageFailed:
        return StageFailed(
            f"{self.stage.key} could not be loaded again on {self.env.node_id} after a job broke it: "
            f"{self.error}",
            stage=self.stage.key,
            node=self.env.node_id,
        )

    # --- taking in -----------------------------------------------------------------------------

    async def _intake(self, inbox: Receiver) -> None:
        while True:
            delivery = await inbox.receive()
            self._in_hand += 1
            try:
                job = await self._take(inbox, delivery)
            except OnePieceError as error:
                inbox.release(delivery)
                get_logger().warning("message_refused", stage=self.stage.key, error=str(error))
                continue
            finally:
                self._in_hand -= 1
            self._work.notify()
            if job is not None:
                self.env.report(job.header.owner, job.run)

    async def _take(self, inbox: Receiver, delivery: Delivery) -> Job | None:
        if delivery.kind != KIND_STAGE_INPUT:
            raise CodecError(f"a message of kind {delivery.kind} came to the inbox of {self.stage.key}")
        unpacked = unpack(delivery.payload, StageInput)
        header = unpacked.header
        released = False

        def release() -> None:
            nonlocal released
            if not released:
                released = True
                inbox.release(delivery)

        held = Held(header, unpacked.values, delivery.payload, self.env.now(), release)
        try:
            self._check_alive(header)
            graph = self.env.routes.graphs.get(header.workflow) or await self._graph(header)
            plan = self._plans.of(graph).nodes.get(header.node)
            if plan is None or plan.stage != self.stage.key:
                raise CodecError(f"{header.node} of {header.workflow} is not for {self.stage.key}")
            job = self._scheduler.add(plan, held)
        except OnePieceError as error:
            release()
            if header.uid not in self._stopped:
                self._break(header, error)
            return None
        if job is not None:
            job.run = StageRun(job.uid, job.node, self.env.node_id, self.actor_id, job.arrived_at)
        return job

    def _check_alive(self, header: StageInput) -> None:
        stopped = self._stopped.get(header.uid)
        if stopped is not None:
            raise stopped
        if self.env.owners.is_lost(header):
            raise self._ownerless(header)
        if self.state is ActorState.FAILED:
            raise self._not_loaded()
        if header.deadline_at is not None and self.env.now() >= header.deadline_at:
            raise DeadlineExceeded(
                f"request {header.uid} passed its deadline before {header.node}",
                uid=header.uid,
                stage=header.node,
            )

    async def _graph(self, header: StageInput) -> WorkflowGraph:
        """Wait for the workflow's graph: a message can overtake the route table that names its workflow."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WORKFLOW_PATIENCE_SECONDS):
                while True:
                    changed = self.env.routes.changed
                    graph = self.env.routes.graphs.get(header.workflow)
                    if graph is not None:
                        return graph
                    await changed.wait()
        raise SchemaMismatch(
            f"{self.env.node_id} knows no workflow {header.workflow!r}, which request {header.uid} is of",
            uid=header.uid,
        )

    # --- working -------------------------------------------------------------------------------

    async def _work_on(self, deliver: ResultDeliver, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self._work.wait_for(self._has_work)
            job = self._scheduler.pull()
            if job is None:
                continue  # another worker was quicker
            if await self._execute(job, deliver):
                await self._load_anew(tasks)
            self._work.notify()

    def _has_work(self) -> bool:
        return self._scheduler.queued > 0

    async def _execute(self, job: Job, deliver: ResultDeliver) -> bool:
        """Run a job and send what comes out; says whether it left the stage dirty."""
        header, run = job.header, job.run
        context = self._context(header.uid, header.deadline_at, job.node, job)
        run.started_at = self.env.now()

        def package(value: Any, compute_seconds: float) -> _Shipment:
            return self._package(job, value, compute_seconds)

        self.env.report(header.owner, run)
        task = asyncio.current_task()
        assert task is not None
        running = self._running[job.uid, job.node] = _Running(header, context, task)
        try:
            outcome = await self._worker.execute(
                job, context, package, lambda error: self._break(header, error)
            )
        finally:
            if self._running.get((job.uid, job.node)) is running:
                del self._running[job.uid, job.node]
        if outcome.shipment is None:
            assert outcome.error is not None
            self._break(header, outcome.error)
            return outcome.is_dirty
        shipment = outcome.shipment
        self._in_hand += 1
        try:
            heading = await deliver.deliver(shipment.targets, shipment.packed)
        except OnePieceError as error:
            self._break(header, error)
            return False
        finally:
            self._in_hand -= 1
        sent_bytes = sum(packed.length for packed in shipment.packed.values())
        run.finished_at = shipment.finished_at
        run.detail = {**shipment.detail, "sent_bytes": sent_bytes}
        run.heading = heading
        self.env.report(header.owner, run)
        return False

    def _package(self, job: Job, value: Any, compute_seconds: float) -> "_Shipment":
        """Runs where the stage does, perhaps on its thread: it changes nothing."""
        now = self.env.now()
        assert job.run.started_at is not None
        detail = {
            "waited_seconds": max(0.0, job.run.started_at - job.run.queued_at),
            "transfer_seconds": max(0.0, *(h.arrived_at - h.header.sent_at for h in job.held.values())),
            "received_bytes": job.received_bytes,
            "compute_seconds": compute_seconds,
            "device": self.threads.name,
        }
        report = evolve(job.run.report(), finished_at=now, detail=detail)
        trail = {**job.trail, job.node: encode_control(report)}
        targets = targets_of(job.plan, job.header, trail, now)
        packed = {name: target.pack(value) for name, target in targets.items()}
        return _Shipment(targets, packed, now, detail)

    def stop_request(self, uid: str, reason: OnePieceError) -> None:
        """Drop what is queued for the request, interrupt what runs, refuse what comes later."""
        self._stopped[uid] = reason
        self._stopped.move_to_end(uid)
        if len(self._stopped) > STOPPED_UIDS_MAX:
            self._stopped.popitem(last=False)
        for job in self._scheduler.drop(uid):
            job.release()
        for (running_uid, _), running in list(self._running.items()):
            if running_uid == uid:
                self._stop(running, reason)

    def stop_ownerless(self) -> None:
        """End what is held for requests whose owner is gone: nobody is there to take their results."""
        held = [job.header for job in self._scheduler.jobs()]
        held += [running.header for running in self._running.values()]
        for header in held:
            if not self.env.owners.is_lost(header):
                continue
            reason = self._ownerless(header)
            self._break(header, reason)  # in case it was only cut off, and is still waiting
            self.stop_request(header.uid, reason)

    def _ownerless(self, header: StageInput) -> NodeLost:
        return NodeLost(
            f"the proxy at {header.owner}, which owned request {header.uid}, is gone", uid=header.uid
        )

    def _stop(self, running: _Running, reason: OnePieceError) -> None:
        if not running.context.cancelled:
            running.context.stop(reason)
            running.task.cancel()

    # --- telling -------------------------------------------------------------------------------

    def _context(
        self, uid: str, deadline_at: float | None, stage: str, job: Job | None = None
    ) -> RunningStage:
        loop = asyncio.get_running_loop()

        def progress(kind: EventKind, detail: Mapping[str, Any]) -> None:
            if job is not None:
                loop.call_soon_threadsafe(self._tell_progress, job, kind, detail)

        return RunningStage(
            state_value=self._loaded_state,
            device=torch_name(self.threads.name),
            uid=uid,
            stage=stage,
            node=self.env.node_id,
            attempt=job.header.attempt if job else 1,
            deadline_at=deadline_at,
            threads=self.threads,
            progress=progress,
            log=get_logger(stage=stage, request=uid, node=self.env.node_id),
        )

    def _tell_progress(self, job: Job, kind: EventKind, detail: Mapping[str, Any]) -> None:
        self.env.report_progress(job.header.owner, job.run, kind, detail)

    def _break(self, header: StageInput, error: OnePieceError) -> None:
        self.env.break_request(
            header.owner, RequestErrored(header.uid, header.node, self.env.node_id, error.to_wire())
        )
