"""Profiling: runs a workflow's stages for real, one after the other, and measures each.

What a node does with a stage task is done here, too, by the same code: the stage is loaded on its
device's threads, its inputs are materialised from messages, its function runs, and its value is cut into the
messages for the next stages. So a measured second is one that a worker of a node is busy. A stage on several
devices has a helper process on each, as in a node. Nothing else runs meanwhile, nothing is sent over a
network, and no request waits for another.
"""

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, TypeGuard

from attrs import define, field, frozen

from onepiece import _torch
from onepiece.codec import PackedAnywhere, unpack
from onepiece.core.capacity import WorkflowShape
from onepiece.core.inventory import Device, DeviceKind
from onepiece.core.service_times import StageProfile, Timing
from onepiece.errors import ConfigError
from onepiece.graph import INPUTS, GraphNode, StageSpec, WorkflowGraph
from onepiece.messages import StageInput
from onepiece.profiles import WorkflowProfile
from onepiece.runtime.device_messages import copied_to_host
from onepiece.runtime.devices import DeviceThreads, count_after, open_device_threads, torch_name
from onepiece.runtime.isolated_process import IsolatedProcess
from onepiece.runtime.isolated_start import Surroundings
from onepiece.runtime.loaded_stage import LoadedStage
from onepiece.runtime.memory_meter import resident_bytes
from onepiece.runtime.request_scheduler import Held, StageTask, constants_of
from onepiece.runtime.result_targets import input_targets, targets_of
from onepiece.runtime.stage_process import StageProcess
from onepiece.runtime.task_worker import RunningStage, TaskWorker
from onepiece.workflow import Workflow

_UID: Final = "00000000000000000000000000"
_NODE: Final = "profile"
_CLOSE_SECONDS: Final = 10.0
SAMPLES_MAX: Final = 10_000


@frozen
class ProfileOptions:
    """How to measure: runs that count and runs before them, on which device, under which size class."""

    samples: int = 5
    warm_up: int = 1
    size_class: str = ""
    told: Callable[[str], None] = lambda _line: None
    """Is told what is being done, for people."""


@define
class _Measured:
    """What was measured of one stage."""

    load_seconds: float
    loaded_bytes: int
    working_bytes: int = 0
    """Beyond what is loaded."""
    seconds: list[float] = field(factory=list)
    output_bytes: int = 0

    @property
    def memory_bytes(self) -> int:
        """What one instance needs."""
        return self.loaded_bytes + self.working_bytes


async def profile_workflow(
    workflow: Workflow[Any, Any], inputs: Mapping[str, Any], device: Device, options: ProfileOptions
) -> WorkflowProfile:
    """Load every stage and run the workflow ``warm_up + samples`` times.

    Args:
        workflow: Any.
        inputs: Checked ones, the same for each run.
        device: Where all stages run; one on a processor stands in for a GPU that is not there. A stage on
            several takes this one and those behind it.
        options: How often.

    Raises:
        ConfigError: A stage wants more devices than there are, or could not be loaded.
        OnePieceError: A stage failed; as a request would.

    Cancellation: stops behind the stage that runs; what was loaded is unloaded.
    """
    _check(workflow.graph, device)
    async with (
        open_device_threads(device.name, close_seconds=_CLOSE_SECONDS) as threads,
        asyncio.TaskGroup() as tasks,
        _Profiler(workflow, threads, tasks, options).loaded() as profiler,
    ):
        for run in range(options.warm_up + options.samples):
            await profiler.run(inputs, counts=run >= options.warm_up)
    return WorkflowProfile(
        workflow=workflow.graph.module,
        digest=workflow.graph.digest,
        measured_on=f"{_device_words(device)}, {os.cpu_count()} processors",
        shape=WorkflowShape.of(workflow.graph),
        stages=tuple(
            _stage_profile(workflow.graph.stages[key], measured, device, options.size_class)
            for key, measured in profiler.measured.items()
        ),
    )


def _check(graph: WorkflowGraph, device: Device) -> None:
    there = count_after(device.name)
    for spec in graph.stages.values():
        if there is not None and spec.resources.count > max(1, there):
            raise ConfigError(
                f"stage {spec.key} works on {spec.resources.count} devices together, and there "
                f"{'is' if there == 1 else 'are'} {there} from {device.name} on; name an earlier one with "
                "--device, or measure it on processors (--device cpu:0)",
                stage=spec.key,
            )


def _devices_of(spec: StageSpec, first: str) -> list[str]:
    """The devices of a stage on several, from the first one on; none for a stage on one."""
    kind, _, index = first.partition(":")
    count = spec.resources.count
    return [f"{kind}:{int(index) + more}" for more in range(count)] if count > 1 else []


def _stage_profile(spec: StageSpec, measured: _Measured, device: Device, size_class: str) -> StageProfile:
    kind = DeviceKind(spec.resources.kind.value)
    declared = spec.resources.memory_bytes
    # What a stage takes of a processor's memory says little about what it takes of a GPU's.
    is_at_home = kind is device.kind or not declared
    spread = statistics.stdev(measured.seconds) if len(measured.seconds) > 1 else 0.0
    timing = Timing(
        statistics.fmean(measured.seconds),
        spread,
        size_class,
        devices=spec.resources.count,
        samples=len(measured.seconds),
    )
    return StageProfile(
        spec.key,
        (timing,),
        kind=kind,
        devices=spec.resources.count,
        concurrency=spec.concurrency,
        memory_bytes=max(declared, measured.memory_bytes) if is_at_home else declared,
        load_seconds=measured.load_seconds,
        output_bytes=measured.output_bytes,
    )


