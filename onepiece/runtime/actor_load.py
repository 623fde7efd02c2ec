"""What one actor has in hand, and has done, as its host and whoever reads its metrics find it."""

from collections.abc import Mapping

from attrs import frozen

from onepiece.core.inventory import StageWork
from onepiece.messages import StageInput
from onepiece.runtime.counts import StageCounts
from onepiece.runtime.request_scheduler import RequestScheduler
from onepiece.runtime.shipment import Running


@frozen(eq=False)
class ActorLoad:
    """A view of the living: look at once."""

    scheduler: RequestScheduler
    running: Mapping[tuple[str, str], Running]
    """By UID and graph node."""
    leaving: int
    """Stage tasks whose outputs are just being sent."""
    work: StageWork
    counts: StageCounts
    """Of this and of earlier actors of the stage on the device."""

    def running_seconds(self, now: float) -> float:
        """For how long what runs has run, all of it together; ``now`` is monotonic."""
        return sum(max(0.0, now - running.begun_at) for running in self.running.values())

    def oldest_seconds(self, now: float) -> float:
        """How long what waits for a worker has waited at most; 0 if nothing does. ``now`` is wall time."""
        return max((now - arrived_at for arrived_at in self.scheduler.ready_since()), default=0.0)

    def held_work(self) -> list[StageInput]:
        """A header for each stage of a request that is here and not done."""
        stage_tasks = [
            *self.scheduler.all_tasks(),
            *(running.stage_task for running in self.running.values()),
        ]
        return [stage_task.header for stage_task in stage_tasks]

    def active_of(self, uid: str) -> dict[str, str]:
        """What is queued or runs of a request, by graph node."""
        found = {
            stage_task.node: "queued"
            for stage_task in self.scheduler.all_tasks()
            if stage_task.uid == uid and stage_task.is_ready
        }
        found.update({node: "running" for running_uid, node in self.running if running_uid == uid})
        return found
