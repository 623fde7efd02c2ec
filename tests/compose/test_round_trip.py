"""Values travel bit-equal and take no more bytes than their elements (and a bounded head)."""

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from attrs import frozen
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st

from onepiece import _torch, limits
from onepiece._annotations import type_spec
from onepiece.codec import materialise, pack, unpack, value_from_bytes, value_to_bytes
from onepiece.errors import CodecError
from onepiece.tensor import ITEM_BYTES, NUMPY_LACKS
from onepiece.types import ANY, ARRAY, TENSOR, TORCH, TypeSpec

# torch tells everybody who touches complex32 once that it is experimental.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

HEAD_BYTES_MAX = 256
"""Of a message with one tensor: its name, dtype, shape of up to six dimensions, and lengths."""

UNSENDABLE = "uint1"
TORCH_DTYPES = sorted(name for name in ITEM_BYTES if hasattr(torch, name))


def sent(value: Any) -> bytes:
    """The value's bytes, put together as the wire does."""
    return b"".join(value_to_bytes(value))


def numpy_bits(array: "np.ndarray[Any, Any]") -> bytes:
    """The elements in C order."""
    return array.tobytes("C")


def torch_bits(tensor: torch.Tensor) -> bytes:
    """The elements in C order."""
    if tensor.numel() == 0:
        return b""
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def size_bound(payload_bytes: int) -> int:
    """The most bytes that one tensor may take on the wire."""
    return payload_bytes + HEAD_BYTES_MAX + limits.ALIGNMENT_BYTES


numpy_dtypes = st.one_of(
    numpy_st.boolean_dtypes(),
    numpy_st.integer_dtypes(endianness="?"),
    numpy_st.unsigned_integer_dtypes(endianness="?"),
    numpy_st.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    numpy_st.complex_number_dtypes(endianness="?", sizes=(64, 128)),
    numpy_st.datetime64_dtypes(endianness="?"),
    numpy_st.timedelta64_dtypes(endianness="?"),
    numpy_st.byte_string_dtypes(max_len=5),
    numpy_st.unicode_string_dtypes(endianness="?", max_len=5),
    st.just(np.dtype(np.longdouble)),
)


