"""All Python files of the project, parsed once."""

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeAlias

from attrs import frozen

ROOT = Path(__file__).parents[2]

PACKAGES = ("onepiece", "transports", "stages", "simulations", "tests")

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@frozen
class Source:
    """One file; ``name`` is its path from the root, ``module`` its dotted name."""

    name: str
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """Its dotted name."""
        return self.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def functions(self) -> Iterator[Function]:
        """All functions, methods and nested ones."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


@frozen
class Import:
    """One imported module (or a name in it), where, and whether inside a function."""

    source: Source
    line: int
    module: str
    names: tuple[str, ...]
    in_function: bool
    for_types_only: bool

    @property
    def root(self) -> str:
        """The top-level package."""
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.source.name}:{self.line} imports {self.module}"


@cache
def sources(*packages: str) -> tuple[Source, ...]:
    """The files of these packages (or of all), whether committed or about to be."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *(packages or PACKAGES)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    names = sorted({name for name in listed if name.endswith(".py")})
    return tuple(_source(name) for name in names if (ROOT / name).exists())


@cache
def _source(name: str) -> Source:
    text = (ROOT / name).read_text()
    return Source(name, text, ast.parse(text))


@cache
def all_files() -> tuple[str, ...]:
    """The names of all files that are or may be committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(name for name in listed.splitlines() if (ROOT / name).is_file())


@cache
def imports(*packages: str) -> tuple[Import, ...]:
    """All imports of these packages' files."""
    return tuple(found for source in sources(*packages) for found in _imports_in(source.name))


@cache
def _imports_in(name: str) -> tuple[Import, ...]:
    return tuple(_imports_of(_source(name)))


def _imports_of(source: Source) -> Iterator[Import]:
    inside = {id(node) for function in source.functions() for node in ast.walk(function)}
    typing_only = {
        id(node)
        for branch in ast.walk(source.tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test).endswith("TYPE_CHECKING")
        for node in ast.walk(branch)
    }
    for node in ast.walk(source.tree):
        match node:
            case ast.Import(names=aliases):
                found: list[tuple[str, tuple[str, ...]]] = [(alias.name, ()) for alias in aliases]
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                found = [(module, tuple(alias.name for alias in aliases))]
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module))]):
                found = [(module, ())]
            case ast.ImportFrom():
                raise AssertionError(f"{source.name}:{node.lineno}: relative import; write the whole name")
            case _:
                continue
        for module, names in found:
            yield Import(source, node.lineno, module, names, id(node) in inside, id(node) in typing_only)


def report(offences: list[str]) -> str:
    """A message that lists them, one a line."""
    return "\n" + "\n".join(offences)
