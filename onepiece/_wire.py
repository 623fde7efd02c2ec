"""Values as they lie in a received message: leaves that point into its bytes, copied by nobody yet."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from attrs import field, frozen

if TYPE_CHECKING:  # whoever only defines stages is spared the transports
    from transports.device_memory import DeviceSpan

Wire: TypeAlias = Any
"""None, bool, int, float, str, bytes, the four classes below, and lists, dicts and tuples of them."""

Buffer: TypeAlias = Union[memoryview, "DeviceSpan"]
"""Bytes of a message, in the host's memory or in a device's."""


def in_host(buffer: Buffer) -> memoryview:
    """The bytes in the host's memory: as they lie there, or a copy; raises ``DeviceError`` of transports."""
    return buffer if isinstance(buffer, memoryview) else memoryview(buffer.to_host())


@frozen
class WireTensor:
    """A tensor's elements, in C order."""

    dtype: str
    shape: tuple[int, ...]
    buffer: Buffer = field(repr=False)


@frozen
class WireBytes:
    """Bytes too long for the header."""

    buffer: Buffer = field(repr=False)


@frozen
class WireText:
    """Text too long for the header, as UTF-8."""

    buffer: Buffer = field(repr=False)


@frozen
class WireRecord:
    """An attrs object or NamedTuple: the name of its class and its fields."""

    name: str
    fields: Mapping[str, Wire]
