"""RequestScheduler: which of an actor's waiting stage tasks runs next.

A *stage task* is one graph node of one request with all its inputs. A stage with one source keeps its
message where it arrived, in the inbox's ring, until a worker takes the stage task: the queue of waiting work
*is* the ring, so that full means full and senders feel it. A stage with several sources cannot wait
there: its first input would hold the ring's head while its last cannot come in. So inputs that wait
for their siblings are copied out into memory with a budget of its own.

Idle workers *pull* (Individual Mode, paper section 4.3). Workflows that share a stage take turns, and so do
their tenants; within one, short stage tasks and those with priority pass others, within bounds
(``core.waiting_order``). Nothing here waits or does I/O; time is an argument.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from attrs import define, evolve, field

from onepiece.codec import Apart, CodecError, unpack
from onepiece.core.fair_door import Weights
from onepiece.core.live_times import LiveTimes
from onepiece.core.waiting_order import WaitingOrder, rank
from onepiece.errors import JoinBudgetExceeded
from onepiece.graph import Constant, GraphNode
from onepiece.messages import StageInput, Trail


@define(eq=False)
class Held:
    """Values of one message, and how to give back the memory they lie in."""

    header: StageInput
    values: Mapping[str, Any]
    payload: memoryview | Apart
    arrived_at: float
    attempt: int
    release: Callable[[], None]
    is_repeat: bool = False
    """Something was lost with an earlier sending of it, or of what it was made from."""
    is_own: bool = False
    """The payload's memory stays, whether released or not, for as long as something refers to it."""
    length: int = field(init=False)
    """Bytes of the message; ``payload`` itself is gone once it was released."""

    @length.default
    def _length(self) -> int:
        return len(self.payload)

    def in_host(self) -> memoryview:
        """A copy of the message in the host's memory."""
        if isinstance(self.payload, Apart):
            return self.payload.to_host()
        return memoryview(bytearray(self.payload))

    def forget(self) -> None:
        """Refer to the message no longer: who lies in its memory keeps that."""
        self.values, self.payload = {}, memoryview(b"")


@define(eq=False)
class StageTask:
    """A graph node of a request; ready when every source has arrived.

    What is asked of its inputs together is brought up to date as each comes in: a hop is short.
    """

    uid: str
    workflow: str
    node: str
    sources: frozenset[str]
    constants: Mapping[str, Any] = field(factory=dict)
    """Parameters whose values stand in the workflow's own text."""
    held: dict[str, Held] = field(factory=dict)
    arrived_at: float = 0.0
    """When the last input came in."""
    attempt: int = 0
    """How often this stage has been given its inputs, as far as its inputs say."""
    is_repeat: bool = False
    """Nodes may have died of it."""
    received_bytes: int = 0
    """Bytes of all its messages."""
    _is_released: bool = False

    def take(self, held: Held) -> None:
        """An input has come in."""
        self.held[held.header.source] = held
        self.arrived_at = max(self.arrived_at, held.arrived_at)
        self.attempt = max(self.attempt, held.attempt)
        self.is_repeat = self.is_repeat or held.is_repeat
        self.received_bytes += held.length

    @property
    def is_ready(self) -> bool:
        """All inputs are here."""
        return self.held.keys() == self.sources

    @property
    def trail(self) -> Trail:
        """What ran before, each stage once, though the paths to here may share some."""
        if len(self.held) == 1:
            return self.header.trail
        return {stage: report for held in self.held.values() for stage, report in held.header.trail.items()}

    @property
    def header(self) -> StageInput:
        """Any of its headers: what they say about the request is the same in all."""
        return next(iter(self.held.values())).header

    def release(self) -> None:
        """Give back the memory of all inputs; again is no harm."""
        if self._is_released:
            return
        self._is_released = True
        for held in self.held.values():
            held.release()


