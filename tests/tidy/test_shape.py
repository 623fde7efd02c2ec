import ast

from tests.tidy.sources import report, sources

FUNCTION_LINES_MAX = 60
MODULE_LINES_MAX = 500
WORDS_ONLY = {
    "onepiece/core/placement_events.py": "placement.py has the theory",
    "onepiece/core/request_events.py": "request.py has the theory",
    "onepiece/core/workers.py": "a helper of placement.py without decisions of its own",
}
"""Core modules that hold only the words of another one, or helpers."""

THEORY_CHARACTERS_MIN = 300
"""A core module's opening text: promises, states, what it survives; shorter is a title."""


def test_functions_are_short() -> None:
    """No function has more than 60 lines: what does not fit has more than one purpose."""
    offences = [
        f"{source.name}:{function.lineno} {function.name} has {lines} lines"
        for source in sources()
        for function in source.functions()
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert not offences, report(offences)


def test_modules_are_short() -> None:
    """No module has more than 500 lines."""
    offences = [
        f"{source.name} has {lines} lines"
        for source in sources()
        if (lines := source.text.count("\n")) > MODULE_LINES_MAX
    ]
    assert not offences, report(offences)


def test_every_test_says_what_must_hold() -> None:
    """A test without a docstring does not say what it is for."""
    offences = [
        f"{source.name}:{function.lineno} {function.name}"
        for source in sources("tests")
        for function in source.functions()
        if function.name.startswith("test_") and not ast.get_docstring(function)
    ]
    assert not offences, report(offences)


def test_cores_open_with_their_theory() -> None:
    """A module of a pure core says first what it promises, and what it does not."""
    offences = [
        f"{source.name} opens with {len(ast.get_docstring(source.tree) or '')} characters"
        for source in sources("onepiece/core", "transports/ring")
        if len(ast.get_docstring(source.tree) or "") < THEORY_CHARACTERS_MIN
        and source.name not in WORDS_ONLY
        and not source.name.endswith("/__init__.py")
    ]
    assert not offences, report(offences)


def test_every_module_of_the_library_says_what_it_is() -> None:
    """Each module of onepiece and transports opens with a docstring."""
    offences = [
        source.name
        for source in sources("onepiece", "transports")
        if source.tree.body and not ast.get_docstring(source.tree)
    ]
    assert not offences, report(offences)
