"""Prefetches as a node carries them out: what is reported of an order, however it ends."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from onepiece import StageContext, stage, workflow
from onepiece.core.prefetches import Prefetch, PrefetchReport, StopPrefetch
from onepiece.errors import SchemaMismatch
from onepiece.node.prefetching import Prefetcher
from onepiece.runtime.environment import Environment
from onepiece.runtime.workflows import WorkflowImports
from tests.runtime.rig import until

_GO_ON = threading.Event()
_READ: list[str] = []


def weights() -> list[str]:
    """As if a download took some time."""
    _GO_ON.wait()
    _READ.append("weights")
    return [__file__]


def broken() -> list[str]:
    """As if there were no such model."""
    raise ValueError("no such model")


@stage(prefetch=weights)
async def large(ctx: StageContext[None], text: str) -> str:
    """Has weights."""
    return text


@stage(prefetch=broken)
async def unknown(ctx: StageContext[None], text: str) -> str:
    """Has none that are there."""
    return text


@stage
async def small(ctx: StageContext[None], text: str) -> str:
    """Has none."""
    return text


@workflow
def chain(text: str) -> str:
    """All of them."""
    return small(unknown(large(text)))


class _Imports:
    async def get(self, _module: str, digest: str | None = None) -> Any:
        if digest == "other":
            raise SchemaMismatch("another version")
        return chain


@asynccontextmanager
async def _prefetcher() -> AsyncIterator[tuple[Prefetcher, list[None]]]:
    news: list[None] = []
    env = SimpleNamespace(node_id="n", monotonic=lambda: 0.0, on_change=lambda: news.append(None))
    _GO_ON.clear()
    _READ.clear()
    async with asyncio.TaskGroup() as tasks:
        made = Prefetcher(cast(Environment, env), cast(WorkflowImports, _Imports()), tasks)
        try:
            yield made, news
        finally:
            _GO_ON.set()
            made.stop_all()
            await until(lambda: all(thread.name != "read-ahead" for thread in threading.enumerate()))


def _order(name: str, number: int = 1, digest: str = "d") -> Prefetch:
    return Prefetch(f"{__name__}:{name}", "m:chain", digest, (1, number), 1)


def _over(reports: Iterable[PrefetchReport]) -> list[bool]:
    return [report.is_over for report in reports]


async def test_an_order_is_over_when_all_is_read() -> None:
    """The same one again changes nothing; a new one for the stage is carried out anew."""
    async with _prefetcher() as (made, news):
        made.begin(_order("large"))
        assert made.reports() == (PrefetchReport(f"{__name__}:large", (1, 1)),)
        made.begin(_order("large"))
        _GO_ON.set()
        await until(lambda: _over(made.reports()) == [True])
        assert len(news) == 1
        made.begin(_order("large"))
        assert _over(made.reports()) == [True]
        made.begin(_order("large", 2))
        assert made.reports() == (PrefetchReport(f"{__name__}:large", (1, 2)),)
        await until(lambda: _over(made.reports()) == [True])
        assert _READ == ["weights"] * 2


@pytest.mark.parametrize(
    "order", [_order("small"), _order("unknown"), _order("absent"), _order("large", digest="other")]
)
async def test_what_cannot_be_read_holds_nothing_up(order: Prefetch) -> None:
    """A stage without weights, one whose prefetch raises, one that is not there, or of another version."""
    async with _prefetcher() as (made, _):
        made.begin(order)
        await until(lambda: _over(made.reports()) == [True])
        assert not _READ


async def test_what_is_taken_back_is_not_told_of_any_more() -> None:
    """Nor is it an error to take back what there is not."""
    async with _prefetcher() as (made, news):
        made.begin(_order("large"))
        await asyncio.sleep(0)
        made.take_back(StopPrefetch(f"{__name__}:large", 1))
        made.take_back(StopPrefetch(f"{__name__}:small", 1))
        assert made.reports() == ()
        _GO_ON.set()
        assert not news
