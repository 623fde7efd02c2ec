"""What people see of a request while it runs."""

import io
import re
from typing import Any

from rich.console import Console

from onepiece.cli.columns import bytes_text, columns, seconds_text
from onepiece.cli.progress import RequestView, display, draw
from onepiece.requests import EventKind, RequestEvent


def events_of_a_request() -> list[RequestEvent]:
    """A request of two stages, from beginning to end."""
    told: list[tuple[EventKind, str | None, dict[str, Any]]] = [
        (EventKind.ACCEPTED, None, {}),
        (EventKind.QUEUED, "encode", {}),
        (EventKind.STAGE_STARTED, "encode", {}),
        (EventKind.STAGE_FINISHED, "encode", {"compute_seconds": 0.25, "sent_bytes": 4096}),
        (EventKind.STAGE_STARTED, "denoise", {}),
        (EventKind.PROGRESS, "denoise", {"step": 4, "total": 40, "eta_seconds": 72.0}),
        (EventKind.PREVIEW, "denoise", {"data": b"x"}),
        (
            EventKind.STAGE_FINISHED,
            "denoise",
            {
                "waited_seconds": 0.001,
                "received_bytes": 4096,
                "transfer_seconds": 0.002,
                "compute_seconds": 80.0,
                "sent_bytes": 3 << 20,
            },
        ),
        (EventKind.FINISHED, None, {"result_bytes": 3 << 20}),
    ]
    return [
        RequestEvent("U", number, kind, 1000.0 + number, stage_name, "n1" if stage_name else None, detail)
        for number, (kind, stage_name, detail) in enumerate(told)
    ]


def test_a_view_tells_each_event_and_sums_up() -> None:
    """Lines name stage, node, step and time left; the table has what each waited, moved and computed."""
    view = RequestView("U")
    lines = [view.take(event) for event in events_of_a_request()]
    assert lines == [
        "accepted U",
        "encode queued at n1",
        "encode started at n1",
        "encode finished after 250 ms",
        "denoise started at n1",
        "denoise step 4 of 40, 1 min 12 s left",
        "denoise sent a preview",
        "denoise finished after 1 min 20 s",
        "finished U: 3.0 MiB",
    ]
    table = view.summary().splitlines()
    assert table[0].split() == ["STAGE", "NODE", "WAITED", "RECEIVED", "TRANSFER", "COMPUTED", "SENT"]
    assert re.split(r" {2,}", table[1]) == ["encode", "n1", "-", "-", "-", "250 ms", "4.0 KiB"]
    assert re.split(r" {2,}", table[2]) == [
        "denoise",
        "n1",
        "1 ms",
        "4.0 KiB",
        "2 ms",
        "1 min 20 s",
        "3.0 MiB",
    ]
    assert table[3] == "finished after 8.00 s, end to end"


def test_a_terminal_gets_a_live_table() -> None:
    """While a stage runs its bar, step and time left are there; when it is done, what it took."""
    view = RequestView("U")
    drawn = []
    for event in events_of_a_request():
        view.take(event)
        console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
        console.print(draw(view))
        assert isinstance(console.file, io.StringIO)
        drawn.append(console.file.getvalue())
    assert "step 4 of 40, 1 min 12 s left" in drawn[5]
    assert "━" in drawn[5]
    assert "1 min 20 s" in drawn[-1]
    assert "━" not in drawn[-1]
    assert "U finished" in drawn[-1]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """It does."""
        return True


def test_the_display_is_chosen_by_the_stream() -> None:
    """A terminal is drawn on, anything else is written to line by line, and quiet is quiet."""
    for stream, quiet, has_escapes in ((Terminal(), False, True), (io.StringIO(), False, False)):
        view = RequestView("U")
        with display(quiet=quiet, stream=stream) as shown:
            for event in events_of_a_request():
                shown.show(view, event, view.take(event))
        assert ("\x1b[" in stream.getvalue()) is has_escapes
        assert "denoise" in stream.getvalue()
    silent = Terminal()
    with display(quiet=True, stream=silent) as shown:
        shown.show(view, event, "line")
    assert not silent.getvalue()


def test_texts_for_people() -> None:
    """Seconds and bytes at the precision that matters, columns as wide as they must be."""
    assert [seconds_text(value) for value in (0.0004, 0.25, 1.256, 59.94, 61, 3661)] == [
        "0 ms",
        "250 ms",
        "1.26 s",
        "59.9 s",
        "1 min 1 s",
        "1 h 1 min",
    ]
    assert [bytes_text(value) for value in (0, 1023, 1024, 5 << 20, 3 << 30, 2 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 MiB",
        "3.0 GiB",
        "2.0 TiB",
    ]
    assert columns(["A", "B"], [["long", "x"], ["s", ""]]) == "A     B\nlong  x\ns"