@define(eq=False)
class _Profiler:
    workflow: Workflow[Any, Any]
    threads: DeviceThreads
    tasks: asyncio.TaskGroup
    options: ProfileOptions
    measured: dict[str, _Measured] = field(factory=dict)
    _states: dict[str, Any] = field(factory=dict)

    @contextlib.asynccontextmanager
    async def loaded(self) -> AsyncIterator["_Profiler"]:
        """All stages, loaded one after the other."""
        async with contextlib.AsyncExitStack() as stack:
            for key, stage in self.workflow.stages.items():
                self.options.told(f"loading {stage.name}")
                before = self._memory(None)[0]
                devices = _devices_of(stage.spec, self.threads.name)
                life = LoadedStage(stage, self.threads, Surroundings(_NODE, self.tasks), devices)
                stack.push_async_callback(life.unload)
                started = time.monotonic()
                try:
                    state = await life.load(self._context(stage.name, None))
                except Exception as error:
                    raise ConfigError(
                        f"stage {key} could not be loaded: {type(error).__name__}: {error}", stage=key
                    ) from error
                seconds = time.monotonic() - started
                self._states[key] = state
                # What this process had before is no part of a process that was begun for the stage.
                before = 0 if isinstance(state, StageProcess) else before
                self.measured[key] = _Measured(seconds, max(0, self._memory(state)[0] - before))
            yield self

    async def run(self, inputs: Mapping[str, Any], *, counts: bool) -> None:
        """Take a request through all stages."""
        graph = self.workflow.graph
        header = StageInput(_UID, graph.name, "", INPUTS, "", 0.0, None, 0.0)
        waiting: dict[str, dict[str, PackedAnywhere]] = {node.id: {} for node in graph.nodes}
        for node_id, target in input_targets(graph, header):
            waiting[node_id][INPUTS] = target.pack(inputs)
        for node in graph.nodes:
            outputs, seconds, working_bytes = await self._run_node(node, waiting.pop(node.id))
            measured = self.measured[node.stage]
            measured.working_bytes = max(measured.working_bytes, working_bytes)
            for node_id, packed in outputs.items():
                if node_id in waiting:
                    waiting[node_id][node.id] = packed
            if counts:
                measured.seconds.append(seconds)
                sent = sum(packed.length for packed in outputs.values())
                measured.output_bytes = max(measured.output_bytes, sent)

    async def _run_node(
        self, node: GraphNode, messages: Mapping[str, PackedAnywhere]
    ) -> tuple[Mapping[str, PackedAnywhere], float, int]:
        """What the node sends on, by graph node, how long its worker was busy, and memory for working."""
        graph, stage = self.workflow.graph, self.workflow.stages[node.stage]
        self.options.told(f"running {node.id}")
        stage_task = _stage_task(graph, node, messages)
        header = stage_task.header

        def package(value: Any, _seconds: float) -> dict[str, PackedAnywhere]:
            targets = targets_of(graph, header, {}, None, 0.0)
            return {name: target.pack(value) for name, target in targets.items()}

        state = self._states[node.stage]
        context = self._context(node.id, state)
        before = self._memory(state)[0]
        self._forget_peak()
        started = time.monotonic()
        outcome = await TaskWorker(stage, self.threads).execute(
            stage_task, context, package, on_late=lambda _error: None
        )
        seconds = time.monotonic() - started
        if outcome.error is not None:
            raise outcome.error
        assert outcome.shipment is not None
        return outcome.shipment, seconds, max(0, self._memory(state)[1] - before)

    def _context(self, node: str, state: Any) -> RunningStage:
        return RunningStage(
            state_value=state,
            device=torch_name(self.threads.name),
            uid=_UID,
            stage=node,
            node=_NODE,
            threads=self.threads,
            progress=lambda _kind, _detail: None,
        )

    def _memory(self, state: Any) -> tuple[int, int]:
        """Bytes in use now, and at most lately: of the GPU, or of the process that holds the stage.

        Of a process nobody knows the most, so that there both are what it has now. Helper processes on
        GPUs, and those of a stage on several devices, tell what they have taken at most.
        """
        if isinstance(state, StageProcess) and not self._is_apart(state):
            return state.memory_bytes, state.memory_bytes
        kind, _, index = self.threads.name.partition(":")
        if kind == "cuda":
            return _torch.cuda_use(int(index))
        held = resident_bytes(state.process_id if self._is_apart(state) else os.getpid())
        return held, held

    def _is_apart(self, state: Any) -> TypeGuard[IsolatedProcess]:
        """Whether the stage's memory is that of a process of its own."""
        return isinstance(state, IsolatedProcess) and not self.threads.name.startswith("cuda")

    def _forget_peak(self) -> None:
        kind, _, index = self.threads.name.partition(":")
        if kind == "cuda":
            _torch.cuda_forget(int(index))


def _stage_task(graph: WorkflowGraph, node: GraphNode, messages: Mapping[str, PackedAnywhere]) -> StageTask:
    held = {}
    for source, packed in messages.items():
        payload = memoryview(b"".join(copied_to_host(packed.parts)))
        unpacked = unpack(payload, StageInput)
        held[source] = Held(unpacked.header, unpacked.values, payload, 0.0, 1, lambda: None)
    sources = frozenset(graph.predecessors(node.id))
    return StageTask(_UID, graph.name, node.id, sources, constants_of(node), held)


def _device_words(device: Device) -> str:
    kind, _, index = device.name.partition(":")
    return f"{device.name} ({_torch.cuda_name(int(index))})" if kind == "cuda" else device.name
