"""Whatever bytes arrive: ``CodecError`` or a value, never another error, never memory they do not back."""

import random
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cbor2
import numpy as np
import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from onepiece import _torch, limits
from onepiece.codec import (
    decode_control,
    encode_control,
    materialise,
    pack,
    register,
    unpack,
    value_from_bytes,
    value_to_bytes,
)
from onepiece.errors import CodecError
from onepiece.types import ANY
from stages.synthetic import diamond

HEAD_OVERHEAD_BYTES = 160 * limits.HEADER_BYTES_MAX
"""Python objects made of the largest head (each byte an empty list), before they are counted."""


@register
@frozen
class HostileHeader:
    """A header for these tests."""

    uid: str
    attempt: int


@pytest.fixture(autouse=True)
def numpy_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values become numpy arrays, whose memory tracemalloc sees."""
    monkeypatch.setattr(_torch, "is_imported", lambda: False)


@contextmanager
def bounded_memory(limit_bytes: int) -> Iterator[None]:
    """The body may not hold more than this at any time."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= limit_bytes


def read(data: bytes) -> None:
    """Read a message to the end."""
    for value in unpack(memoryview(data), HostileHeader).values.values():
        materialise(value, ANY)


def swallow(data: bytes) -> None:
    """Read a message to the end, or get a ``CodecError``."""
    try:
        read(data)
    except CodecError as error:
        assert error.message  # noqa: PT017 - the outcome may also be a value


def good_message() -> bytes:
    """A message with everything in it."""
    values = {
        "array": np.arange(100, dtype=">f4").reshape(4, 25).T,
        "nested": {"list": [1, (2.5, None, True)], "bytes": b"b" * 3000, "text": "t" * 3000},
        "empty": np.zeros((0, 3)),
        "small": np.array(3, np.float32),
    }
    return b"".join(pack(HostileHeader("u" * 26, 1), values).parts)


GOOD = good_message()


@given(st.data())
@settings(deadline=None, max_examples=400)
def test_damaged_messages(data: st.DataObject) -> None:
    """Bits flipped, cut short, bytes inserted or overwritten by large lengths."""
    message = bytearray(GOOD)
    head_bytes = struct.unpack_from("<I", message, 4)[0] + 8
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(head_bytes, len(message) - 1)))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "overwrite", "remove"])):
            case "flip":
                message[place] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del message[max(place, 1) :]
            case "insert":
                message[place:place] = data.draw(st.binary(min_size=1, max_size=9))
            case "overwrite":
                message[place : place + 9] = b"\x9b\xff\xff\xff\xff\xff\xff\xff\xff"
            case "remove":
                del message[place : place + data.draw(st.integers(1, 8))]
        if not message:
            break
    swallow(bytes(message))


def with_head(head: Any, body: bytes = b"") -> bytes:
    """A message with this head, which need not follow any rule."""
    encoded = head if isinstance(head, bytes) else cbor2.dumps(head)
    start = b"OPV1" + struct.pack("<I", len(encoded)) + encoded
    return start + bytes(-len(start) % 64 if body else 0) + body


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.sampled_from(["float32", "<M8[ns]", "<U5", "|V4", "|O", "builtins:eval", "os:system", ""])
    | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.builds(cbor2.CBORTag, st.integers(20300, 20306) | st.integers(0, 300), inner)
        | st.builds(
            lambda number, dtype, shape: cbor2.CBORTag(20305, [number, dtype, shape]),
            st.integers(-1, 2),
            st.sampled_from(
                ["float32", "uint8", "bfloat16", ">i2", "|S0", "<U0", "object", "<M8[fortnights]"]
            ),
            st.lists(st.integers(-1, 1 << 62), max_size=4),
        )
    ),
    max_leaves=10,
)


@given(
    st.dictionaries(st.text(max_size=3), anything, max_size=3), st.lists(st.integers(-1, 1 << 62), max_size=3)
)
@settings(deadline=None, max_examples=400)
def test_heads_of_anything(values: dict[str, Any], lengths: list[int]) -> None:
    """Well-formed CBOR that follows no rule of the format."""
    header = ["HostileHeader", {"uid": "u", "attempt": 1}]
    swallow(with_head([header, values, lengths], bytes(200)))


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=300)
def test_heads_of_random_bytes(head: bytes) -> None:
    """Bytes that are no CBOR."""
    swallow(with_head(head))
    swallow(head)


HEADER = ["HostileHeader", {"uid": "u", "attempt": 1}]


