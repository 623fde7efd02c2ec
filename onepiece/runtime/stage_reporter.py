"""What an actor tells the owners of requests about the stages that it has here."""

from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen

from onepiece.errors import OnePieceError, StageFailed, last_frame
from onepiece.log import get_logger
from onepiece.messages import RequestErrored, StageInput, StageProgress, StageReport
from onepiece.requests import EventKind
from onepiece.runtime.environment import Environment
from onepiece.runtime.request_scheduler import StageTask

_LOGGED_CHARACTERS: Final = 500


def cost_of(stage_task: StageTask, started_at: float, compute_seconds: float, device: str) -> dict[str, Any]:
    """What a stage task has cost, as its event ``stage_finished`` says it."""
    held = stage_task.held.values()
    return {
        "waited_seconds": max(0.0, started_at - stage_task.arrived_at),
        "transfer_seconds": max(0.0, *(each.arrived_at - each.header.sent_at for each in held)),
        "received_bytes": stage_task.received_bytes,
        "compute_seconds": compute_seconds,
        "device": device,
    }


@frozen
class StageReporter:
    """Speaks for one actor; nothing here waits."""

    actor_id: int
    env: Environment

    def report_of(
        self,
        stage_task: StageTask,
        started_at: float | None = None,
        finished_at: float | None = None,
        detail: Mapping[str, Any] | None = None,
        heading: Mapping[str, str] | None = None,
    ) -> StageReport:
        """How far a stage task is: queued, and, as far as that is so, started and finished."""
        return StageReport(
            stage_task.uid,
            stage_task.node,
            self.env.node_id,
            self.env.identity.life,
            self.actor_id,
            stage_task.arrived_at,
            started_at,
            finished_at,
            detail or {},
            heading or {},
        )

    def done_again(self, header: StageInput, heading: Mapping[str, str]) -> None:
        """A stage that was done before is so for an owner that had not heard of it."""
        now, life = self.env.now(), self.env.identity.life
        report = StageReport(
            header.uid, header.node, self.env.node_id, life, self.actor_id, now, now, now, heading=heading
        )
        self.env.report(header.owner, report)

    def progress(self, header: StageInput, kind: EventKind, detail: Mapping[str, Any]) -> None:
        """What a stage says itself about how far it is."""
        now, life = self.env.now(), self.env.identity.life
        progress = StageProgress(header.uid, kind.value, header.node, self.env.node_id, life, now, detail)
        self.env.report(header.owner, progress)

    def broke(self, header: StageInput, error: OnePieceError) -> None:
        """The request cannot go on; a stage's own failure is told in the log of its node too."""
        if isinstance(error, StageFailed):
            get_logger().warning(
                "stage_failed",
                request=header.uid,
                stage=header.node,
                cause=error.fields.get("cause"),
                error=error.message[:_LOGGED_CHARACTERS],
                at=last_frame(error),
            )
        self.env.break_request(
            header.owner, RequestErrored(header.uid, header.node, self.env.node_id, error.to_wire())
        )
