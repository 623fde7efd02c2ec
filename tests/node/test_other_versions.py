"""Requests that were accepted for another version of a workflow than the one which is registered now."""

from collections.abc import Mapping

import pytest

from onepiece import StageContext, stage, workflow
from onepiece.codec import Wire, pack_inputs, unpack
from onepiece.core.request_record import Holding
from onepiece.errors import SchemaMismatch
from onepiece.messages import StageInput
from onepiece.node.adoption import _strange, inputs_for
from onepiece.runtime.result_targets import InputTarget

UID = "0" * 26


@stage
async def shout(ctx: StageContext[None], text: str, words: list[str], count: int) -> str:
    """Never runs here."""
    return text


@workflow
def newer(text: str, words: list[str] = ["a"], count: int = 3) -> str:  # noqa: B006 - a constant of its graph
    """Its inputs were others once."""
    return shout(text, words, count)


def kept(**inputs: object) -> Mapping[str, Wire]:
    """Inputs as an earlier owner kept them."""
    packed = pack_inputs(inputs)
    return unpack(memoryview(b"".join(packed.parts)), type(None)).values


def test_new_inputs_have_their_defaults() -> None:
    """A request that gives all that is needed goes on; its lists are its own."""
    inputs, error = inputs_for(newer.graph, UID, kept(text="ahoy"))
    assert (inputs, error) == ({"text": "ahoy", "words": ["a"], "count": 3}, None)
    assert inputs["words"] is not newer.graph.inputs[1].default


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ({"words": ["b"]}, "has no input 'text'"),
        ({"text": "ahoy", "colour": "red"}, "'colour' is unknown now"),
        ({"text": "ahoy", "count": "three"}, "input 'count'"),
    ],
)
def test_what_does_not_fit_is_named(inputs: dict[str, object], why: str) -> None:
    """An input that is missing, gone, or of another type."""
    _, error = inputs_for(newer.graph, UID, kept(**inputs))
    assert error is not None
    assert why in error.message
    assert error.fields == {"uid": UID, "workflow": "newer"}


def test_where_it_has_been_must_be_known() -> None:
    """Stages and joins that the new version has not."""
    assert _strange(newer.graph, UID, {}, (Holding("a.1", {"shout": "running"}, ("shout",)),)) is None
    for joins, holding in (
        ({"whisper": 7}, Holding("a.1")),
        ({}, Holding("a.1", {"whisper": "running"})),
        ({}, Holding("a.1", {}, (), ("whisper",))),
    ):
        error = _strange(newer.graph, UID, joins, (holding,))
        assert error is not None
        assert "'whisper'" in error.message


def test_inputs_that_are_not_there_are_an_error_of_the_request() -> None:
    """Whoever packs them hears of it: a bare ``KeyError`` would take the whole node along."""
    header = StageInput(UID, "newer", "shout", "", "local://a/control", 0.0, 1.0, 0.0)
    target = InputTarget(header, "m:shout", {"text": "text", "count": "count"})
    with pytest.raises(SchemaMismatch, match="no input 'count'"):
        target.pack({"text": "ahoy"})
