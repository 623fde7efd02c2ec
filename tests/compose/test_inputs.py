"""A client's inputs: defaults filled in, converted from JSON's few types, or refused by name."""

from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
from attrs import frozen

from onepiece import InvalidInput, PayloadTooLarge, StageContext, Tensor, limits, stage, workflow
from onepiece.errors import Rejected
from onepiece.graph import check_inputs
from onepiece.workflow import WorkflowCall


class Size(NamedTuple):
    """A NamedTuple among the inputs."""

    width: int
    height: int = 480


@frozen
class Style:
    """An attrs class among the inputs, with a rule of its own."""

    name: str
    weights: tuple[float, ...] = ()

    def __attrs_post_init__(self) -> None:
        """Refuse the empty name."""
        if not self.name:
            raise ValueError("a style needs a name")


WIDE = Size(832)


@stage
async def draw(
    ctx: StageContext[None],
    prompt: str,
    image: bytes,
    steps: int,
    strength: float,
    mode: Literal["fast", "good"],
    size: Size,
    style: Style | None,
    latents: Tensor | None,
    tags: dict[str, list[str]],
) -> bytes:
    """Take everything."""
    return image


@workflow
def picture(
    prompt: str,
    image: bytes = b"",
    steps: int = 40,
    strength: float = 0.5,
    mode: Literal["fast", "good"] = "good",
    size: Size = WIDE,
    style: Style | None = None,
    latents: Tensor | None = None,
    tags: dict[str, list[str]] = {},  # noqa: B006 - a workflow's function runs once
) -> bytes:
    """Have an input of each kind."""
    return draw(prompt, image, steps, strength, mode, size, style, latents, tags)


def checked(**fields: Any) -> Any:
    """The one field's value, as the stages will get it."""
    values = check_inputs(picture.graph, {"prompt": "a ship", **fields})
    assert list(values) == [each.name for each in picture.graph.inputs]
    return values[next(iter(fields))] if fields else values


def test_defaults_are_filled_in() -> None:
    """Every input has a value; a mutable default is not shared between requests."""
    first, second = checked(), checked()
    assert first["steps"] == 40
    assert first["size"] == Size(832, 480)
    assert first["style"] is None
    first["tags"]["changed"] = ["by a stage"]
    assert second["tags"] == {}
    assert checked()["tags"] == {}


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        ({"strength": 1}, 1.0),
        ({"size": {"width": 8}}, Size(8, 480)),
        ({"size": Size(1, 2)}, Size(1, 2)),
        ({"style": {"name": "ink", "weights": [1, 2.5]}}, Style("ink", (1.0, 2.5))),
        ({"style": None}, None),
        ({"image": b"png"}, b"png"),
        ({"image": bytearray(b"png")}, b"png"),
        ({"mode": "fast"}, "fast"),
        ({"tags": {"a": ["b"]}}, {"a": ["b"]}),
        ({"prompt": "x" * limits.TEXT_INPUT_BYTES_MAX}, "x" * limits.TEXT_INPUT_BYTES_MAX),
    ],
)
def test_what_json_can_say_is_converted(fields: dict[str, Any], value: Any) -> None:
    """An object becomes the record, a list the tuple, an int the float that the signature names."""
    result = checked(**fields)
    assert result == value
    assert type(result) is type(value) or isinstance(value, bytes)


def test_tensors_pass_as_they_are() -> None:
    """A tensor among the inputs is looked at, not copied."""
    array = np.ones(3)
    assert checked(latents=array) is array


BAD = [
    ({"promt": "x"}, "promt", "has no input 'promt'; its inputs are: prompt: str, image: bytes = b''"),
    ({"prompt": 3}, "prompt", "the int 3 where str is wanted"),
    ({"prompt": None}, "prompt", "None where str is wanted"),
    ({"prompt": b"x"}, "prompt", "a bytes where str is wanted"),
    ({"image": "base64"}, "image", "the str 'base64' where bytes is wanted"),
    ({"steps": "40"}, "steps", "the str '40' where int is wanted"),
    ({"steps": 40.0}, "steps", "the float 40.0 where int is wanted"),
    ({"steps": True}, "steps", "the bool True where int is wanted"),
    ({"steps": 1 << 64}, "steps", "an int of more than 64 bits"),
    ({"prompt": "a\udc80"}, "prompt", "a lone surrogate"),
    ({"strength": 10**400}, "strength", "too large for a float"),
    ({"strength": "much"}, "strength", "the str 'much' where float is wanted"),
    ({"mode": "slow"}, "mode", r"the str 'slow' where Literal\['fast', 'good'\] is wanted"),
    ({"size": {"width": "8"}}, "size", "width: the str '8' where int is wanted"),
    ({"size": {"depth": 8}}, "size", "unknown field 'depth'; Size"),
    ({"size": {}}, "size", "Size.* cannot be made: .*width"),
    ({"size": [8]}, "size", "a list where Size"),
    ({"style": {"name": ""}}, "style", "a dict where Style"),
    ({"latents": [[1.0]]}, "latents", "a list where Tensor | None is wanted"),
    ({"tags": {"a": "b"}}, "tags", r"\['a'\]: the str 'b' where list\[str\] is wanted"),
    ({"tags": {1: []}}, "tags", "the key 1 where a str is wanted"),
]


