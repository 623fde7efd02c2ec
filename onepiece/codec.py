"""From Python values to bytes and back: control messages and values with tensors.

Nothing that arrives can run code or name a class to build: there is no pickle here, a control message
names one of the classes registered by this process, a record one that an annotation of this process
named. Every length is compared with the bytes that are there before memory is taken for it.

*Control messages* are CBOR: ``[name of the class, {field: value}]``, checked field by field.

*Values* travel as a head and buffers::

    0        4              8
    | "OPV1" | head's bytes | head (CBOR)                      | zeros to 64 |
    | buffer 0 ...                                             | zeros to 64 |
    | buffer 1 ...                                             |

    head = [message header or null, {name: tree of a value}, [bytes of buffer 0, bytes of buffer 1, ...]]

A tensor's buffer holds its elements in C order and nothing else. On the way out it is the tensor's own
memory wherever that lies so already; on the way in ``unpack`` copies nothing, and ``materialise``
copies once, from the message to the device. Whether bytes were damaged on the way is the ring's
business (it hashes); here damaged bytes give ``CodecError`` or another value, never anything else.
"""

import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from attrs import frozen

from onepiece import _cbor, limits
from onepiece._control import (
    decode_control,
    encode_control,
    header_from_tree,
    header_to_tree,
    register,
)
from onepiece._materialise import materialise, select
from onepiece._tree import TreeReader, TreeWriter
from onepiece._wire import Wire, WireBytes, WireRecord, WireTensor, WireText
from onepiece.errors import CodecError, InvalidInput
from onepiece.types import ANY, TypeSpec

if TYPE_CHECKING:  # whoever only defines stages is spared the transports
    from transports.operations import Bytes

__all__ = [
    "VALUE_CONTENT_TYPE",
    "CodecError",
    "Packed",
    "Unpacked",
    "Wire",
    "WireBytes",
    "WireRecord",
    "WireTensor",
    "WireText",
    "decode_control",
    "encode_control",
    "materialise",
    "pack",
    "register",
    "select",
    "unpack",
    "value_from_bytes",
    "value_to_bytes",
]

VALUE_CONTENT_TYPE: Final = "application/vnd.onepiece.value"
"""What ``value_to_bytes`` makes, as HTTP calls it."""

_MAGIC: Final = b"OPV1"
_PREFIX: Final = struct.Struct("<4sI")
_ZEROS: Final = bytes(limits.ALIGNMENT_BYTES)
_SOLE_VALUE: Final = "value"

Header = TypeVar("Header")


@frozen
class Packed:
    """A message ready to be sent: the concatenation of ``parts``, ``length`` bytes in all."""

    parts: "tuple[Bytes, ...]"
    length: int


@frozen
class Unpacked(Generic[Header]):
    """A received message: its header, and its values, which still lie in the view it came from."""

    header: Header
    values: Mapping[str, Wire]


def pack_inputs(inputs: Mapping[str, Any]) -> Packed:
    """A request's inputs without a header; raises ``InvalidInput`` naming the one that has no form."""
    try:
        return pack(None, inputs)
    except CodecError as error:
        for name, value in inputs.items():
            try:
                pack(None, {name: value})
            except CodecError as why:
                raise InvalidInput(f"input {name!r}: {why.message}", field=name) from error
        raise InvalidInput(f"the inputs: {error.message}") from error  # only together they are too much


def pack(header: object, values: Mapping[str, Any]) -> Packed:
    """Lay out a message without copying its tensors.

    Args:
        header: An object of a registered class, or None.
        values: Python values by name, or values of ``unpack`` to pass on as they are.

    Returns:
        Parts that refer to the memory of the tensors in ``values``: these must not change until the
        message has left.

    Raises:
        CodecError: A value has no form on the wire; it and the part of it are named.
    """
    writer = TreeWriter()
    trees = {name: writer.write(value, name) for name, value in values.items()}
    buffers = [memoryview(buffer) for buffer in writer.buffers]
    lengths = [buffer.nbytes for buffer in buffers]
    head = _cbor.encode([header_to_tree(header), trees, lengths], limits.HEADER_BYTES_MAX, "the header")
    parts: list[Bytes] = [_PREFIX.pack(_MAGIC, len(head)) + head]
    length = _PREFIX.size + len(head)
    for buffer in buffers:
        if not buffer.nbytes:
            continue
        padding = -length % limits.ALIGNMENT_BYTES
        if padding:
            parts.append(_ZEROS[:padding])
        parts.append(buffer)
        length += padding + buffer.nbytes
    return Packed(tuple(parts), length)


