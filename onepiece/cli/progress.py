"""What a person sees of a request while it runs: a live table on a terminal, lines anywhere else.

Both show one *view*, which takes the request's events in and knows nothing of where it is shown.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from attrs import define, field
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from onepiece.cli.columns import bytes_text, columns, seconds_text
from onepiece.requests import EventKind, RequestEvent

REFRESHES_PER_SECOND = 8


@define
class StageView:
    """One stage of the request, so far."""

    name: str
    state: str = "pending"
    node: str = ""
    step: int | None = None
    total: int | None = None
    eta_seconds: float | None = None
    detail: Mapping[str, Any] = field(factory=dict)
    """What the stage said when it finished: seconds and bytes."""

    @property
    def progress_text(self) -> str:
        """``step 4 of 40, 12 s left``, as far as it is known."""
        if self.step is None:
            return ""
        text = f"step {self.step}" + (f" of {self.total}" if self.total is not None else "")
        return text + (f", {seconds_text(self.eta_seconds)} left" if self.eta_seconds is not None else "")


@define
class RequestView:
    """A request, so far, in the order in which its stages were heard of."""

    uid: str
    began_at: float | None = None
    ended_at: float | None = None
    outcome: str = ""
    stages: dict[str, StageView] = field(factory=dict)

    def take(self, event: RequestEvent) -> str | None:
        """Take an event in; the line that tells of it, if it is worth one."""
        if self.began_at is None:
            self.began_at = event.at
        if event.kind in {EventKind.FINISHED, EventKind.FAILED, EventKind.CANCELLED}:
            return self._end(event)
        if event.stage is None:
            return f"{event.kind.value} {self.uid}"
        stage = self.stages.setdefault(event.stage, StageView(event.stage))
        stage.node = event.node or stage.node
        match event.kind:
            case EventKind.QUEUED:
                stage.state = "queued"
                return f"{stage.name} queued at {stage.node}"
            case EventKind.STAGE_STARTED:
                stage.state = "running"
                return f"{stage.name} started at {stage.node}"
            case EventKind.PROGRESS:
                stage.step = event.detail.get("step")
                stage.total = event.detail.get("total")
                stage.eta_seconds = event.detail.get("eta_seconds")
                return f"{stage.name} {stage.progress_text}"
            case EventKind.PREVIEW:
                return f"{stage.name} sent a preview"
            case _:
                stage.state, stage.eta_seconds, stage.detail = "finished", None, event.detail
                return f"{stage.name} finished after {_seconds(event.detail, 'compute_seconds')}"

    @property
    def elapsed_seconds(self) -> float | None:
        """From acceptance to the end, when that is known."""
        if self.began_at is None or self.ended_at is None:
            return None
        return self.ended_at - self.began_at

    def summary(self) -> str:
        """A table of what each stage took, and the whole."""
        rows = [
            [
                stage.name,
                stage.node,
                _seconds(stage.detail, "waited_seconds"),
                _bytes(stage.detail, "received_bytes"),
                _seconds(stage.detail, "transfer_seconds"),
                _seconds(stage.detail, "compute_seconds"),
                _bytes(stage.detail, "sent_bytes"),
            ]
            for stage in self.stages.values()
        ]
        head = ["STAGE", "NODE", "WAITED", "RECEIVED", "TRANSFER", "COMPUTED", "SENT"]
        elapsed = self.elapsed_seconds
        whole = "" if elapsed is None else f"\n{self.outcome} after {seconds_text(elapsed)}, end to end"
        return columns(head, rows) + whole

    def _end(self, event: RequestEvent) -> str:
        self.ended_at, self.outcome = event.at, event.kind.value
        if event.kind is EventKind.FINISHED:
            return f"finished {self.uid}: {_bytes(event.detail, 'result_bytes')}"
        return f"{event.kind.value} {self.uid}: {event.detail.get('message', '')}"


class Display(Protocol):
    """Where a view is shown."""

    def show(self, view: RequestView, event: RequestEvent, line: str | None) -> None:
        """Show what an event changed."""
        ...


@define
class Lines:
    """One line per event, with the seconds since the first one."""

    stream: TextIO

    def show(self, view: RequestView, event: RequestEvent, line: str | None) -> None:
        """Write the event's line."""
        if line is not None:
            since = event.at - (view.began_at or event.at)
            self.stream.write(f"{since:8.2f}s  {line}\n")
            self.stream.flush()


@define
class LiveTable:
    """A table that is drawn again and again in its place."""

    live: Live

    def show(self, view: RequestView, event: RequestEvent, line: str | None) -> None:
        """Draw the view anew."""
        self.live.update(draw(view))


@define
class Silent:
    """Shows nothing."""

    def show(self, view: RequestView, event: RequestEvent, line: str | None) -> None:
        """Do nothing."""


def draw(view: RequestView) -> Group:
    """The view as a table with a bar for each stage that reports steps."""
    table = Table.grid(padding=(0, 2))
    colours = {"finished": "green", "running": "cyan", "queued": "yellow", "pending": "dim"}
    for stage in view.stages.values():
        is_done = stage.state == "finished"
        bar: ProgressBar | Text = Text(_seconds(stage.detail, "compute_seconds") if is_done else "")
        if stage.total and not is_done:
            bar = ProgressBar(total=stage.total, completed=stage.step or 0, width=30)
        table.add_row(
            Text(stage.name, style="bold"),
            Text(stage.state, style=colours[stage.state]),
            bar,
            Text("" if is_done else stage.progress_text),
            Text(stage.node, style="dim"),
        )
    return Group(Text(f"{view.uid} {view.outcome}".rstrip(), style="dim"), table)


@contextmanager
def display(*, quiet: bool = False, stream: TextIO | None = None) -> Iterator[Display]:
    """The display for standard error: live if that is a terminal, lines if not, nothing if ``quiet``."""
    stream = stream or sys.stderr
    if quiet:
        yield Silent()
        return
    if not stream.isatty():
        yield Lines(stream)
        return
    console = Console(file=stream)
    with Live(console=console, refresh_per_second=REFRESHES_PER_SECOND) as live:
        yield LiveTable(live)


def _seconds(detail: Mapping[str, Any], name: str) -> str:
    value = detail.get(name)
    return seconds_text(value) if isinstance(value, int | float) else "-"


def _bytes(detail: Mapping[str, Any], name: str) -> str:
    value = detail.get(name)
    return bytes_text(value) if isinstance(value, int) else "-"
