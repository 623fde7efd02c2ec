"""Control messages: registered attrs classes as CBOR. The owner of cattrs.

cattrs alone is lenient (``int("5")``, ``str(None)``); here a field holds exactly what its annotation
says or the message is refused. Unions of attrs classes carry the class's name beside the fields.
"""

import enum
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, Union, get_args, get_origin

import attrs
import cattrs
from cattrs.errors import BaseValidationError, ForbiddenExtraKeysError, StructureHandlerNotFoundError

from onepiece import _cbor, limits
from onepiece._materialise import AS_SENT, materialise
from onepiece._tree import TreeReader, TreeWriter
from onepiece.errors import CodecError

if TYPE_CHECKING:  # whoever only defines stages is spared the transports
    from transports.operations import Bytes

Message = TypeVar("Message")

_TREE: Final = "a value with its tuples and records kept apart from lists and maps"
PlainValue = Annotated[Any, _TREE]
"""A field that holds a user's value (no tensors): tuples and records arrive as what they were."""

_CLASS_KEY: Final = "="
_registered: Final[dict[str, type]] = {}
_SCALARS: Final = (bool, int, float, str, bytes, type(None))
_WHOLE: Final[frozenset[type]] = frozenset({bool, float, str, bytes, type(None)})
"""What is read as it stands; integers have a bound."""
_AS_THEY_ARE: Final[frozenset[type]] = frozenset(_SCALARS)
_MISSING: Final = object()
_converter: Final = cattrs.Converter(forbid_extra_keys=True, detailed_validation=False)


def register(cls: type[Message]) -> type[Message]:
    """Let objects of an attrs class travel as control messages and headers; use it as a decorator.

    The class's name is its name on the wire, so two classes of one name cannot both be registered.
    """
    if not hasattr(cls, "__attrs_attrs__"):
        raise TypeError(f"{cls.__qualname__} is no attrs class")
    taken = _registered.setdefault(cls.__name__, cls)
    same = (taken.__module__, taken.__qualname__) == (cls.__module__, cls.__qualname__)
    assert same, f"{cls.__name__} names two messages: in {taken.__module__} and in {cls.__module__}"
    _registered[cls.__name__] = cls
    return cls


def encode_control(message: object) -> bytes:
    """A message of a registered class as bytes.

    Raises:
        CodecError: It is too large, or a field holds what has no form on the wire.
    """
    return _cbor.encode(header_to_tree(message), limits.CONTROL_BYTES_MAX, type(message).__name__)


def decode_control(data: "Bytes") -> object:
    """The message that ``encode_control`` wrote.

    Raises:
        CodecError: The class is unknown, a field is missing, unknown or of the wrong type, or the
            bytes are too many, nested too deep, or no CBOR.
    """
    tree = _cbor.decode(memoryview(data).cast("B"), limits.CONTROL_BYTES_MAX, "a control message")
    return _from_tree(tree, None)


def header_to_tree(message: object) -> Any:
    """A registered message, or None, as a tree for the encoder."""
    if message is None:
        return None
    name = type(message).__name__
    if _registered.get(name) is not type(message):
        raise CodecError(f"{type(message).__qualname__} is not registered as a message")
    return [name, _converter.unstructure(message)]


def header_from_tree(tree: Any, header_type: type[Message]) -> Message:
    """The header in a decoded tree, which must be of ``header_type``; raises ``CodecError``."""
    if header_type is type(None):
        if tree is not None:
            raise CodecError("a header where none is wanted")
        return header_type()
    message: Message = _from_tree(tree, header_type)
    return message


def _from_tree(tree: Any, wanted: type | None) -> Any:
    match tree:
        case [str(name), dict(fields)]:
            pass
        case _:
            raise CodecError("a message that is not [name, fields]")
    cls = _registered.get(name)
    if cls is None:
        raise CodecError(f"unknown message {name[:40]!r}; known: {', '.join(sorted(_registered))}")
    if wanted is not None and cls is not wanted:
        raise CodecError(f"a {name} where a {wanted.__name__} is wanted")
    return _structured(fields, cls)


