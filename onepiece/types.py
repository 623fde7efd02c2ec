"""Types as plain data: what a stage's signature says, in a form that can be compared and sent.

A ``TypeSpec`` is read from an annotation once, where the stage is defined. From then on nothing looks
at annotations: wiring compares specs with specs, inputs and return values are compared with specs,
and two nodes compare the text of their specs to learn whether they hold the same workflow.

What an annotation may be::

    None bool int float str bytes   Literal["a", 1]   T | None, A | B, Optional[T]   Any
    list[T]   dict[str, T]   tuple[A, B]   tuple[T, ...]
    onepiece.Tensor   torch.Tensor   numpy.ndarray   numpy.typing.NDArray[numpy.float32]
    attrs classes and NamedTuples (*records*), made of the same

``bool`` is no ``int`` here, though it is one in Python: a flag wired to a count is a mistake. An
``int`` does for a ``float``. ``Any`` switches the check off on its side.
"""

import enum
from collections.abc import Iterator, Mapping
from typing import Final, TypeAlias

from attrs import field, frozen

Scalar: TypeAlias = bool | int | float | str | None
"""What a ``Literal`` is made of."""


class Kind(enum.Enum):
    """The forms a type can have."""

    ANY = "any"
    NONE = "none"
    BOOL = "bool"
    INT = "int"
    FLOAT = "float"
    STR = "str"
    BYTES = "bytes"
    TENSOR = "tensor"  # onepiece.Tensor: any of the next two
    TORCH = "torch"
    ARRAY = "array"  # numpy.ndarray
    LIST = "list"
    DICT = "dict"
    TUPLE = "tuple"
    SEQUENCE = "sequence"  # tuple[T, ...]
    UNION = "union"
    LITERAL = "literal"
    RECORD = "record"


_PLAIN_TEXTS: Final[Mapping[Kind, str]] = {
    Kind.ANY: "Any",
    Kind.NONE: "None",
    Kind.BOOL: "bool",
    Kind.INT: "int",
    Kind.FLOAT: "float",
    Kind.STR: "str",
    Kind.BYTES: "bytes",
    Kind.TENSOR: "Tensor",
    Kind.TORCH: "torch.Tensor",
}

_TENSORS: Final = frozenset({Kind.TENSOR, Kind.TORCH, Kind.ARRAY})

_SCALARS: Final[Mapping[type, Kind]] = {
    bool: Kind.BOOL,
    int: Kind.INT,
    float: Kind.FLOAT,
    str: Kind.STR,
    type(None): Kind.NONE,
}


@frozen
class TypeSpec:
    """One type. ``str()`` gives it as one would write it in Python, records by their name alone."""

    kind: Kind
    items: "tuple[TypeSpec, ...]" = ()
    """The types inside: of elements, of a union's members, of a record's fields."""
    names: tuple[str, ...] = field(default=())
    """A record's field names, one for each of ``items``."""
    values: tuple[Scalar, ...] = ()
    """A literal's values."""
    name: str = ""
    """A record's ``module:qualname``; an array's dtype, or empty for any."""
    is_tuple: bool = False
    """The record is a NamedTuple: it can be unpacked and indexed."""

    @property
    def is_tensor(self) -> bool:
        """Values of it travel as tensors."""
        return self.kind in _TENSORS

    @property
    def may_hold_torch(self) -> bool:
        """Some of a value of it may be a torch tensor where it arrives."""
        own = self.kind in {Kind.ANY, Kind.TENSOR, Kind.TORCH}
        return own or any(item.may_hold_torch for item in self.items)

    def __str__(self) -> str:
        plain = _PLAIN_TEXTS.get(self.kind)
        if plain is not None:
            return plain
        inside = [str(item) for item in self.items]
        match self.kind:
            case Kind.ARRAY:
                return f"NDArray[{self.name}]" if self.name else "numpy.ndarray"
            case Kind.DICT:
                return f"dict[str, {inside[0]}]"
            case Kind.SEQUENCE:
                return f"tuple[{inside[0]}, ...]"
            case Kind.UNION:
                return " | ".join(inside)
            case Kind.LITERAL:
                return f"Literal[{', '.join(map(repr, self.values))}]"
            case Kind.RECORD:
                return self.name.rpartition(":")[2]
            case _:  # list and tuple
                return f"{self.kind.value}[{', '.join(inside) or '()'}]"

    @property
    def definition(self) -> str:
        """The same, but a record with its fields: ``Size(width: int, height: int)``."""
        if self.kind is not Kind.RECORD:
            return str(self)
        fields = ", ".join(f"{name}: {item}" for name, item in zip(self.names, self.items, strict=True))
        return f"{self}({fields})"

    def records(self) -> Iterator["TypeSpec"]:
        """The records in it, inner ones first."""
        for item in self.items:
            yield from item.records()
        if self.kind is Kind.RECORD:
            yield self

    def accepts(self, other: "TypeSpec") -> str | None:
        """Why a value of type ``other`` must not be given where this type is wanted; None if it may."""
        return _refusal(self, other)

    def select(self, path: tuple[int | str, ...]) -> "TypeSpec | None":
        """The type of the item that ``path`` leads to, or None if there is no such item."""
        spec = self
        for step in path:
            inner = spec._item(step)
            if inner is None:
                return None
            spec = inner
        return spec

    def _item(self, step: int | str) -> "TypeSpec | None":
        if isinstance(step, str):
            return self.items[self.names.index(step)] if step in self.names else None
        fits = (self.kind is Kind.TUPLE or self.is_tuple) and 0 <= step < len(self.items)
        return self.items[step] if fits else None


