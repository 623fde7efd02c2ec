"""Whether a value is what a ``TypeSpec`` says: of inputs, return values, and values on the wire.

*Checking* is strict and changes nothing: what a stage returns must be of the type its signature
names. *Conforming* is for what comes from outside, as JSON has fewer types than Python: a list does
for a tuple, an object for a record, ``3`` for ``3.0``; the value that the type wants comes back.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from onepiece import _torch, limits
from onepiece._annotations import build_record, record_class, record_fields, record_name
from onepiece._wire import WireBytes, WireRecord, WireTensor, WireText
from onepiece.errors import CodecError
from onepiece.tensor import numpy_wire_name
from onepiece.types import Kind, TypeSpec

_SHOWN_CHARACTERS_MAX: Final = 60
_LITERAL_CHARACTERS_MAX: Final = 200

_PYTHON_TYPES: Final[Mapping[Kind, tuple[type, ...]]] = {
    Kind.NONE: (type(None),),
    Kind.BOOL: (bool,),
    Kind.INT: (int,),
    Kind.FLOAT: (float, int),
    Kind.STR: (str, WireText),
    Kind.BYTES: (bytes, bytearray, memoryview, WireBytes),
}


class Mismatch(Exception):  # noqa: N818 - caught inside this package, never told to anybody
    """A value is not what the type says; ``path`` leads to the part that is not."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, why)
        self.path = path
        self.why = why

    def __str__(self) -> str:
        return f"{self.path}: {self.why}" if self.path else self.why


def check_value(spec: TypeSpec, value: Any) -> str | None:
    """Why ``value`` is not of type ``spec``; None if it is. Tensors are looked at, never read.

    Args:
        spec: The type.
        value: A Python value, or one that still lies in a received message.

    Returns:
        For example ``a dict where Tensor is wanted``, or ``item 1: a str where int is wanted``.
    """
    try:
        _fit(spec, value, "", loose=False)
    except Mismatch as mismatch:
        return str(mismatch)
    return None


def conform(spec: TypeSpec, value: Any, path: str) -> Any:
    """The value as ``spec`` wants it, from one that JSON could say; raises ``Mismatch``."""
    return _fit(spec, value, path, loose=True)


def describe(value: Any) -> str:
    """A value's type, and the value itself where it is short enough to be read."""
    kind = type(value)
    if value is None:
        return "None"
    if kind in {bool, int, float, str}:
        text = repr(value) if kind is not str or len(value) <= _SHOWN_CHARACTERS_MAX else ""
        return f"the {kind.__name__} {text}" if 0 < len(text) <= _SHOWN_CHARACTERS_MAX else _article(kind)
    if isinstance(value, WireTensor):
        return f"a tensor ({value.dtype}{list(value.shape)})"
    if isinstance(value, WireRecord):
        return f"a {value.name.rpartition(':')[2]}"
    return {WireBytes: "bytes", WireText: "a str"}.get(kind) or _article(kind)


def show_value(value: Any) -> str:
    """A value of a definition as text: the same on every node, whether it knows the record's class or not.

    A long one is cut, and told from others by a hash of the whole.
    """
    text = _literal(value)
    if len(text) <= _LITERAL_CHARACTERS_MAX:
        return text
    return f"{text[:_SHOWN_CHARACTERS_MAX]}...#{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_literal(item)}' for key, item in value.items())}}}"
    if isinstance(value, WireRecord):
        name, fields = value.name, value.fields
    else:
        names = record_fields(type(value))
        if names is None and isinstance(value, tuple):
            return f"({', '.join(map(_literal, value))})"
        if names is None:
            return repr(value)
        name, fields = record_name(type(value)), {each: getattr(value, each) for each in names}
    inside = ", ".join(f"{each}={_literal(item)}" for each, item in fields.items())
    return f"{name.rpartition(':')[2]}({inside})"


def _article(kind: type) -> str:
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _refuse(spec: TypeSpec, value: Any, path: str) -> Mismatch:
    return Mismatch(path, f"{describe(value)} where {spec.definition} is wanted")


def _fit(spec: TypeSpec, value: Any, path: str, *, loose: bool) -> Any:
    kind = spec.kind
    if kind is Kind.ANY:
        if loose:
            _check_plain(value, path)
        return value
    plain = _PYTHON_TYPES.get(kind)
    if plain is not None:
        if not isinstance(value, plain) or (isinstance(value, bool) and kind is not Kind.BOOL):
            raise _refuse(spec, value, path)
        return _bounded(kind, value, path) if loose else value
    if spec.is_tensor:
        return _fit_tensor(spec, value, path)
    match kind:
        case Kind.LITERAL:
            if not any(value == each and type(value) is type(each) for each in spec.values):
                raise _refuse(spec, value, path)
            return value
        case Kind.UNION:
            return _fit_union(spec, value, path, loose=loose)
        case Kind.RECORD:
            return _fit_record(spec, value, path, loose=loose)
        case Kind.DICT:
            return _fit_dict(spec, value, path, loose=loose)
        case _:
            return _fit_sequence(spec, value, path, loose=loose)


def _bounded(kind: Kind, value: Any, path: str) -> Any:
    """An input of a plain type within its bounds, as the type wants it."""
    match kind:
        case Kind.FLOAT:
            try:
                return float(value)
            except OverflowError:
                raise Mismatch(path, "an int that is too large for a float") from None
        case Kind.INT:
            _check_plain(value, path)
        case Kind.STR:
            _check_plain(value, path)
            size = len(value.encode())
            if size > limits.TEXT_INPUT_BYTES_MAX:
                raise TooLarge(path, f"a text of {size} bytes", limits.TEXT_INPUT_BYTES_MAX)
        case Kind.BYTES:
            size = memoryview(value).nbytes
            if size > limits.BYTES_INPUT_BYTES_MAX:
                raise TooLarge(path, f"{size} bytes", limits.BYTES_INPUT_BYTES_MAX)
    return value


