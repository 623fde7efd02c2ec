"""Tensors by name: the annotation ``Tensor``, and the element types that travel.

A dtype's *wire name* is torch's and numpy's common name (``float32``, ``bfloat16``, ``bool``), little
endian. What only numpy has keeps numpy's own spelling: ``>f4`` (big endian), ``<M8[ns]``, ``<U5``.
"""

import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import numpy as np

from onepiece.errors import CodecError

assert sys.byteorder == "little", "tensors travel in the hosts' byte order, which is little endian"

if TYPE_CHECKING:
    Tensor: TypeAlias = Any
else:

    class Tensor:
        """A dense array of numbers, whichever library holds it.

        As an annotation of a stage or workflow it accepts ``torch.Tensor`` and ``numpy.ndarray``. A
        stage receives a ``torch.Tensor`` on its device if its process has imported torch, else a
        ``numpy.ndarray``. Type checkers take it for ``Any``.
        """

        def __new__(cls) -> Self:
            """Refuse: it names a type and holds nothing."""
            raise TypeError("onepiece.Tensor is an annotation; make a torch.Tensor or a numpy.ndarray")


ITEM_BYTES: Final[Mapping[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,  # two elements in a byte, which torch counts as one
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Wire names that need no parsing, and the bytes of one element."""

NUMPY_LACKS: Final = frozenset(
    name for name in ITEM_BYTES if name.startswith(("bfloat", "float8", "float4")) or name == "complex32"
)

# Kinds: booleans, integers, floats, complex, time, fixed-length bytes and text. No objects, no records.
_NUMPY_SPELLING: Final = re.compile(r"[<>|][biufcmMSU][0-9]{1,9}(\[[0-9]{0,6}[a-zA-Z]{1,2}\])?")


def numpy_wire_name(dtype: np.dtype[Any]) -> str:
    """The wire name of a numpy dtype; raises ``CodecError`` for those that cannot travel."""
    if dtype.isnative and dtype.name in ITEM_BYTES:
        return dtype.name
    if not _NUMPY_SPELLING.fullmatch(dtype.str) or dtype.itemsize == 0:
        raise CodecError(
            f"numpy dtype {dtype!s} has no form on the wire; send numbers, text or time of a fixed size,"
            " and the fields of a structured array as arrays of their own"
        )
    return dtype.str


def item_bytes(name: str) -> int:
    """The bytes of one element of the dtype with this wire name; raises ``CodecError`` if unknown."""
    known = ITEM_BYTES.get(name)
    return known if known is not None else _parse_numpy_spelling(name).itemsize


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a wire name; raises ``CodecError`` if numpy has none."""
    if name in NUMPY_LACKS:
        raise CodecError(
            f"numpy has no dtype {name}: install the extra 'diffusion' (pip install -e '.[diffusion]')"
            " and import torch, or convert the tensor before it leaves the stage"
        )
    return np.dtype(name) if name in ITEM_BYTES else _parse_numpy_spelling(name)


def _parse_numpy_spelling(name: str) -> np.dtype[Any]:
    if not _NUMPY_SPELLING.fullmatch(name):
        raise CodecError(f"unknown dtype {name[:40]!r}")
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError) as error:
        raise CodecError(f"dtype {name!r} does not exist on this machine: {error}") from error
    if dtype.itemsize == 0 or dtype.str != name:
        raise CodecError(f"unknown dtype {name!r}")
    return dtype


def numpy_buffer(array: "np.ndarray[Any, Any]") -> memoryview:
    """The array's elements in C order: its own memory if they lie so, else a copy of just them."""
    if array.size == 0:
        return memoryview(b"")
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.ndarray).view(np.uint8).data


def numpy_from_buffer(
    name: str, shape: tuple[int, ...], buffer: memoryview, *, is_own: bool = False
) -> "np.ndarray[Any, Any]":
    """An array with the buffer's elements; the caller has checked shape against size.

    A new one, or, if the buffer ``is_own``, one over it, where it may be written to.
    """
    dtype = numpy_dtype(name)
    if is_own and buffer.nbytes and not buffer.readonly:
        array = np.frombuffer(buffer, np.uint8).view(dtype).reshape(shape)
        if array.flags.aligned:
            return array
    array = np.empty(shape, dtype)
    if array.size:
        np.copyto(array.reshape(-1).view(np.uint8), np.frombuffer(buffer, np.uint8))
    return array