def tensor(number: Any, dtype: Any, shape: Any) -> cbor2.CBORTag:
    """A tensor's tag."""
    return cbor2.CBORTag(20305, [number, dtype, shape])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"", "cut short"),
        (b"OPV2" + bytes(60), "OPV2"),
        (b"OPV1" + struct.pack("<I", 0xFFFFFFFF), "4294967295 bytes"),
        (with_head(b"\x9b" + b"\xff" * 8), "CBOR"),
        (with_head(b"\x5b\x00\x00\x00\xff" + b"\xff" * 4), "CBOR"),
        (with_head(b"\x81" * 10_000), "CBOR"),
        (with_head(b"\x9f\xff"), "CBOR"),
        (with_head(cbor2.dumps([HEADER, {}, []]) + b"\x00"), "behind its end"),
        (with_head([HEADER, {}]), "head"),
        (with_head([HEADER, {1: 2}, []]), "keys"),
        (with_head([["Nobody", {}], {}, []]), "unknown message 'Nobody'"),
        (with_head([["HostileHeader", {"uid": "u"}], {}, []]), "'attempt' is missing"),
        (with_head([["HostileHeader", {"uid": "u", "attempt": "1"}], {}, []]), "a str where int"),
        (with_head([["HostileHeader", {"uid": "u", "attempt": 1, "x": 1}], {}, []]), "unknown field 'x'"),
        (with_head([HEADER, {}, [1 << 62]]), "a buffer of 4611686018427387904 bytes"),
        (with_head([HEADER, {}, [64]], bytes(64)), "belong to no value"),
        (with_head([HEADER, {}, []], bytes(64)), "ends at"),
        (with_head([HEADER, {"x": tensor(0, "float32", [1 << 40])}, [64]], bytes(64)), "bytes with a buffer"),
        (with_head([HEADER, {"x": tensor(0, "float32", [0, 1 << 62, 1 << 62])}, [0]]), "63 bits"),
        (with_head([HEADER, {"x": tensor(0, "float32", [-16])}, [64]], bytes(64)), "dimension -16"),
        (with_head([HEADER, {"x": tensor(0, "float32", [True])}, [4]], bytes(4)), "dimension True"),
        (with_head([HEADER, {"x": tensor(0, "float32", [1] * 33 + [16])}, [64]], bytes(64)), "34 dimensions"),
        (with_head([HEADER, {"x": tensor(0, "object", [8])}, [64]], bytes(64)), "unknown dtype"),
        (with_head([HEADER, {"x": tensor(0, "|S0", [1 << 40])}, [0]]), "unknown dtype"),
        (with_head([HEADER, {"x": [tensor(0, "uint8", [64])] * 2}, [64]], bytes(64)), "another value"),
        (with_head([HEADER, {"x": cbor2.CBORTag(20304, 7)}, []]), "buffer 7 does not exist"),
        (with_head([HEADER, {"x": cbor2.CBORTag(20303, 0)}, [2]], b"\xff\xfe"), "UTF-8"),
        (with_head([HEADER, {"x": cbor2.CBORTag(35, "(a+)+")}, []]), "semantic tag 35"),
        (with_head([HEADER, {"x": 1 << 70}, []]), "semantic tag 2"),
        (with_head([HEADER, {"x": cbor2.undefined}, []]), "no part of the format"),
        (with_head([HEADER, {}, [0] * 2000]), "2000 buffers"),
        (with_head([HEADER, {"x": [0] * limits.TREE_NODES_MAX}, []]), "values in one message"),
    ],
)
def test_each_rule_has_its_error(message: bytes, words: str) -> None:
    """Lengths, shapes, tags, counts, depth: each is refused, and the error says what is wrong."""
    with bounded_memory(HEAD_OVERHEAD_BYTES), pytest.raises(CodecError, match=words):
        read(message)


@pytest.mark.parametrize("filler", [b"\x80", b"\xa0", b"\x40", b"\x60", b"\xf6", b"\xd9\x4f\x4d\x80"])
def test_the_largest_head_takes_bounded_memory(filler: bytes) -> None:
    """A head full of the smallest items is refused, and cost no more than a fixed multiple of its bound."""
    count = (limits.HEADER_BYTES_MAX - 100) // len(filler)
    head = (
        b"\x83" + cbor2.dumps(HEADER) + b"\xa1\x61x\x9a" + struct.pack(">I", count) + filler * count + b"\x80"
    )
    message = memoryview(with_head(head))
    with bounded_memory(HEAD_OVERHEAD_BYTES), pytest.raises(CodecError):
        unpack(message, HostileHeader)


def test_a_head_beyond_the_bound_is_not_parsed() -> None:
    """A megabyte of head is refused by its length alone."""
    message = memoryview(with_head(b"\x80" * (1 << 20)))
    with bounded_memory(64 * 1024), pytest.raises(CodecError, match="at most 262144"):
        unpack(message, HostileHeader)


def test_materialising_takes_no_more_than_the_message() -> None:
    """One copy of the tensors, and small change."""
    array = np.zeros(1 << 20, np.uint8)
    data = b"".join(value_to_bytes({"a": array, "b": bytes(1 << 20)}))
    with bounded_memory(len(data) + (1 << 17)):
        value_from_bytes(data)


def test_a_header_of_another_class_is_refused() -> None:
    """A message where another kind is wanted, or none."""
    with pytest.raises(CodecError, match="a header where none is wanted"):
        unpack(memoryview(GOOD), type(None))
    data = b"".join(pack(None, {}).parts)
    with pytest.raises(CodecError, match="not \\[name, fields\\]"):
        unpack(memoryview(data), HostileHeader)
    with pytest.raises(CodecError, match="where one is wanted"):
        value_from_bytes(data)


def test_damaged_control_messages() -> None:
    """A whole workflow's graph with random damage: a graph or ``CodecError``, nothing else."""
    good = encode_control(diamond.graph)
    rng = random.Random(7)
    refused = 0
    for _ in range(400):
        data = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            decode_control(bytes(data))
        except CodecError:
            refused += 1
    assert refused > 300  # damage to texts alone may give another valid graph


def test_control_messages_beyond_the_bound() -> None:
    """A control message of more than a megabyte is refused before it is parsed."""
    with pytest.raises(CodecError, match="at most 1048576"):
        decode_control(bytes(limits.CONTROL_BYTES_MAX + 1))
