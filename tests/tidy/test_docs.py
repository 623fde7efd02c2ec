"""The documentation agrees with the project."""

import re
import tomllib

import pytest

from onepiece.metrics import SCRAPE_SUCCESS, MetricKind
from onepiece.metrics_catalogue import CATALOGUE
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


def test_every_metric_is_in_the_reference() -> None:
    """The tables of the reference say of each metric just what the code does: type, labels, unit, meaning."""
    page = (ROOT / "docs/reference/metrics.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `onepiece_")]
    wanted = []
    for metric in (*CATALOGUE, SCRAPE_SUCCESS):
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "-"
        cells = (f"`{metric.name}`", metric.kind.value, labels, metric.unit or "-", metric.meaning)
        wanted.append(f"| {' | '.join(cells)} |")
    assert sorted(rows) == sorted(wanted), report(sorted({*rows} ^ {*wanted}))


def test_names_of_metrics_follow_the_rules() -> None:
    """Each name stands once, counters alone end in ``_total``, and units come last."""
    names = [metric.name for metric in CATALOGUE]
    assert len(set(names)) == len(names)
    for metric in CATALOGUE:
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER), metric.name
        assert not metric.unit or metric.name.removesuffix("_total").endswith(metric.unit), metric.name


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
