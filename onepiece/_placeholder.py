"""What stands for a value while a workflow is drawn: it can be passed on and taken apart, no more.

A workflow's function runs once, before any request exists. Code in it that looks at a value (``if``,
``+``, an f-string) would look at a value that is not there, and would silently do the same for every
request; so each such operation raises, at the line that holds it.
"""

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Final, NoReturn

from attrs import evolve

from onepiece.errors import DefinitionError
from onepiece.graph import FromInput, FromStage
from onepiece.types import Kind, TypeSpec

_TAKEN_APART: Final = "tuples, NamedTuples and attrs objects that a stage returns"


class Placeholder:
    """An input, or what a stage will return, in a workflow that is being drawn."""

    __slots__ = ("_onepiece_drawing", "_onepiece_source", "_onepiece_type")

    def __init__(self, drawing: object, source: FromInput | FromStage, spec: TypeSpec) -> None:
        self._onepiece_drawing = drawing
        self._onepiece_source = source
        self._onepiece_type = spec

    def __repr__(self) -> str:
        return f"<{_name(self)}: {self._onepiece_type}>"

    def __getattr__(self, name: str) -> "Placeholder":
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # protocols of the interpreter and of libraries: not supported
        return _item(self, name)

    def __getitem__(self, index: object) -> "Placeholder":
        spec = self._onepiece_type
        if type(index) is not int:
            raise DefinitionError(f"{_name(self)}[{index!r}]: {_unknown(self)}")
        return _item(self, index + len(spec.items) if index < 0 else index)

    def __iter__(self) -> Iterator["Placeholder"]:
        spec = self._onepiece_type
        if spec.kind is not Kind.TUPLE and not spec.is_tuple:
            raise DefinitionError(f"{_name(self)} cannot be unpacked or iterated over: {_unknown(self)}")
        return iter([_item(self, index) for index in range(len(spec.items))])

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self.__slots__:
            raise DefinitionError(f"{_name(self)}.{name} cannot be set; {_STATIC}")
        object.__setattr__(self, name, value)

    __hash__ = object.__hash__


_STATIC: Final = (
    "a workflow's function runs once, before any request exists, and draws a static graph of stages;"
    " do this in a stage"
)


# Functions, not methods: every attribute of a placeholder is a field of the value it stands for.
drawing_of: Final[Callable[[Placeholder], object]] = attrgetter("_onepiece_drawing")
source_of: Final[Callable[[Placeholder], FromInput | FromStage]] = attrgetter("_onepiece_source")
type_of: Final[Callable[[Placeholder], TypeSpec]] = attrgetter("_onepiece_type")


def _name(placeholder: Placeholder) -> str:
    source = source_of(placeholder)
    return f"the input {source.name!r}" if isinstance(source, FromInput) else f"the result of {source}"


def _unknown(placeholder: Placeholder) -> str:
    return f"it is a {type_of(placeholder)}, and only {_TAKEN_APART} can be taken apart"


def _item(placeholder: Placeholder, step: int | str) -> Placeholder:
    source, spec = source_of(placeholder), type_of(placeholder)
    shown = f".{step}" if isinstance(step, str) else f"[{step}]"
    if isinstance(source, FromInput):
        raise DefinitionError(
            f"{_name(placeholder)}{shown}: inputs are passed to stages whole; only {_TAKEN_APART} can be"
            " taken apart"
        )
    inner = spec.select((step,))
    if inner is None:
        raise DefinitionError(f"{_name(placeholder)} has no {shown}: it is a {spec}")
    return Placeholder(drawing_of(placeholder), evolve(source, path=(*source.path, step)), inner)


def unretained(placeholder: Placeholder) -> Placeholder:
    """The same result of a stage, sent on at most once; raises ``DefinitionError`` for an input."""
    source = source_of(placeholder)
    if isinstance(source, FromInput):
        raise DefinitionError(
            f"at_most_once of {_name(placeholder)}: inputs are always kept, with the request itself; it is"
            " for results of stages"
        )
    return Placeholder(drawing_of(placeholder), evolve(source, is_retained=False), type_of(placeholder))


def _refusing(operation: str) -> Any:
    def refuse(self: Placeholder, *_: object) -> NoReturn:
        raise DefinitionError(f"{operation} on {_name(self)}: {_STATIC}")

    return refuse


_OPERATIONS: Final = {
    "a truth value (if, while, and, or, not)": "bool",
    "a text form (str, print, an f-string)": "str format",
    "a length": "len",
    "'in'": "contains",
    "a comparison": "eq ne lt le gt ge",
    "arithmetic": (
        "add radd iadd sub rsub isub mul rmul imul truediv rtruediv floordiv rfloordiv mod rmod divmod"
        " rdivmod pow rpow matmul rmatmul neg pos abs invert round trunc floor ceil lshift rlshift rshift"
        " rrshift and rand or ror xor rxor"
    ),
    "a conversion to a number": "int float complex index",
    "a conversion to bytes": "bytes",
    "a call": "call",
    "'await'": "await",
    "'async for'": "aiter",
    "'with'": "enter exit",
    "'async with'": "aenter aexit",
    "a change of an item": "setitem delitem",
    "a reversal": "reversed",
}

for _operation, _methods in _OPERATIONS.items():
    for _method in _methods.split():
        setattr(Placeholder, f"__{_method}__", _refusing(_operation))
