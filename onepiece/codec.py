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

The buffers may lie in a device's memory (``pack_on_device``, ``Apart``): one behind the other as they would
here, while the head alone is in the host's.
"""

import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

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
from onepiece._wire import Buffer, Wire, WireBytes, WireRecord, WireTensor, WireText, in_host
from onepiece.errors import CodecError, InvalidInput
from onepiece.types import ANY, TypeSpec

if TYPE_CHECKING:  # whoever only defines stages is spared the transports
    from transports.device_memory import DeviceSpan
    from transports.operations import Bytes, Content

__all__ = [
    "VALUE_CONTENT_TYPE",
    "Apart",
    "CodecError",
    "Packed",
    "PackedAnywhere",
    "Unpacked",
    "Wire",
    "WireBytes",
    "WireRecord",
    "WireTensor",
    "WireText",
    "decode_control",
    "encode_control",
    "head_bytes",
    "in_host",
    "materialise",
    "pack",
    "pack_on_device",
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
class PackedAnywhere:
    """A message ready to be sent: the concatenation of ``parts``, ``length`` bytes in all.

    Some of them may lie in a device's memory.
    """

    parts: "tuple[Content, ...]"
    length: int


@frozen
class Packed(PackedAnywhere):
    """One that lies in the host's memory."""

    parts: "tuple[Bytes, ...]"
    length: int


@frozen
class Apart:
    """A received message whose buffers lie in a device's memory: the head, and what follows its zeros."""

    head: memoryview
    body: "DeviceSpan"

    def __len__(self) -> int:
        return self._body_start + len(self.body)

    @property
    def _body_start(self) -> int:
        return len(self.head) + (padding_behind(len(self.head)) if len(self.body) else 0)

    def part(self, start: int, end: int) -> Buffer:
        """Some bytes of the body, counted as in the whole message."""
        begin = self._body_start
        return self.body[start - begin : end - begin] if end > start else memoryview(b"")

    def to_host(self) -> memoryview:
        """A writable copy of the whole message in the host's memory; raises ``DeviceError`` of transports."""
        zeros = bytes(self._body_start - len(self.head))
        return memoryview(bytearray().join((self.head, zeros, self.body.to_host())))


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
    parts, length = _laid_out(TreeWriter(), header, values)
    return Packed(cast("tuple[Bytes, ...]", parts), length)  # this writer leaves nothing anywhere else


def pack_on_device(header: object, values: Mapping[str, Any]) -> PackedAnywhere:
    """As ``pack``, but tensors on GPUs stay there; blocks until they have been computed.

    Raises ``CodecError`` also if the driver refuses.
    """
    return PackedAnywhere(*_laid_out(TreeWriter(leaves_on_device=True), header, values))


def _laid_out(
    writer: TreeWriter, header: object, values: Mapping[str, Any]
) -> "tuple[tuple[Content, ...], int]":
    trees = {name: writer.write(value, name) for name, value in values.items()}
    lengths = [len(buffer) for buffer in writer.buffers]
    head = _cbor.encode([header_to_tree(header), trees, lengths], limits.HEADER_BYTES_MAX, "the header")
    parts: list[Content] = [_PREFIX.pack(_MAGIC, len(head)) + head]
    length = _PREFIX.size + len(head)
    for buffer in writer.buffers:
        if not len(buffer):
            continue
        padding = padding_behind(length)
        if padding:
            parts.append(_ZEROS[:padding])
        parts.append(buffer)
        length += padding + len(buffer)
    return tuple(parts), length


def padding_behind(length: int) -> int:
    """How many zeros stand between the first ``length`` bytes of a message and a buffer behind them."""
    return -length % limits.ALIGNMENT_BYTES


def head_bytes(begin: bytes) -> int:
    """The length of a message's head, its first eight bytes included, which ``begin`` begins with."""
    return _PREFIX.size + int(_PREFIX.unpack_from(begin)[1])


def unpack(view: "memoryview | Apart", header_type: type[Header]) -> Unpacked[Header]:
    """Read a message in place.

    Args:
        view: The message, exactly. The values refer to it: it must stay until they are materialised
            or dropped.
        header_type: The registered class that the header must be of; ``type(None)`` for none.

    Raises:
        CodecError: The bytes are no such message.
    """
    head, body_start, data = _head(view.head if isinstance(view, Apart) else view)
    if isinstance(view, Apart) and body_start != len(data):
        raise CodecError(f"a head of {body_start} bytes in {len(data)} beside a device")
    match head:
        case [header_tree, dict(trees), list(lengths)]:
            pass
        case _:
            raise CodecError("the head is not [header, values, lengths]")
    header = header_from_tree(header_tree, header_type)
    buffers: list[Buffer]
    if isinstance(view, Apart):
        buffers = [view.part(start, end) for start, end in _spans(body_start, len(view), lengths)]
    else:
        buffers = [data[start:end] for start, end in _spans(body_start, len(data), lengths)]
    reader = TreeReader(buffers)
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


def _spans(position: int, message_bytes: int, lengths: list[Any]) -> Iterator[tuple[int, int]]:
    """Where the buffers behind the head begin and end; they must fill the message exactly."""
    if len(lengths) > limits.BUFFERS_MAX:
        raise CodecError(f"{len(lengths)} buffers in a message; {limits.BUFFERS_MAX} at most")
    for length in lengths:
        if type(length) is not int or length < 0:
            raise CodecError(f"a buffer of {length!r} bytes")
        if length:
            position += padding_behind(position)
        if length > message_bytes - position:
            raise CodecError(f"a buffer of {length} bytes in a message of {message_bytes}")
        yield position, position + length
        position += length
    if position != message_bytes:
        raise CodecError(f"a message of {message_bytes} bytes ends at {position}")


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
