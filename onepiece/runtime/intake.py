"""What comes into an actor's inbox: taken in once, and sent on if it is wanted elsewhere.

A message becomes (a part of) a stage task for the RequestScheduler, unless

* its request has ended, is late, or cannot run here: then the owner is told why;
* its stage is here already. What was lost on its way is sent again, sometimes although it had arrived:
  such a repeat is dropped. One of a stage that is *done* is answered by what that stage put out, as long
  as all of that is retained, and runs again only if it is not and the owner asks for it.

Inputs of one request that meet must meet at one actor. When the routes change where that is, those that
wait here for their siblings go there, and so do those that were sent here by older routes. The owner is
told; it also learns if they are lost on the way.
"""

import asyncio
import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from attrs import define, field

from onepiece.codec import CodecError, unpack
from onepiece.core.routing import ActorRoute
from onepiece.errors import DeadlineExceeded, OnePieceError, SchemaMismatch, name_of
from onepiece.graph import WorkflowGraph
from onepiece.limits import STOPPED_UIDS_MAX, WORKFLOW_PATIENCE_SECONDS
from onepiece.log import get_logger
from onepiece.messages import KIND_STAGE_INPUT, OutputHeaded, StageInput, StageWasLost, split_attempt
from onepiece.runtime.counts import REPEATED, StageCounts
from onepiece.runtime.device_messages import from_device
from onepiece.runtime.environment import Environment
from onepiece.runtime.inbox_rooms import InboxRooms
from onepiece.runtime.request_scheduler import Held, RequestScheduler, StageTask
from onepiece.runtime.result_deliver import Letter, ResultDeliver
from onepiece.runtime.result_targets import StageTarget, retained_targets
from onepiece.runtime.signal import Signal
from onepiece.runtime.stage_reporter import StageReporter
from transports import Delivery, Receiver

_SEEN_SECONDS: Final = 0.5
"""Within which senders see what was taken here; they look every quarter of a second."""
_LINGERS_MAX: Final = 8