ANY: Final = TypeSpec(Kind.ANY)
NONE: Final = TypeSpec(Kind.NONE)
BOOL: Final = TypeSpec(Kind.BOOL)
INT: Final = TypeSpec(Kind.INT)
FLOAT: Final = TypeSpec(Kind.FLOAT)
STR: Final = TypeSpec(Kind.STR)
BYTES: Final = TypeSpec(Kind.BYTES)
TENSOR: Final = TypeSpec(Kind.TENSOR)
TORCH: Final = TypeSpec(Kind.TORCH)
ARRAY: Final = TypeSpec(Kind.ARRAY)


def _refusal(wanted: TypeSpec, given: TypeSpec) -> str | None:
    if Kind.ANY in {wanted.kind, given.kind}:
        return None
    if given.kind is Kind.UNION:
        return next((why for item in given.items if (why := _refusal(wanted, item))), None)
    if wanted.kind is Kind.UNION:
        fits = any(_refusal(item, given) is None for item in wanted.items)
        return None if fits else f"{given} is none of {wanted}"
    if given.kind is Kind.LITERAL:
        return _literal_refusal(wanted, given)
    if wanted.is_tensor and given.is_tensor:
        both_named = wanted.name and given.name
        return f"{given} is no {wanted}" if both_named and wanted.name != given.name else None
    if wanted.kind is Kind.FLOAT and given.kind is Kind.INT:
        return None
    if wanted.kind is Kind.SEQUENCE and given.kind is Kind.TUPLE:
        whys = (_refusal(wanted.items[0], item) for item in given.items)
        return next((why for why in whys if why), None)
    if wanted.kind is not given.kind:
        return f"{given.definition} is no {wanted.definition}"
    return _inner_refusal(wanted, given)


def _literal_refusal(wanted: TypeSpec, given: TypeSpec) -> str | None:
    """A literal fits a literal with all of its values, and the plain type of all of its values."""
    for value in given.values:
        if wanted.kind is Kind.LITERAL:
            fits = any(value == other and type(value) is type(other) for other in wanted.values)
        else:
            fits = _refusal(wanted, TypeSpec(_SCALARS[type(value)])) is None
        if not fits:
            return f"{value!r} is no {wanted}"
    return None


def _inner_refusal(wanted: TypeSpec, given: TypeSpec) -> str | None:
    """Two types of the same form: compare what is inside."""
    if wanted.kind is Kind.LITERAL:
        return _literal_refusal(wanted, given)
    if wanted.kind is Kind.RECORD and (wanted.name, wanted.names) != (given.name, given.names):
        return f"{given.definition} is no {wanted.definition}"
    if len(wanted.items) != len(given.items):
        return f"{given} has {len(given.items)} items where {wanted} has {len(wanted.items)}"
    for label, mine, theirs in _labelled_items(wanted, given):
        why = _refusal(mine, theirs)
        if why is not None:
            return f"{label}: {why}"
    return None


def _labelled_items(wanted: TypeSpec, given: TypeSpec) -> Iterator[tuple[str, TypeSpec, TypeSpec]]:
    for index, (mine, theirs) in enumerate(zip(wanted.items, given.items, strict=True)):
        match wanted.kind:
            case Kind.RECORD:
                yield f"field {wanted.names[index]!r}", mine, theirs
            case Kind.TUPLE:
                yield f"item {index}", mine, theirs
            case _:
                yield "items", mine, theirs
