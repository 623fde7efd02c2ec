"""RequestScheduler: which of an actor's waiting jobs runs next.

A *job* is one graph node of one request with all its inputs. A stage with one source keeps its
message where it arrived, in the inbox's ring, until a worker takes the job: the queue of waiting work
*is* the ring, so that full means full and senders feel it. A stage with several sources cannot wait
there: its first input would hold the ring's head while its last cannot come in. So inputs that wait
for their siblings are copied out into memory with a budget of its own.

Idle workers *pull* (Individual Mode, paper section 4.3). Workflows that share a stage take turns; in
one workflow the job with the earliest arrival goes first. Nothing here waits or does I/O; time is an
argument.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attrs import define, field

from onepiece.codec import CodecError, unpack
from onepiece.errors import JoinBudgetExceeded
from onepiece.messages import StageInput, Trail
from onepiece.runtime.plan import NodePlan
from onepiece.runtime.reports import StageRun


@define(eq=False)
class Held:
    """Values of one message, and how to give back the memory they lie in."""

    header: StageInput
    values: Mapping[str, Any]
    payload: memoryview
    arrived_at: float
    release: Callable[[], None]
    length: int = field(init=False)
    """Bytes of the message; ``payload`` itself is gone once it was released."""

    @length.default
    def _length(self) -> int:
        return len(self.payload)


@define(eq=False)
class Job:
    """A graph node of a request; ready when every source has arrived."""

    uid: str
    workflow: str
    plan: NodePlan
    held: dict[str, Held] = field(factory=dict)
    run: StageRun = field(init=False)
    """What is told of it, once it is complete."""
    _is_released: bool = False

    @property
    def node(self) -> str:
        """The graph node."""
        return self.plan.node

    @property
    def is_ready(self) -> bool:
        """All inputs are here."""
        return self.held.keys() == self.plan.sources

    @property
    def arrived_at(self) -> float:
        """When the last input came in."""
        return max(held.arrived_at for held in self.held.values())

    @property
    def received_bytes(self) -> int:
        """Bytes of all its messages."""
        return sum(held.length for held in self.held.values())

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
    """The jobs of one actor.

    Args:
        join_bytes_max: Bytes that inputs may use while they wait for their siblings.
    """

    join_bytes_max: int
    join_bytes: int = 0
    _joining: "OrderedDict[tuple[str, str], Job]" = field(factory=OrderedDict)
    _ready: "OrderedDict[str, deque[Job]]" = field(factory=OrderedDict)

    def add(self, plan: NodePlan, held: Held) -> Job | None:
        """Take a message's values for a graph node.

        Returns the job once it is complete, and it is queued then.

        A second message for the same source changes nothing and is released. Raises
        ``JoinBudgetExceeded`` if it must wait for siblings and there is no room; the message is
        released then too.
        """
        header = held.header
        sources = plan.sources
        if header.source not in sources:
            held.release()
            raise CodecError(f"{header.node} of {header.workflow} takes nothing from {header.source!r}")
        key = (header.uid, header.node)
        job = self._joining.get(key)
        if job is None:
            job = Job(header.uid, header.workflow, plan)
        elif header.source in job.held:
            held.release()
            return None
        if len(job.held) + 1 < len(sources):
            held = self._copied_out(held)
            self._joining[key] = job
        job.held[header.source] = held
        if not job.is_ready:
            return None
        if self._joining.pop(key, None) is not None:
            self.join_bytes -= sum(h.length for source, h in job.held.items() if source != header.source)
        self._ready.setdefault(job.workflow, deque()).append(job)
        return job

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
        copy = memoryview(bytes(held.payload))
        held.release()
        unpacked = unpack(copy, StageInput)
        return Held(unpacked.header, unpacked.values, copy, held.arrived_at, _nothing)

    def pull(self) -> Job | None:
        """The next job to run, taking turns between workflows."""
        for workflow, queue in self._ready.items():
            job = queue.popleft()
            self._ready.move_to_end(workflow)
            if not queue:
                del self._ready[workflow]
            return job
        return None

    def drop(self, uid: str) -> list[Job]:
        """Take out everything of a request; the caller releases the jobs."""
        dropped = [job for job in self._joining.values() if job.uid == uid]
        for job in dropped:
            del self._joining[job.uid, job.node]
            self.join_bytes -= sum(held.length for held in job.held.values())
        for workflow, queue in list(self._ready.items()):
            gone = [job for job in queue if job.uid == uid]
            if not gone:
                continue
            dropped += gone
            kept = deque(job for job in queue if job.uid != uid)
            if kept:
                self._ready[workflow] = kept
            else:
                del self._ready[workflow]
        return dropped

    def overdue(self, now: float) -> list[Job]:
        """Jobs whose deadline has passed; the caller drops their requests."""
        return [job for job in self.jobs() if _is_overdue(job, now)]

    def uids(self) -> set[str]:
        """The requests with something here."""
        return {job.uid for job in self.jobs()}

    def jobs(self) -> Iterable[Job]:
        """All that is here, complete or not."""
        yield from self._joining.values()
        for queue in self._ready.values():
            yield from queue

    @property
    def queued(self) -> int:
        """Complete jobs that wait for a worker."""
        return sum(len(queue) for queue in self._ready.values())

    @property
    def joining(self) -> int:
        """Jobs that wait for inputs."""
        return len(self._joining)


def _is_overdue(job: Job, now: float) -> bool:
    deadline_at = job.header.deadline_at
    return deadline_at is not None and now >= deadline_at


def _nothing() -> None:
    """A copy in memory needs no giving back."""
