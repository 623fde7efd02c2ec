"""Requests whose owner died, and whose workflow nobody can drive any more."""

import asyncio
from pathlib import Path

import pytest

from onepiece.errors import ConfigError, DeadlineExceeded
from onepiece.runtime.workflows import WorkflowImports
from tests.node import hop_stages
from tests.node.hop_crashes import NEVER, Trap
from tests.node.proxy_set import until
from tests.node.test_delivery_ends import ready_set

REQUEST_SECONDS = 3.0


@pytest.mark.timeout(90)
async def test_an_orphan_of_a_workflow_that_is_gone_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its deadline, in a named error that every proxy tells; nothing of it stays."""

    async def gone(*_: object) -> None:
        raise ConfigError("its module is gone")

    async def stay(_: str) -> None:
        await asyncio.Event().wait()

    async with ready_set(tmp_path, Trap(NEVER), monkeypatch) as (a_set, one, other):
        monkeypatch.setitem(hop_stages.hooks, "render", stay)
        handle = await one.submit("film", {"text": "ahoy"}, timeout=REQUEST_SECONDS, key="order-17")
        await until(lambda: hop_stages.runs["render"] == 1)
        monkeypatch.setattr(WorkflowImports, "get", gone)
        await a_set.die("proxy-1")
        with pytest.raises(DeadlineExceeded, match="its workflow 'film' is not registered any more"):
            await other.attach(handle.uid).result()
        await until(lambda: not a_set.retained_sources())
