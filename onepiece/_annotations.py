"""From a signature's annotations to ``TypeSpec``s, without importing torch to recognise it.

Records (attrs classes, NamedTuples) are remembered under ``module:qualname``: a value that arrives
as a record is built from the class that an annotation of this process named, never from a class
that a peer named.
"""

import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Union, get_args, get_origin

import attrs
import numpy as np

from onepiece import limits
from onepiece.errors import DefinitionError
from onepiece.tensor import ITEM_BYTES
from onepiece.tensor import Tensor as TensorAnnotation
from onepiece.types import ANY, ARRAY, BOOL, BYTES, FLOAT, INT, NONE, STR, TENSOR, TORCH, Kind, TypeSpec

_SUPPORTED: Final = (
    "None, bool, int, float, str, bytes, Literal, unions, list[T], dict[str, T], tuple[...], Any, Tensor,"
    " torch.Tensor, numpy.ndarray, attrs classes and NamedTuples"
)

_SIMPLE: Final[Mapping[Any, TypeSpec]] = {
    Any: ANY,
    None: NONE,
    type(None): NONE,
    bool: BOOL,
    int: INT,
    float: FLOAT,
    str: STR,
    bytes: BYTES,
    TensorAnnotation: TENSOR,
    np.ndarray: ARRAY,
}

_RECORDS: Final[dict[str, type]] = {}


class _TorchByName:
    """Stands for ``torch`` where an annotation is written as text and torch is not imported."""

    Tensor: Final = TORCH


_BY_NAME: Final[Mapping[str, Any]] = {
    "torch": _TorchByName,
    "numpy": np,
    "np": np,
    "Tensor": TensorAnnotation,
}


def record_class(name: str) -> type | None:
    """The class of the record ``module:qualname`` if an annotation in this process named it."""
    return _RECORDS.get(name)


def record_name(cls: type) -> str:
    """The name under which values of a record class travel."""
    return f"{cls.__module__}:{cls.__qualname__}"


def record_fields(cls: type) -> tuple[str, ...] | None:
    """The names of the fields that make up an attrs object or NamedTuple; None for other classes."""
    if attrs.has(cls):
        return tuple(attribute.name for attribute in attrs.fields(cls) if attribute.init)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return tuple(cls._fields)
    return None


def build_record(cls: type, values: Mapping[str, Any]) -> Any:
    """Make an object of a record class from its fields by name; raises what its constructor raises."""
    if attrs.has(cls):
        aliases = {attribute.name: attribute.alias for attribute in attrs.fields(cls)}
        return cls(**{aliases.get(name) or name: value for name, value in values.items()})
    return cls(**values)


def resolve(function: Callable[..., Any], name: str, annotation: Any) -> Any:
    """Evaluate one annotation that may be written as text; raises ``DefinitionError``."""
    if not isinstance(annotation, str):
        return annotation
    namespace = sys.modules[function.__module__].__dict__ if function.__module__ in sys.modules else {}
    fallback = {key: value for key, value in _BY_NAME.items() if key not in namespace}
    holder = types.SimpleNamespace(__annotations__={name: annotation})
    try:
        return typing.get_type_hints(holder, namespace, fallback)[name]
    except (NameError, AttributeError, SyntaxError, TypeError) as error:
        raise DefinitionError(
            f"{function.__qualname__}: the annotation {annotation!r} of {name!r} cannot be read ({error});"
            " its names must be importable from the module's top level"
        ) from error


def type_spec(annotation: Any, where: str, depth: int = 0) -> TypeSpec:
    """Read an annotation.

    Args:
        annotation: An evaluated annotation.
        where: What it annotates, for the error: ``denoise, parameter 'steps'``.
        depth: How many types this one is inside of.

    Raises:
        DefinitionError: It is none of the supported types.
    """
    if depth > limits.TREE_DEPTH_MAX:
        raise DefinitionError(
            f"{where}: the type is nested more than {limits.TREE_DEPTH_MAX} deep (does it hold itself?)"
        )
    if isinstance(annotation, TypeSpec):
        return annotation
    simple = _simple(annotation)
    if simple is not None:
        return simple
    arguments = get_args(annotation)
    origin = get_origin(annotation)

    def inner(argument: Any) -> TypeSpec:
        return type_spec(argument, where, depth + 1)

    if origin is Literal:
        return _literal(arguments, where)
    if origin in {Union, types.UnionType}:
        return TypeSpec(Kind.UNION, tuple(map(inner, arguments)))
    if origin is typing.Annotated:
        return inner(arguments[0])
    if origin is np.ndarray:
        return TypeSpec(Kind.ARRAY, name=_array_dtype(arguments))
    if origin is list:
        return TypeSpec(Kind.LIST, (inner(arguments[0]),))
    if origin is dict and arguments[0] is str:
        return TypeSpec(Kind.DICT, (inner(arguments[1]),))
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return TypeSpec(Kind.SEQUENCE, (inner(arguments[0]),))
    if origin is tuple:
        return TypeSpec(Kind.TUPLE, tuple(map(inner, arguments)))
    if isinstance(annotation, type) and origin is None and record_fields(annotation) is not None:
        return _record(annotation, where, depth)
    raise DefinitionError(f"{where}: {_shown(annotation)} cannot travel between stages; use {_SUPPORTED}")


def _simple(annotation: Any) -> TypeSpec | None:
    try:
        simple = _SIMPLE.get(annotation)
    except TypeError:  # not hashable, so none of them
        return None
    if simple is not None:
        return simple
    is_torch = isinstance(annotation, type) and annotation.__module__ == "torch"
    return TORCH if is_torch and annotation.__name__ == "Tensor" else None


def _literal(values: tuple[Any, ...], where: str) -> TypeSpec:
    for value in values:
        if type(value) not in {bool, int, str, type(None)}:
            raise DefinitionError(f"{where}: {value!r} in a Literal is no str, int, bool or None")
    return TypeSpec(Kind.LITERAL, values=values)


def _array_dtype(arguments: tuple[Any, ...]) -> str:
    """The dtype's name of ``NDArray[numpy.float32]``; empty where any dtype will do."""
    scalar = (get_args(arguments[1]) or (Any,))[0] if len(arguments) == 2 else Any
    if not isinstance(scalar, type) or not issubclass(scalar, np.generic) or scalar.__subclasses__():
        return ""
    name = np.dtype(scalar).name
    return name if name in ITEM_BYTES else ""


def _record(cls: type, where: str, depth: int) -> TypeSpec:
    name = record_name(cls)
    fields = record_fields(cls)
    assert fields is not None
    try:
        if attrs.has(cls):
            attrs.resolve_types(cls)
            hints = {a.name: a.type for a in attrs.fields(cls) if a.init}
        else:
            hints = typing.get_type_hints(cls)
    except NameError as error:
        raise DefinitionError(f"{where}: the fields of {name} cannot be read: {error}") from error
    items = tuple(
        type_spec(hints.get(each), f"{where}, field {cls.__name__}.{each}", depth + 1) for each in fields
    )
    _RECORDS[name] = cls
    return TypeSpec(Kind.RECORD, items, fields, name=name, is_tuple=not attrs.has(cls))


def _shown(annotation: Any) -> str:
    return annotation.__qualname__ if isinstance(annotation, type) else str(annotation)