@pytest.mark.parametrize(("fields", "name", "words"), BAD)
def test_bad_inputs_name_the_field(fields: dict[str, Any], name: str, words: str) -> None:
    """Unknown, of the wrong type, wrong inside: the message and the fields say which and what is wanted."""
    with pytest.raises(InvalidInput, match=f"workflow 'picture'.*{words}") as caught:
        check_inputs(picture.graph, {"prompt": "a ship", **fields})
    assert caught.value.fields["field"] == name
    assert caught.value.fields["workflow"] == "picture"
    assert repr(name) in caught.value.message


def test_a_missing_input_is_named() -> None:
    """The error says which, of what type, and which inputs there are."""
    with pytest.raises(
        InvalidInput, match=r"needs the input 'prompt' \(str\); its inputs are: prompt: str"
    ) as caught:
        check_inputs(picture.graph, {})
    assert caught.value.fields == {"workflow": "picture", "field": "prompt", "expected": "str"}


@pytest.mark.parametrize(
    ("fields", "bound"),
    [
        ({"prompt": "x" * (1 << 20)}, limits.TEXT_INPUT_BYTES_MAX),
        ({"prompt": "\N{SNOWMAN}" * (limits.TEXT_INPUT_BYTES_MAX // 2)}, limits.TEXT_INPUT_BYTES_MAX),
        ({"image": bytes(limits.BYTES_INPUT_BYTES_MAX + 1)}, limits.BYTES_INPUT_BYTES_MAX),
        ({"tags": {"a": ["b"] * (limits.ITEMS_INPUT_MAX + 1)}}, limits.ITEMS_INPUT_MAX),
        ({"tags": {str(n): [] for n in range(limits.ITEMS_INPUT_MAX + 1)}}, limits.ITEMS_INPUT_MAX),
        ({"style": {"name": "x" * (1 << 20)}}, limits.TEXT_INPUT_BYTES_MAX),
    ],
)
def test_inputs_beyond_a_bound_name_it(fields: dict[str, Any], bound: int) -> None:
    """A prompt of a megabyte: refused with the bound in the message, and the prompt not in it."""
    with pytest.raises(PayloadTooLarge, match=str(bound)) as caught:
        check_inputs(picture.graph, {"prompt": "a ship", **fields})
    assert caught.value.fields["bound"] == bound
    assert len(caught.value.message) < 300


def test_the_error_of_a_bad_field_is_short() -> None:
    """Whatever a client sends, the answer is not as long."""
    for fields in ({"x" * (1 << 20): 1}, {"steps": "9" * (1 << 20)}, {"mode": "m" * (1 << 20)}):
        with pytest.raises(Rejected) as caught:
            check_inputs(picture.graph, {"prompt": "a ship", **fields})
        assert len(caught.value.message) < 1000


def test_calling_a_workflow_checks_its_inputs() -> None:
    """A call outside a workflow is plain data for a client, checked before anything is sent."""
    call = picture("a ship", steps=3)
    assert isinstance(call, WorkflowCall)
    assert (call.workflow, call.module) == ("picture", f"{__name__}:picture")
    assert call.inputs["steps"] == 3
    assert call.inputs["mode"] == "good"
    assert str(call.returns) == "bytes"
    with pytest.raises(InvalidInput, match="unexpected keyword argument 'stepps'; its inputs are"):
        picture("a ship", stepps=3)  # type: ignore[call-arg]  # what is tested
    with pytest.raises(InvalidInput, match="needs the input 'prompt'"):
        picture()  # type: ignore[call-arg]  # what is tested
    with pytest.raises(InvalidInput, match="input 'steps': the str '3'"):
        picture("a ship", steps="3")  # type: ignore[arg-type]  # what is tested