@st.composite
def numpy_views(draw: st.DrawFn) -> "np.ndarray[Any, Any]":
    """Arrays of every dtype, seen through transposed, sliced, reversed, broadcast and 0-d views."""
    dtype = draw(numpy_dtypes)
    shape = draw(numpy_st.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    count = math.prod(shape) * dtype.itemsize
    raw = np.frombuffer(draw(st.binary(min_size=count, max_size=count)), np.uint8)
    if dtype.kind in "US":  # text must stay text
        raw = np.zeros_like(raw)
    array = np.empty(shape, dtype)
    if count:
        array.reshape(-1).view(np.uint8)[:] = raw
    if draw(st.booleans()):
        array = array.transpose(draw(st.permutations(range(array.ndim))))
    if draw(st.booleans()):
        array = array[draw(numpy_st.basic_indices(array.shape, allow_newaxis=True, max_dims=6))]
        array = np.asarray(array, dtype)
    if draw(st.booleans()):
        array = np.broadcast_to(array, (draw(st.integers(0, 3)), *array.shape))
    return array


@given(numpy_views())
@example(np.arange(12, dtype=">f4").reshape(3, 4)[::-1, ::-2])
@example(np.broadcast_to(np.float32(1.5), (7, 9)))
@settings(deadline=None, max_examples=300)
def test_numpy_views_arrive_equal_and_no_larger(array: "np.ndarray[Any, Any]") -> None:
    """Every dtype, byte order, shape and stride: the same bits, only the elements sent (faults 71, 72)."""
    data = sent(array)
    received = value_from_bytes(data, ARRAY)
    assert isinstance(received, np.ndarray)
    assert received.dtype == array.dtype
    assert received.shape == array.shape
    assert numpy_bits(received) == numpy_bits(array)
    assert len(data) <= size_bound(array.size * array.itemsize)


@st.composite
def torch_views(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of every dtype, seen through permuted, sliced, expanded, overlapping and 0-d views."""
    name = draw(st.sampled_from(TORCH_DTYPES))
    shape = draw(numpy_st.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    count = math.prod(shape) * ITEM_BYTES[name]
    raw = bytearray(draw(st.binary(min_size=count, max_size=count)))
    if name == "bool":
        raw = bytearray(byte & 1 for byte in raw)
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    tensor = flat.view(getattr(torch, name)).reshape(shape)
    if draw(st.booleans()):
        tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    if draw(st.booleans()) and tensor.dim():
        start, step = draw(st.integers(0, 2)), draw(st.integers(1, 3))
        tensor = tensor[..., start::step]
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(draw(st.integers(0, 3)), *tensor.shape)
    if draw(st.booleans()) and tensor.dim() and tensor.shape[0]:
        tensor = tensor[0]
    return tensor


@given(torch_views())
@settings(deadline=None, max_examples=300)
def test_torch_views_arrive_equal_and_no_larger(tensor: torch.Tensor) -> None:
    """Every dtype (bf16, fp8), shape and stride: same bits, and only its elements sent (faults 71, 72)."""
    data = sent(tensor)
    received = value_from_bytes(data, TORCH)
    assert isinstance(received, torch.Tensor)
    assert received.dtype == tensor.dtype
    assert received.shape == tensor.shape
    assert torch_bits(received) == torch_bits(tensor)
    assert len(data) <= size_bound(tensor.numel() * tensor.element_size())


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_every_torch_dtype_has_its_size_in_the_table(name: str) -> None:
    """The bytes of an element that hostile messages are checked against are torch's own."""
    assert torch.empty(0, dtype=getattr(torch, name)).element_size() == ITEM_BYTES[name]


def test_every_dense_dtype_of_torch_travels() -> None:
    """No dtype of this torch is missing but those without elements of whole bytes, and quantised ones."""
    names = {
        str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)
    }
    left_out = {name for name in names if name not in ITEM_BYTES}
    prefixes = (
        "qint",
        "quint",
        "bits",
        "uint1",
        "uint2",
        "uint3",
        "uint4",
        "uint5",
        "uint6",
        "uint7",
        "int1",
    )
    others = ("int2", "int3", "int4", "int5", "int6", "int7")
    assert {name for name in left_out if not name.startswith((*prefixes, *others))} == set()


def test_only_the_slice_of_a_large_storage_is_sent() -> None:
    """A row of a megabyte costs a row."""
    column = torch.zeros(1024, 1024, dtype=torch.bfloat16)[:, 7]
    assert len(sent(column)) <= size_bound(2048)
    assert len(sent(np.zeros((1024, 1024))[:, 7])) <= size_bound(8192)


def test_one_element_of_any_stride() -> None:
    """A single element counts as contiguous whatever its stride; it is sent like any other."""
    assert torch_bits(value_from_bytes(sent(torch.arange(4.0)[2:3:2]), TORCH)) == torch_bits(
        torch.tensor([2.0])
    )
    strided = torch.arange(9, dtype=torch.bfloat16).reshape(3, 3)[:1, 1:2]
    assert torch.equal(value_from_bytes(sent(strided), TORCH), strided)
    assert np.array_equal(value_from_bytes(sent(np.arange(4.0)[::3][1:]), ARRAY), [3.0])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_lazy_conjugates_and_negatives_are_carried_out(dtype: torch.dtype) -> None:
    """A view that torch marks as conjugate or negative arrives with the values it shows."""
    tensor = torch.randn(3, 4, dtype=dtype)
    for view in (tensor.conj(), torch._neg_view(tensor), tensor.conj().imag):
        received = value_from_bytes(sent(view), TORCH)
        assert torch.equal(received, view.clone())


def test_parameters_travel_without_their_gradients() -> None:
    """A parameter arrives as a plain tensor."""
    parameter = torch.nn.Parameter(torch.ones(3))
    received = value_from_bytes(sent(parameter), TORCH)
    assert torch.equal(received, torch.ones(3))
    assert not received.requires_grad


def test_contiguous_tensors_are_not_copied_on_the_way_out() -> None:
    """The part to be sent is the tensor's own memory; so is a numpy array's, and long bytes."""
    tensor = torch.arange(1000, dtype=torch.float32).reshape(10, 100)
    array = np.arange(1000.0).reshape(10, 100)
    data = bytes(5000)
    parts = pack(None, {"tensor": tensor[2:], "array": array, "data": data}).parts
    addresses = [np.frombuffer(part, np.uint8).ctypes.data for part in parts]
    assert tensor[2:].data_ptr() in addresses
    assert array.ctypes.data in addresses
    assert np.frombuffer(data, np.uint8).ctypes.data in addresses


def test_nothing_refers_to_the_message_after_materialise() -> None:
    """The ring's slot can be given back: its memory is no longer seen by anything."""
    values = {"a": torch.ones(500), "b": np.ones(500), "c": b"c" * 5000, "d": "d" * 5000, "e": (1, [b"e"])}
    message = bytearray(b"".join(pack(None, values).parts))
    unpacked = unpack(memoryview(message), type(None))
    received = {name: materialise(value, ANY) for name, value in unpacked.values.items()}
    del unpacked
    message += b"grows only while nothing refers to it"
    message[:] = bytes(len(message))
    assert torch.equal(torch.as_tensor(received["a"]), torch.ones(500))
    assert (received["c"], received["d"], received["e"]) == (values["c"], values["d"], values["e"])


@pytest.mark.parametrize("is_writable", [True, False])
def test_buffers_are_aligned(is_writable: bool) -> None:
    """Each buffer begins at a multiple of 64 within the message, whatever stands before it."""
    values = {"a": np.ones(3, np.uint8), "b": b"b" * 1500, "c": np.zeros((0, 4)), "d": np.ones(5)}
    data = b"".join(pack(None, values).parts)
    message = memoryview(bytearray(data)) if is_writable else memoryview(data)
    start = np.frombuffer(message, np.uint8).ctypes.data
    for value in unpack(message, type(None)).values.values():
        if value.buffer.nbytes:
            offset = np.frombuffer(value.buffer, np.uint8).ctypes.data - start
            assert offset % limits.ALIGNMENT_BYTES == 0


def test_more_than_two_gib_in_one_tensor() -> None:
    """Lengths are not cut to 32 bits; neither side copies to find them (fault 71)."""
    array = np.zeros((1 << 31) + 4096, np.uint8)  # pages that nobody touches take no memory
    packed = pack(None, {"x": array})
    assert packed.length == sum(memoryview(part).nbytes for part in packed.parts)
    assert array.nbytes < packed.length <= size_bound(array.nbytes)
    message = np.zeros(packed.length, np.uint8)
    head = b"".join(bytes(part) for part in packed.parts[:-1])
    message[: len(head)] = np.frombuffer(head, np.uint8)
    assert unpack(message.data, type(None)).values["x"].shape == array.shape


class Size(NamedTuple):
    """A record that is a NamedTuple."""

    width: int
    height: int


@frozen
class Clip:
    """A record that is an attrs class, with another inside."""

    size: Size
    frames: list[bytes]
    note: str | None = None


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(limits.INTEGER_MIN, limits.INTEGER_MAX)
    | st.floats(allow_nan=False)
    | st.text(max_size=2000)
    | st.binary(max_size=2000),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@given(plain_values)
@settings(deadline=None)
def test_plain_values_arrive_as_they_were(value: Any) -> None:
    """Texts, bytes, numbers, lists, maps and tuples keep their types; tuples do not become lists."""
    received = value_from_bytes(sent(value))
    assert repr(received) == repr(value)


def test_records_arrive_as_objects_of_their_class() -> None:
    """Objects of attrs classes and NamedTuples are built again, inside each other, too."""
    spec = type_spec(Clip, "test")
    clip = Clip(Size(4, 3), [b"x" * 3000, b""])
    assert value_from_bytes(sent(clip), spec) == clip
    assert type(value_from_bytes(sent(clip), spec).size) is Size


def test_records_of_unknown_classes_arrive_as_maps() -> None:
    """A client that never imported the workflow gets the fields, and no class is looked for by name."""

    @frozen
    class Hidden:
        number: int

    assert value_from_bytes(sent(Hidden(3))) == {"number": 3}


def test_received_values_can_be_passed_on_unopened() -> None:
    """A forwarded message is packed from what still lies in the first, to the same values."""
    values = {"t": np.arange(9).reshape(3, 3).T, "c": Clip(Size(1, 2), [b"y" * 4000]), "s": "z" * 3000}
    first = b"".join(pack(None, values).parts)
    again = b"".join(pack(None, unpack(memoryview(first), type(None)).values).parts)
    assert again == first


@pytest.mark.parametrize(
    ("dtype", "spec"),
    [("<f4", TORCH), (">f4", TORCH), (">i8", TENSOR), ("<f4", TENSOR)],
)
def test_numpy_becomes_torch_where_the_signature_says_so(dtype: str, spec: TypeSpec) -> None:
    """Values are kept, byte order is torch's; ``Tensor`` keeps numpy for what torch lacks."""
    array = np.arange(6).astype(dtype).reshape(2, 3)
    received = value_from_bytes(sent(array), spec)
    assert np.array_equal(np.asarray(received), array)
    assert isinstance(received, torch.Tensor) == (spec == TORCH or not dtype.startswith(">"))


def test_tensors_are_numpy_where_torch_was_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """``Tensor`` in a process without torch: numpy, and for dtypes that it lacks a hint at the extra."""
    monkeypatch.setattr(_torch, "is_imported", lambda: False)
    assert isinstance(value_from_bytes(sent(torch.ones(3)), TENSOR), np.ndarray)
    for name in sorted(NUMPY_LACKS & set(TORCH_DTYPES)):
        data = sent(torch.zeros(4, dtype=torch.uint8).view(getattr(torch, name)))
        with pytest.raises(CodecError, match=r"\.\[diffusion\]"):
            value_from_bytes(data, TENSOR)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array([object()]), "dtype object"),
        (np.zeros(2, [("a", "i4"), ("b", "f4")]), "structured"),
        (np.ma.masked_array([1, 2], [False, True]), "mask"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(8, dtype=torch.uint8).view(getattr(torch, UNSENDABLE)), "uint1"),
        ({"a": [1, {2}]}, r"value\['a'\]\[1\]: a builtins.set"),
        ({1: 2}, "key 1"),
        (1 << 64, "65 bits"),
        ("\ud800", "no form"),
        ("\ud800" * 2000, "Unicode"),
        (memoryview(bytes(10))[::2], "side by side"),
        (list(range(limits.TREE_NODES_MAX)), "use a tensor"),
        ([b"x" * 2000] * (limits.BUFFERS_MAX + 1), "more than 1024 tensors"),
    ],
)
def test_what_cannot_travel_is_named(value: Any, words: str) -> None:
    """Objects, structured and masked arrays, sparse and meta tensors: an error that says which and where."""
    with pytest.raises(CodecError, match=words):
        value_to_bytes(value)


def test_a_value_inside_itself_is_refused() -> None:
    """A list that holds itself ends in an error, not in a full stack."""
    knot: list[Any] = []
    knot.append(knot)
    with pytest.raises(CodecError, match="in itself"):
        value_to_bytes(knot)


def test_a_value_of_another_type_is_refused() -> None:
    """What arrives is compared with the signature before anything is built."""
    with pytest.raises(CodecError, match=r"a tensor .* where Size"):
        value_from_bytes(sent(np.ones(3)), type_spec(Size, "test"))
    with pytest.raises(CodecError, match="the str 'x' where Tensor is wanted"):
        value_from_bytes(sent("x"), TENSOR)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_by_name() -> None:
    """One of the strided layout says so only if it is asked."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(CodecError, match=r"^x\[0\]: a nested tensor has no form on the wire"):
        pack(None, {"x": [nested]})