def unpack(view: memoryview, header_type: type[Header]) -> Unpacked[Header]:
    """Read a message in place.

    Args:
        view: The message, exactly. The values refer to it: it must stay until they are materialised
            or dropped.
        header_type: The registered class that the header must be of; ``type(None)`` for none.

    Raises:
        CodecError: The bytes are no such message.
    """
    head, body_start, data = _head(view)
    match head:
        case [header_tree, dict(trees), list(lengths)]:
            pass
        case _:
            raise CodecError("the head is not [header, values, lengths]")
    header = header_from_tree(header_tree, header_type)
    reader = TreeReader(list(_slices(data, body_start, lengths)))
    values = reader.read(trees)
    reader.finish()
    return Unpacked(header, values)


def _head(view: memoryview) -> tuple[Any, int, memoryview]:
    """The head, where it ends, and the message as bytes."""
    if not view.c_contiguous:
        raise CodecError("a message must lie in one piece")
    data = view.cast("B").toreadonly() if view.readonly else view.cast("B")
    if data.nbytes < _PREFIX.size:
        raise CodecError(f"a message of {data.nbytes} bytes is cut short")
    magic, head_bytes = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise CodecError(f"a message begins with {magic!r} where {_MAGIC!r} is wanted")
    if head_bytes > data.nbytes - _PREFIX.size:
        raise CodecError(f"a head of {head_bytes} bytes in a message of {data.nbytes}")
    end = _PREFIX.size + head_bytes
    return _cbor.decode(data[_PREFIX.size : end], limits.HEADER_BYTES_MAX, "the head"), end, data


def _slices(data: memoryview, position: int, lengths: list[Any]) -> Iterator[memoryview]:
    """The buffers behind the head; they must fill the message exactly."""
    if len(lengths) > limits.BUFFERS_MAX:
        raise CodecError(f"{len(lengths)} buffers in a message; {limits.BUFFERS_MAX} at most")
    for length in lengths:
        if type(length) is not int or length < 0:
            raise CodecError(f"a buffer of {length!r} bytes")
        if length:
            position += -position % limits.ALIGNMENT_BYTES
        if length > data.nbytes - position:
            raise CodecError(f"a buffer of {length} bytes in a message of {data.nbytes}")
        yield data[position : position + length]
        position += length
    if position != data.nbytes:
        raise CodecError(f"a message of {data.nbytes} bytes ends at {position}")


def value_to_bytes(value: Any) -> "list[Bytes]":
    """One value on its own, for results and HTTP: the pieces to write one behind the other.

    Raises:
        CodecError: The value, or a part of it that is named, has no form on the wire.
    """
    return list(pack(None, {_SOLE_VALUE: value}).parts)


def value_from_bytes(data: "Bytes", spec: TypeSpec | None = None, device: str = "cpu") -> Any:
    """Read what ``value_to_bytes`` wrote; nothing refers to ``data`` afterwards.

    Args:
        data: The bytes.
        spec: The type it must have; None takes any.
        device: Where torch tensors are made.

    Raises:
        CodecError: The bytes are no value, or none of this type.
    """
    values = unpack(memoryview(data), type(None)).values
    if values.keys() != {_SOLE_VALUE}:
        raise CodecError(f"a message with the values {sorted(values)[:8]} where one is wanted")
    return materialise(values[_SOLE_VALUE], spec or ANY, device)
