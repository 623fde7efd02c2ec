"""Workflows draw graphs; wrong wiring is refused where it is written, with both schemas."""

import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from attrs import evolve, frozen

from onepiece import ConfigError, DefinitionError, StageContext, Tensor, WiringError, limits, stage, workflow
from onepiece.graph import INPUTS, Constant, FromInput, FromStage, check_inputs, validate
from onepiece.workflow import load_workflow


class Pair(NamedTuple):
    """Two tensors with names."""

    mean: Tensor
    number: int


@frozen
class Encoded:
    """A record with a record inside."""

    pair: Pair
    mask: Tensor


@stage
async def encode(ctx: StageContext[None], text: str, scale: float = 1.0) -> Tensor:
    """Make a tensor of a text."""
    return np.ones(1) * scale


@stage
async def look(ctx: StageContext[None], image: bytes) -> tuple[Tensor, int]:
    """Make a tensor and a number of an image."""
    return np.ones(1), len(image)


@stage
async def pack(ctx: StageContext[None], tensor: Tensor) -> Encoded:
    """Make a record."""
    return Encoded(Pair(tensor, 1), tensor)


@stage
async def join(
    ctx: StageContext[None], a: Tensor, b: Tensor, n: int = 1, words: tuple[str, ...] = ()
) -> bytes:
    """Make bytes of tensors."""
    return b""


@stage
async def clock(ctx: StageContext[None], every: int) -> int:
    """Need nothing from anybody."""
    return every


@workflow
def everything(prompt: str, image: bytes, n: int = 3) -> bytes:
    """Use all kinds of sources."""
    tensor, _ = look(image)
    packed = pack(encode(prompt))
    return join(packed.pair.mean, tensor, n, words=("a", "b"))


def test_the_graph_is_what_was_written() -> None:
    """Nodes in topological order, a source for each argument, types and constants as given."""
    graph = everything.graph
    assert graph.module == f"{__name__}:everything"
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
    assert "record test_workflow:Pair(mean: Tensor, number: int)" in base.schema_text.replace(
        "tests.compose.", ""
    )


def wrong_type(image: bytes) -> bytes:
    """A number where a tensor is wanted."""
    tensor, size = look(image)
    return join(tensor, size)


def wrong_input(image: bytes) -> bytes:
    """Bytes where a text is wanted."""
    tensor = encode(image)  # type: ignore[arg-type]  # what is tested
    return join(tensor, tensor)


def wrong_item(prompt: str) -> bytes:
    """A record where its tensor is wanted."""
    packed = pack(encode(prompt))
    return join(packed.pair, packed.mask)


def wrong_output(prompt: str) -> bytes:
    """A tensor where bytes are promised."""
    result: bytes = encode(prompt)
    return result


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            wrong_type,
            [
                "workflow 'wrong_type', stage 'join', parameter 'b'",
                "int is no Tensor",
                "look(image: bytes) -> tuple[Tensor, int]",
                "join(a: Tensor, b: Tensor, n: int = 1, words: tuple[str, ...] = ()) -> bytes",
            ],
        ),
        (
            wrong_input,
            ["stage 'encode', parameter 'text'", "bytes is no str", "input image: bytes", "encode(text: str"],
        ),
        (
            wrong_item,
            [
                "'join', parameter 'a'",
                "Pair(mean: Tensor, number: int) is no Tensor",
                "pack.pair: Pair of pack(",
            ],
        ),
        (
            wrong_output,
            [
                "its result",
                "Tensor is no bytes",
                "encode(text: str, scale: float = 1.0) -> Tensor",
                "-> bytes",
            ],
        ),
    ],
)
def test_wrong_wiring_names_both_schemas(function: Callable[..., Any], words: list[str]) -> None:
    """The stage, the parameter, the giving schema and the taking one, before anything runs."""
    with pytest.raises(WiringError) as caught:
        workflow(function)
    for each in words:
        assert each in caught.value.message.replace(f"{__name__}.", "")
    assert caught.value.fields["expected"] != caught.value.fields["given"]


def missing(prompt: str) -> bytes:
    """An argument is missing."""
    return join(encode(prompt))  # type: ignore[call-arg]  # what is tested


def unknown(prompt: str) -> bytes:
    """An argument that the stage does not have."""
    return join(encode(prompt), encode(prompt), colour=1)  # type: ignore[call-arg]  # what is tested


def twice(prompt: str) -> bytes:
    """An argument given twice."""
    return join(encode(prompt), encode(prompt), a=encode(prompt))  # type: ignore[misc]  # what is tested


def wrong_constant(prompt: str) -> bytes:
    """A constant of another type."""
    return join(encode(prompt), encode(prompt), n="3")  # type: ignore[arg-type]  # what is tested


def tensor_constant(prompt: str) -> bytes:
    """A tensor written into the graph."""
    return join(encode(prompt), np.ones(3))


