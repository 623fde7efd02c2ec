"""What a node writes: one line an event, whichever library says it."""

import contextlib
import io
import json
import logging
import os

import pytest

from onepiece.errors import ConfigError
from onepiece.limits import LOG_TEXT_BYTES_MAX
from onepiece.log import configure, get_logger
from tests.runtime.failing_stages import MUCH, Noted, Silent


def test_events_are_lines_of_fields() -> None:
    """Text is for people, ``key=value``; JSON for machines; both name level and event."""
    stream = io.StringIO()
    configure("text", "info", stream)
    get_logger(node="n1").info("node_started", address="tcp://127.0.0.1:1")
    assert stream.getvalue().count("\n") == 1
    for part in ("level=info", "event=node_started", "node=n1", "address=tcp://127.0.0.1:1"):
        assert part in stream.getvalue()
    stream = io.StringIO()
    configure("json", "info", stream)
    get_logger(node="n1").info("node_started")
    line = json.loads(stream.getvalue())
    assert (line["event"], line["level"], line["node"]) == ("node_started", "info", "n1")


def test_least_level() -> None:
    """What is below the level is not written, nor computed."""
    stream = io.StringIO()
    configure("text", "warning", stream)
    get_logger().info("seen_by_nobody")
    logging.getLogger("transports.tcp").info("nor this")
    get_logger().warning("seen")
    assert stream.getvalue().count("\n") == 1


def test_libraries_write_into_the_same_stream() -> None:
    """What the transports log is an event with its source, also with a traceback, and once only."""
    stream = io.StringIO()
    configure("json", "info", stream)
    configure("json", "info", stream)
    try:
        raise OSError("the cable is out")
    except OSError:
        logging.getLogger("transports.tcp_owner").warning("%s was lost", "127.0.0.1:9", exc_info=True)
    [line] = [json.loads(text) for text in stream.getvalue().splitlines()]
    assert line["source"] == "transports.tcp_owner"
    assert line["message"] == "127.0.0.1:9 was lost"
    assert line["level"] == "warning"
    assert "the cable is out" in line["exception"]


def test_what_a_library_repeats_is_left_out() -> None:
    """A thousand equal lines are one; another one from the same place is written."""
    stream = io.StringIO()
    configure("json", "info", stream)
    for message in ["no descriptors"] * 1000 + ["no memory"]:
        logging.getLogger("asyncio").error("%s", message)
    assert [json.loads(text)["message"] for text in stream.getvalue().splitlines()] == [
        "no descriptors",
        "no memory",
    ]


@pytest.mark.parametrize("way", ["closed", "reader gone"])
def test_a_stream_that_takes_no_more_stops_nobody(way: str) -> None:
    """Whoever logs goes on where ``| head`` has read enough, or the stream was closed."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w", encoding="utf-8") as stream:
        configure("text", "info", stream)
        get_logger().info("read")
        assert b"event=read" in os.read(reading, 1000)
        os.close(reading)
        if way == "closed":
            stream.close()
        for _ in range(2):
            get_logger().info("lost")
        configure("text", "info", io.StringIO())
        with contextlib.suppress(OSError, ValueError):
            stream.close()


def test_unknown_level_or_form() -> None:
    """The error lists what there is."""
    with pytest.raises(ConfigError, match="debug, info, warning, error"):
        configure("text", "loud")


def test_no_event_is_too_much_or_cannot_be_shown() -> None:
    """Whatever a stage gives to its logger, one line of a bounded size is written."""
    stream = io.StringIO()
    configure("text", "info", stream)
    get_logger().info("said", thing=Silent(), text="x" * MUCH, name="\udc80")
    get_logger().error("raised", exc_info=Noted())
    said, raised = stream.getvalue().splitlines()
    assert len(said) < 2 * LOG_TEXT_BYTES_MAX
    assert "Silent that cannot be shown" in said
    assert "cannot be shown: SystemExit" in raised
