"""Workflows that are written wrongly: each mistake is found where it is made, and named."""

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onepiece import DefinitionError, Tensor, WiringError, limits, workflow
from onepiece.errors import ConfigError
from onepiece.runtime.workflows import import_workflow
from onepiece.workflow import load_workflow
from tests.compose.workflow_parts import Pair, encode, everything, join, look, pack


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
        assert each in caught.value.message.replace(f"{Pair.__module__}.", "")
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
        (unused, "encode never reaches its output"),
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


@pytest.mark.parametrize(
    ("text", "place"),
    [("import os\n\nraise ValueError('no')\n", "raises_it.py:3)"), ("x = (\n", "(raises_it.py, line 1)")],
)
def test_a_module_that_raises_is_told_with_the_line(
    text: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line of the module, and none of ours."""
    (tmp_path / "raises_it.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        import_workflow("raises_it:x")
    assert caught.value.message.endswith(place)


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
