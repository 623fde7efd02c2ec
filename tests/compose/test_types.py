"""Annotations become types, types accept each other, values are checked against them."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Optional, Union

import numpy as np
import pytest
import torch
from attrs import field, frozen
from numpy.typing import NDArray

import onepiece
from onepiece import DefinitionError, Tensor
from onepiece._annotations import type_spec
from onepiece.codec import WireRecord, WireTensor, decode_control, encode_control, register
from onepiece.graph import TypeSpec, check_value

ROOT = Path(onepiece.__file__).parents[1]


class Size(NamedTuple):
    """A NamedTuple."""

    width: int
    height: int


@frozen
class Encoded:
    """An attrs class with a private field and one that its constructor does not take."""

    text: Tensor
    _scale: float = 1.0
    length: int = field(init=False, default=0)


@frozen
class Tree:
    """An attrs class that holds itself."""

    children: "list[Tree]"


@register
@frozen
class SpecCarrier:
    """A message that carries a type."""

    spec: TypeSpec


def spec(annotation: Any) -> TypeSpec:
    """The type of an annotation."""
    return type_spec(annotation, "test")


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (None, "None"),
        (bool, "bool"),
        (int, "int"),
        (float, "float"),
        (str, "str"),
        (bytes, "bytes"),
        (Any, "Any"),
        (Tensor, "Tensor"),
        (torch.Tensor, "torch.Tensor"),
        (np.ndarray, "numpy.ndarray"),
        (NDArray[Any], "numpy.ndarray"),
        (NDArray[np.floating[Any]], "numpy.ndarray"),
        (NDArray[np.float32], "NDArray[float32]"),
        (str | None, "str | None"),
        (Optional[str], "str | None"),  # noqa: UP045 - the old spelling is what is tested
        (Union[int, str], "int | str"),  # noqa: UP007 - the old spelling is what is tested
        (Literal["a", 1, True], "Literal['a', 1, True]"),
        (Literal["a"] | None, "Literal['a'] | None"),
        (list[int], "list[int]"),
        (dict[str, list[bytes]], "dict[str, list[bytes]]"),
        (tuple[int, str], "tuple[int, str]"),
        (tuple[int, ...], "tuple[int, ...]"),
        (tuple[()], "tuple[()]"),
        (Annotated[int, "steps"], "int"),
        (Size, "Size"),
        (Encoded, "Encoded"),
    ],
)
def test_annotations_are_read(annotation: Any, text: str) -> None:
    """Each supported annotation gives a type whose text reads as it was written; it survives the wire."""
    given = spec(annotation)
    assert str(given) == text
    assert decode_control(encode_control(SpecCarrier(given))) == SpecCarrier(given)
    assert given.accepts(given) is None


def test_records_show_their_fields() -> None:
    """A record's definition names what travels: fields that the constructor takes, with their types."""
    assert spec(Size).definition == "Size(width: int, height: int)"
    assert spec(Encoded).definition == "Encoded(text: Tensor, _scale: float)"
    assert [str(each) for each in spec(list[tuple[Size, Encoded]]).records()] == ["Size", "Encoded"]


@pytest.mark.parametrize(
    "annotation",
    [set[int], object, complex, list, dict, dict[int, str], Literal[b"x"], type, "text", Path, len],
)
def test_other_annotations_are_refused(annotation: Any) -> None:
    """What cannot travel is refused where it is written; the error says where that is."""
    with pytest.raises(DefinitionError, match=r"^test: "):
        spec(annotation)


def test_types_that_hold_themselves_are_refused() -> None:
    """A recursive record has no end."""
    with pytest.raises(DefinitionError, match="hold itself"):
        spec(Tree)