@define
class RequestScheduler:
    """The stage tasks of one actor.

    Args:
        join_bytes_max: Bytes that inputs may use while they wait for their siblings.
        ready: What waits for a worker; by itself without weights.
    """

    join_bytes_max: int
    _ready: "WaitingOrder[StageTask]" = field(factory=WaitingOrder)
    join_bytes: int = 0
    _joining: "OrderedDict[tuple[str, str], StageTask]" = field(factory=OrderedDict)
    _times: LiveTimes = field(factory=LiveTimes)
    _queued: set[tuple[str, str]] = field(factory=set)

    @classmethod
    def weighted(cls, join_bytes_max: int, weights: Weights) -> Self:
        """One in which workflows and tenants take turns by weight."""
        return cls(join_bytes_max, WaitingOrder(weights.workflows, weights.tenants))

    def add(self, node: GraphNode, sources: frozenset[str], held: Held) -> StageTask | None:
        """Take a message's values for a graph node that waits for ``sources``.

        Returns the stage task once it is complete, and it is queued then.

        A second message for the same source changes nothing and is released. Raises
        ``JoinBudgetExceeded`` if it must wait for siblings and there is no room; the message is
        released then too.
        """
        header = held.header
        if header.source not in sources:
            held.release()
            raise CodecError(f"{header.node} of {header.workflow} takes nothing from {header.source!r}")
        key = (header.uid, header.node)
        stage_task = self._joining.get(key)
        if stage_task is None:
            stage_task = StageTask(header.uid, header.workflow, header.node, sources, constants_of(node))
        elif header.source in stage_task.held:
            held.release()
            return None
        if len(stage_task.held) + 1 < len(sources):
            held = self._copied_out(held)
            self._joining[key] = stage_task
        stage_task.take(held)
        if not stage_task.is_ready:
            return None
        if self._joining.pop(key, None) is not None:
            self.join_bytes -= sum(
                h.length for source, h in stage_task.held.items() if source != header.source
            )
        self._queue(stage_task)
        return stage_task

    def _queue(self, stage_task: StageTask) -> None:
        terms = stage_task.header.terms
        seen = self._times.mean_seconds(stage_task.node, terms.size_class)
        ranked = rank(stage_task.arrived_at, 0.0 if seen is None else seen, terms.priority)
        cost = 1.0 if seen is None else seen
        self._ready.add(stage_task, stage_task.workflow, terms.tenant, ranked, cost)
        self._queued.add((stage_task.uid, stage_task.node))

    def took(self, stage_task: StageTask, started_at: float | None, finished_at: float | None) -> None:
        """A stage task of this actor has taken so long: the next ones like it are expected to."""
        if started_at is not None and finished_at is not None:
            size_class = stage_task.header.terms.size_class
            self._times.note(stage_task.node, size_class, finished_at - started_at)

    def _copied_out(self, held: Held) -> Held:
        if self.join_bytes + held.length > self.join_bytes_max:
            held.release()
            raise JoinBudgetExceeded(
                f"inputs of {held.header.node} that wait for their siblings use {self.join_bytes} bytes; "
                f"{held.length} more exceed the budget of {self.join_bytes_max}; send less at once, or "
                "raise --join-bytes",
                uid=held.header.uid,
                stage=held.header.node,
            )
        self.join_bytes += held.length
        if held.is_own:
            held.release()
            return evolve(held, release=_nothing)
        copy = held.in_host()
        held.release()
        unpacked = unpack(copy, StageInput)
        return Held(
            unpacked.header,
            unpacked.values,
            copy,
            held.arrived_at,
            held.attempt,
            _nothing,
            held.is_repeat,
            is_own=True,
        )

    def pull(self) -> StageTask | None:
        """The next stage task to run."""
        stage_task = self._ready.pull()
        if stage_task is not None:
            self._queued.discard((stage_task.uid, stage_task.node))
        return stage_task

    def drop(self, uid: str) -> list[StageTask]:
        """Take out everything of a request; the caller releases the stage tasks."""
        dropped = [stage_task for stage_task in self._joining.values() if stage_task.uid == uid]
        for stage_task in dropped:
            del self._joining[stage_task.uid, stage_task.node]
            self.join_bytes -= sum(held.length for held in stage_task.held.values())
        for stage_task in [each for each in self._ready if each.uid == uid]:
            self._ready.remove(stage_task.workflow, stage_task.header.terms.tenant, stage_task)
            self._queued.discard((uid, stage_task.node))
            dropped.append(stage_task)
        return dropped

    def is_queued(self, uid: str, node: str) -> bool:
        """Whether this graph node of the request has all it needs and waits for a worker."""
        return (uid, node) in self._queued

    def joins(self) -> list[StageTask]:
        """Stage tasks that wait for inputs."""
        return list(self._joining.values())

    def take_join(self, stage_task: StageTask) -> None:
        """Take out a stage task whose inputs meet elsewhere now; the caller sends them on."""
        del self._joining[stage_task.uid, stage_task.node]
        self.join_bytes -= sum(held.length for held in stage_task.held.values())

    def overdue(self, now: float) -> list[StageTask]:
        """Stage tasks whose deadline has passed; the caller drops their requests."""
        return [stage_task for stage_task in self.all_tasks() if _is_overdue(stage_task, now)]

    def ready_since(self) -> list[float]:
        """When each of those that wait for a worker had all its inputs."""
        return [stage_task.arrived_at for stage_task in self._ready]

    def uids(self) -> set[str]:
        """The requests with something here."""
        return {stage_task.uid for stage_task in self.all_tasks()}

    def all_tasks(self) -> Iterable[StageTask]:
        """Everything here."""
        yield from self._joining.values()
        yield from self._ready

    @property
    def queued(self) -> int:
        """Complete stage tasks that wait for a worker."""
        return len(self._ready)

    @property
    def joining(self) -> int:
        """Stage tasks that wait for inputs."""
        return len(self._joining)


def _is_overdue(stage_task: StageTask, now: float) -> bool:
    deadline_at = stage_task.header.deadline_at
    return deadline_at is not None and now >= deadline_at


def constants_of(node: GraphNode) -> dict[str, Any]:
    """The parameters of a graph node whose values stand in the workflow's own text."""
    return {name: source.value for name, source in node.inputs.items() if isinstance(source, Constant)}


def _nothing() -> None:
    """A copy in memory needs no giving back."""
