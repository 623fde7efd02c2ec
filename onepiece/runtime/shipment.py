"""What an actor has in hand: stage tasks that run, and values that are about to be sent on."""

import asyncio
from collections.abc import Mapping
from typing import Any

from attrs import define, frozen

from onepiece.codec import PackedAnywhere
from onepiece.messages import StageReport
from onepiece.runtime.request_scheduler import StageTask
from onepiece.runtime.result_targets import Target
from onepiece.runtime.task_worker import RunningStage


def always() -> bool:
    """What is not retained is wanted for as long as it can be sent."""
    return True


@define(eq=False)
class Running:
    """A stage task that runs."""

    stage_task: StageTask
    context: RunningStage
    task: asyncio.Task[Any]
    begun_at: float
    """Monotonic."""


@frozen
class Shipment:
    """A stage's value, cut into the messages that carry it on."""

    targets: Mapping[str, Target]
    packed: Mapping[str, PackedAnywhere]
    report: StageReport
    length: int
    """Bytes of all messages."""

    @property
    def seconds(self) -> float:
        """How long its stage took."""
        assert self.report.started_at is not None
        assert self.report.finished_at is not None
        return max(0.0, self.report.finished_at - self.report.started_at)