def test_torch_is_recognised_by_name_without_an_import() -> None:
    """``torch.Tensor`` as text needs no torch; nothing of this imports it."""
    code = """
import sys
from onepiece import StageContext, stage
@stage
async def denoise(ctx: "StageContext[None]", x: "torch.Tensor", y: "np.ndarray", z: "Tensor") -> "Tensor": ...
print(denoise.spec.signature, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    expected = "denoise(x: torch.Tensor, y: numpy.ndarray, z: Tensor) -> Tensor False"
    assert done.stdout.strip() == expected


@pytest.mark.parametrize(
    ("wanted", "given"),
    [
        (float, int),
        (float, Literal[1, 2]),
        (Tensor, torch.Tensor),
        (Tensor, NDArray[np.float32]),
        (torch.Tensor, Tensor),
        (NDArray[np.float32], Tensor),
        (NDArray[np.float32], NDArray[Any]),
        (str | None, str),
        (str | None, None),
        (int | str | None, str | int),
        (str, Literal["a", "b"]),
        (Literal["a", "b"], Literal["b"]),
        (list[float], list[int]),
        (tuple[float, ...], tuple[int, int]),
        (tuple[int, ...], tuple[int, ...]),
        (dict[str, str | None], dict[str, str]),
        (Any, Size),
        (Size, Any),
        (Size, Size),
    ],
)
def test_types_accept(wanted: Any, given: Any) -> None:
    """Whatever value of the given type does for the wanted one is accepted."""
    assert spec(wanted).accepts(spec(given)) is None


@pytest.mark.parametrize(
    ("wanted", "given", "why"),
    [
        (int, float, "float is no int"),
        (int, bool, "bool is no int"),
        (bool, int, "int is no bool"),
        (str, bytes, "bytes is no str"),
        (Tensor, bytes, "bytes is no Tensor"),
        (NDArray[np.float32], NDArray[np.int8], "NDArray[int8] is no NDArray[float32]"),
        (str, str | None, "None is no str"),
        (int | None, str, "str is none of int | None"),
        (Literal["a"], str, "str is no Literal['a']"),
        (Literal["a"], Literal["a", "b"], "'b' is no Literal['a']"),
        (Literal[1], Literal[True], "True is no Literal[1]"),
        (int, Literal["a"], "'a' is no int"),
        (int, Literal[True], "True is no int"),
        (list[int], list[str], "items: str is no int"),
        (list[int], tuple[int, ...], "tuple[int, ...] is no list[int]"),
        (tuple[int, str], tuple[int, int], "item 1: int is no str"),
        (tuple[int, str], tuple[int], "tuple[int] has 1 items where tuple[int, str] has 2"),
        (tuple[int, ...], tuple[int, str], "str is no int"),
        (dict[str, int], dict[str, bytes], "items: bytes is no int"),
        (Size, Encoded, "Encoded(text: Tensor, _scale: float) is no Size(width: int, height: int)"),
        (Size, tuple[int, int], "tuple[int, int] is no Size(width: int, height: int)"),
    ],
)
def test_types_refuse(wanted: Any, given: Any, why: str) -> None:
    """What does not fit is refused with both types in the reason."""
    assert spec(wanted).accepts(spec(given)) == why


def test_items_are_selected_by_path() -> None:
    """By field name, by index where the type can be indexed, through several levels; else None."""
    nested = spec(tuple[int, Size])
    assert nested.select(()) == nested
    assert nested.select((1, "height")) == spec(int)
    assert nested.select((1, 0)) == spec(int)
    for path in ((2,), (-1,), ("width",), (0, 0), (1, "depth")):
        assert nested.select(path) is None
    assert spec(Encoded).select((0,)) is None  # an attrs object cannot be indexed
    assert spec(list[int]).select((0,)) is None  # of unknown length


class Word(str):
    """A text."""

    __slots__ = ()


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (None, None),
        (int, 3),
        (float, 3),
        (float, np.float64(2)),
        (str, Word("x")),
        (bytes, bytearray(b"x")),
        (Tensor, torch.ones(2)),
        (Tensor, np.ones(2)),
        (torch.Tensor, torch.nn.Parameter(torch.ones(2))),
        (NDArray[np.float64], np.ones(2)),
        (NDArray[Any], np.array([object()])),
        (int | None, None),
        (list[Tensor], [np.ones(1), torch.ones(1)]),
        (tuple[int, str], (1, "a")),
        (tuple[int, ...], ()),
        (dict[str, int], {"a": 1}),
        (Size, Size(1, 2)),
        (Encoded, Encoded(np.ones(1))),
        (Any, object()),
        (Size, WireRecord(f"{__name__}:Size", {"width": 1, "height": 2})),
        (Tensor, WireTensor("float32", (2,), memoryview(bytes(8)))),
    ],
)
def test_values_of_the_type_are_accepted(annotation: Any, value: Any) -> None:
    """Values of the type, subclasses, and values that still lie in a message."""
    assert check_value(spec(annotation), value) is None


@pytest.mark.parametrize(
    ("annotation", "value", "why"),
    [
        (Tensor, {"a": 1}, "a dict where Tensor is wanted"),
        (Tensor, [1.0], "a list where Tensor is wanted"),
        (torch.Tensor, np.ones(1), "a numpy.ndarray where torch.Tensor is wanted"),
        (np.ndarray, torch.ones(1), "a torch.Tensor where numpy.ndarray is wanted"),
        (NDArray[np.float32], np.ones(1), "an array of float64 where NDArray[float32] is wanted"),
        (NDArray[np.float32], np.array([None]), "an array of object where NDArray[float32] is wanted"),
        (int, True, "the bool True where int is wanted"),
        (int, 1.0, "the float 1.0 where int is wanted"),
        (str, 5, "the int 5 where str is wanted"),
        (int, "x" * 1000, "a str where int is wanted"),
        (bytes, "x", "the str 'x' where bytes is wanted"),
        (None, 0, "the int 0 where None is wanted"),
        (str, None, "None where str is wanted"),
        (int | str, 1.5, "the float 1.5 where int | str is wanted"),
        (Literal["a"], "b", "the str 'b' where Literal['a'] is wanted"),
        (Literal[1], True, "the bool True where Literal[1] is wanted"),
        (list[int], (1,), "a tuple where list[int] is wanted"),
        (list[int], [1, "a"], "item [1]: the str 'a' where int is wanted"),
        (tuple[int, str], (1,), "1 items where tuple[int, str] is wanted"),
        (tuple[int, ...], (1, None), "item [1]: None where int is wanted"),
        (dict[str, int], {"a": {}}, "item ['a']: a dict where int is wanted"),
        (dict[str, int], {1: 1}, "the key 1 where a str is wanted"),
        (Size, (1, 2), "a tuple where Size(width: int, height: int) is wanted"),
        (Size, Size("a", 2), "field width: the str 'a' where int is wanted"),  # type: ignore[arg-type]  # on purpose
        (Size, {"width": 1, "height": 2}, "a dict where Size(width: int, height: int) is wanted"),
        (Encoded, Size(1, 2), "a test_types.Size where Encoded(text: Tensor, _scale: float) is wanted"),
        (Tensor, WireRecord("m:R", {}), "a R where Tensor is wanted"),
    ],
)
def test_values_of_other_types_are_described(annotation: Any, value: Any, why: str) -> None:
    """The reason says what came, what is wanted, and where inside; strictly, with nothing converted."""
    refusal = check_value(spec(annotation), value)
    assert refusal is not None
    assert refusal.replace("tests.compose.", "") == why


def test_the_tensor_annotation_is_no_class_to_make() -> None:
    """``Tensor()`` is a mistake; the error says what to make instead."""
    with pytest.raises(TypeError, match=r"torch\.Tensor or a numpy\.ndarray"):
        Tensor()
