"""Values as they lie in a received message: leaves that point into its bytes, copied by nobody yet."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from attrs import field, frozen

Wire: TypeAlias = Any
"""None, bool, int, float, str, bytes, the four classes below, and lists, dicts and tuples of them."""


@frozen
class WireTensor:
    """A tensor's elements, in C order."""

    dtype: str
    shape: tuple[int, ...]
    buffer: memoryview = field(repr=False)


@frozen
class WireBytes:
    """Bytes too long for the header."""

    buffer: memoryview = field(repr=False)


@frozen
class WireText:
    """Text too long for the header, as UTF-8."""

    buffer: memoryview = field(repr=False)


@frozen
class WireRecord:
    """An attrs object or NamedTuple: the name of its class and its fields."""

    name: str
    fields: Mapping[str, Wire]
