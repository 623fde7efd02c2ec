"""Ids, limits, logs, and the context for unit tests."""

import io
import json
import random
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepiece import ConfigError, DeadlineExceeded, RequestCancelled, ids, limits, log
from onepiece.testing import stage_context


@given(st.floats(0, 2**47 / 1000), st.floats(0, 2**47 / 1000), st.randoms(use_true_random=False))
def test_uids_sort_by_time(one: float, other: float, rng: random.Random) -> None:
    """A UID has 26 characters that tell its millisecond, and sorts by it."""
    first, second = ids.new_uid(one, rng), ids.new_uid(other, rng)
    assert ids.is_uid(first)
    assert len(first) == ids.UID_CHARACTERS
    assert ids.uid_time(first) == int(one * 1000) / 1000
    if int(one * 1000) != int(other * 1000):
        assert (first < second) == (one < other)


def test_uids_repeat_with_their_source_and_differ_without() -> None:
    """The same seed gives the same UID, so that simulations repeat; two draws differ."""
    rng = random.Random(1)
    first = ids.new_uid(1.7e9, rng)
    assert first == ids.new_uid(1.7e9, random.Random(1))
    assert first != ids.new_uid(1.7e9, rng)


@pytest.mark.parametrize(
    "text", ["", "x", "0" * 25, "0" * 27, "I" * 26, "8" + "0" * 25, "../" + "0" * 23, "0" * 25 + "\n"]
)
def test_what_is_no_uid(text: str) -> None:
    """What comes from a URL is checked by form; no path, no newline, no 27th character passes."""
    assert not ids.is_uid(text)


@given(st.text(max_size=300))
def test_node_names_can_stand_anywhere(host: str) -> None:
    """Whatever the host is called, the node's name is short and plain."""
    name = ids.new_node_name(host, random.Random(0))
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert 6 < len(name) <= limits.NAME_CHARACTERS_MAX
    assert not name.startswith("-")


def test_node_names_keep_the_host() -> None:
    """One can tell where a node runs, and two lives of it apart."""
    first = ids.new_node_name("GPU-07.rack.example", random.Random(1))
    second = ids.new_node_name("GPU-07.rack.example", random.Random(2))
    assert first.startswith("gpu-07-rack-example-")
    assert first != second


@pytest.fixture
def stream() -> io.StringIO:
    """Where the log goes."""
    return io.StringIO()


def test_text_logs_are_fields(stream: io.StringIO) -> None:
    """One line, key=value, the event first; levels below the limit are not written."""
    log.configure("text", "info", stream)
    logger = log.get_logger(node="n-1")
    logger.debug("hidden")
    logger.info("stage_started", stage="denoise", fields={"a": 1})
    line = stream.getvalue()
    assert line.count("\n") == 1
    assert line.startswith("at=")
    assert "level=info event=stage_started" in line
    assert "node=n-1" in line
    assert "stage=denoise" in line


def test_json_logs_are_objects(stream: io.StringIO) -> None:
    """One object a line; an exception is in it."""
    log.configure("json", "debug", stream)
    try:
        raise ValueError("boom")
    except ValueError:
        log.get_logger(uid="u").exception("stage_failed")
    event = json.loads(stream.getvalue())
    assert (event["event"], event["level"], event["uid"]) == ("stage_failed", "error", "u")
    assert "boom" in event["exception"]


def test_wrong_log_options_are_named() -> None:
    """The error lists what there is."""
    with pytest.raises(ConfigError, match="'loud' does not exist; choose from debug"):
        log.configure(level="loud")
    with pytest.raises(ConfigError, match="'xml' does not exist; choose from text, json"):
        log.configure("xml")  # type: ignore[arg-type]  # what is tested


async def test_the_test_context_behaves_like_a_real_one() -> None:
    """It records reports, runs blocking code in another thread, and stops a cancelled or late stage."""
    context = stage_context({"weights": 1}, device="cuda:1", timeout=3600)
    assert context.state == {"weights": 1}
    assert context.device == "cuda:1"
    assert context.deadline is not None
    assert 0 < context.deadline <= 3600
    context.report(step=1, total=2, preview=b"png", content_type="image/png")
    assert context.reports == [{"step": 1, "total": 2, "preview": b"png", "content_type": "image/png"}]
    assert await context.run(threading.get_ident) != threading.get_ident()
    assert await context.run(int, "11", base=2) == 3
    context.cancel()
    assert context.cancelled
    with pytest.raises(RequestCancelled):
        context.report(step=2)
    late = stage_context(timeout=-1)
    with pytest.raises(DeadlineExceeded):
        late.report(step=1)
    assert stage_context().deadline is None
    assert late.deadline_at is not None
    assert late.deadline_at < time.time()
