"""What anybody's code made, as texts and plain values of bounded size: for errors and reports.

Nothing here raises for what it is given, but ``plain_strictly``, which says so: a ``__str__``, a
``__repr__`` or an attribute of a user's object may raise, return nonsense or megabytes.
"""

import reprlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Final

from onepiece.limits import (
    ERROR_CAUSE_BYTES_MAX,
    ERROR_SHOWN_BYTES_MAX,
    ERROR_TEXT_BYTES_MAX,
    INTEGER_MAX,
    INTEGER_MIN,
)

_CUT: Final = " ... "
_DEPTH_MAX: Final = 8
_NODE_BYTES: Final = 8
_NAME_BYTES_MAX: Final = 200
_MEMBERS_MAX: Final = 8
_MEMBER_BYTES_MAX: Final = 500

_repr: Final = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 200


class NotPlain(Exception):  # noqa: N818 - named by what it says of a value
    """A part of a value is not plain, or the value is too large; the text names the part."""


def head(text: str, bytes_max: int) -> str:
    r"""The text; of one that takes more than this as UTF-8 the beginning, which says so.

    A surrogate, which has no form in UTF-8, becomes ``\udc80``: errors quote broken texts and file names
    too, and telling of them must not fail.
    """
    text = str.__str__(text)
    data = text[: bytes_max + 1].encode("utf-8", "backslashreplace")
    if len(data) <= bytes_max:
        return data.decode()
    mark = f"{_CUT}({len(text)} characters in all)"
    return data[: bytes_max - len(mark)].decode("utf-8", "ignore") + mark


def tail(text: str, bytes_max: int) -> str:
    """As ``head``, but of a text that is too long the end."""
    data = text[-bytes_max - 1 :].encode("utf-8", "backslashreplace")
    if len(data) <= bytes_max:
        return data.decode()
    return _CUT + data[len(_CUT) - bytes_max :].decode("utf-8", "ignore")


def shown(value: Any) -> str:
    """The value as ``repr`` shows it, shortened."""
    return head(_guarded(lambda: _repr.repr(value), value), ERROR_SHOWN_BYTES_MAX)


def text_of(value: Any, bytes_max: int = ERROR_TEXT_BYTES_MAX) -> str:
    """The value as ``str`` shows it, shortened."""
    return head(_guarded(lambda: str(value), value), bytes_max)


def attribute(value: Any, name: str) -> Any:
    """An attribute; None if there is none, or asking for it raises."""
    try:
        return getattr(value, name, None)
    except BaseException:  # noqa: BLE001 - a property is anybody's code
        return None


def described(error: BaseException, bytes_max: int = ERROR_CAUSE_BYTES_MAX) -> str:
    """``ValueError: what it says``, and of a group what its members say."""
    return head(_described(error, bytes_max, 0), bytes_max)


def _described(error: BaseException, bytes_max: int, depth: int) -> str:
    said = f"{kind_name(error)}: {text_of(error, bytes_max - _NAME_BYTES_MAX - 2)}"
    if not isinstance(error, BaseExceptionGroup) or depth > _DEPTH_MAX:
        return said
    members = attribute(error, "exceptions")
    members = members if isinstance(members, tuple) else ()
    inside = [_described(member, _MEMBER_BYTES_MAX, depth + 1) for member in members[:_MEMBERS_MAX]]
    if len(members) > _MEMBERS_MAX:
        inside.append(f"{len(members) - _MEMBERS_MAX} more")
    return f"{said}: {'; '.join(inside)}"


def kind_name(value: Any) -> str:
    """The name of the value's class."""
    return head(type.__dict__["__name__"].__get__(type(value)), _NAME_BYTES_MAX)


def trace_of(error: BaseException, bytes_max: int = ERROR_CAUSE_BYTES_MAX) -> str:
    """The end of the error's traceback; long lines are shortened, so that some frames are in it."""
    lines = _guarded(lambda: "".join(traceback.format_exception(error)), error).split("\n")
    return tail("\n".join(head(line, ERROR_SHOWN_BYTES_MAX) for line in lines), bytes_max)


