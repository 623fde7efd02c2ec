"""The actors of one node: started and ended as the manager orders.

An order to run an actor is carried out by importing its workflow off the event loop, comparing the
digests, and running a ``StageActor`` as a task. What cannot be started is kept as a report of a failed
actor, so that the next heartbeat tells the manager why. Orders are idempotent by ``actor_id``; those of
a manager that no longer leads (a lower epoch) are ignored.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

from attrs import define, evolve, field

from onepiece._bounded import described, text_of
from onepiece.core.actors import Assign, Unassign
from onepiece.core.inventory import ActorReport, ActorState
from onepiece.core.lending import LentReport
from onepiece.core.prefetches import Prefetch, StopPrefetch
from onepiece.errors import OnePieceError, SchemaMismatch
from onepiece.limits import ERROR_CAUSE_BYTES_MAX
from onepiece.log import get_logger
from onepiece.messages import ReleaseRequests, StageWasLost, StopRequest
from onepiece.node.control import ControlService
from onepiece.node.lender import Lender
from onepiece.node.prefetching import Prefetcher
from onepiece.node.quiet_requests import let_go
from onepiece.runtime.actor_load import ActorLoad
from onepiece.runtime.devices import DeviceThreads
from onepiece.runtime.environment import Environment
from onepiece.runtime.stage_actor import StageActor
from onepiece.runtime.workflows import WorkflowImports
from onepiece.stage import Stage

_QUIET_SECONDS: Final = 0.4


@define(eq=False)
class _Hosted:
    """One ordered actor, from the order until it is gone."""

    report: ActorReport
    actor: StageActor | None = None
    task: "asyncio.Task[None] | None" = None
    unassigned: asyncio.Event = field(factory=asyncio.Event)


class ActorHost:
    """Runs the actors ordered by the manager on this node's devices."""

    def __init__(
        self,
        env: Environment,
        devices: Sequence[DeviceThreads],
        imports: WorkflowImports,
        tasks: asyncio.TaskGroup,
        lender: Lender | None = None,
    ) -> None:
        self._env = env
        self._lender = lender
        self._devices = {device.name: device for device in devices}
        self._imports = imports
        self._tasks = tasks
        self._hosted: dict[int, _Hosted] = {}
        self._ending: dict[asyncio.Task[None], _Hosted] = {}
        self._manager_epoch = 0
        self.prefetches = Prefetcher(env, imports, tasks)

    def attach(self, control: ControlService) -> None:
        """Receive the manager's orders, and owners' orders to stop work of a request."""
        control.on(Assign, self._on_assign)
        control.on(Unassign, self._on_unassign)
        control.on(Prefetch, self._on_prefetch)
        control.on(StopPrefetch, self._on_prefetch)
        control.on(StopRequest, self._on_stop)
        control.on(ReleaseRequests, self._on_release)

    def reports(self) -> tuple[ActorReport, ...]:
        """What the next heartbeat says."""
        return tuple(self._report_of(hosted) for hosted in self._hosted.values())

    def lent(self) -> LentReport | None:
        """The jobs on idle devices; None if this node lends none."""
        return None if self._lender is None else self._lender.report()

    @property
    def is_idle(self) -> bool:
        """Whether no actor holds work now."""
        return all(hosted.actor is None or hosted.actor.is_idle for hosted in self._hosted.values())

    async def idle(self) -> None:
        """Wait until no actor has held work for a while, long enough for what was on its way to come in."""
        loop = asyncio.get_running_loop()
        quiet_since = loop.time()
        while loop.time() - quiet_since < _QUIET_SECONDS:
            await asyncio.sleep(_QUIET_SECONDS / 4)
            if not self.is_idle:
                quiet_since = loop.time()

    def active_of(self, uid: str) -> dict[str, str]:
        """What is queued or runs of a request, by graph node."""
        found: dict[str, str] = {}
        for hosted in self._hosted.values():
            if hosted.actor is not None:
                found.update(hosted.actor.load().active_of(uid))
        return found

    def owners(self) -> dict[str, str]:
        """The owner's control address, as its inputs name it, of each request with work here."""
        actors = [hosted.actor for hosted in self._hosted.values() if hosted.actor is not None]
        return {header.uid: header.owner for actor in actors for header in actor.load().held_work()}

    def routes_changed(self) -> None:
        """Inputs that meet at another actor now are sent there."""
        for hosted in list(self._hosted.values()):
            if hosted.actor is not None:
                hosted.actor.forward_joins()

    def loads(self) -> Iterator[tuple[ActorReport, ActorLoad | None]]:
        """What each actor has in hand and has done, also those that were dropped and have not ended."""
        for hosted in (*self._hosted.values(), *self._ending.values()):
            yield self._report_of(hosted), None if hosted.actor is None else hosted.actor.load()

    def _note_end(self, hosted: _Hosted) -> None:
        """What an actor has counted is kept when it goes; again is no harm."""
        if hosted.actor is not None:
            load = hosted.actor.load()
            load.counts.actor_ended(load.work)
            hosted.actor = None

    def _tell_lost(self, actor: StageActor) -> None:
        """An actor crashed with work in it: the owners go on from what is retained."""
        life = self._env.identity.life
        for header in actor.load().held_work():
            self._env.tell_owner(header.uid, header.owner, StageWasLost(header.uid, header.node, life))

    def drop_all(self) -> None:
        """End every actor at once: this incarnation of the node is no member any more."""
        for hosted in self._hosted.values():
            if hosted.task is not None:
                hosted.task.cancel()
                self._ending[hosted.task] = hosted
                hosted.task.add_done_callback(lambda task: self._note_end(self._ending.pop(task)))
        self._hosted.clear()
        self.prefetches.stop_all()
        self._manager_epoch = 0

    async def all_gone(self) -> None:
        """Wait until the actors that were dropped have ended; a stage that blocks its thread delays this."""
        while self._ending:
            await asyncio.wait(self._ending)

    def _report_of(self, hosted: _Hosted) -> ActorReport:
        if hosted.actor is None:
            return hosted.report
        report = hosted.actor.report()
        return evolve(report, digest=hosted.report.digest, schema_text=hosted.report.schema_text)

    def _is_current(self, epoch: int) -> bool:
        if epoch < self._manager_epoch:
            return False
        self._manager_epoch = epoch
        return True

    def _on_assign(self, order: Assign) -> None:
        if not self._is_current(order.manager_epoch) or order.actor_id in self._hosted:
            return
        report = ActorReport(order.actor_id, order.stage, order.devices, ActorState.LOADING)
        hosted = self._hosted[order.actor_id] = _Hosted(report)
        hosted.task = self._tasks.create_task(self._run(order, hosted), name=f"actor {order.actor_id}")

    def _on_unassign(self, order: Unassign) -> None:
        hosted = self._hosted.get(order.actor_id)
        if hosted is None or not self._is_current(order.manager_epoch):
            return
        get_logger().info("actor_unassigned", actor=order.actor_id, reason=order.reason)
        hosted.unassigned.set()
        if hosted.actor is not None:
            hosted.actor.drain()

    def _on_prefetch(self, order: Prefetch | StopPrefetch) -> None:
        if not self._is_current(order.manager_epoch):
            return
        if isinstance(order, Prefetch):
            self.prefetches.begin(order)
        else:
            self.prefetches.take_back(order)

    def _on_stop(self, order: StopRequest) -> None:
        reason = OnePieceError.from_wire(order.reason)
        for hosted in self._hosted.values():
            if hosted.actor is not None:
                hosted.actor.stop_request(order.uid, reason)

    def _on_release(self, message: ReleaseRequests) -> None:
        """They have ended: a second run of a stage, or inputs that wait for siblings, serve nobody."""
        for uid in message.uids:
            reason = let_go(uid)
            for hosted in self._hosted.values():
                if hosted.actor is not None:
                    hosted.actor.stop_request(uid, reason)

    async def _run(self, order: Assign, hosted: _Hosted) -> None:
        taken = contextlib.nullcontext() if self._lender is None else self._lender.taken(order.devices)
        with taken:
            await self._live(order, hosted)

    async def _live(self, order: Assign, hosted: _Hosted) -> None:
        if not await self._has_lived(order, hosted):
            # Not where the error is at hand, whose frames keep what the actor had: memory of a GPU, say.
            await hosted.unassigned.wait()
        self._note_end(hosted)
        if self._hosted.get(order.actor_id) is hosted:
            del self._hosted[order.actor_id]
        self._env.on_change()

    async def _has_lived(self, order: Assign, hosted: _Hosted) -> bool:
        """Run the actor to its regular end; false if it could not start, or crashed, which is reported."""
        try:
            stage = await self._find(order, hosted)
            self._check_devices(order, stage)
        except OnePieceError as error:
            self._fail(hosted, error)
            return False
        names = order.devices
        if self._lender is not None:
            await self._lender.freed(names)
        get_logger().info("actor_starting", actor=order.actor_id, stage=order.stage, device=", ".join(names))
        actor = hosted.actor = StageActor(
            order.actor_id, stage, self._devices[names[0]], self._env, devices=names
        )
        if hosted.unassigned.is_set():
            actor.drain()
        self._env.on_change()
        try:
            await actor.run()
        except Exception as error:  # noqa: BLE001 - a bug in one actor must not take the others along
            get_logger().exception("actor_crashed", actor=order.actor_id, stage=order.stage)
            self._tell_lost(actor)
            self._note_end(hosted)
            self._fail(hosted, OnePieceError(f"the actor crashed: {described(error)}"))
            return False
        return True

    def _check_devices(self, order: Assign, stage: Stage[Any, Any, Any]) -> None:
        missing = [name for name in order.devices if name not in self._devices]
        if missing:
            known = ", ".join(self._devices)
            raise OnePieceError(f"this node has no device {missing[0]!r}; it has {known or 'none'}")
        if len(order.devices) != stage.spec.resources.count:
            raise OnePieceError(
                f"{order.stage} works on {stage.spec.resources.count} devices together on this node, and"
                f" was ordered to {len(order.devices)}: its file is not the same at the manager"
            )

    async def _find(self, order: Assign, hosted: _Hosted) -> Stage[Any, Any, Any]:
        workflow = await self._imports.get(order.module)
        graph = workflow.graph
        hosted.report = evolve(hosted.report, digest=graph.digest)
        if graph.digest != order.digest:
            hosted.report = evolve(hosted.report, schema_text=graph.schema_text)
            raise SchemaMismatch(
                f"{order.module} is not the same on {self._env.node_id} as at the manager "
                f"(digest {graph.digest} here, {order.digest} there); here it is:\n{graph.schema_text}"
            )
        return workflow.stages[order.stage]

    def _fail(self, hosted: _Hosted, error: OnePieceError) -> None:
        message = text_of(
            error.message, ERROR_CAUSE_BYTES_MAX
        )  # a heartbeat carries it: a module may raise much
        get_logger().error("actor_refused", actor=hosted.report.actor_id, error=message)
        hosted.report = evolve(hosted.report, state=ActorState.FAILED, error=message)
        self._env.on_change()
