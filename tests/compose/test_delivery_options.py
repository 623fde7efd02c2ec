"""What a definition says of keeping outputs: ``at_most_once`` on an edge, ``checkpoint`` on a stage."""

from typing import Any

import numpy as np
import pytest

from onepiece import DefinitionError, StageContext, Tensor, at_most_once, stage, workflow
from onepiece.codec import decode_control, encode_control
from onepiece.graph import FromStage, WorkflowGraph, validate
from onepiece.messages import STORE, StageInput
from onepiece.runtime.result_targets import StageTarget, StoreTarget, targets_of


@stage
async def split(ctx: StageContext[None], text: str) -> tuple[Tensor, Tensor]:
    """Two tensors of a text."""
    return np.ones(1), np.ones(2)


@stage
async def merge(ctx: StageContext[None], left: Tensor, right: Tensor) -> bytes:
    """Bytes of two tensors."""
    return b""


@stage(checkpoint=True)
async def costly(ctx: StageContext[None], text: str) -> Tensor:
    """Worth keeping."""
    return np.ones(1)


HEADER = StageInput(
    uid="u",
    workflow="w",
    node="split",
    source="@inputs",
    owner="owner",
    received_at=0.0,
    deadline_at=None,
    sent_at=0.0,
)


def drawn(*, mark_left: bool = False, mark_both: bool = False, mark_output: bool = False) -> WorkflowGraph:
    """A workflow of two stages with two edges between them, some of them marked."""

    def two(text: str) -> bytes:
        pair = split(text)
        left, right = at_most_once(pair) if mark_both else pair
        merged = merge(at_most_once(left) if mark_left else left, right)
        return at_most_once(merged) if mark_output else merged

    return workflow(two).graph


def test_an_edge_is_retained_unless_it_is_marked() -> None:
    """The mark is on the source; what is taken out of a marked result is marked, too."""
    assert drawn().node("merge").inputs == {
        "left": FromStage("split", (0,)),
        "right": FromStage("split", (1,)),
    }
    assert drawn(mark_left=True).node("merge").inputs == {
        "left": FromStage("split", (0,), is_retained=False),
        "right": FromStage("split", (1,)),
    }
    assert drawn(mark_both=True).node("merge").inputs == {
        "left": FromStage("split", (0,), is_retained=False),
        "right": FromStage("split", (1,), is_retained=False),
    }
    assert drawn(mark_output=True).output == FromStage("merge", is_retained=False)
    validate(drawn(mark_left=True, mark_output=True))


def test_marks_tell_versions_apart() -> None:
    """Two nodes that would treat an edge or a stage differently have different digests."""
    versions = [drawn(), drawn(mark_left=True), drawn(mark_both=True), drawn(mark_output=True)]
    assert len({each.digest for each in versions}) == 4
    assert "left=at_most_once(split[0]), right=split[1]" in drawn(mark_left=True).schema_text
    assert "return at_most_once(merge)" in drawn(mark_output=True).schema_text

    def build(*, checkpoint: bool) -> WorkflowGraph:
        kept = stage(checkpoint=checkpoint)(costly.function)

        def one(text: str) -> Tensor:
            return kept(text)

        return workflow(one).graph

    assert build(checkpoint=True).digest != build(checkpoint=False).digest


def test_a_message_is_retained_if_all_of_its_parts_may_be() -> None:
    """One marked part makes the whole message at-most-once: nobody is told to say that it was consumed."""
    for graph, is_retained in (
        (drawn(), True),
        (drawn(mark_left=True), False),
        (drawn(mark_both=True), False),
        (drawn(mark_output=True), True),
    ):
        target = targets_of(graph, HEADER, {}, "me", 1.0)["merge"]
        assert isinstance(target, StageTarget)
        assert target.is_retained is is_retained
        assert target.header.retained_by == ("me" if is_retained else None)


def test_a_result_is_retained_on_its_way_to_the_store_unless_marked() -> None:
    """The workflow's own output obeys the mark, too."""
    header = StageInput("u", "w", "merge", "split", "owner", 0.0, None, 0.0)
    for graph, is_retained in ((drawn(), True), (drawn(mark_output=True), False)):
        target = targets_of(graph, header, {}, "me", 1.0)[STORE]
        assert isinstance(target, StoreTarget)
        assert target.is_retained is is_retained
        assert target.header.retained_by == ("me" if is_retained else None)


def test_marks_survive_the_wire() -> None:
    """A graph that is sent as a control message keeps them."""
    graph = drawn(mark_left=True)
    assert decode_control(encode_control(graph)) == graph


def test_a_checkpoint_is_part_of_the_spec() -> None:
    """False unless asked for, and nothing but a bool."""
    assert costly.spec.checkpoint is True
    assert split.spec.checkpoint is False
    decorate: Any = stage
    with pytest.raises(DefinitionError, match="checkpoint is 'yes'; True or False"):
        decorate(checkpoint="yes")(costly.function)


def marks_an_input(text: str) -> Tensor:
    """An input is kept with the request."""
    return costly(at_most_once(text))


def marks_a_constant(text: str) -> Tensor:
    """A constant is kept in the graph."""
    assert text is not None
    return costly(at_most_once("x"))


def test_only_results_of_stages_can_be_marked() -> None:
    """Inputs and constants are never lost; outside a workflow there is nothing to mark."""
    with pytest.raises(DefinitionError, match="at_most_once of the input 'text': inputs are always kept"):
        workflow(marks_an_input)
    with pytest.raises(DefinitionError, match="at_most_once is given the str"):
        workflow(marks_a_constant)
    with pytest.raises(DefinitionError, match="at_most_once is given the int 3"):
        at_most_once(3)


def test_a_stage_of_a_helper_process_stands_at_the_top_of_a_module() -> None:
    """The process finds it by importing: one inside a function is refused where it is written."""
    with pytest.raises(DefinitionError, match="define it at the top of one"):

        @stage(isolation="process")
        async def inside(ctx: StageContext[None], text: str) -> str:
            return text
