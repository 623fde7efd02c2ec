"""What nodes have and what workflows need: the facts that the control machines decide upon.

All of these are plain values that travel in control messages. A *stage* is named by its key
(``module:function``), so that two workflows that use the same stage share its actors. Memory is
counted per device and in bytes.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol, Self

from attrs import evolve, field, frozen, validators

from onepiece.limits import REPORTED_CLASSES_MAX


class DeviceKind(enum.StrEnum):
    """What a device is; a stage asks for one kind."""

    GPU = "gpu"
    CPU = "cpu"


class ActorState(enum.StrEnum):
    """Where a stage actor is in its life, as its node reports it and as routes show it."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


WORKER_ROLE: Final = "worker"

REASON_CHARACTERS_MAX: Final = 4096
"""Reasons that come from a node, or hold schemas, are cut to this, as they travel in each table."""


@frozen
class Device:
    """A device of one node, for example ``cuda:0`` or ``cpu:0``."""

    name: str
    kind: DeviceKind
    memory_bytes: int = field(validator=validators.ge(0))


@frozen
class NodeInfo:
    """Who a node is; fixed for the life of one incarnation.

    ``incarnation`` is higher than any that this node id used before (a node takes the larger of the
    wall clock in milliseconds and its last incarnation plus one).
    """

    node_id: str
    incarnation: int
    address: str
    http: str | None
    roles: tuple[str, ...]
    devices: tuple[Device, ...] = field()
    process_id: int

    @devices.validator
    def _names_are_unique(self, _attribute: object, devices: tuple[Device, ...]) -> None:
        if len({device.name for device in devices}) < len(devices):
            raise ValueError(f"{self.node_id} names a device twice: {[device.name for device in devices]}")

    @property
    def is_worker(self) -> bool:
        """Actors may be placed on it."""
        return WORKER_ROLE in self.roles


@frozen
class RunSums:
    """Finished runs, the sum of their seconds, and of the squares."""

    runs: int = 0
    seconds: float = 0.0
    squares: float = 0.0

    def with_run(self, seconds: float) -> Self:
        """One more run."""
        return evolve(
            self,
            runs=self.runs + 1,
            seconds=self.seconds + seconds,
            squares=self.squares + seconds * seconds,
        )


@frozen
class StageWork:
    """What an actor has done since it began: finished runs, the sum of their seconds, and of the squares.

    ``classes`` are those of them whose requests named a size class, by class, as far as there is room for.
    ``load_seconds`` is what its last load took, None before the first one is done; ``concurrency`` how
    many runs it takes at once; ``memory_bytes`` what it has taken of each of its devices at most, 0 where
    that could not be told.
    """

    runs: int = 0
    seconds: float = 0.0
    squares: float = 0.0
    load_seconds: float | None = None
    concurrency: int = 1
    memory_bytes: int = 0
    classes: Mapping[str, RunSums] = field(factory=dict)

    @property
    def all_runs(self) -> RunSums:
        """Of all classes together."""
        return RunSums(self.runs, self.seconds, self.squares)

    def with_run(self, seconds: float, memory_bytes: int = 0, size_class: str = "") -> Self:
        """One more run, and what has been taken of each device at most since the last load."""
        runs = self.all_runs.with_run(seconds)
        classes = self.classes
        if size_class and (size_class in classes or len(classes) < REPORTED_CLASSES_MAX):
            classes = {**classes, size_class: classes.get(size_class, RunSums()).with_run(seconds)}
        return evolve(
            self,
            runs=runs.runs,
            seconds=runs.seconds,
            squares=runs.squares,
            memory_bytes=max(self.memory_bytes, memory_bytes),
            classes=classes,
        )


_NO_WORK: Final = StageWork()


@frozen
class ActorReport:
    """One actor as its node sees it, part of each heartbeat.

    ``address`` is where its inbox listens ("" until it does). ``digest`` is that of the workflow as
    *this node* imported it; where it differs from the one assigned, ``schema_text`` is the node's
    version, so that the error can name both.
    """

    actor_id: int
    stage: str
    devices: tuple[str, ...]
    state: ActorState
    address: str = ""
    queued: int = 0
    running: int = 0
    error: str | None = None
    digest: str = ""
    schema_text: str = ""
    work: StageWork = _NO_WORK