@define(eq=False)
class Intake:
    """The way into one actor.

    Args:
        actor_id: The actor.
        stage: Its stage's key.
        env: Its node.
        scheduler: Where what was taken in waits.
        reporter: How owners are told.
        work: Notified of each change.
        counts: Where what is dropped, or sent on again, is counted.
        is_running: Whether this graph node of a request runs here now.
        unusable: Why the actor can run nothing any more, if so.
    """

    actor_id: int
    stage: str
    env: Environment
    scheduler: RequestScheduler
    reporter: StageReporter
    work: Signal
    counts: StageCounts
    is_running: Callable[[str, str], bool]
    unusable: Callable[[], OnePieceError | None]
    rooms: InboxRooms | None = None
    """Of an inbox in a device's memory."""
    in_hand: int = 0
    """Messages that are just being taken in or sent on."""
    taken_at: float = float("-inf")
    """When the latest message came, on the monotonic clock."""
    _stopped: "OrderedDict[str, OnePieceError]" = field(factory=OrderedDict)
    _done: "OrderedDict[tuple[str, str], int]" = field(factory=OrderedDict)
    """The attempt in which each stage of a request was done here."""
    _tasks: asyncio.TaskGroup | None = None

    async def take_from(self, inbox: Receiver, tasks: asyncio.TaskGroup) -> None:
        """Take in what comes until cancelled; what has to wait, or to be sent on, is left to ``tasks``."""
        self._tasks = tasks
        await inbox.deliver_to(functools.partial(self._receive, inbox))

    def _receive(self, inbox: Receiver, delivery: Delivery) -> None:
        """Take in a message; called by the event loop as soon as it is there, so this never waits."""
        self.taken_at = self.env.monotonic()
        try:
            held = self._held(inbox, delivery) if self.rooms is None else self._held_apart(delivery)
        except OnePieceError as error:
            if self.rooms is None:  # else nobody refers to it now
                inbox.release(delivery)
            get_logger().warning("message_refused", stage=self.stage, error=str(error))
            return
        graph = self.env.routes.graphs.get(held.header.workflow)
        if graph is not None:
            self._take(held, graph)
            return
        assert self._tasks is not None
        self._tasks.create_task(self._take_later(held), name=f"take {held.header.uid}/{held.header.node}")

    def use_rooms(self, inbox: Receiver, is_idle: Callable[[], bool]) -> InboxRooms | None:
        """Where the inbox is in a device's memory: what gives its room back, which the caller runs."""
        if inbox.device is not None:
            self.rooms = InboxRooms(inbox, self.stage, is_idle, self.work.notify)
        return self.rooms

    @property
    def occupied(self) -> int:
        """Messages whose memory is in use, also by what has ended here."""
        return 0 if self.rooms is None else self.rooms.occupied

    async def until_over(self, is_idle: Callable[[], bool]) -> None:
        """Wait until nothing is left here, and until senders have seen that all of it was taken.

        What they have not seen taken when the inbox closes they send elsewhere, and what has run here runs
        there again. Where messages keep coming, as no other actor takes any, the wait is bounded.
        """
        for _ in range(_LINGERS_MAX):
            await self.work.wait_for(is_idle)
            seconds = self.taken_at + _SEEN_SECONDS - self.env.monotonic()
            if seconds <= 0:
                return
            await asyncio.sleep(seconds)
        await self.work.wait_for(is_idle)

    async def _take_later(self, held: Held) -> None:
        """A message can overtake the route table that names its workflow."""
        self.in_hand += 1
        try:
            graph = await self._graph(held.header)
        except OnePieceError as error:
            held.release()
            self.reporter.broke(held.header, error)
        else:
            self._take(held, graph)
        finally:
            self.in_hand -= 1
            self.work.notify()

    def stop(self, uid: str, reason: OnePieceError) -> None:
        """Take in nothing more of a request."""
        self._stopped[uid] = reason
        self._stopped.move_to_end(uid)
        if len(self._stopped) > STOPPED_UIDS_MAX:
            self._stopped.popitem(last=False)

    def why_stopped(self, uid: str) -> OnePieceError | None:
        """Why nothing more of a request is to be done; None if that is not so."""
        return self._stopped.get(uid)

    def done(self, stage_task: StageTask) -> None:
        """A stage of a request has run here: a repeat of its inputs need not run again."""
        self._done[stage_task.uid, stage_task.node] = stage_task.attempt
        if len(self._done) > STOPPED_UIDS_MAX:
            self._done.popitem(last=False)

    def forward_joins(self) -> None:
        """Routes have changed: inputs that meet elsewhere now are sent there."""
        for stage_task in self.scheduler.joins():
            if self._meets_elsewhere(stage_task.header) is not None:
                assert self._tasks is not None, "an actor that does not serve holds nothing"
                self.scheduler.take_join(stage_task)
                self._tasks.create_task(
                    self._forward(stage_task), name=f"forward {stage_task.uid}/{stage_task.node}"
                )

    def _held(self, inbox: Receiver, delivery: Delivery) -> Held:
        self._check_kind(delivery)
        payload, attempt, was_lost = split_attempt(delivery.payload)
        unpacked = unpack(payload, StageInput)
        released = False

        def release() -> None:
            nonlocal released
            if not released:
                released = True
                inbox.release(delivery)

        is_repeat = was_lost or attempt > 1
        return Held(
            unpacked.header,
            unpacked.values,
            payload,
            self.env.now(),
            attempt,
            release,
            is_repeat,
            is_own=delivery.is_own,
        )

    def _held_apart(self, delivery: Delivery) -> Held:
        """A message that lies in the device's memory, which whatever lies there keeps."""
        assert self.rooms is not None
        payload = self.rooms.occupy(delivery)
        self._check_kind(delivery)
        message, attempt, was_lost = from_device(delivery.head, payload)
        unpacked = unpack(message, StageInput)
        is_repeat = was_lost or attempt > 1
        now = self.env.now()
        held = Held(unpacked.header, unpacked.values, message, now, attempt, _nothing, is_repeat)
        held.release = held.forget
        return held

    def _check_kind(self, delivery: Delivery) -> None:
        if delivery.kind != KIND_STAGE_INPUT:
            raise CodecError(f"a message of kind {delivery.kind} came to the inbox of {self.stage}")

    def _take(self, held: Held, graph: WorkflowGraph) -> None:
        """Queue the stage task that this message completes, if it is wanted and does so."""
        header = held.header
        try:
            self._check_alive(header)
            node = graph.find(header.node)
            if node is None or node.stage != self.stage:
                raise CodecError(f"{header.node} of {header.workflow} is not for {self.stage}")
            if self._is_repeat(graph, header, held.attempt):
                held.release()
                return
            stage_task = self.scheduler.add(node, frozenset(graph.predecessors(node.id)), held)
            if stage_task is None and self._meets_elsewhere(header) is not None:
                self.forward_joins()
        except OnePieceError as error:
            held.release()
            self.counts.dropped[name_of(error)] += 1
            self.reporter.broke(header, error)  # whoever drives a request that has ended learns of that
            return
        finally:
            self.work.notify()
        if stage_task is not None:
            self.env.report(header.owner, self.reporter.report_of(stage_task))

    def _check_alive(self, header: StageInput) -> None:
        stopped = self._stopped.get(header.uid) or self.unusable()
        if stopped is not None:
            raise OnePieceError.from_wire(stopped.to_wire())  # what is raised keeps what its frames hold
        if header.deadline_at is not None and self.env.now() >= header.deadline_at:
            raise DeadlineExceeded(
                f"request {header.uid} passed its deadline before {header.node}",
                uid=header.uid,
                stage=header.node,
            )

    async def _graph(self, header: StageInput) -> WorkflowGraph:
        """The workflow's graph; a message can overtake the route table that names its workflow."""
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

    def _is_repeat(self, graph: WorkflowGraph, header: StageInput, attempt: int) -> bool:
        """Whether this stage of the request is here already, or was and need not run again."""
        key = (header.uid, header.node)
        if self.is_running(*key) or self.scheduler.is_queued(*key):
            return True
        done = self._done.get(key)
        if done is None:
            return False
        if attempt > done:
            held = {output.target for output in self.env.retainer.targets_of(*key)}
            if held != retained_targets(graph, header.node):
                del self._done[key]
                return False
            self._done[key] = attempt
            assert self._tasks is not None
            self._tasks.create_task(self._redeliver(header, attempt), name=f"redeliver {key}")
        return True

    async def _redeliver(self, header: StageInput, attempt: int) -> None:
        """The owner does not know that this stage is done: send on what is held, and say so."""
        try:
            letters = {}
            for key in self.env.retainer.targets_of(header.uid, header.node):
                output = await self.env.retainer.fetch(key)
                if output is not None:
                    self.env.counts.resent[output.target.stage, REPEATED] += 1
                    is_wanted = functools.partial(self.env.retainer.holds, key)
                    letters[key.target] = Letter(
                        output.target, output.parts, attempt, is_wanted=is_wanted, key=key
                    )
            heading = await ResultDeliver(self.env).deliver(letters)
        except OnePieceError as error:
            self.reporter.broke(header, error)
        else:
            self.reporter.done_again(header, heading)

    async def _forward(self, stage_task: StageTask) -> None:
        """Send on the inputs of a join, and tell the owner where they are now, or that they are lost."""
        letters = {}
        for source, held in stage_task.held.items():
            target = StageTarget(held.header, self.stage, {})
            assert isinstance(held.payload, memoryview), "what waits for its siblings was copied out"
            letters[source] = Letter(target, [held.payload], held.attempt)
        news: OutputHeaded | StageWasLost
        self.in_hand += 1
        try:
            heading = await ResultDeliver(self.env).deliver(letters)
            news = OutputHeaded(stage_task.uid, {stage_task.node: next(iter(heading.values()))})
        except OnePieceError as error:
            get_logger().warning(
                "join_not_forwarded", request=stage_task.uid, stage=stage_task.node, error=error.message
            )
            news = StageWasLost(stage_task.uid, stage_task.node, self.env.identity.life)
        finally:
            self.in_hand -= 1
            self.work.notify()
        self.env.tell_owner(stage_task.uid, stage_task.header.owner, news)

    def _meets_elsewhere(self, header: StageInput) -> ActorRoute | None:
        """The other actor at which the inputs of a join meet; None if that is this one, or is not known."""
        table = self.env.routes.table
        met = table.actor(header.joins.get(header.node, -1))
        if met is None or not met.address:
            met = table.meeting_point(self.stage, header.uid)
        return None if met is None or met.actor_id == self.actor_id or not met.address else met


def _nothing() -> None:
    """Takes the place of what is made next."""
