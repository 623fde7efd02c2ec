"""The tree of values in a message's header, whose large leaves lie in buffers behind it.

::

    None bool int float            themselves
    str, bytes of <= 1 KiB         themselves
    list, dict with str keys       arrays and maps of trees
    tuple                          tag TUPLE  [tree, ...]
    attrs object, NamedTuple       tag RECORD ["module:qualname", {field: tree}]
    longer str, bytes              tag TEXT, BYTES  number of the buffer
    tensor                         tag TENSOR [number of the buffer, dtype, shape]

Every buffer belongs to exactly one leaf: a small message that names one large buffer many times
would otherwise grow when it is materialised.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from onepiece import _on_device, _torch, limits
from onepiece._annotations import record_fields, record_name
from onepiece._cbor import ARRAY_TYPES, MAP_TYPES, CBORTag
from onepiece._wire import Buffer, Wire, WireBytes, WireRecord, WireTensor, WireText
from onepiece.errors import CodecError
from onepiece.tensor import item_bytes, numpy_buffer, numpy_wire_name

# Unassigned numbers of the range that anybody may use; two bytes each on the wire.
TUPLE: Final = 20301
RECORD: Final = 20302
TEXT: Final = 20303
BYTES: Final = 20304
TENSOR: Final = 20305


class TreeWriter:
    """Turns values into trees and collects the buffers that belong beside them.

    Args:
        inline_bytes_max: Texts and bytes up to this length stand in the tree.
        leaves_on_device: The buffer of a tensor on a GPU is its memory there, and no copy in the host's.
    """

    def __init__(
        self, inline_bytes_max: int = limits.INLINE_BYTES_MAX, *, leaves_on_device: bool = False
    ) -> None:
        self._inline_bytes_max = inline_bytes_max
        self._leaves_on_device = leaves_on_device
        self.buffers: list[bytes | Buffer] = []
        self._nodes = 0

    def write(self, value: Any, path: str, depth: int = 0) -> Any:
        """The tree of one value; raises ``CodecError`` naming the part that cannot travel."""
        self._nodes += 1
        if self._nodes > limits.TREE_NODES_MAX:
            raise CodecError(f"{path}: more than {limits.TREE_NODES_MAX} values in one message; use a tensor")
        if depth > limits.TREE_DEPTH_MAX:
            raise CodecError(f"{path}: nested more than {limits.TREE_DEPTH_MAX} deep (or in itself)")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return _bounded_integer(value, path)
        if isinstance(value, float):
            return float(value)
        if isinstance(value, str):
            return self._write_text(value, path)
        if isinstance(value, bytes | bytearray | memoryview):
            return self._write_bytes(value, path)
        if isinstance(value, np.ndarray) or _torch.is_tensor(value):
            return self._write_tensor(value, path)
        return self._write_container(value, path, depth + 1)

    def _write_container(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if isinstance(value, WireTensor | WireBytes | WireText):
            return self._write_wire(value)
        if isinstance(value, WireRecord):
            return CBORTag(RECORD, [value.name, self._write_fields(value.fields, path, depth)])
        if kind is list:
            return [self.write(item, f"{path}[{index}]", depth) for index, item in enumerate(value)]
        if kind is tuple:
            return CBORTag(TUPLE, [self.write(item, f"{path}[{i}]", depth) for i, item in enumerate(value)])
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str):
                    raise CodecError(f"{path}: the key {key!r} is no str")
            return {str(key): self.write(item, f"{path}[{key!r}]", depth) for key, item in value.items()}
        if isinstance(value, np.generic):
            raise CodecError(f"{path}: a {kind.__name__} of numpy; send value.item() or numpy.asarray(value)")
        names = record_fields(kind)
        if names is None:
            raise CodecError(
                f"{path}: a {kind.__module__}.{kind.__qualname__} has no form on the wire; make it an attrs"
                " class or NamedTuple of plain values and tensors"
            )
        fields = {name: getattr(value, name) for name in names}
        return CBORTag(RECORD, [record_name(kind), self._write_fields(fields, path, depth)])

    def _write_fields(self, fields: Mapping[str, Any], path: str, depth: int) -> dict[str, Any]:
        return {name: self.write(item, f"{path}.{name}", depth) for name, item in fields.items()}

    def _write_text(self, value: str, path: str) -> Any:
        if len(value) <= self._inline_bytes_max // 4:  # a character takes up to four bytes
            return str(value)
        try:
            data = value.encode()
        except UnicodeEncodeError as error:
            raise CodecError(f"{path}: the text is no valid Unicode: {error}") from error
        return str(value) if len(data) <= self._inline_bytes_max else CBORTag(TEXT, self._add(data))

    def _write_bytes(self, value: bytes | bytearray | memoryview, path: str) -> Any:
        view = memoryview(value)
        if not view.c_contiguous:
            raise CodecError(f"{path}: a memoryview whose bytes do not lie side by side; send bytes(view)")
        if view.nbytes <= self._inline_bytes_max:
            return bytes(view)
        return CBORTag(BYTES, self._add(view.cast("B")))

    def _write_tensor(self, value: Any, path: str) -> CBORTag:
        buffer: Buffer
        try:
            if isinstance(value, np.ndarray):
                if isinstance(value, np.ma.MaskedArray):
                    raise CodecError("a masked array has no form on the wire; send its data and its mask")
                name, buffer = numpy_wire_name(value.dtype), numpy_buffer(value)
            else:
                name, buffer = _torch.wire_name(value), self._buffer_of(value)
        except CodecError as error:
            raise CodecError(f"{path}: {error.message}") from error
        return CBORTag(TENSOR, [self._add(buffer), name, list(value.shape)])

    def _buffer_of(self, tensor: Any) -> Buffer:
        if self._leaves_on_device and _torch.is_on_gpu(tensor):
            return _on_device.span_of(tensor)
        return _torch.buffer(tensor)

    def _write_wire(self, value: WireTensor | WireBytes | WireText) -> CBORTag:
        number = self._add(value.buffer)
        if isinstance(value, WireTensor):
            return CBORTag(TENSOR, [number, value.dtype, list(value.shape)])
        return CBORTag(BYTES if isinstance(value, WireBytes) else TEXT, number)

    def _add(self, buffer: bytes | Buffer) -> int:
        if len(self.buffers) == limits.BUFFERS_MAX:
            raise CodecError(f"more than {limits.BUFFERS_MAX} tensors and long values in one message")
        self.buffers.append(buffer)
        return len(self.buffers) - 1


def _bounded_integer(value: int, path: str) -> int:
    if not limits.INTEGER_MIN <= value <= limits.INTEGER_MAX:
        raise CodecError(f"{path}: an int of {value.bit_length()} bits; 64 travel at most")
    return int(value)


class TreeReader:
    """Turns trees from the wire into values whose leaves point into the buffers; trusts nothing."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._buffers: dict[int, Buffer] = dict(enumerate(buffers))
        self._nodes = 0

    def read(self, tree: Any, depth: int = 0) -> Wire:
        """The value of one tree; raises ``CodecError`` if it breaks any rule."""
        self._nodes += 1
        if self._nodes > limits.TREE_NODES_MAX:
            raise CodecError(f"more than {limits.TREE_NODES_MAX} values in one message")
        if depth > limits.TREE_DEPTH_MAX:
            raise CodecError(f"a value nested more than {limits.TREE_DEPTH_MAX} deep")
        kind = type(tree)
        if tree is None or kind in {bool, float, str, bytes}:
            return tree
        if kind is int:
            return _bounded_integer(tree, "header")
        if kind in ARRAY_TYPES:
            return [self.read(item, depth + 1) for item in tree]
        if kind in MAP_TYPES:
            return self._read_map(tree, depth)
        if kind is CBORTag:
            return self._read_tagged(tree.tag, tree.value, depth)
        raise CodecError(f"a {kind.__name__} is no part of the format")

    def finish(self) -> None:
        """Every buffer must have found its leaf."""
        if self._buffers:
            raise CodecError(f"{len(self._buffers)} buffers belong to no value")

    def _read_map(self, tree: Any, depth: int) -> dict[str, Wire]:
        if type(tree) not in MAP_TYPES or not all(type(key) is str for key in tree):
            raise CodecError("a map with keys that are no text")
        return {key: self.read(item, depth + 1) for key, item in tree.items()}

    def _read_tagged(self, tag: int, inside: Any, depth: int) -> Wire:
        if tag == TEXT:
            return WireText(self._take(inside))
        if tag == BYTES:
            return WireBytes(self._take(inside))
        parts: Sequence[Any] = inside if type(inside) in ARRAY_TYPES else ()
        if tag == TUPLE and parts is inside:
            return tuple(self.read(item, depth + 1) for item in parts)
        if tag == TENSOR and len(parts) == 3:
            number, dtype, shape = parts
            if type(dtype) is str and type(shape) in ARRAY_TYPES:
                return self._read_tensor(number, dtype, shape)
        if tag == RECORD and len(parts) == 2 and type(parts[0]) is str:
            return WireRecord(parts[0], self._read_map(parts[1], depth))
        raise CodecError(f"the tag {tag} with a {type(inside).__name__} is no part of the format")

    def _read_tensor(self, number: Any, dtype: str, shape: Sequence[Any]) -> WireTensor:
        if len(shape) > limits.TENSOR_DIMENSIONS_MAX:
            raise CodecError(f"a tensor of {len(shape)} dimensions; {limits.TENSOR_DIMENSIONS_MAX} at most")
        elements = 1
        size = extent = item_bytes(dtype)  # as if lengths of 0 were 1: libraries multiply the others, too
        for length in shape:
            if type(length) is not int or length < 0:
                raise CodecError(f"a tensor with the dimension {length!r}")
            elements *= length
            extent *= max(length, 1)
        if extent > limits.TENSOR_ELEMENTS_MAX:
            raise CodecError("a tensor whose dimensions multiply to more than 63 bits")
        buffer = self._take(number)
        wanted = elements * size
        if wanted != len(buffer):
            raise CodecError(
                f"a tensor {dtype}{list(shape)} of {wanted} bytes with a buffer of {len(buffer)}"
            )
        return WireTensor(dtype, tuple(shape), buffer)

    def _take(self, number: Any) -> Buffer:
        if type(number) is not int or number not in self._buffers:
            raise CodecError(f"the buffer {number!r} does not exist, or belongs to another value already")
        return self._buffers.pop(number)