@frozen
class StageNeed:
    """What one instance of a stage needs: ``device_count`` devices of one node, and memory on each.

    ``memory_bytes`` is what its definition says; ``inbox_on_device``: its inbox takes more of the device.
    """

    stage: str
    name: str
    kind: DeviceKind
    memory_bytes: int = field(validator=validators.ge(0))
    device_count: int = field(default=1, validator=validators.ge(1))
    instances: int = field(default=1, validator=validators.ge(1))
    inbox_on_device: bool = False


class _Kind(Protocol):
    @property
    def value(self) -> str: ...


class _Resources(Protocol):
    @property
    def kind(self) -> _Kind: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def count(self) -> int: ...


class _StageSpec(Protocol):
    @property
    def key(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def resources(self) -> _Resources: ...
    @property
    def instances(self) -> int: ...
    @property
    def inbox(self) -> _Kind: ...


class _Node(Protocol):
    @property
    def stage(self) -> str: ...


class _Graph(Protocol):
    """The part of ``onepiece.graph.WorkflowGraph`` that matters here.

    Named by its shape, as the real one knows tensors and the codec, and cores import neither.
    """

    @property
    def name(self) -> str: ...
    @property
    def module(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def schema_text(self) -> str: ...
    @property
    def stages(self) -> Mapping[str, _StageSpec]: ...
    @property
    def nodes(self) -> Sequence[_Node]: ...


@frozen
class RegisteredWorkflow:
    """A workflow as the NodeManager keeps it: enough to place it, not enough to run it.

    ``module`` is ``module:attribute``; workers import it themselves and compare ``digest``. ``steps`` are
    the stages that a request goes through, each as often as it does; none: each stage once.
    """

    name: str
    module: str
    digest: str
    schema_text: str
    stages: tuple[StageNeed, ...]
    steps: tuple[str, ...] = ()

    @classmethod
    def of(cls, graph: _Graph) -> Self:
        """What the NodeManager needs to know of a workflow's graph."""
        return cls(
            name=graph.name,
            module=graph.module,
            digest=graph.digest,
            schema_text=graph.schema_text,
            stages=tuple(
                StageNeed(
                    stage=spec.key,
                    name=spec.name,
                    kind=DeviceKind(spec.resources.kind.value),
                    memory_bytes=spec.resources.memory_bytes,
                    device_count=spec.resources.count,
                    instances=spec.instances,
                    inbox_on_device=spec.inbox.value == "device",
                )
                for _, spec in sorted(graph.stages.items())
            ),
            steps=tuple(node.stage for node in graph.nodes),
        )

    @property
    def path(self) -> tuple[str, ...]:
        """The stages that a request goes through."""
        return self.steps or tuple(need.stage for need in self.stages)


def stage_needs(workflows: Iterable[RegisteredWorkflow]) -> dict[str, StageNeed]:
    """The stages of all workflows by key; one that several workflows share appears once."""
    needs: dict[str, StageNeed] = {}
    for workflow in workflows:
        for need in workflow.stages:
            assert needs.setdefault(need.stage, need) == need, f"two needs of one stage: {need!r}"
    return needs


def with_inboxes(needs: Mapping[str, StageNeed], inbox_bytes: int) -> dict[str, StageNeed]:
    """The needs with ``inbox_bytes`` more where an instance's inbox lies in its device's memory."""
    return {
        stage: evolve(need, memory_bytes=need.memory_bytes + inbox_bytes) if need.inbox_on_device else need
        for stage, need in needs.items()
    }


def users_of(stage: str, workflows: Iterable[RegisteredWorkflow]) -> list[RegisteredWorkflow]:
    """The workflows that have the stage, by name."""
    users = [each for each in workflows if any(need.stage == stage for need in each.stages)]
    return sorted(users, key=lambda workflow: workflow.name)


def shortened(reason: str) -> str:
    """The reason, cut in its middle if it is longer than ``REASON_CHARACTERS_MAX``."""
    if len(reason) <= REASON_CHARACTERS_MAX:
        return reason
    half = (REASON_CHARACTERS_MAX - 5) // 2
    return f"{reason[:half]} ... {reason[-half:]}"


def format_bytes(count: int) -> str:
    """A size for people: ``40.0 GiB``, ``512 B``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
