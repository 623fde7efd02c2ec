"""Control messages hold exactly what their classes say."""

import enum
from collections.abc import Mapping
from typing import Any

import cbor2
import pytest
from attrs import evolve, field, frozen
from hypothesis import given
from hypothesis import strategies as st

from onepiece import StageContext, _annotations, limits, stage, workflow
from onepiece.codec import decode_control, encode_control, register
from onepiece.errors import CodecError
from onepiece.graph import WorkflowGraph
from stages.echo import echo, shout
from stages.synthetic import chain, diamond, noop


class Colour(enum.Enum):
    """A closed set of words."""

    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    """Numbers with names."""

    LOW = 1
    HIGH = 2


@frozen
class Circle:
    """One of two shapes."""

    radius: float


@frozen
class Square:
    """The other, with the same field."""

    radius: float


@register
@frozen
class Everything:
    """A message with a field of every kind."""

    text: str
    count: int
    ratio: float
    flag: bool
    data: bytes
    colour: Colour
    level: Level
    shape: Circle | Square
    pair: tuple[int, str]
    many: tuple[Circle, ...]
    listed: list[int]
    named: Mapping[str, tuple[int, ...]]
    maybe: str | None = None
    number_or_text: int | str = 0
    free: Mapping[str, Any] = field(factory=dict)


@frozen
class Corner:
    """A record that stands in a workflow's text."""

    at: tuple[int, int]
    tags: list[str]
    more: dict[str, bytes]


CORNER = Corner((1, 2), ["a"], {"k": b"v"})


@stage
async def cut(ctx: StageContext[None], size: Corner, other: Corner) -> int:
    """Take a record from the inputs and one from the workflow's text."""
    return 1


@workflow
def sized(size: Corner = CORNER) -> int:
    """Have a record as a default and as a constant."""
    return cut(size, CORNER)


GOOD = Everything(
    text="t",
    count=1,
    ratio=0.5,
    flag=True,
    data=b"d",
    colour=Colour.BLUE,
    level=Level.HIGH,
    shape=Square(2.0),
    pair=(1, "a"),
    many=(Circle(1.0),),
    listed=[1, 2],
    named={"k": (1, 2)},
    maybe="m",
    number_or_text="x",
    free={"a": [1, {"b": None}]},
)


def test_every_kind_of_field_arrives() -> None:
    """Enums, unions of classes with the same fields, nested classes, free maps: equal on the other side."""
    assert decode_control(encode_control(GOOD)) == GOOD


@pytest.mark.parametrize("graph", [echo.graph, noop.graph, chain.graph, diamond.graph], ids=lambda g: g.name)
def test_graphs_arrive(graph: Any) -> None:
    """A workflow's graph is equal on the other side, its schema and digest too."""
    received = decode_control(encode_control(graph))
    assert received == graph
    assert isinstance(received, type(graph))
    assert received.digest == graph.digest
    assert received.schema_text == graph.schema_text


@given(
    st.builds(
        evolve,
        st.just(GOOD),
        text=st.text(max_size=50),
        count=st.integers(limits.INTEGER_MIN, limits.INTEGER_MAX),
        ratio=st.floats(allow_nan=False),
        data=st.binary(max_size=50),
        named=st.dictionaries(
            st.text(max_size=5), st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=3
        ),
    )
)
def test_all_values_of_the_plain_types_arrive(message: Everything) -> None:
    """Any text, 64-bit integer, float and bytes."""
    assert decode_control(encode_control(message)) == message


