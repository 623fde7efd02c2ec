"""The stage actors of a worker: what waits and runs, how long workers have been busy, and for what."""

from collections.abc import Iterable, Iterator
from typing import Final

from onepiece import metrics_catalogue as catalogue
from onepiece.core.inventory import ActorReport, ActorState, Device
from onepiece.errors import DeadlineExceeded, NodeLost, RequestCancelled, StageFailed
from onepiece.metrics import Sample
from onepiece.node.actor_host import ActorHost
from onepiece.runtime.actor_load import ActorLoad
from onepiece.runtime.environment import Environment

_ERRORS: Final = tuple(kind.__name__ for kind in (DeadlineExceeded, NodeLost, RequestCancelled, StageFailed))
"""Those that are shown before the first one happens, so that its coming is a rise."""


def devices(env: Environment, host: ActorHost, known: Iterable[Device]) -> Iterator[Sample]:
    """The memory of each, and what is promised of it."""
    specs = {key: spec for graph in env.routes.graphs.values() for key, spec in graph.stages.items()}
    for device in known:
        yield catalogue.DEVICE_LIMIT_BYTES.of(device.memory_bytes, device.name)
        yield catalogue.DEVICE_DECLARED_BYTES.of(0, device.name)
    for report, _ in host.loads():
        for name in report.devices if report.stage in specs else ():
            yield catalogue.DEVICE_DECLARED_BYTES.of(specs[report.stage].resources.memory_bytes, name)


def actors(env: Environment, host: ActorHost) -> Iterator[Sample]:
    """All of them; those of one stage on one device are one."""
    for report, load in host.loads():
        labels = report.stage, ", ".join(report.devices)
        for state in ActorState:
            yield catalogue.STAGE_ACTORS.of(report.state is state, *labels, state.value)
        if load is not None:
            yield from _in_hand(env, report, load, labels)
    for labels, counts in env.counts.stages.items():
        yield catalogue.STAGE_RUNS.of(counts.ended_runs, *labels)
        yield catalogue.STAGE_BUSY.of(counts.ended_seconds + counts.fruitless_seconds, *labels)
        yield catalogue.STAGE_LOADS.of(counts.loads, *labels)
        for error in {*_ERRORS, *counts.wasted_seconds}:
            yield catalogue.STAGE_WASTED.of(counts.wasted_seconds.get(error, 0.0), *labels, error)
        for error in {*_ERRORS, *counts.dropped}:
            yield catalogue.STAGE_DROPPED.of(counts.dropped[error], *labels, error)


def _in_hand(
    env: Environment, report: ActorReport, load: ActorLoad, labels: tuple[str, str]
) -> Iterator[Sample]:
    is_working = report.state in {ActorState.READY, ActorState.DRAINING}
    scheduler, work = load.scheduler, load.work
    yield catalogue.STAGE_WORKERS.of(work.concurrency if is_working else 0, *labels)
    yield catalogue.STAGE_RUNNING.of(len(load.running), *labels)
    yield catalogue.STAGE_QUEUED.of(scheduler.queued, *labels)
    yield catalogue.STAGE_OLDEST.of(load.oldest_seconds(env.now()), *labels)
    yield catalogue.STAGE_JOINING.of(scheduler.joining, *labels)
    yield catalogue.STAGE_LEAVING.of(load.leaving, *labels)
    yield catalogue.JOIN_BYTES.of(scheduler.join_bytes, *labels)
    yield catalogue.JOIN_LIMIT_BYTES.of(scheduler.join_bytes_max, *labels)
    yield catalogue.STAGE_RUNS.of(work.runs, *labels)
    yield catalogue.STAGE_BUSY.of(work.seconds + load.running_seconds(env.monotonic()), *labels)
    if work.load_seconds is not None:
        yield catalogue.STAGE_LOAD_SECONDS.of(work.load_seconds, *labels)
