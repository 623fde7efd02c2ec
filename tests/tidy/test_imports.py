"""Who may import what, beyond the layers that import-linter checks."""

import ast
import subprocess
import sys

from tests.tidy.sources import PACKAGES, ROOT, imports, report, sources

EVERYWHERE = frozenset({"attrs", "anyio", "numpy"})
"""Third-party packages that are part of how everything is written."""

OWNERS = {
    "PIL": ("stages/", "simulations/plot.py"),
    "av": ("stages/_video.py",),
    "cattrs": ("onepiece/_control.py",),
    "cbor2": ("onepiece/_cbor.py",),
    "diffusers": ("stages/",),
    "distributed": ("onepiece/cli/bench_",),
    # The client of the proxy and that of etcd have nothing in common but the package.
    "httpx": ("onepiece/client/", "onepiece/coordination/_etcd_client.py"),
    "huggingface_hub": ("stages/_diffusers.py",),
    # The manager's state and the results have nothing in common but the package.
    "lmdb": ("onepiece/store/_lmdb.py", "onepiece/coordination/_state_file.py"),
    "prometheus_client": ("onepiece/metrics.py",),
    "psutil": ("onepiece/cli/bench_",),
    "python_multipart": ("onepiece/node/http_multipart.py",),
    "pyverbs": ("transports/_pyverbs.py",),
    "ray": ("onepiece/cli/bench_",),
    "rich": ("onepiece/cli/", "stages/demo/"),
    "safetensors": ("stages/training/",),
    "sklearn": ("stages/training/",),
    "starlette": ("onepiece/node/http_", "onepiece/node/proxy.py"),
    "structlog": ("onepiece/log.py", "onepiece/context.py"),
    "tokenizers": ("stages/training/",),
    "torch": ("onepiece/_torch.py", "onepiece/context.py", "stages/"),
    "transformers": ("stages/",),
    "uvicorn": ("onepiece/node/http_server.py",),
    "uvloop": ("onepiece/node/loop.py",),
    "xxhash": ("onepiece/core/routing.py", "transports/ring/"),
    "zmq": ("onepiece/cli/bench_",),
}
"""Whose file(s) a third-party package belongs to, as the beginning of their names."""

REQUIRED = frozenset(
    {"anyio", "attrs", "cattrs", "cbor2", "httpx", "lmdb", "numpy", "python_multipart", "rich"}
    | {"prometheus_client", "starlette", "structlog", "uvicorn", "xxhash"}
)
"""Installed with the package itself; everything else is optional, and imported on first use."""

LAZY: dict[str, str] = {
    "onepiece/__init__.py": "the client needs httpx, which stages and workers do not",
    "onepiece/_on_device.py": "whoever only defines stages is spared the transports",
    "onepiece/cli/bench_hop_process.py": "a stage of pyzmq must not carry what a node imports",
    "onepiece/node/leadership.py": "the client of etcd needs httpx, which most nodes do without",
    "onepiece/cli/main.py": "each command imports only what it needs: help is there at once",
    "stages/demo/fork_server.py": "loading it before the fork is what the server is for",
    "stages/training/__main__.py": "each command imports only what it needs: they take seconds to import",
}
"""Files that may import modules of our own inside functions, and why. Never to break a cycle."""

PURE = ("onepiece/core", "transports/ring", "transports/tcp_frames.py", "transports/operations.py")

IMPURE = frozenset(
    {"asyncio", "anyio", "socket", "ssl", "select", "time", "random", "secrets", "uuid", "logging"}
    | {"structlog", "threading", "multiprocessing", "subprocess", "concurrent", "os", "pathlib", "io"}
    | {"torch", "lmdb", "starlette", "httpx", "uvicorn", "tempfile", "signal", "mmap", "queue"}
)


def test_third_party_packages_have_owners() -> None:
    """A third-party package is imported by its owner file alone, so that there is one place to change."""
    offences = [
        f"{found}; its owner is {OWNERS.get(found.root, 'not named: add it to this table and to the docs')}"
        for found in imports("onepiece", "transports", "stages", "simulations")
        if found.root not in sys.stdlib_module_names
        and found.root not in {*PACKAGES, *EVERYWHERE}
        and not found.source.name.startswith(OWNERS.get(found.root, ()))
    ]
    assert not offences, report(offences)


