"""Habits of the code that a reader should be able to rely on."""

import ast
import re

from tests.tidy.sources import ROOT, all_files, imports, report, sources

_LIBRARY = ("onepiece", "transports", "stages", "simulations")

_MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home|Users|mnt)/\w")
_SUPPRESSION = re.compile(r"#\s*(?:noqa|type:\s*ignore|pragma: no cover)")
_REASONED = re.compile(
    r"#\s*(?:noqa: [A-Z]+\d+(?:, ?[A-Z]+\d+)*|type: ignore\[[\w, -]+\])(?=\s+(?:- |# |\S))"
)
_TEXT_SUFFIXES = (".py", ".md", ".toml", ".txt", ".cfg", ".yaml", ".yml", ".html", ".js", ".css", "Makefile")


def _calls(*packages: str) -> list[tuple[str, ast.Call]]:
    return [
        (f"{source.name}:{node.lineno}", node)
        for source in sources(*packages)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
    ]


TASK_OWNERS = {
    "onepiece/node/http_server.py": "awaited in finally; a task group would wrap the block's errors",
    "onepiece/runtime/devices.py": "runs on the device's own loop; cancelled and awaited from the caller's",
    "transports/background.py": "this is the owner",
}
"""Files of the library that may start a task outside a task group, and who looks after it there."""


def test_every_task_has_an_owner() -> None:
    """Tasks are made by task groups; a task that ``asyncio`` makes is lost when nobody looks.

    Tests, benchmarks and conformance checks may hold one in a variable that they use afterwards.
    """
    offences = []
    for source in sources():
        if source.name in TASK_OWNERS:
            continue
        is_check = source.name.startswith(("tests/", "transports/testing/", "onepiece/cli/bench_"))
        held = _held_calls(source.tree) if is_check else set()
        offences += [
            f"{source.name}:{node.lineno} {ast.unparse(node.func)}"
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Call) and _makes_a_task(node) and id(node) not in held
        ]
    assert not offences, report(offences)


def test_task_owners_are_current() -> None:
    """No file is excused that starts no task."""
    makers = {
        s.name for s in sources() for n in ast.walk(s.tree) if isinstance(n, ast.Call) and _makes_a_task(n)
    }
    assert not TASK_OWNERS.keys() - makers


def _makes_a_task(call: ast.Call) -> bool:
    called = ast.unparse(call.func)
    owner, _, name = called.rpartition(".")
    is_maker = name in {"create_task", "ensure_future", "run_coroutine_threadsafe"}
    return is_maker and (owner in {"", "asyncio"} or owner.endswith(("loop", "loop()")))


def _held_calls(tree: ast.Module) -> set[int]:
    """Calls whose result is kept under a name that is used elsewhere in the file, or passed on."""
    used = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    held: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) if name in used:
                held |= {id(inner) for inner in ast.walk(node.value)}
            case ast.Call(args=arguments) | ast.List(elts=arguments):
                held |= {id(argument) for argument in arguments}
            case ast.ListComp(elt=element) | ast.SetComp(elt=element) | ast.Await(value=element):
                held.add(id(element))
    return held


def test_nothing_from_outside_can_run_code() -> None:
    """No pickle, marshal, shelve, eval, exec or yaml: what arrives is data."""
    offences = [
        str(i) for i in imports(*_LIBRARY) if i.root in {"pickle", "marshal", "shelve", "dill", "yaml"}
    ]
    offences += [
        f"{where} {call.func.id}"
        for where, call in _calls(*_LIBRARY)
        if isinstance(call.func, ast.Name) and call.func.id in {"eval", "exec", "compile"}
    ]
    offences += [
        f"{where} torch.load without weights_only"
        for where, call in _calls(*_LIBRARY)
        if ast.unparse(call.func) == "torch.load" and "weights_only" not in {k.arg for k in call.keywords}
    ]
    assert not offences, report(offences)


def test_tests_wait_for_conditions() -> None:
    """A test sleeps only inside a loop that looks for a condition; a fixed wait is too short or too long."""
    offences = []
    for source in sources("tests"):
        looping = {
            id(node)
            for loop in ast.walk(source.tree)
            if isinstance(loop, ast.While | ast.For | ast.AsyncFor)
            for node in ast.walk(loop)
        }
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Call) or id(node) in looping:
                continue
            called = ast.unparse(node.func)
            is_zero = len(node.args) == 1 and ast.unparse(node.args[0]) in {"0", "0.0"}
            is_for_ever = "sleep_forever" in called or "3600" in ast.unparse(node)
            if called in {"time.sleep", "asyncio.sleep", "anyio.sleep", "sleep"} and not (
                is_zero or is_for_ever
            ):
                offences.append(f"{source.name}:{node.lineno} {ast.unparse(node)}")
    assert not offences, report(offences)


def test_suppressions_name_their_rule_and_reason() -> None:
    """A silenced check says which one, and why."""
    offences = [
        f"{source.name}:{number} {line.strip()}"
        for source in sources()
        for number, line in enumerate(source.text.splitlines(), 1)
        if _SUPPRESSION.search(line) and not _REASONED.search(line) and "re.compile" not in line
    ]
    assert not offences, report(offences)


def test_skips_name_what_is_missing() -> None:
    """A skipped test says which capability it lacks."""
    offences = [
        f"{where} {ast.unparse(call)[:80]}"
        for where, call in _calls("tests")
        if ast.unparse(call.func) in {"pytest.skip", "pytest.mark.skip", "pytest.mark.skipif"}
        and not (call.args and ast.unparse(call.func) == "pytest.skip")
        and "reason" not in {keyword.arg for keyword in call.keywords}
    ]
    assert not offences, report(offences)


def test_no_path_of_one_machine() -> None:
    """Nothing that is committed names a directory that exists on one machine only."""
    offences = [
        f"{name}:{number} {line.strip()[:100]}"
        for name in all_files()
        if name.endswith(_TEXT_SUFFIXES) and name != "tests/tidy/test_habits.py"
        for number, line in enumerate((ROOT / name).read_text(errors="replace").splitlines(), 1)
        if _MACHINE_PATH.search(line)
    ]
    assert not offences, report(offences)


def test_asserts_have_one_condition() -> None:
    """In the library an assert states one thing, so that the line that failed says what is wrong."""
    offences = [
        f"{source.name}:{node.lineno} {ast.unparse(node)[:100]}"
        for source in sources("onepiece", "transports")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Assert)
        and isinstance(node.test, ast.BoolOp)
        and isinstance(node.test.op, ast.And)
    ]
    assert not offences, report(offences)


def test_todo_is_not_committed() -> None:
    """What is not done is not promised by a comment, and nothing is a stub."""
    pattern = re.compile(r"\b(?:TODO|FIXME|XXX)\b|\bNotImplementedError\b")
    offences = [
        f"{source.name}:{number} {line.strip()}"
        for source in sources()
        if source.name != "tests/tidy/test_habits.py"
        for number, line in enumerate(source.text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert not offences, report(offences)