def _guarded(show: Callable[[], str], value: Any) -> str:
    try:
        return str.__str__(show())  # an exact one, where it is of a class of somebody's own
    except BaseException as error:  # noqa: BLE001 - anybody's code may raise anything, SystemExit too
        return f"<{kind_name(value)} that cannot be shown: {kind_name(error)} in doing so>"


def plain(value: Any, bytes_max: int) -> Any:
    """The value as JSON and CBOR can hold it; what neither can is shown as ``repr`` does.

    What stands behind ``bytes_max`` is left out, with " ... " in its place.
    """
    try:
        return _Plain(bytes_max, is_strict=False).of(value, "value")
    except BaseException:  # noqa: BLE001 - what lies about its class, say
        return shown(value)


def plain_strictly(value: Any, bytes_max: int, what: str) -> Any:
    """As ``plain``, but raises ``NotPlain`` where that would change the value, which it calls ``what``."""
    return _Plain(bytes_max, is_strict=True).of(value, what)


class _Plain:
    """Copies one value."""

    def __init__(self, bytes_max: int, *, is_strict: bool) -> None:
        self._bytes_max = bytes_max
        self._left = bytes_max
        self._is_strict = is_strict

    def of(self, value: Any, path: str, depth: int = 0) -> Any:
        self._take(_NODE_BYTES, path)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            number = int.__index__(value)
            if INTEGER_MIN <= number <= INTEGER_MAX:
                return number
        elif isinstance(value, float):
            return float.__float__(value)
        elif isinstance(value, str):
            return self._text(value, path)
        elif isinstance(value, bytes | bytearray):
            self._take(len(value), path)
            return bytes(value) if self._left >= 0 else f"({len(value)} bytes)"
        elif isinstance(value, list | tuple) and depth < _DEPTH_MAX:
            return list(self._items(value, path, depth + 1))
        elif isinstance(value, dict) and depth < _DEPTH_MAX:
            return dict(self._entries(value, path, depth + 1))
        return self._other(value, path)

    def _items(self, value: list[Any] | tuple[Any, ...], path: str, depth: int) -> Iterator[Any]:
        iterate = list.__iter__ if isinstance(value, list) else tuple.__iter__
        for index, item in enumerate(iterate(value)):  # type: ignore[arg-type]  # it is the value's own
            if self._left <= 0:
                yield _CUT
                return
            yield self.of(item, f"{path}[{index}]", depth)

    def _entries(self, value: dict[Any, Any], path: str, depth: int) -> Iterator[tuple[str, Any]]:
        for key, item in list(dict.items(value)):
            if self._left <= 0:
                yield _CUT, _CUT
                return
            if isinstance(key, str):
                name = self._text(key, path)
            elif self._is_strict:
                raise NotPlain(f"{path} has the key {shown(key)}, which is no text")
            else:
                name = text_of(key, ERROR_SHOWN_BYTES_MAX)
            yield name, self.of(item, f"{path}.{name[:40]}", depth)

    def _text(self, value: str, path: str) -> str:
        if self._is_strict:
            text = head(value, max(0, self._left) + _NODE_BYTES)  # enough to see that it is too much
            self._take(max(len(value), len(text.encode())), path)
            return text
        text = head(value, max(ERROR_SHOWN_BYTES_MAX, min(self._left, ERROR_TEXT_BYTES_MAX)))
        self._take(len(text.encode()), path)
        return text

    def _other(self, value: Any, path: str) -> str:
        if self._is_strict:
            raise NotPlain(
                f"{path} is {shown(value)}, a {kind_name(value)}: give None, bool, int (of 64 bits), float,"
                f" str, bytes, or lists and dicts of these, at most {_DEPTH_MAX} deep"
            )
        text = shown(value)
        self._take(len(text.encode()), path)
        return text

    def _take(self, count: int, path: str) -> None:
        self._left -= count
        if self._left < 0 and self._is_strict:
            raise NotPlain(f"{path} is too much: {self._bytes_max} bytes at most in all")
