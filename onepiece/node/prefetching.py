"""Prefetches on a node: carried out as the manager orders, while the old instance still serves.

An order names the stage whose instance is to come; what its ``prefetch`` names is read into the page cache
(``read_ahead``). The node's heartbeats say of each order whether that is over. It is over at once where the
stage has none, and when it fails, or takes longer than its bound: loading then reads the rest itself, and
says what is wrong. An order that is sent again is the same one; a new one for the stage takes its place.
"""

import asyncio
from typing import Any

from attrs import define, evolve, field

from onepiece._bounded import described
from onepiece.core.prefetches import Prefetch, PrefetchReport, StopPrefetch
from onepiece.errors import OnePieceError
from onepiece.limits import PREFETCH_SECONDS_MAX
from onepiece.log import get_logger
from onepiece.runtime.environment import Environment
from onepiece.runtime.read_ahead import reading_ahead
from onepiece.runtime.workflows import WorkflowImports


@define(eq=False)
class Prefetcher:
    """See the module's text."""

    env: Environment
    imports: WorkflowImports
    tasks: asyncio.TaskGroup
    _reports: dict[str, PrefetchReport] = field(factory=dict)
    """By stage."""
    _running: dict[str, "asyncio.Task[None]"] = field(factory=dict)

    def reports(self) -> tuple[PrefetchReport, ...]:
        """What the next heartbeat says."""
        return tuple(self._reports.values())

    def begin(self, order: Prefetch) -> None:
        """Carry an order out, unless that is done or under way."""
        known = self._reports.get(order.stage)
        if known is not None and known.number == order.number:
            return
        self.stop(order.stage)
        self._reports[order.stage] = PrefetchReport(order.stage, order.number)
        name = f"prefetch {order.stage}"
        self._running[order.stage] = self.tasks.create_task(self._run(order), name=name)

    def take_back(self, order: StopPrefetch) -> None:
        """Nothing comes of the move, or the stage is being loaded."""
        self.stop(order.stage)

    def stop(self, stage: str) -> None:
        """End the prefetch of a stage, and forget it; no error if there is none."""
        self._reports.pop(stage, None)
        running = self._running.pop(stage, None)
        if running is not None:
            running.cancel()

    def stop_all(self) -> None:
        """This life of the node is over."""
        for stage in list(self._reports):
            self.stop(stage)

    async def _run(self, order: Prefetch) -> None:
        begun_at = self.env.monotonic()
        try:
            done = await self._read(order)
        except TimeoutError:
            get_logger().warning("prefetch_took_too_long", stage=order.stage, seconds=PREFETCH_SECONDS_MAX)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            get_logger().warning("prefetch_failed", stage=order.stage, error=described(error))
        else:
            seconds = round(self.env.monotonic() - begun_at, 3)
            get_logger().info("prefetched", stage=order.stage, bytes=done, seconds=seconds)
        report = self._reports.get(order.stage)
        if report is not None and report.number == order.number:
            self._reports[order.stage] = evolve(report, is_over=True)
        self.env.on_change()

    async def _read(self, order: Prefetch) -> int:
        workflow = await self.imports.get(order.module, order.digest)
        stage: Any = workflow.stages.get(order.stage)
        if stage is None:
            raise OnePieceError(f"{order.module} has no stage {order.stage} on {self.env.node_id}")
        if stage.prefetch is None:
            return 0
        return await reading_ahead(stage.prefetch, PREFETCH_SECONDS_MAX)