def _check_plain(value: Any, path: str) -> None:
    """Refuse what JSON can say and the wire can not, however deep it lies."""
    match value:
        case int() if not limits.INTEGER_MIN <= value <= limits.INTEGER_MAX:
            raise Mismatch(path, "an int of more than 64 bits")
        case str() if not _is_encodable(value):
            raise Mismatch(path, "a text with a lone surrogate, which has no form in UTF-8")
        case list() | tuple():
            for item in value:
                _check_plain(item, path)
        case dict():
            for key, item in value.items():
                _check_plain(key, path)
                _check_plain(item, path)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class TooLarge(Mismatch):
    """An input exceeds a bound."""

    def __init__(self, path: str, what: str, bound: int) -> None:
        super().__init__(path, f"{what} where at most {bound} may come")
        self.bound = bound


def _fit_tensor(spec: TypeSpec, value: Any, path: str) -> Any:
    is_wire = isinstance(value, WireTensor)
    is_array = isinstance(value, np.ndarray) and spec.kind is not Kind.TORCH
    is_torch = spec.kind is not Kind.ARRAY and _torch.is_tensor(value)
    if not (is_wire or is_array or is_torch):
        raise _refuse(spec, value, path)
    if spec.name:
        dtype = value.dtype if is_wire else _dtype_name(value)
        if dtype != spec.name:
            raise Mismatch(path, f"an array of {dtype} where {spec} is wanted")
    return value


def _dtype_name(array: "np.ndarray[Any, Any]") -> str:
    try:
        return numpy_wire_name(array.dtype)
    except CodecError:
        return str(array.dtype)


def _fit_union(spec: TypeSpec, value: Any, path: str, *, loose: bool) -> Any:
    """The strict fit goes first: 3 stays an int in ``float | int``."""
    for strictness in (False, True) if loose else (False,):
        for item in spec.items:
            try:
                fitted = _fit(item, value, path, loose=strictness)
            except TooLarge:
                raise
            except Mismatch:
                continue
            return _fit(item, fitted, path, loose=True) if loose else fitted
    raise _refuse(spec, value, path)


def _fit_record(spec: TypeSpec, value: Any, path: str, *, loose: bool) -> Any:
    fields = _fields_of(spec, value, loose=loose)
    if fields is None:
        raise _refuse(spec, value, path)
    unknown = [name for name in fields if name not in spec.names]
    if unknown:
        raise Mismatch(path, f"unknown field {unknown[0]!r}; {spec.definition} is wanted")
    types = dict(zip(spec.names, spec.items, strict=True))
    fitted = {
        name: _fit(types[name], item, _join(path, f".{name}"), loose=loose) for name, item in fields.items()
    }
    if not loose:
        return value
    cls = record_class(spec.name)
    if cls is None:
        raise Mismatch(path, f"the class {spec.name} is not known here")
    try:
        return build_record(cls, fitted)
    except (TypeError, ValueError) as error:
        raise Mismatch(path, f"{spec.definition} cannot be made: {error}") from error


def _fields_of(spec: TypeSpec, value: Any, *, loose: bool) -> Mapping[str, Any] | None:
    """A record's fields, or None if the value is no such record."""
    if isinstance(value, WireRecord):
        same = value.name == spec.name and tuple(value.fields) == spec.names
        return value.fields if same else None
    if loose and type(value) is dict:
        return value
    names = record_fields(type(value))
    if names is None or record_name(type(value)) != spec.name:
        return None
    return {name: getattr(value, name) for name in names}


def _fit_dict(spec: TypeSpec, value: Any, path: str, *, loose: bool) -> Any:
    if not isinstance(value, dict):
        raise _refuse(spec, value, path)
    _bound_items(value, path, loose=loose)
    for key in value:
        if not isinstance(key, str):
            raise Mismatch(path, f"the key {key!r} where a str is wanted")
    fitted = {
        key: _fit(spec.items[0], item, _join(path, f"[{key!r}]"), loose=loose) for key, item in value.items()
    }
    return fitted if loose else value


def _fit_sequence(spec: TypeSpec, value: Any, path: str, *, loose: bool) -> Any:
    wanted = list if spec.kind is Kind.LIST else tuple
    if not isinstance(value, (list, tuple) if loose else wanted):
        raise _refuse(spec, value, path)
    _bound_items(value, path, loose=loose)
    types = spec.items if spec.kind is Kind.TUPLE else spec.items * len(value)
    if len(types) != len(value):
        raise Mismatch(path, f"{len(value)} items where {spec} is wanted")
    fitted = (
        _fit(inner, item, _join(path, f"[{index}]"), loose=loose)
        for index, (inner, item) in enumerate(zip(types, value, strict=True))
    )
    return wanted(fitted) if loose else _run_through(fitted, value)


def _run_through(checks: Iterable[Any], value: Any) -> Any:
    for _ in checks:
        pass
    return value


def _bound_items(value: Any, path: str, *, loose: bool) -> None:
    if loose and len(value) > limits.ITEMS_INPUT_MAX:
        raise TooLarge(path, f"{len(value)} items", limits.ITEMS_INPUT_MAX)


def _join(path: str, step: str) -> str:
    if path:
        return f"{path}{step}"
    return f"field {step[1:]}" if step.startswith(".") else f"item {step}"