def _structured(fields: Any, cls: type) -> Any:
    try:
        plain = _plainly_structured(fields, cls)
        if plain is not None:
            return plain
        return _converter.get_structure_hook(cls)(fields, cls)
    except CodecError as error:
        raise CodecError(f"{cls.__name__}: {error.message}") from error
    except KeyError as error:
        raise CodecError(f"{cls.__name__}: the field {error.args[0]!r} is missing") from error
    except ForbiddenExtraKeysError as error:
        unknown = ", ".join(sorted(map(repr, error.extra_fields)))
        raise CodecError(f"{cls.__name__}: unknown field {unknown[:100]}") from error
    except (
        ValueError,
        TypeError,
        AttributeError,
        BaseValidationError,
        StructureHandlerNotFoundError,
    ) as error:
        raise CodecError(f"{cls.__name__}: {error}") from error


_Check = tuple[str, frozenset[type], frozenset[type]]
"""A field's name, the types that it takes as they are, and those of what is in it, if that is a map."""


def _plainly_structured(fields: Any, cls: type) -> Any:
    """The message, if every field holds what needs no conversion; None: the converter decides.

    Nearly all messages are of this kind, and the converter calls several functions for each field.
    """
    checks = _checks_of(cls)
    if checks is None or len(fields) != len(checks):
        return None
    for name, wanted, items in checks:
        value = fields.get(name, _MISSING)
        kind = type(value)
        if kind not in wanted:
            return None
        if kind is dict:
            for key, item in value.items():
                if type(key) is not str or type(item) not in items:
                    return None
    return cls(**fields)


@cache
def _checks_of(cls: type) -> tuple[_Check, ...] | None:
    """How to check each field of a class by its type alone; None if one needs more than that."""
    checks = [_check_of(each) for each in attrs.fields(cls) if each.init]
    return tuple(each for each in checks if each is not None) if None not in checks else None


def _check_of(attribute: "attrs.Attribute[Any]") -> _Check | None:
    annotation = attribute.type
    if attribute.alias != attribute.name:
        return None
    if _is_mapping(annotation):
        key, item = get_args(annotation)
        items: frozenset[type] = _WHOLE if item is Any else frozenset({item}) & _AS_THEY_ARE
        return (attribute.name, frozenset({dict}), items) if key is str and items else None
    wanted = frozenset(get_args(annotation) if _is_union(annotation) else {annotation})
    return (attribute.name, wanted, frozenset()) if wanted <= _AS_THEY_ARE else None


def _strict_scalar(value: Any, wanted: Any) -> Any:
    """Scalars are looked up by their base class: enums that are texts or numbers come here, too."""
    if type(value) is wanted:
        return value
    if _is_enum(wanted):
        return _structure_enum(value, wanted)
    if wanted is float and type(value) is int:
        return _float_of(value)
    raise CodecError(f"a {type(value).__name__} where {wanted.__name__} is wanted")


def _float_of(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise CodecError("a whole number beyond all floats where float is wanted") from None


def _structure_sequence(annotation: Any) -> Callable[[Any, Any], Any]:
    """By itself cattrs iterates over whatever it gets, a text for instance; insist on an array."""
    arguments = get_args(annotation)
    make = get_origin(annotation)
    is_fixed = make is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis)

    def structure(value: Any, _wanted: Any) -> Any:
        if type(value) is not list or (is_fixed and len(value) != len(arguments)):
            raise CodecError(f"a {type(value).__name__} where {annotation} is wanted")
        types = arguments if is_fixed else (arguments[0],) * len(value)
        # The hook is asked for late, and cached by cattrs: a type may hold itself.
        return make(_converter.get_structure_hook(t)(item, t) for item, t in zip(value, types, strict=True))

    return structure


