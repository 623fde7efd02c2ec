"""What a stage may put into ``ctx.report``: checked where it is called, for its author to see."""

from collections.abc import Mapping
from typing import Any

from onepiece._bounded import NotPlain, plain_strictly
from onepiece.errors import CodecError
from onepiece.limits import PREVIEW_BYTES_MAX, REPORT_BYTES_MAX


def reportable(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a report's fields: of plain values, tuples as lists.

    Raises:
        CodecError: A field is none, or all of them are too much; it is named.
    """
    try:
        copy: dict[str, Any] = plain_strictly(dict(fields), REPORT_BYTES_MAX, "report")
    except NotPlain as error:
        raise CodecError(f"{error}; see the bounds of ctx.report, and return what is no progress") from None
    return copy


def preview_of(preview: bytes) -> bytes:
    """A preview's bytes.

    Raises:
        ValueError: There are too many of them.
    """
    data = bytes(preview)
    if len(data) > PREVIEW_BYTES_MAX:
        raise ValueError(f"a preview of {len(data)} bytes; at most {PREVIEW_BYTES_MAX}: shrink it")
    return data