def in_a_list(prompt: str) -> bytes:
    """Results inside a list."""
    return join(encode(prompt), [encode(prompt)])


def unused(prompt: str) -> bytes:
    """A node whose result nobody uses."""
    encode(prompt)
    return join(pack(encode(prompt)).mask, encode(prompt))


def several(prompt: str) -> tuple[Tensor, Tensor]:
    """Two results."""
    return encode(prompt), encode(prompt)


def nothing(prompt: str) -> None:
    """No result."""
    encode(prompt)


def the_input(prompt: str) -> str:
    """No stage at all."""
    return prompt


def plain_value(prompt: str) -> int:
    """A plain value."""
    return 3


async def coroutine(prompt: str) -> Tensor:
    """A coroutine function."""
    return encode(prompt)


def nested(prompt: str, image: bytes) -> bytes:
    """A workflow inside a workflow."""
    return everything(prompt, image)  # type: ignore[return-value]  # what is tested


def endless(prompt: str) -> bytes:
    """More nodes than a workflow may have."""
    for _ in range(limits.STAGES_PER_WORKFLOW_MAX + 1):
        tensor = encode(prompt)
    return join(tensor, tensor)


def no_such_item(prompt: str) -> bytes:
    """An item that the record does not have."""
    return join(pack(encode(prompt)).colour, encode(prompt))  # type: ignore[attr-defined]  # what is tested


def no_such_index(image: bytes) -> bytes:
    """An index that the tuple does not have."""
    return join(look(image)[2], look(image)[0])  # type: ignore[misc]  # what is tested


def item_of_an_input(pair: Pair) -> bytes:
    """An item of an input."""
    return join(pair.mean, pair.mean)


def index_of_a_tensor(prompt: str) -> bytes:
    """A slice of a tensor: a stage's work."""
    return join(encode(prompt)[0], encode(prompt))


def sliced(image: bytes) -> bytes:
    """A slice of a tuple."""
    return join(*look(image)[0:1])  # type: ignore[call-arg]  # what is tested


def unpacked_tensor(prompt: str) -> bytes:
    """A tensor taken apart."""
    a, b = encode(prompt)
    return join(a, b)


def too_many(image: bytes) -> bytes:
    """A tuple of two unpacked into three."""
    a, b, _ = look(image)  # type: ignore[misc]  # what is tested
    return join(a, b)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (missing, "missing a required argument: 'b'"),
        (unknown, "unexpected keyword argument 'colour'"),
        (twice, "multiple values for argument 'a'"),
        (wrong_constant, "stage 'join', parameter 'n': the str '3' where int is wanted"),
        (tensor_constant, "parameter 'b' is a tensor"),
        (in_a_list, "a list holds results of stages"),
        (unused, "encode never reach its output"),
        (several, "returns several values"),
        (nothing, "returns None"),
        (the_input, "returns its input 'prompt'"),
        (plain_value, "returns 3"),
        (coroutine, "must be a plain 'def'"),
        (nested, "inside another workflow; call its stages"),
        (endless, "more than 64 nodes"),
        (no_such_item, r"the result of pack has no \.colour: it is a Encoded"),
        (no_such_index, r"the result of look has no \[2\]"),
        (item_of_an_input, r"the input 'pair'\.mean: inputs are passed to stages whole"),
        (index_of_a_tensor, r"the result of encode has no \[0\]: it is a Tensor"),
        (sliced, "only tuples, NamedTuples and attrs objects"),
        (unpacked_tensor, "cannot be unpacked"),
    ],
)
def test_wrong_definitions_are_explained(function: Callable[..., Any], words: str) -> None:
    """Arguments, results, items, nesting: each mistake has its own words and names the workflow's part."""
    with pytest.raises(DefinitionError, match=words) as caught:
        workflow(function)
    assert not isinstance(caught.value, WiringError)


def test_unpacking_too_few_is_pythons_own_error() -> None:
    """The length of a tuple is known, so Python itself says that it does not fit."""
    with pytest.raises(ValueError, match=r"not enough values"):
        workflow(too_many)


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


def test_a_failed_drawing_leaves_nothing_behind() -> None:
    """After an error stages can be called and workflows drawn again."""
    with pytest.raises(DefinitionError):
        workflow(missing)
    with pytest.raises(TypeError, match="outside a workflow"):
        encode("x")
    assert workflow(name="fine")(lambda_free).graph.name == "fine"


def lambda_free(prompt: str) -> Tensor:
    """The smallest workflow of one stage."""
    return encode(prompt)


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


def test_a_definition_error_in_the_module_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a module with wrong wiring shows the wiring error, not an import error."""

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, _target: object = None) -> None:
            if name == "broken_stages":
                workflow(wrong_type)

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    with pytest.raises(WiringError):
        load_workflow("broken_stages:w")
    assert not isinstance(sys.modules.get("broken_stages"), types.ModuleType)
