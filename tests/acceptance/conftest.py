from collections.abc import Generator
from pathlib import Path

import pytest

from tests.acceptance.node_set import live_sets

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here starts node processes."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.acceptance)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the logs of the nodes beside a failure."""
    report = yield
    if report.failed:
        for a_set in live_sets:
            report.sections.append((f"nodes in {a_set.directory}", a_set.logs()))
    return report
