"""The size class that a request names, from its proxy and its worker to what the manager is told."""

from pathlib import Path

from onepiece.limits import REPORTED_CLASSES_MAX
from onepiece.requests import Terms
from tests.node.in_process import ended, open_nodes, proxy_of


async def test_requests_and_runs_are_counted_by_size_class(tmp_path: Path) -> None:
    """Of the first classes, each by itself; the others count as if they had none."""
    classes = ["", "large", "large", *(f"class {number}" for number in range(REPORTED_CLASSES_MAX + 2))]
    async with open_nodes("stages.echo:echo", directory=tmp_path, workers=1) as (seed, worker):
        proxy = proxy_of(seed)
        for size_class in classes:
            terms = Terms(size_class=size_class)
            accepted = await proxy.submit("echo", {"text": "x"}, timeout_seconds=20.0, key=None, terms=terms)
            await ended(proxy, accepted.uid)
        offered = seed.member.offered()["echo"]
        assert worker.host is not None
        (report,) = worker.host.reports()
    assert sum(offered.values()) == report.work.runs == len(classes)
    assert len(offered) == REPORTED_CLASSES_MAX + 1
    assert len(report.work.classes) == REPORTED_CLASSES_MAX
    assert offered["large"] == report.work.classes["large"].runs == 2
    assert offered[""] == 1 + 3
    assert sum(each.runs for each in report.work.classes.values()) == len(classes) - 4
