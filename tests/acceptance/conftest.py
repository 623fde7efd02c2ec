from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.acceptance.node_set import NodeSet, live_sets, start_set

TEST_SECONDS = 240
"""More than each of a test's waits may take: those say what they waited for."""
_HERE = Path(__file__).parent

_WORKFLOWS = (
    "stages.synthetic:chain",
    "stages.synthetic:diamond",
    "stages.synthetic:noop",
    "tests.acceptance.own_stages:breakable",
    "tests.acceptance.own_stages:loud",
    "tests.acceptance.own_stages:plain",
    "tests.acceptance.own_stages:many_bytes",
    "tests.acceptance.own_stages:wants_gpu",
)


@pytest.fixture(scope="session")
def five(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeSet]:
    """A seed and four workers, which tests share that leave it as it was; all show metrics."""
    directory = tmp_path_factory.mktemp("five") / "set"
    with start_set(*_WORKFLOWS, directory=directory, worker_options=("--metrics", "127.0.0.1:0")) as a_set:
        yield a_set


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here starts node processes."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.acceptance)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TEST_SECONDS))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the logs of the nodes beside a failure."""
    report = yield
    if report.failed:
        for a_set in live_sets:
            report.sections.append((f"nodes in {a_set.directory}", a_set.logs()))
    return report
