"""The owner of cbor2: bounded, strict CBOR and nothing that builds objects.

Of CBOR's types only these are let in: null, booleans, integers of 64 bits, floats, text, bytes,
arrays, maps with text keys, and the tags of ``_tree``. cbor2 knows many tags more (regular
expressions, dates, shared references that make cycles, decimals with huge exponents); each is refused
before cbor2 acts on it, and whatever it might learn in a later version is refused behind it.
"""

import io
from typing import Any, Final, NoReturn

import cbor2
from cbor2 import CBORTag

from onepiece import limits
from onepiece.errors import CodecError

__all__ = ["ARRAY_TYPES", "MAP_TYPES", "CBORTag", "decode", "encode"]

# cbor2 makes the immutable ones of what is inside a tag.
ARRAY_TYPES: Final = (list, tuple)
MAP_TYPES: Final = (dict, cbor2.frozendict)

_BUILTIN_TAGS: Final = (
    *range(6),  # dates, big integers, decimals, big floats
    *(25, 256),  # string references
    *(28, 29),  # shared references
    *(30, 35, 36, 37),  # rationals, regular expressions, MIME, UUIDs
    *(52, 54, 260, 261),  # network addresses
    *(100, 1004, 258, 43000, 55799),  # days, sets, complex numbers, self-described CBOR
)


def _refuse(_decoder: object, _immutable: object = None) -> NoReturn:
    raise CodecError("a CBOR tag that is not part of the format")


_REFUSED: Final = dict.fromkeys(_BUILTIN_TAGS, _refuse)


def encode(tree: Any, bytes_max: int, what: str) -> bytes:
    """Write a tree of the types above; raises ``CodecError`` if it is none, or too large."""
    try:
        data = cbor2.dumps(tree)
    except (cbor2.CBORError, ValueError, TypeError, RecursionError) as error:
        raise CodecError(f"{what} holds a value that has no form on the wire: {error}") from error
    if len(data) > bytes_max:
        raise CodecError(
            f"{what} takes {len(data)} bytes where at most {bytes_max} may stand;"
            " put numbers into a tensor and long data into bytes, which travel beside it"
        )
    return data


def decode(data: bytes | memoryview, bytes_max: int, what: str) -> Any:
    """Read exactly one item; raises ``CodecError`` for anything malformed, too large or too deep."""
    if len(data) > bytes_max:
        raise CodecError(f"{what} has {len(data)} bytes where at most {bytes_max} may stand")
    stream = io.BytesIO(data)
    decoder = cbor2.CBORDecoder(
        stream,
        semantic_decoders=_REFUSED,
        max_depth=limits.CBOR_DEPTH_MAX,
        allow_indefinite=False,
        allow_duplicate_keys=False,
    )
    try:
        item = decoder.decode()
    except CodecError:
        raise
    except Exception as error:  # whatever hostile bytes make cbor2 raise, they are what is wrong
        raise CodecError(f"{what} is no valid CBOR: {error}") from error
    if stream.tell() != len(data):  # the decoder leaves the stream behind the item
        raise CodecError(f"{what} has bytes behind its end")
    return item
