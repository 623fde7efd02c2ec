"""Workflows draw graphs of what is written; while they do, there is no value to look at."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from onepiece import ConfigError, DefinitionError, StageContext, Tensor, stage, workflow
from onepiece.graph import INPUTS, Constant, FromInput, FromStage, check_inputs, validate
from onepiece.workflow import load_workflow
from tests.compose.workflow_parts import Pair, clock, encode, everything, join, look, pack


def test_the_graph_is_what_was_written() -> None:
    """Nodes in topological order, a source for each argument, types and constants as given."""
    graph = everything.graph
    assert graph.module == f"{Pair.__module__}:everything"
    assert [node.id for node in graph.nodes] == ["look", "encode", "pack", "join"]
    assert graph.node("join").inputs == {
        "a": FromStage("pack", ("pair", "mean")),
        "b": FromStage("look", (0,)),
        "n": FromInput("n"),
        "words": Constant(("a", "b")),
    }
    assert graph.node("encode").inputs == {"text": FromInput("prompt")}
    assert graph.output == FromStage("join")
    assert set(everything.stages) == set(graph.stages)
    assert everything.stages[graph.node("look").stage] is look
    assert graph.stage_of("look") == look.spec
    assert check_inputs(graph, {"prompt": "p", "image": b"i"}) == {"prompt": "p", "image": b"i", "n": 3}


def test_neighbours_are_found() -> None:
    """Who waits for whom; the workflow's inputs count as one neighbour."""
    graph = everything.graph
    assert graph.predecessors("join") == ("pack", "look", INPUTS)
    assert graph.predecessors("pack") == ("encode",)
    assert graph.successors("look") == ("join",)
    assert graph.successors(INPUTS) == ("look", "encode", "join")
    assert graph.entry_nodes == ("look", "encode", "join")
    assert graph.successors("join") == ()


def test_a_node_of_constants_starts_with_the_request() -> None:
    """It waits for the inputs, though it reads none of them."""

    @workflow
    def ticking(image: bytes) -> bytes:
        tensor, _ = look(image)
        return join(tensor, tensor, clock(5))

    assert ticking.graph.predecessors("clock") == (INPUTS,)
    assert "clock" in ticking.graph.entry_nodes


def test_nodes_of_one_stage_are_numbered() -> None:
    """Each call is a node of its own; an explicit name that looks like a number is not taken twice."""

    @stage(name="encode_2")
    async def other(ctx: StageContext[None], text: str) -> Tensor:
        return np.ones(1)

    @stage
    async def join_tensors(ctx: StageContext[None], a: Tensor, b: Tensor) -> Tensor:
        return a

    @workflow
    def again(prompt: str) -> bytes:
        first, second, third = encode(prompt), other(prompt), encode(prompt)
        return join(join_tensors(first, second), third)

    assert [node.id for node in again.graph.nodes] == [
        "encode",
        "encode_2",
        "encode_3",
        "join_tensors",
        "join",
    ]


def test_the_schema_tells_versions_apart() -> None:
    """The same text gives the same digest; another type, default, wire or constant gives another."""

    def version(name: str, constant: int, *, swap: bool = False, default: int = 1) -> Any:
        def drawn(prompt: str, n: int = default) -> bytes:
            left, right = encode(prompt), pack(encode(prompt)).mask
            return join(right, left, constant) if swap else join(left, right, constant)

        return workflow(name=name)(drawn).graph

    base = version("w", 1)
    assert base.digest == version("w", 1).digest
    assert base.schema_text == version("w", 1).schema_text
    others = [version("v", 1), version("w", 2), version("w", 1, swap=True), version("w", 1, default=2)]
    assert len({base.digest, *(each.digest for each in others)}) == 5
    assert "record workflow_parts:Pair(mean: Tensor, number: int)" in base.schema_text.replace(
        "tests.compose.", ""
    )


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "if": lambda x: 1 if x else 2,
    "not": lambda x: not x,
    "f-string": lambda x: f"{x}!",
    "str": str,
    "len": len,
    "in": lambda x: 1 in x,
    "==": lambda x: x == 1,
    "!=": lambda x: x != 1,
    "<": lambda x: x < 1,
    "+": lambda x: x + 1,
    "r+": lambda x: 1 + x,
    "+=": lambda x: x.__iadd__(1),
    "*": lambda x: x * 2,
    "/": lambda x: x / 2,
    "-x": lambda x: -x,
    "abs": abs,
    "round": round,
    "@": lambda x: x @ x,
    "int": int,
    "float": float,
    "range": range,
    "bytes": bytes,
    "call": lambda x: x(),
    "for": list,
    "reversed": reversed,
    "[] =": lambda x: x.__setitem__(0, 1),
    "set attribute": lambda x: setattr(x, "mean", 1),
    "key": lambda x: x["mean"],
    "await": lambda x: x.__await__(),
    "with": lambda x: x.__enter__(),
    "min": lambda x: min(x, 1),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_looking_at_a_value_is_refused(operation: str) -> None:
    """There is no value yet: each operation raises, and says that a workflow draws a static graph."""

    def looks(n: int, image: bytes) -> bytes:
        OPERATIONS[operation](n)
        raise AssertionError("the operation went through")

    with pytest.raises(
        DefinitionError, match=r"static graph|cannot be unpacked|can be taken apart"
    ) as caught:
        workflow(looks)
    assert "the input 'n'" in caught.value.message