def _structure_mapping(annotation: Any) -> Callable[[Any, Any], Any]:
    key_type, value_type = get_args(annotation)

    def structure(value: Any, _wanted: Any) -> dict[Any, Any]:
        if type(value) is not dict:
            raise CodecError(f"a {type(value).__name__} where {annotation} is wanted")
        if not value:
            return {}
        key_hook = _converter.get_structure_hook(key_type)
        value_hook = _converter.get_structure_hook(value_type)
        return {key_hook(key, key_type): value_hook(item, value_type) for key, item in value.items()}

    return structure


def _is_sequence(annotation: Any) -> bool:
    return get_origin(annotation) in {tuple, list}


def _is_mapping(annotation: Any) -> bool:
    origin = get_origin(annotation)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _is_enum(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, enum.Enum)


def _structure_enum(value: Any, wanted: Any) -> Any:
    try:
        return wanted(value)
    except (ValueError, TypeError) as error:
        raise CodecError(f"{value!r} is no {wanted.__name__}") from error


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in {Union, types.UnionType}


def _union_classes(annotation: Any) -> dict[str, type]:
    return {each.__name__: each for each in get_args(annotation) if attrs.has(each)}


def _structure_union(annotation: Any) -> Callable[[Any, Any], Any]:
    classes = _union_classes(annotation)
    others = [each for each in get_args(annotation) if each not in classes.values()]
    scalars = frozenset(each for each in others if each in _SCALARS)
    rest = [each for each in others if each not in scalars or each is float]  # an int does for a float

    def structure(value: Any, _wanted: Any) -> Any:
        if type(value) in scalars:
            return value
        if type(value) is dict and value.get(_CLASS_KEY) in classes:
            fields = dict(value)
            return _structured(fields, classes[fields.pop(_CLASS_KEY)])
        for each in rest:
            try:
                return _converter.get_structure_hook(each)(value, each)
            except CodecError:
                continue
        raise CodecError(f"a {type(value).__name__} where {annotation} is wanted")

    return structure


def _unstructure_union(annotation: Any) -> Callable[[Any], Any]:
    classes = tuple(_union_classes(annotation).values())

    def unstructure(value: Any) -> Any:
        tree = _converter.unstructure(value)
        return {_CLASS_KEY: type(value).__name__, **tree} if isinstance(value, classes) else tree

    return unstructure


def _is_plain_value(annotation: Any) -> bool:
    return get_origin(annotation) is Annotated and _TREE in get_args(annotation)[1:]


def _write_plain_value(value: Any) -> Any:
    writer = TreeWriter(inline_bytes_max=limits.CONTROL_BYTES_MAX)
    tree = writer.write(value, "value")
    if writer.buffers:
        raise CodecError("a tensor inside a control message; tensors travel as values")
    return tree


def _read_plain_value(tree: Any, _wanted: Any) -> Any:
    """Untyped fields, too: nothing of the format's own may be left in a message."""
    if type(tree) in _WHOLE:  # most of what is reported; the way below says the same
        return tree
    return materialise(TreeReader(()).read(tree), AS_SENT)


for _scalar in _SCALARS[:-1]:
    _converter.register_structure_hook(_scalar, _strict_scalar)
_converter.register_structure_hook_func(lambda each: each is Any, _read_plain_value)
_converter.register_structure_hook_func(_is_enum, _structure_enum)
_converter.register_structure_hook_factory(_is_sequence, _structure_sequence)
_converter.register_structure_hook_factory(_is_mapping, _structure_mapping)
_converter.register_structure_hook_factory(_is_union, _structure_union)
_converter.register_unstructure_hook_factory(_is_union, _unstructure_union)
_converter.register_structure_hook_func(_is_plain_value, _read_plain_value)
_converter.register_unstructure_hook_func(_is_plain_value, _write_plain_value)