def test_table_of_owners_is_used() -> None:
    """Each line of the table is about a package that is imported."""
    used = {found.root for found in imports("onepiece", "transports", "stages", "simulations")}
    unused = OWNERS.keys() - used
    assert not unused, f"nobody imports {sorted(unused)}"


def test_optional_packages_are_imported_on_first_use() -> None:
    """The library imports without what an extra installs."""
    offences = [
        str(found)
        for found in imports("onepiece", "transports")
        if found.root not in sys.stdlib_module_names
        and found.root not in {*PACKAGES, *REQUIRED}
        and not found.in_function
        and not found.for_types_only
    ]
    assert not offences, report(offences)


def test_functions_import_only_what_is_optional() -> None:
    """An import inside a function is of an optional package or listed with its reason."""
    offences = [
        str(found)
        for found in imports("onepiece", "transports", "stages", "simulations")
        if found.in_function
        and (found.root in sys.stdlib_module_names or found.root in {*PACKAGES, *REQUIRED})
        and found.source.name not in LAZY
    ]
    assert not offences, report(offences)


def test_reasons_for_lazy_imports_are_current() -> None:
    """No file is excused that needs no excuse."""
    lazy = {found.source.name for found in imports() if found.in_function}
    assert not LAZY.keys() - lazy


def test_pure_cores_import_nothing_impure() -> None:
    """Cores reach neither clock, chance, files, network nor threads, not through other modules either."""
    by_module = {source.module: source for source in sources("onepiece", "transports")}
    edges: dict[str, list[tuple[str, str]]] = {}
    for found in imports("onepiece", "transports"):
        targets = [found.module, *(f"{found.module}.{name}" for name in found.names)]
        edges.setdefault(found.source.module, []).extend((target, str(found)) for target in targets)
    offences: list[str] = []
    waiting = [source.module for source in sources(*PURE)]
    seen = set(waiting)
    while waiting:
        for target, where in edges.get(waiting.pop(), []):
            if target.partition(".")[0] in IMPURE:
                offences.append(where)
            elif target in by_module and target not in seen:
                seen.add(target)
                waiting.append(target)
    assert not offences, report(sorted(set(offences)))


def test_pure_cores_do_nothing_outside() -> None:
    """Cores do not print, open or ask."""
    offences = [
        f"{source.name}:{node.lineno} calls {node.func.id}"
        for source in sources(*PURE)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"print", "open", "input"}
    ]
    assert not offences, report(offences)


def test_private_modules_stay_in_their_package() -> None:
    """A module whose name begins with an underscore is imported only from its own package and below."""
    offences = []
    for found in imports("onepiece", "transports", "stages", "simulations"):
        parts = found.module.split(".")
        private = next(
            (n for n, part in enumerate(parts) if part.startswith("_") and part != "__main__"), None
        )
        if found.root not in PACKAGES or private is None:
            continue
        home = ".".join(parts[:private])
        if not f"{found.source.module}.".startswith(f"{home}."):
            offences.append(str(found))
    assert not offences, report(offences)


def test_stages_use_only_what_users_may() -> None:
    """Stages import from ``onepiece`` itself what it exports, and nothing from inside it."""
    (package,) = (source for source in sources("onepiece") if source.name == "onepiece/__init__.py")
    exported = {
        element.value
        for node in package.tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and "__all__" in ast.unparse(node).partition("=")[0]
        and isinstance(node.value, ast.List | ast.Tuple)
        for element in node.value.elts
        if isinstance(element, ast.Constant)
    }
    assert exported
    allowed = {"onepiece", "onepiece.testing"}
    offences = [
        str(found)
        for found in imports("stages")
        if found.root == "onepiece"
        and (found.module not in allowed or set(found.names) - exported)
        and not found.source.name.startswith("stages/demo/")
    ]
    assert not offences, report(offences)


def test_import_onepiece_is_light() -> None:
    """``import onepiece`` loads nothing that is optional, nor servers and databases."""
    heavy = {"torch", "diffusers", "transformers", "uvicorn", "starlette", "lmdb", "rich", "PIL", "av"}
    script = f"import sys, onepiece; print(sorted({heavy!r} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