def altered(**fields: Any) -> bytes:
    """The good message with other content in some fields; None removes the field."""
    name, tree = cbor2.loads(encode_control(GOOD))
    for field_name, value in fields.items():
        if value is None:
            del tree[field_name]
        else:
            tree[field_name] = value
    return cbor2.dumps([name, tree])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"count": "1"}, "a str where int"),
        ({"count": True}, "a bool where int"),
        ({"count": 1.0}, "a float where int"),
        ({"flag": 1}, "an? int where bool"),
        ({"text": 5}, "an? int where str"),
        ({"text": b"t"}, "a bytes where str"),
        ({"data": "d"}, "a str where bytes"),
        ({"ratio": "0.5"}, "a str where float"),
        ({"colour": "green"}, "'green' is no Colour"),
        ({"level": 3}, "3 is no Level"),
        ({"shape": {"radius": 1.0}}, "a dict where"),
        ({"shape": {"=": "Everything", "radius": 1.0}}, "a dict where"),
        ({"shape": {"=": "Circle"}}, "Circle: the field 'radius' is missing"),
        ({"pair": [1]}, "a list where"),
        ({"pair": "1a"}, "a str where"),
        ({"many": "circles"}, "a str where"),
        ({"many": [{"radius": 1.0, "x": 1}]}, "unknown field 'x'"),
        ({"many": [7]}, "Everything: "),
        ({"listed": {"a": 1}}, "a dict where"),
        ({"named": [1]}, "a list where"),
        ({"named": {"k": 1}}, "an? int where"),
        ({"maybe": 3}, "an? int where"),
        ({"number_or_text": 1.5}, "a float where"),
        ({"free": {"a": cbor2.CBORTag(20305, [0, "uint8", [1]])}}, "Everything: the buffer 0"),
        ({"free": {"a": cbor2.CBORTag(99, 1)}}, "Everything: the tag 99"),
        ({"text": None}, "'text' is missing"),
        ({"extra": 1}, "unknown field 'extra'"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], words: str) -> None:
    """No text becomes a number, no number a flag, nothing is dropped or made up."""
    with pytest.raises(CodecError, match=words):
        decode_control(altered(**fields))


@pytest.mark.parametrize(
    "tree", [None, [], ["Everything"], ["Everything", []], [1, {}], {"Everything": {}}, "x"]
)
def test_a_message_is_a_name_and_fields(tree: Any) -> None:
    """Anything else is refused."""
    with pytest.raises(CodecError, match="name, fields"):
        decode_control(cbor2.dumps(tree))


def test_an_unknown_message_lists_the_known() -> None:
    """The other side may run another version: the error says what this one knows."""
    with pytest.raises(CodecError, match=r"'Rumour'; known: .*Everything"):
        decode_control(cbor2.dumps(["Rumour", {}]))


def test_only_registered_messages_are_sent() -> None:
    """An object of another class is refused where it is sent, not where it arrives."""
    with pytest.raises(CodecError, match="Circle is not registered"):
        encode_control(Circle(1.0))


def test_only_attrs_classes_can_be_registered() -> None:
    """A class without fields to check is no message."""
    with pytest.raises(TypeError, match="no attrs class"):
        register(Colour)


def test_two_messages_cannot_share_a_name() -> None:
    """The name is the tag: a second class of that name is refused where it is defined."""

    @frozen
    class Everything:
        other: int

    with pytest.raises(AssertionError, match="names two messages"):
        register(Everything)


def test_a_message_too_large_is_refused_before_it_is_sent() -> None:
    """The sender learns it, with what to do instead."""
    with pytest.raises(CodecError, match="at most 1048576"):
        encode_control(evolve(GOOD, data=bytes(limits.CONTROL_BYTES_MAX)))


def test_a_graph_is_the_same_where_its_records_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that never imported the workflow passes its graph on unchanged, with the same digest."""
    data = encode_control(sized.graph)
    monkeypatch.setattr(_annotations, "_RECORDS", {})
    received = decode_control(data)
    assert isinstance(received, WorkflowGraph)
    assert received.schema_text == sized.graph.schema_text
    assert "size: Corner = Corner(at=(1, 2), tags=['a'], more={'k': b'v'})" in received.schema_text
    assert encode_control(received) == data


def test_long_values_are_told_apart_in_the_schema() -> None:
    """A default of kilobytes does not fill every error, and one changed letter in it is another schema."""

    def version(default: str) -> WorkflowGraph:
        def drawn(text: str = default) -> str:
            return shout(text)

        return workflow(name="w")(drawn).graph

    one, other = version("x" * 9000 + "a"), version("x" * 9000 + "b")
    assert len(one.schema_text) < 500
    assert one.digest != other.digest
