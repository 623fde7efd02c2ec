"""A stage with a TaskWorker, and nothing else of a node around it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

from attrs import define, field

from onepiece.codec import pack, unpack, value_from_bytes, value_to_bytes
from onepiece.errors import OnePieceError
from onepiece.graph import INPUTS
from onepiece.messages import StageInput
from onepiece.requests import EventKind
from onepiece.runtime.devices import DeviceThreads, open_device_threads
from onepiece.runtime.isolated_process import IsolatedProcess, IsolationBounds
from onepiece.runtime.isolated_start import Surroundings
from onepiece.runtime.loaded_stage import LoadedStage
from onepiece.runtime.request_scheduler import Held, StageTask
from onepiece.runtime.task_worker import Outcome, RunningStage, TaskWorker
from onepiece.stage import Stage

PATIENT: Final = IsolationBounds(
    stop_seconds=20.0,
    leave_seconds=20.0,
    unload_seconds=20.0,
    terminate_seconds=20.0,
    kill_seconds=20.0,
    pause_seconds=0.01,
)
"""For tests of what obeys, on machines that are slow at times."""

SHORT: Final = IsolationBounds(
    stop_seconds=0.3,
    leave_seconds=0.2,
    unload_seconds=0.5,
    terminate_seconds=0.5,
    kill_seconds=20.0,
    pause_seconds=0.01,
)
"""For tests of what does not."""

NODE: Final = "node-1"


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for a condition; fails if it does not come about."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - of other processes, which set no event here
            await asyncio.sleep(0.005)


def descriptors() -> set[str]:
    """The open descriptors of this process, by what they lead to, for comparison."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the listing's own, closed meanwhile
            found.add(f"{link.name} {link.readlink()}")
    return found


def children(process_id: int | str = "self") -> set[int]:
    """The children of a process, zombies included; none of one that has ended."""
    found = set[int]()
    for path in Path(f"/proc/{process_id}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended meanwhile; another one has its children
            found |= set(map(int, path.read_text().split()))
    return found


def is_alive(process_id: int) -> bool:
    """Whether there is such a process that is no zombie."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in {"Z", "X"}


def stage_task_of(
    values: Mapping[str, Any],
    *,
    uid: str = "u",
    node: str = "stage",
    deadline_at: float | None = None,
    attempt: int = 1,
    release: Callable[[], None] = lambda: None,
) -> StageTask:
    """A stage task whose inputs lie in one message."""
    header = StageInput(uid, "w", node, INPUTS, "owner", 0.0, deadline_at, 0.0)
    message = memoryview(bytearray(b"".join(pack(header, values).parts)))
    unpacked = unpack(message, StageInput)

    def give_back() -> None:
        message[:] = bytes(len(message))  # as a ring would be used anew: whoever still reads it sees zeros
        release()

    held = Held(unpacked.header, unpacked.values, message, 0.0, attempt, give_back)
    stage_task = StageTask(uid, "w", node, frozenset({INPUTS}))
    stage_task.take(held)
    return stage_task


@define(eq=False)
class Rig:
    """A loaded stage; ``run`` executes it as an actor would."""

    stage: Stage[Any, Any, Any]
    threads: DeviceThreads
    tasks: asyncio.TaskGroup
    bounds: IsolationBounds
    loaded: LoadedStage
    state: Any = None
    late: list[OnePieceError] = field(factory=list)
    progress: list[tuple[EventKind, Mapping[str, Any]]] = field(factory=list)

    @property
    def process(self) -> IsolatedProcess:
        """The stage's helper process."""
        assert isinstance(self.state, IsolatedProcess)
        return self.state

    @property
    def steps(self) -> list[int]:
        """The steps that were reported."""
        return [detail["step"] for kind, detail in self.progress if kind is EventKind.PROGRESS]

    def context(self, state: Any, deadline_at: float | None = None, attempt: int = 1) -> RunningStage:
        """A context as an actor makes it."""
        return RunningStage(
            state_value=state,
            device="cpu",
            uid="u",
            stage="stage",
            node=NODE,
            attempt=attempt,
            deadline_at=deadline_at,
            threads=self.threads,
            progress=lambda kind, detail: self.progress.append((kind, detail)),
        )

    async def load(self) -> None:
        """Load the stage (again)."""
        self.loaded = loaded_stage(self.stage, self.threads, self.tasks, self.bounds)
        self.state = await self.loaded.load(self.context(None))

    async def reload(self) -> None:
        """As an actor does when a stage task left the stage dirty."""
        await self.loaded.unload()
        await self.load()

    async def run(self, *, within: float | None = None, **values: Any) -> Outcome[Any]:
        """Run a stage task with these inputs; its shipment is the value itself."""
        return await self.execute(stage_task_of(values), self._context(within))

    async def value(self, **values: Any) -> Any:
        """What a stage task with these inputs returns; it must not fail."""
        outcome = await self.run(**values)
        assert outcome.error is None, outcome.error
        return outcome.shipment

    def start(self, *, within: float | None = None, **values: Any) -> "Started":
        """The same, as a task that can be stopped."""
        context = self._context(within)
        return Started(context, self.tasks.create_task(self.execute(stage_task_of(values), context)))

    async def execute(self, stage_task: StageTask, context: RunningStage) -> Outcome[Any]:
        """Run a stage task."""
        return await TaskWorker(self.stage, self.threads).execute(
            stage_task, context, _as_value, self.late.append
        )

    def _context(self, within: float | None) -> RunningStage:
        return self.context(self.state, None if within is None else time.time() + within)


@define(eq=False)
class Started:
    """A stage task under way."""

    context: RunningStage
    task: "asyncio.Task[Outcome[Any]]"

    def stop(self, reason: OnePieceError) -> None:
        """Interrupt it as an actor does."""
        self.context.stop(reason)
        self.task.cancel()


def loaded_stage(
    stage: Stage[Any, Any, Any], threads: DeviceThreads, tasks: asyncio.TaskGroup, bounds: IsolationBounds
) -> LoadedStage:
    """A life of the stage, on as many devices as it wants."""
    devices = [f"cpu:{index}" for index in range(stage.spec.resources.count)]
    return LoadedStage(stage, threads, Surroundings(NODE, tasks, bounds), devices)


def _as_value(value: Any, _seconds: float) -> Any:
    """What the next stage would be given."""
    return value_from_bytes(b"".join(value_to_bytes(value)))


@asynccontextmanager
async def rig(stage: Stage[Any, Any, Any], bounds: IsolationBounds = PATIENT) -> AsyncIterator[Rig]:
    """Load a stage; it is unloaded behind the block."""
    async with open_device_threads("cpu:0", close_seconds=1.0) as threads, asyncio.TaskGroup() as tasks:
        made = Rig(stage, threads, tasks, bounds, loaded_stage(stage, threads, tasks, bounds))
        await made.load()
        try:
            yield made
        finally:
            await made.loaded.unload()
