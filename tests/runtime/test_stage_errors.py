"""Whatever a stage raises, reports or returns: its request fails with it, and nothing else does."""

import json
from typing import Any

import numpy as np
import pytest

from onepiece._bounded import described, trace_of
from onepiece.codec import decode_control, encode_control
from onepiece.errors import CodecError, InvalidInput, NotReady, OnePieceError, StageFailed, last_frame
from onepiece.limits import ERROR_BYTES_MAX, ERROR_CAUSE_BYTES_MAX
from onepiece.messages import RequestErrored
from onepiece.node.http_events import format_event
from onepiece.requests import EventKind, RequestEvent
from onepiece.stage import Stage
from onepiece.testing import stage_context
from tests.runtime.failing_stages import (
    FAULTS,
    SETUP_FAULT,
    Silent,
    circle,
    in_process,
    loaded_in_process,
    loaded_on_loop,
    loaded_on_thread,
    on_loop,
    on_thread,
)
from tests.runtime.rig import rig

SAYS = {
    "mute": "failed on node-1: Mute: <Mute that cannot be shown: RuntimeError in doing so>",
    "much": "ValueError: xxx",
    "much rejected": "bbb",
    "object": "bad thing",
    "poor": "red",
    "coloured": "no such colour: red",
    "surrogate": r"ValueError: \udc80",
    "iteration": "StopIteration: enough",
    "cancelled": "CancelledError: by myself",
}
KINDS: dict[str, type[OnePieceError]] = dict.fromkeys(
    ["much rejected", "object", "many", "deep", "no text", "poor", "coloured"], InvalidInput
) | {"soon": NotReady}

places = pytest.mark.parametrize("place", [on_loop, on_thread, in_process], ids=lambda place: str(place.name))


def carried(error: OnePieceError) -> OnePieceError:
    """The error as its request's owner gets it."""
    sent = encode_control(RequestErrored("u", "stage", "node-1", error.to_wire()))
    assert len(sent) < ERROR_BYTES_MAX
    received = decode_control(sent)
    assert isinstance(received, RequestErrored)
    return OnePieceError.from_wire(received.error)


@places
async def test_any_error_is_its_requests_alone(place: Stage[Any, Any, Any]) -> None:
    """It has a form on the wire, says what it can, and the next stage task runs."""
    async with rig(place) as rigged:
        for fault in FAULTS:
            outcome = await rigged.run(fault=fault)
            assert outcome.error is not None
            assert not outcome.is_dirty
            told = carried(outcome.error)
            assert type(told) is KINDS.get(fault, StageFailed), fault
            assert SAYS.get(fault, "") in told.message
            assert await rigged.value(fault="none") == 1


@places
async def test_a_value_that_cannot_be_shown_fails_its_request(place: Stage[Any, Any, Any]) -> None:
    """Its type is wrong; saying so must not fail."""
    async with rig(place) as rigged:
        outcome = await rigged.run(fault="value")
        assert isinstance(outcome.error, StageFailed)
        assert await rigged.value(fault="none") == 1


@places
async def test_report_refuses_what_is_not_plain(place: Stage[Any, Any, Any]) -> None:
    """Where it is called; the error names the field."""
    async with rig(place) as rigged:
        outcome = await rigged.run(fault="report")
        assert outcome.error is not None
        assert "CodecError: report.thing is <object object" in outcome.error.message
        outcome = await rigged.run(fault="report much")
        assert outcome.error is not None
        assert "CodecError: report.text is too much: 65536 bytes at most" in outcome.error.message
        assert not rigged.progress
        assert await rigged.value(fault="none") == 1


@pytest.mark.parametrize(
    "value", [object(), 1 << 64, {1: 2}, np.float32(1.0), [[{"x": {1, 2}}]], circle(), "é" * 40_000]
)
def test_what_is_no_plain_value_is_no_report(value: Any) -> None:
    """Neither in a node nor in the context for unit tests; what is, is copied."""
    with pytest.raises(CodecError, match=r"report\.field"):
        stage_context().report(field=value)
    context = stage_context()
    items = [1, 2.5, None, b"x", "\udc80", {"y": (True,)}]
    context.report(step=1, items=items)
    items.clear()
    assert context.reports == [{"step": 1, "items": [1, 2.5, None, b"x", r"\udc80", {"y": [True]}]}]


def test_an_event_that_is_no_json_is_told_all_the_same() -> None:
    """Whoever made it; what has no form is shown."""
    event = RequestEvent("u", 1, EventKind.PROGRESS, 1.0, "stage", "n", {"thing": Silent(), "loss": 1.5})
    data = format_event(event).partition(b"data: ")[2]
    detail = json.loads(data)["detail"]
    assert detail["loss"] == 1.5
    assert "Silent" in detail["thing"]


@places
async def test_errors_name_the_stages_line_and_members(place: Stage[Any, Any, Any]) -> None:
    """Those that Python, or a group, wraps are told as what the stage raised (bounded)."""
    async with rig(place) as rigged:
        for fault in ("iteration", "cancelled", "much", "mute"):
            outcome = await rigged.run(fault=fault)
            assert outcome.error is not None
            assert "failing_stages.py" in str(last_frame(outcome.error)), fault
        outcome = await rigged.run(fault="group")
        assert outcome.error is not None
        assert "several (3 sub-exceptions): KeyError: 'one'; Mute: <Mute that" in outcome.error.message
        assert "ValueError: xxx" in outcome.error.message


@pytest.mark.parametrize(
    "place", [loaded_on_loop, loaded_on_thread, loaded_in_process], ids=lambda place: str(place.name)
)
@pytest.mark.parametrize("fault", ["mute", "notes", "much", "poor", "cancelled"])
async def test_any_error_of_a_setup_is_the_loads(
    fault: str, place: Stage[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised where the stage is loaded, and can be told of."""
    monkeypatch.setenv(SETUP_FAULT, fault)
    with pytest.raises(ExceptionGroup) as caught:
        async with rig(place):
            pass
    (error,) = caught.value.exceptions
    assert SAYS.get(fault, "").removeprefix("failed on node-1: ") in described(error)
    assert len(trace_of(error).encode()) <= ERROR_CAUSE_BYTES_MAX
