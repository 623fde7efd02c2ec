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
       |                      +----- a stage task left the stage dirty, or its process died: LOADING
       +-- setup raised --> FAILED (stays, so that the manager learns why)

A worker does not wait until its output is sent: while the next inbox is full it goes on with this one, as
far as there is ``Retainer.room``. Cancelling ``run`` stops at once: what is queued or runs is lost.
"""

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

from attrs import define, evolve, field

from onepiece._bounded import described, trace_of
from onepiece.codec import encode_control
from onepiece.core.inventory import ActorReport, ActorState, StageWork
from onepiece.core.retention import OutputKey
from onepiece.errors import NodeLost, OnePieceError, StageFailed, name_of
from onepiece.graph import StageSpec
from onepiece.limits import ISOLATED_STARTS_MAX
from onepiece.log import get_logger
from onepiece.messages import StageInput
from onepiece.requests import EventKind
from onepiece.runtime.actor_inbox import InboxRefused, device_inbox_bytes, open_actor_inbox
from onepiece.runtime.actor_load import ActorLoad
from onepiece.runtime.checkpoints import keep_outputs
from onepiece.runtime.counts import StageCounts
from onepiece.runtime.devices import DeviceThreads, torch_name
from onepiece.runtime.environment import Environment
from onepiece.runtime.intake import Intake
from onepiece.runtime.isolated_start import Surroundings
from onepiece.runtime.loaded_stage import LoadedStage
from onepiece.runtime.request_scheduler import RequestScheduler, StageTask
from onepiece.runtime.result_deliver import Letter, ResultDeliver
from onepiece.runtime.result_targets import targets_of
from onepiece.runtime.shipment import Running, Shipment, always
from onepiece.runtime.signal import Signal
from onepiece.runtime.stage_reporter import StageReporter, cost_of
from onepiece.runtime.task_worker import RunningStage, TaskWorker
from onepiece.stage import Stage
from transports import Receiver

_CHECKPOINT: Final = "@checkpoint"


@define(eq=False)
class StageActor:
    """One stage on one device of this node, or on several of them together."""

    actor_id: int
    stage: Stage[Any, Any, Any]
    threads: DeviceThreads
    env: Environment
    state: ActorState = ActorState.LOADING
    address: str = ""
    error: str | None = None
    devices: tuple[str, ...] = ()
    """Those of a stage on several; the first is that of ``threads``."""
    _scheduler: RequestScheduler = field(init=False)
    _running: dict[tuple[str, str], Running] = field(factory=dict)
    _intake: Intake = field(init=False)
    _reporter: StageReporter = field(init=False)
    _worker: TaskWorker = field(init=False)
    _leaving: int = 0
    """Stage tasks whose outputs are just being sent."""
    _computed: set[tuple[str, str]] = field(factory=set)
    """Stage tasks that have run and are about to be sent on; as good as running to whoever asks."""
    _is_ending: bool = False
    _work: Signal = field(factory=Signal)
    _drain: asyncio.Event = field(factory=asyncio.Event)
    _loaded: LoadedStage | None = None
    _loaded_state: Any = None
    _reload: asyncio.Lock = field(factory=asyncio.Lock)
    _work_done: StageWork = field(init=False)
    _counts: StageCounts = field(init=False)
    _idle_deaths: int = 0
    """Of the stage's process, in a row."""

    def __attrs_post_init__(self) -> None:
        self._scheduler = RequestScheduler.weighted(self.env.join_bytes, self.env.weights)
        self._work_done = StageWork(concurrency=self.spec.concurrency)
        self._counts = self.env.counts.of_stage(self.stage.key, self.device)
        self._reporter = StageReporter(self.actor_id, self.env)
        self._worker = TaskWorker(self.stage, self.threads)
        self._intake = Intake(
            self.actor_id,
            self.stage.key,
            self.env,
            self._scheduler,
            self._reporter,
            self._work,
            self._counts,
            is_running=lambda uid, node: (uid, node) in self._running or (uid, node) in self._computed,
            unusable=lambda: self._not_loaded() if self.state is ActorState.FAILED else None,
        )

    @property
    def spec(self) -> StageSpec:
        """The stage's schema."""
        return self.stage.spec

    @property
    def device(self) -> str:
        """What it runs on, in words."""
        return ", ".join(self.devices) or self.threads.name

    def report(self) -> ActorReport:
        """What the next heartbeat says of this actor."""
        return ActorReport(
            actor_id=self.actor_id,
            stage=self.stage.key,
            devices=self.devices or (self.threads.name,),
            state=self.state,
            address=self.address,
            queued=self._scheduler.queued + self._scheduler.joining,
            running=len(self._running),
            error=self.error,
            work=self._work_done,
        )

    @property
    def is_idle(self) -> bool:
        """Nothing waits, is being joined, runs, or is on its way in or out."""
        waiting = self._scheduler.queued + self._scheduler.joining
        return not waiting and not self._running and not self._intake.in_hand and not self._leaving

    def drain(self) -> None:
        """Finish what is here and end; new work is still taken in until routes have changed."""
        self._drain.set()
        if self.state is not ActorState.FAILED:
            self._become(ActorState.DRAINING)

    async def run(self) -> None:
        """Live from loading to unloading; raises only what is a bug of ours."""
        region = f"actor/{self.actor_id}"
        try:
            async with open_actor_inbox(self.env, region, self.spec, self.threads.name) as inbox:
                self.address = str(self.env.address.region(region))
                await self._live(inbox)
        except InboxRefused as error:
            self.error = str(error)
            get_logger().error("actor_has_no_inbox", stage=self.stage.key, error=self.error)
            self._become(ActorState.FAILED)
        await self._drain.wait()  # not where the error is at hand, whose frames keep the inbox's memory

    async def _live(self, inbox: Receiver) -> None:
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
        rooms = self._intake.use_rooms(inbox, lambda: self.is_idle)
        workers = [
            *([] if rooms is None else [tasks.create_task(rooms.serve())]),
            tasks.create_task(self._intake.take_from(inbox, tasks)),
            *(tasks.create_task(self._work_on(deliver, tasks)) for _ in range(self.spec.concurrency)),
            tasks.create_task(self._mend(tasks)),
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
        """Ended with work in hand: what is cancelled is waited for, so its ``report`` has to raise."""
        self._is_ending = True
        for running in self._running.values():
            uid = running.context.uid
            reason = NodeLost(f"{self.stage.key} was ended on {self.env.node_id} during {uid}", uid=uid)
            self._stop(running, reason)

    async def _until_idle(self, inbox: Receiver) -> None:
        """Wait until nothing is left; ``inbox.depth`` counts what intake has not seen and what is in use."""
        await self._intake.until_over(lambda: self.is_idle and inbox.depth == self._intake.occupied)

    def _become(self, state: ActorState) -> None:
        if self._drain.is_set() and state is ActorState.READY:
            state = ActorState.DRAINING
        self.state = state
        self.env.on_change()

    # --- loading -------------------------------------------------------------------------------

    async def _load(self, tasks: asyncio.TaskGroup) -> bool:
        context = self._context("", deadline_at=None, stage=self.spec.name)
        around = Surroundings(self.env.node_id, tasks, load_gate=self.env.load_gate)
        inbox_bytes = device_inbox_bytes(self.env, self.spec)
        self._loaded = LoadedStage(self.stage, self.threads, around, self.devices, inbox_bytes)
        begun_at = self.env.monotonic()
        self._counts.loads += 1
        try:
            self._loaded_state = await self._loaded.load(context)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            self.error = described(error)
            get_logger().error(
                "stage_load_failed", stage=self.stage.key, node=self.env.node_id, exception=trace_of(error)
            )
            self._become(ActorState.FAILED)
            return False
        self.error = None
        taken = max(self._work_done.memory_bytes, self._loaded.memory_bytes)
        load_seconds = self.env.monotonic() - begun_at
        self._work_done = evolve(self._work_done, load_seconds=load_seconds, memory_bytes=taken)
        self._become(ActorState.READY)
        return True

    async def _unload(self) -> None:
        loaded, self._loaded, self._loaded_state = self._loaded, None, None
        if loaded is not None:
            await loaded.unload()

    async def _load_anew(self, broken: LoadedStage | None, tasks: asyncio.TaskGroup) -> None:
        """A stage task left the stage in an unknown state: no further one runs before it is loaded again.

        Several stage tasks may say so of the same life of the stage; it is loaded again once.
        """
        async with self._reload:
            if broken is None or self._loaded is not broken:
                return
            self._idle_deaths = 0 if broken.has_worked or not broken.is_broken else self._idle_deaths + 1
            self._become(ActorState.LOADING)
            await self._unload()
            if self._idle_deaths >= ISOLATED_STARTS_MAX:
                self.error = f"its process {await broken.broken()}, {self._idle_deaths} times before any work"
                self._become(ActorState.FAILED)
                self._refuse_queued()
            elif not await self._load(tasks):
                self._refuse_queued()
        self._work.notify()

    async def _mend(self, tasks: asyncio.TaskGroup) -> None:
        """Load a stage anew whose process ends, whether or not a stage task was there to see it."""
        while (loaded := self._loaded) is not None:
            await loaded.broken()
            await self._load_anew(loaded, tasks)

    def _refuse_queued(self) -> None:
        """The stage is gone for good: end what waits here; what comes later is refused on arrival."""
        error = self._not_loaded()
        for uid in self._scheduler.uids():
            for stage_task in self._scheduler.drop(uid):
                self._counts.dropped[name_of(error)] += 1
                self._reporter.broke(stage_task.header, error)
                stage_task.release()

    def _not_loaded(self) -> StageFailed:
        return StageFailed(
            f"{self.stage.key} could not be loaded again on {self.env.node_id} after a request broke it: "
            f"{self.error}",
            stage=self.stage.key,
            node=self.env.node_id,
        )

    # --- what is here ---------------------------------------------------------------------------

    def forward_joins(self) -> None:
        """Routes have changed: inputs that meet elsewhere now are sent there."""
        self._intake.forward_joins()

    def load(self) -> ActorLoad:
        """What it has in hand now, and has done."""
        return ActorLoad(self._scheduler, self._running, self._leaving, self._work_done, self._counts)

    # --- working -------------------------------------------------------------------------------

    async def _work_on(self, deliver: ResultDeliver, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self._work.wait_for(self._has_work)
            await self.env.retainer.room()
            if (stage_task := self._scheduler.pull() if self._has_work() else None) is None:
                continue  # another worker was quicker, or the stage is being loaded anew
            loaded = self._loaded
            if await self._execute(stage_task, deliver, tasks):
                await self._load_anew(loaded, tasks)
            del stage_task  # it keeps the memory of its inputs, and the next one may be long in coming
            self._work.notify()

    def _has_work(self) -> bool:
        is_loaded = self._loaded is not None and not self._loaded.is_broken and not self._reload.locked()
        return is_loaded and self._scheduler.queued > 0

    async def _execute(self, stage_task: StageTask, deliver: ResultDeliver, tasks: asyncio.TaskGroup) -> bool:
        """Run a stage task and have sent what comes out; says whether it left the stage dirty."""
        header = stage_task.header
        context = self._context(header.uid, header.deadline_at, stage_task.node, header, stage_task.attempt)
        started_at, begun_at = self.env.now(), self.env.monotonic()

        def package(value: Any, compute_seconds: float) -> Shipment:
            return self._package(stage_task, value, started_at, compute_seconds)

        begun = self._reporter.report_of(stage_task, started_at)
        announce = None
        if stage_task.is_repeat:  # if it takes this node along as well, that must count
            announce = functools.partial(self.env.report_heard, header.owner, begun)
        else:
            self.env.report(header.owner, begun)
        task = asyncio.current_task()
        assert task is not None
        running = Running(stage_task, context, task, begun_at)
        self._running[stage_task.uid, stage_task.node] = running
        try:
            outcome = await self._worker.execute(
                stage_task, context, package, lambda error: self._reporter.broke(header, error), announce
            )
        except asyncio.CancelledError:  # the actor itself ends
            self._counts.ran_in_vain(NodeLost.__name__, self.env.monotonic() - begun_at)
            raise
        finally:
            if self._running.get((stage_task.uid, stage_task.node)) is running:
                del self._running[stage_task.uid, stage_task.node]
        if outcome.shipment is None:
            assert outcome.error is not None
            self._counts.ran_in_vain(name_of(outcome.error), self.env.monotonic() - begun_at)
            if not self._is_ending:  # that is not the request's fault, which goes on elsewhere
                self._reporter.broke(header, outcome.error)
            return outcome.is_dirty
        taken = 0 if self._loaded is None else self._loaded.memory_bytes
        self._work_done = self._work_done.with_run(
            self.env.monotonic() - begun_at, taken, header.terms.size_class
        )
        self._ship(stage_task, outcome.shipment, deliver, tasks)
        return False

    def _ship(
        self, stage_task: StageTask, shipment: "Shipment", deliver: ResultDeliver, tasks: asyncio.TaskGroup
    ) -> None:
        """Have the outputs sent, while the worker goes on.

        One that waited for room in another inbox would not empty this one: where the ways of requests cross,
        or lead back here, each could wait for the other for ever. ``Retainer.room`` is the bound.
        """
        key = (stage_task.uid, stage_task.node)
        self._scheduler.took(stage_task, shipment.report.started_at, shipment.report.finished_at)

        async def ship() -> None:
            self._computed.discard(key)  # from here on it is done, or runs again
            try:
                await self._send_on(stage_task, shipment, deliver)
            except OnePieceError as error:
                self._reporter.broke(stage_task.header, error)

        def shipped(_: object) -> None:
            self._leaving -= 1
            self.env.retainer.sent(shipment.length)
            self._work.notify()

        self._leaving += 1
        self._computed.add(key)
        self.env.retainer.sending(shipment.length)
        tasks.create_task(ship()).add_done_callback(shipped)

    async def _send_on(self, stage_task: StageTask, shipment: "Shipment", deliver: ResultDeliver) -> None:
        """Retain the outputs, send them, and tell those who retain the inputs once all are taken.

        Those of a checkpointed stage are kept by store nodes as well, before the stage counts as finished:
        whoever takes them need not wait for that.
        """
        stopped = self._intake.why_stopped(stage_task.uid)
        if stopped is not None:  # what is retained behind that word, nobody would let go of
            self._counts.put_out_in_vain(name_of(stopped), shipment.seconds)
            return
        open_ends = set(shipment.targets) | ({_CHECKPOINT} if self.spec.checkpoint else set())

        def settle(name: str) -> None:
            open_ends.discard(name)
            if not open_ends:
                self._consumed(stage_task)

        letters = {}
        for name, target in shipment.targets.items():
            packed = shipment.packed[name]
            is_wanted: Callable[[], bool] = always
            key = OutputKey(stage_task.uid, stage_task.node, name) if target.is_retained else None
            if key is not None:
                self.env.retainer.hold(key, target, packed)
                is_wanted = functools.partial(self.env.retainer.holds, key)
            on_taken = functools.partial(settle, name)
            letters[name] = Letter(target, packed.parts, stage_task.attempt, on_taken, is_wanted, key=key)
        self._intake.done(stage_task)
        if self.spec.checkpoint:
            heading = await self._deliver_and_checkpoint(stage_task, shipment, deliver, letters, settle)
        else:
            heading = await deliver.deliver(letters)
        report = shipment.report
        detail = {**report.detail, "sent_bytes": shipment.length}
        finished = self._reporter.report_of(
            stage_task, report.started_at, report.finished_at, detail, heading
        )
        self.env.report(stage_task.header.owner, finished)

    async def _deliver_and_checkpoint(
        self,
        stage_task: StageTask,
        shipment: "Shipment",
        deliver: ResultDeliver,
        letters: Mapping[str, Letter],
        settle: Callable[[str], None],
    ) -> Mapping[str, str]:
        try:
            async with asyncio.TaskGroup() as sends:
                sends.create_task(self._checkpoint(stage_task, shipment, settle))
                heading = await deliver.deliver(letters)
        except* OnePieceError as errors:
            raise errors.exceptions[0] from errors
        return heading

    async def _checkpoint(
        self, stage_task: StageTask, shipment: "Shipment", settle: Callable[[str], None]
    ) -> None:
        await keep_outputs(self.env, stage_task.uid, shipment, stage_task.attempt)
        settle(_CHECKPOINT)

    def _consumed(self, stage_task: StageTask) -> None:
        for held in stage_task.held.values():
            if held.header.retained_by is not None:
                taken = (stage_task.uid, held.header.source, stage_task.node)
                self.env.outbox.consumed(held.header.retained_by, taken)

    def _package(
        self, stage_task: StageTask, value: Any, started_at: float, compute_seconds: float
    ) -> "Shipment":
        now = self.env.now()
        detail = cost_of(stage_task, started_at, compute_seconds, self.device)
        report = self._reporter.report_of(stage_task, started_at, now, detail)
        graph = self.env.routes.graphs[stage_task.workflow]
        trail = {**stage_task.trail, stage_task.node: encode_control(report)}
        targets = targets_of(graph, stage_task.header, trail, self.env.control_address, now)
        packed = {name: target.pack(value) for name, target in targets.items()}
        return Shipment(targets, packed, report, sum([each.length for each in packed.values()]))

    def stop_request(self, uid: str, reason: OnePieceError) -> None:
        """Drop what is queued for the request, interrupt what runs, refuse what comes later."""
        self._intake.stop(uid, reason)
        for stage_task in self._scheduler.drop(uid):
            self._counts.dropped[name_of(reason)] += 1
            stage_task.release()
        for (running_uid, _), running in list(self._running.items()):
            if running_uid == uid:
                self._stop(running, reason)

    def _stop(self, running: Running, reason: OnePieceError) -> None:
        if not running.context.cancelled:
            running.context.stop(reason)
            running.task.cancel()

    # --- telling -------------------------------------------------------------------------------

    def _context(
        self,
        uid: str,
        deadline_at: float | None,
        stage: str,
        header: StageInput | None = None,
        attempt: int = 1,
    ) -> RunningStage:
        loop = asyncio.get_running_loop()

        def progress(kind: EventKind, detail: Mapping[str, Any]) -> None:
            if header is not None:
                loop.call_soon_threadsafe(self._reporter.progress, header, kind, detail)

        return RunningStage(
            state_value=self._loaded_state,
            device=torch_name(self.threads.name),
            uid=uid,
            stage=stage,
            node=self.env.node_id,
            attempt=attempt,
            deadline_at=deadline_at,
            threads=self.threads,
            progress=progress,
            now=self.env.now,
            monotonic=self.env.monotonic,
        )
