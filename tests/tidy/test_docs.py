"""The documentation agrees with the project."""

import re
import tomllib

import pytest

from tests.tidy.sources import ROOT, all_files, report

_LINK = re.compile(r"\[[^\]]+\]\((?!https?://|mailto:|#)([^)#\s]+)(?:#[^)]*)?\)")

GLOSSARY_WORDS = (
    "node", "NodeManager", "stage", "stage actor", "workflow", "request", "UID", "proxy", "workflow set",
    "result store", "TaskManager", "stage task", "RequestScheduler", "TaskWorker", "ResultDeliver",
    "Individual Mode", "Collaboration Mode", "message", "inbox", "channel", "transport", "region",
    "remote memory", "operation",
    "outcome", "program", "double ring", "reserve", "commit", "release", "session", "generation", "lease",
    "fence", "incarnation", "event", "effect", "story", "placement", "move", "drain", "copy", "tombstone",
    "deadline", "timeout",
)  # fmt: skip


def _pyproject() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _dependencies() -> list[str]:
    project = _pyproject()["project"]
    assert isinstance(project, dict)
    lines = list(project["dependencies"])
    for extra in project.get("optional-dependencies", {}).values():
        lines += extra
    return sorted({re.split(r"[\[<>=!~; ]", line)[0] for line in lines})


@pytest.mark.parametrize("name", _dependencies())
def test_every_dependency_is_justified(name: str) -> None:
    """Each dependency has a line in the reference that says why it is there."""
    page = (ROOT / "docs/reference/dependencies.md").read_text()
    assert re.search(rf"^\| {re.escape(name)} \|", page, re.MULTILINE), f"{name} has no line"


def test_no_dependency_is_listed_in_vain() -> None:
    """The page has no line for what is no dependency of the package."""
    page = (ROOT / "docs/reference/dependencies.md").read_text()
    listed = set(re.findall(r"^\| ([\w.-]+) \|", page, re.MULTILINE)) - {"package"}
    assert not listed - set(_dependencies())


@pytest.mark.parametrize("word", GLOSSARY_WORDS)
def test_every_word_is_defined(word: str) -> None:
    """Each word of the project's vocabulary has an entry in the glossary."""
    page = (ROOT / "docs/glossary.md").read_text()
    assert re.search(rf"^\*\*{re.escape(word)}\*\*", page, re.MULTILINE), f"{word} is not defined"


def test_links_lead_somewhere() -> None:
    """A relative link in a document names a file that exists."""
    offences = []
    for name in all_files():
        if not name.endswith(".md"):
            continue
        page = ROOT / name
        offences += [
            f"{name}: {target}"
            for target in _LINK.findall(page.read_text())
            if not (page.parent / target).exists()
        ]
    assert not offences, report(offences)
