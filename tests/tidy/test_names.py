"""Public names: what a package offers is in its ``__all__``, and all of that exists."""

import ast
import importlib

import pytest

from tests.tidy.sources import Source, report, sources


def _is_only_text(source: Source) -> bool:
    return all(isinstance(node, ast.Expr) for node in source.tree.body)


_EXPORTERS = [
    source
    for source in sources("onepiece", "transports", "stages")
    if source.name.endswith("/__init__.py") and not _is_only_text(source)
]


def _exported(source: Source) -> list[str] | None:
    for node in source.tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            assert isinstance(node.value, ast.List | ast.Tuple), f"{source.name}: __all__ is no list of names"
            return [str(ast.literal_eval(element)) for element in node.value.elts]
    return None


@pytest.mark.parametrize("source", _EXPORTERS, ids=lambda source: source.module)
def test_packages_say_what_is_public(source: Source) -> None:
    """A package that holds more than a docstring has ``__all__``, without repetition."""
    names = _exported(source)
    assert names is not None, f"{source.name} has no __all__"
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("source", _EXPORTERS, ids=lambda source: source.module)
def test_public_names_exist(source: Source) -> None:
    """Each name in ``__all__`` can be had from the package, and is public."""
    package = importlib.import_module(source.module)
    missing = [name for name in _exported(source) or [] if not hasattr(package, name)]
    assert not missing, f"{source.module} lacks {missing}"
    private = [name for name in _exported(source) or [] if name.startswith("_") and name != "__version__"]
    assert not private


def test_every_error_is_exported_by_onepiece() -> None:
    """A user can catch whatever the library raises by a name of ``onepiece``."""
    errors = importlib.import_module("onepiece.errors")
    onepiece = importlib.import_module("onepiece")
    kinds = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.OnePieceError)
    }
    assert not kinds - set(onepiece.__all__)


def test_words_for_the_same_thing_are_the_same() -> None:
    """Names use the glossary's word: a node is no server, a request no job, an actor no replica."""
    wrong = {"replica": "actor", "job": "request", "pod": "node", "shard": "channel"}
    offences = []
    for source in sources("onepiece", "transports"):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                words = set(node.name.lower().split("_"))
                offences += [
                    f"{source.name}:{node.lineno} {node.name}: say {right}"
                    for word, right in wrong.items()
                    if word in words
                ]
    assert not offences, report(offences)
