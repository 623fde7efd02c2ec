"""Stages, workflows and loads for the tests of capacity, and a schedule that serves as fast as it can."""

import heapq
from collections.abc import Sequence

from hypothesis import strategies as st

from onepiece.core.capacity import CapacityModel, Demand, Step, WorkflowShape
from onepiece.core.inventory import DeviceKind
from onepiece.core.service_times import StageProfile, Timing

GIB = 1 << 30


def make_stage(
    name: str,
    seconds: float,
    *,
    spread: float = 0.0,
    concurrency: int = 1,
    devices: int = 1,
    gib: int = 1,
    load_seconds: float = 0.0,
    kind: DeviceKind = DeviceKind.GPU,
) -> StageProfile:
    """A stage that was measured once, without batches."""
    return StageProfile(
        name,
        (Timing(seconds, spread, devices=devices),),
        kind=kind,
        devices=devices,
        concurrency=concurrency,
        memory_bytes=gib * GIB,
        load_seconds=load_seconds,
    )


def make_line(name: str, *stages: StageProfile) -> CapacityModel:
    """A model of one workflow whose stages stand in a row."""
    return CapacityModel.of(stages, [WorkflowShape.line(name, [stage.stage for stage in stages])])


SECONDS = st.integers(1, 40).map(lambda tenths: tenths / 10)


@st.composite
def models(draw: st.DrawFn) -> CapacityModel:
    """Up to three workflows, each any graph over a few shared stages with constant times."""
    names = [f"s{n}" for n in range(draw(st.integers(1, 4)))]
    profiles = [make_stage(name, draw(SECONDS), concurrency=draw(st.integers(1, 3))) for name in names]
    shapes = []
    for number in range(draw(st.integers(1, 3))):
        steps: list[Step] = []
        for place in range(draw(st.integers(1, 5))):
            earlier = [step.name for step in steps]
            after = draw(st.sets(st.sampled_from(earlier), max_size=2)) if earlier else set()
            steps.append(Step(f"{place}", draw(st.sampled_from(names)), tuple(sorted(after)), len(after) > 1))
        shapes.append(WorkflowShape(f"w{number}", tuple(steps)))
    return CapacityModel.of(profiles, shapes)


@st.composite
def loads(draw: st.DrawFn) -> tuple[CapacityModel, list[Demand], dict[str, int]]:
    """A model, a mix of demands, and instances of every stage."""
    model = draw(models())
    mix = [Demand(name, float(draw(st.integers(1, 5)))) for name in model.workflows]
    return model, mix, {stage: draw(st.integers(1, 4)) for stage in model.stages}


def greedy_seconds(model: CapacityModel, workflows: Sequence[str], instances: dict[str, int]) -> float:
    """How long these requests take that are all there at once, if no worker idles while work waits."""
    free = {stage: model.workers(stage, instances) for stage in model.stages}
    queues: dict[str, list[tuple[int, Step]]] = {stage: [] for stage in model.stages}
    ended: dict[int, set[str]] = {request: set() for request in range(len(workflows))}
    running: list[tuple[float, int, str, str]] = []
    now = 0.0

    def begin(request: int) -> None:
        waiting = {(r, step.name) for queue in queues.values() for r, step in queue}
        at_work = {(r, name) for _, r, name, _ in running}
        for step in model.shape(workflows[request]).steps:
            key = (request, step.name)
            is_new = step.name not in ended[request] and key not in waiting and key not in at_work
            if is_new and ended[request].issuperset(step.after):
                queues[step.stage].append((request, step))

    for request in ended:
        begin(request)
    while True:
        for stage, queue in queues.items():
            while queue and free[stage]:
                request, step = queue.pop(0)
                free[stage] -= 1
                seconds = model.stages[stage].timing("").mean_seconds
                heapq.heappush(running, (now + seconds, request, step.name, stage))
        if not running:
            return now
        now, request, name, stage = heapq.heappop(running)
        free[stage] += 1
        ended[request].add(name)
        begin(request)
