"""What a person sees: the stages of a request as they run, and a table of what they took.

``RequestView`` is fed events and asked for pictures; it reads no clock and writes nowhere.
"""

from collections.abc import Sequence
from typing import Any, Final

from attrs import define, field
from rich.box import SIMPLE_HEAD
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from onepiece.requests import EventKind, RequestEvent

_BAR_WIDTH: Final = 24
_STYLES: Final = {
    "waiting": "dim",
    "queued": "yellow",
    "running": "cyan",
    "finished": "green",
    "failed": "red",
    "cancelled": "red",
}


@define
class StageView:
    """One stage of the request."""

    name: str
    state: str = "waiting"
    node: str = ""
    started_at: float | None = None
    step: int = 0
    total: int = 0
    progressed_at: float | None = None
    detail: dict[str, Any] = field(factory=dict)

    def remaining_seconds(self, now: float) -> float | None:
        """The estimate: the mean time of the steps done, for those to come."""
        if self.state != "running" or not self.step or self.started_at is None or self.progressed_at is None:
            return None
        one = (self.progressed_at - self.started_at) / self.step
        return max(0.0, one * (self.total - self.step) - (now - self.progressed_at))


@define
class RequestView:
    """All stages of one request, in the order of the graph."""

    stages: dict[str, StageView]
    accepted_at: float | None = None
    finished_at: float | None = None

    @classmethod
    def of(cls, stages: Sequence[str]) -> "RequestView":
        """Of a request that has not begun."""
        return cls({name: StageView(name) for name in stages})

    def take_in(self, event: RequestEvent) -> None:
        """Follow one event."""
        if event.kind is EventKind.ACCEPTED:
            self.accepted_at = event.at
        elif event.kind is EventKind.FINISHED:
            self.finished_at = event.at
        elif event.kind in {EventKind.FAILED, EventKind.CANCELLED}:
            for stage in self.stages.values():
                if stage.state == "running":
                    stage.state = event.kind.value
        named = self.stages.get(event.stage or "")
        if named is not None:
            _follow(named, event)

    def progress(self, now: float) -> Table:
        """The live picture."""
        table = Table(box=None, pad_edge=False, show_header=False)
        for _ in range(5):
            table.add_column()
        for stage in self.stages.values():
            total = stage.total or 1
            done = stage.step if stage.total else int(stage.state == "finished")
            pulse = stage.state == "running" and not stage.total
            bar = ProgressBar(total, done, width=_BAR_WIDTH, pulse=pulse, animation_time=now)
            table.add_row(
                stage.name,
                Text(stage.state, style=_STYLES[stage.state]),
                bar,
                f"step {stage.step} of {stage.total}" if stage.total else "",
                _remaining(stage, now),
            )
        return table

    def summary(self) -> Table:
        """What each stage waited, received and computed, and the whole from end to end."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("stage", no_wrap=True)
        table.add_column("node", no_wrap=True)
        for heading in ("waited", "received", "transfer", "computed", "sent"):
            table.add_column(heading, justify="right", no_wrap=True)
        for stage in self.stages.values():
            took = stage.detail
            table.add_row(
                stage.name,
                stage.node,
                _seconds(took.get("waited_seconds")),
                _bytes(took.get("received_bytes")),
                _seconds(took.get("transfer_seconds")),
                _seconds(took.get("compute_seconds")),
                _bytes(took.get("sent_bytes")),
            )
        whole = None
        if self.accepted_at is not None and self.finished_at is not None:
            whole = self.finished_at - self.accepted_at
        table.add_section()
        table.add_row("end to end", "", "", "", "", _seconds(whole), "")
        return table


def _follow(stage: StageView, event: RequestEvent) -> None:
    stage.node = event.node or stage.node
    match event.kind:
        case EventKind.QUEUED:
            stage.state = "queued"
        case EventKind.STAGE_STARTED:
            stage.state, stage.started_at = "running", event.at
        case EventKind.PROGRESS:
            stage.step = int(event.detail.get("step") or 0)
            stage.total = int(event.detail.get("total") or 0)
            stage.progressed_at = event.at
        case EventKind.STAGE_FINISHED:
            stage.state, stage.detail = "finished", dict(event.detail)
            stage.step = stage.total
        case _:
            pass


def _remaining(stage: StageView, now: float) -> str:
    seconds = stage.remaining_seconds(now)
    return "" if seconds is None else f"about {seconds:.1f} s left"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f} s"


def _bytes(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f} B" if value < 10_000 else f"{value / 1024:.1f} KiB"