def test_placeholders_can_be_shown_and_hashed() -> None:
    """A debugger may look at one, and a dict may hold it."""

    @workflow
    def shows(image: bytes) -> bytes:
        pair = look(image)
        assert repr(pair) == "<the result of look: tuple[Tensor, int]>"
        assert repr(image) == "<the input 'image': bytes>"
        by_name = {pair: "it"}
        assert by_name[pair] == "it"
        assert not hasattr(pair, "__array__")
        return join(pair[0], pair[-2], pair[-1])

    assert shows.graph.node("join").inputs["n"] == FromStage("look", (1,))
    assert shows.graph.node("join").inputs["b"] == FromStage("look", (0,))


def test_a_placeholder_of_another_workflow_is_refused() -> None:
    """What was kept from one drawing has no meaning in the next."""
    kept = []

    def keeps(prompt: str) -> bytes:
        tensor = encode(prompt)
        kept.append(tensor)
        return join(tensor, tensor)

    def takes(prompt: str) -> bytes:
        return join(encode(prompt), kept[0])

    workflow(keeps)
    with pytest.raises(DefinitionError, match="belongs to another workflow"):
        workflow(takes)


def test_two_stages_of_one_name_in_a_graph_are_refused() -> None:
    """A module that was run twice has two functions of one key; a graph cannot tell them apart."""

    def again() -> Any:
        @stage
        async def same(ctx: StageContext[None], x: Tensor) -> Tensor:
            return x

        return same

    first, second = again(), again()

    def uses(prompt: str) -> Tensor:
        result: Tensor = second(first(encode(prompt)))
        return result

    with pytest.raises(DefinitionError, match="two different stages"):
        workflow(uses)


def test_validate_finds_what_drawing_would() -> None:
    """A graph from elsewhere that breaks a promise is refused; the drawn one passes."""
    graph = everything.graph
    validate(graph)
    look_node, encode_node, pack_node, join_node = graph.nodes
    broken = {
        "never reach": evolve(graph, output=FromStage("pack"), returns=pack.spec.returns),
        "mean does not exist": evolve(graph, nodes=(look_node, encode_node, join_node)),
        "does not exist": evolve(graph, nodes=(join_node, look_node, encode_node, pack_node)),
        "repeats": evolve(graph, nodes=(*graph.nodes, join_node)),
        "has no 'x'": evolve(
            graph, nodes=(evolve(look_node, inputs={"x": FromInput("image")}), *graph.nodes[1:])
        ),
        "lacks image": evolve(graph, nodes=(evolve(look_node, inputs={}), *graph.nodes[1:])),
        "str is no bytes": evolve(
            graph, nodes=(evolve(look_node, inputs={"image": FromInput("prompt")}), *graph.nodes[1:])
        ),
        "the int 1 where bytes": evolve(
            graph, nodes=(evolve(look_node, inputs={"image": Constant(1)}), *graph.nodes[1:])
        ),
        "bytes is no str": evolve(graph, returns=encode.spec.parameters[0].type),
    }
    for words, each in broken.items():
        with pytest.raises(DefinitionError, match=words):
            validate(each)


def test_workflows_are_loaded_by_reference() -> None:
    """``module:attribute`` as nodes are given it; each mistake is a ConfigError that says what there is."""
    assert load_workflow("stages.echo:echo").name == "echo"
    for reference, words in {
        "stages.echo": "expected module:attribute",
        "": "expected module:attribute",
        "stages.nowhere:echo": "cannot be imported",
        "stages.echo:shout": "no workflow 'shout'; it has: echo",
        "stages.echo:absent": "it has: echo",
    }.items():
        with pytest.raises(ConfigError, match=words):
            load_workflow(reference)
