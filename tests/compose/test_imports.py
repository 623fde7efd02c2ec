"""``import onepiece`` is light, and its public names are all there."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import onepiece

HEAVY = ("torch", "diffusers", "transformers", "uvicorn", "starlette", "httpx", "lmdb", "av", "zmq")
ROOT = Path(onepiece.__file__).parents[1]


@pytest.mark.parametrize(
    "module", ["onepiece", "onepiece.testing", "onepiece.codec", "stages.echo", "stages.synthetic"]
)
def test_defining_stages_imports_nothing_heavy(module: str) -> None:
    """A process that only defines stages or decodes messages loads neither torch nor a server."""
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_are_all_there() -> None:
    """Each name of ``__all__`` resolves, none is missing from ``dir``, and they are sorted."""
    for name in onepiece.__all__:
        assert getattr(onepiece, name) is not None
    assert set(onepiece.__all__) <= set(dir(onepiece))
    assert list(onepiece.__all__) == sorted(onepiece.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """The lazy look-up invents nothing."""
    with pytest.raises(AttributeError, match="no attribute 'teapot'"):
        getattr(onepiece, "teapot")  # noqa: B009 - type checkers know that it is not there


@pytest.mark.parametrize(
    ("package", "owners"),
    [
        ("cbor2", {"onepiece/_cbor.py"}),
        ("cattrs", {"onepiece/_control.py"}),
        ("torch", {"onepiece/_torch.py"}),
        ("pickle", set()),
    ],
)
def test_each_package_has_one_owner(package: str, owners: set[str]) -> None:
    """One file imports it; pickle none."""
    found = set()
    for path in (ROOT / "onepiece").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names.append(node.module)
            if any(name.split(".")[0] == package for name in names):
                found.add(str(path.relative_to(ROOT)))
    assert found == owners


def test_importing_onepiece_alone_starts_nothing() -> None:
    """Neither an event loop's library, nor logging, nor a transport: these come with what uses them."""
    names = ("asyncio", "anyio", "structlog", "transports")
    code = f"import sys, onepiece; print([name for name in {names!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
