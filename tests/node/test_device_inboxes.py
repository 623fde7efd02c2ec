"""Nodes whose actors have their inboxes in the memory of a GPU, which is pretended."""

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from onepiece.core.inventory import ActorState
from onepiece.node.actor_host import ActorHost
from tests.node import gpu_stages
from tests.node.gpu_set import GpuSet, gpu_set
from tests.node.in_process import proxy_of, until_ready
from tests.node.proxy_set import until
from tests.runtime.pretended_gpu import CountingDriver, pretended_gpu
from tests.transports.fake_cuda import assert_given_back
from transports import Address

LENGTH = 300_000


@pytest.fixture
def driver() -> Iterator[CountingDriver]:
    """The GPU's driver."""
    gpu_stages.reset()
    with pretended_gpu() as pretended:
        yield pretended
        gpu_stages.reset()
        assert_given_back(pretended)


async def ready(a_set: GpuSet) -> None:
    """Wait until all stages are loaded."""
    await until_ready(proxy_of(a_set.seed))


async def test_tensors_stay_on_the_device(driver: CountingDriver, tmp_path: Path) -> None:
    """They come from stage to stage bit for bit, into the inbox itself; the host has what is retained.

    When all is done, joins among it, the device's memory is free again, but for the inboxes.
    """
    async with gpu_set("shown", "shown_once", "scenery", directory=tmp_path, workers=5) as a_set:
        await ready(a_set)
        for workflow, copies in (("shown_once", []), ("shown", [LENGTH])):
            driver.copied_to_host.clear()
            picture = gpu_stages.pixels(7, LENGTH)
            assert await a_set.run(workflow, seed=7, length=LENGTH) == gpu_stages.seen(picture)
            (address,) = gpu_stages.arrived
            assert any(address in each for each in a_set.spans_of_inboxes())
            assert driver.copied_to_host == copies
            gpu_stages.reset()
        for length in (3, 50_000):
            wanted = gpu_stages.description(3, length, "a title")
            assert await a_set.run("scenery", seed=3, length=length, title="a title") == wanted
        await until(lambda: len(driver.memory) == len(a_set.spans_of_inboxes()))


async def test_what_a_dead_node_had_comes_again(driver: CountingDriver, tmp_path: Path) -> None:
    """It comes from what its sender retains in the host's memory: what computed it does not run again."""
    reached: asyncio.Queue[str] = asyncio.Queue()

    async def hang(node: str) -> None:
        reached.put_nowait(node)
        if gpu_stages.runs["look"] == 1:
            await asyncio.Event().wait()

    gpu_stages.hooks["look"] = hang
    async with gpu_set("shown", directory=tmp_path, workers=3) as a_set:
        await ready(a_set)
        running = asyncio.ensure_future(a_set.run("shown", seed=1, length=LENGTH))
        victim = await reached.get()
        await until(lambda: driver.copied_to_host == [LENGTH])
        await a_set.die(victim)
        assert await running == gpu_stages.seen(gpu_stages.pixels(1, LENGTH))
        assert gpu_stages.runs == {"paint": 1, "look": 2}
        assert await reached.get() != victim
        others = [node for name, node in a_set.nodes.items() if name != victim]
        assert sum(sum(node.env.counts.resent.values()) for node in others) >= 1
        await until(lambda: all(not node.env.retainer.keys() for node in others))


async def test_a_crashed_actor_keeps_no_memory(
    driver: CountingDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its report stays until the manager has had enough of it; its inbox's memory does not."""
    monkeypatch.setattr(ActorHost, "_on_unassign", lambda *_: None)
    async with gpu_set("shown_once", directory=tmp_path, workers=3) as a_set:
        await ready(a_set)
        before = len(a_set.spans_of_inboxes())
        driver.fails = {"cuFlushGPUDirectRDMAWrites": 400}
        running = asyncio.ensure_future(a_set.run("shown_once", seed=1, length=LENGTH))
        await until(lambda: len(a_set.spans_of_inboxes()) < before)
        driver.fails = {}
        running.cancel()
        await asyncio.wait([running])
        await until(lambda: gc.collect() >= 0 and len(driver.memory) == len(a_set.spans_of_inboxes()))
        reports = [report for node in a_set.nodes.values() if node.host for report in node.host.reports()]
        assert [report.error for report in reports if report.state is ActorState.FAILED]


async def test_a_stage_that_cannot_have_its_inbox_is_told(driver: CountingDriver, tmp_path: Path) -> None:
    """Over a transport that reaches no device no request is taken, and whoever looks sees why."""
    listen = Address.parse("tcp://127.0.0.1:0")
    async with gpu_set("shown", directory=tmp_path, workers=1, listen=listen) as a_set:
        proxy = proxy_of(a_set.seed)

        def why() -> str:
            return str(proxy.readiness())

        await until(lambda: "DeviceUnreachable" in why())
        assert "listen on verbs://" in why()
        assert not proxy.readiness().ready
