"""A node that is told to drain, and to resume: seen by its clients, without a request lost."""

import asyncio
from pathlib import Path

import pytest

import onepiece
from onepiece.client import Client
from onepiece.core.actors import Unassign
from onepiece.core.inventory import ActorState
from onepiece.runtime.environment import Routes
from tests.node import hop_stages, waiting_stages
from tests.node.in_process import open_nodes, proxy_of, run
from tests.node.proxy_set import until

SECONDS = 40.0


async def becomes(client: Client, name: str, state: str) -> None:
    """Wait until the set says so of a node."""
    async with asyncio.timeout(SECONDS):
        while {node.node: node.state for node in await client.nodes()}[name] != state:  # noqa: ASYNC110 - a view
            await asyncio.sleep(0.02)


async def test_drain_and_resume(tmp_path: Path) -> None:
    """Its stage finishes, the next one gets its output; drained, it waits; it serves again (fault 125)."""
    waiting_stages.reset()
    async with (
        open_nodes("tests.node.waiting_stages:film", directory=tmp_path, workers=2) as nodes,
        onepiece.connect(str(nodes[0].http)) as client,
    ):
        under_way = await client.submit("film", {"name": "under way"}, timeout=SECONDS)
        await until(lambda: "under way" in waiting_stages.running)
        [busy] = [node for node in nodes if node.host is not None and not node.host.is_idle]
        name = busy.info.node_id
        assert (await client.drain(name)).node == name
        await becomes(client, name, "draining")
        for _ in range(2 * waiting_stages.STEPS):
            waiting_stages.may_step.release()
        assert await under_way.result() == "under way, slowly, shown"
        assert waiting_stages.begun == {"under way": 1}
        await becomes(client, name, "drained")
        await client.resume(name)
        await becomes(client, name, "alive")
        again = await client.submit("film", {"name": "again"}, timeout=SECONDS)
        assert await again.result() == "again, slowly, shown"


async def test_the_last_worker_that_drains_serves_on_and_is_not_called_drained(tmp_path: Path) -> None:
    """Its stages have no other place: requests still run on it; it is drained when another one resumes."""
    hop_stages.runs.clear()
    hop_stages.hooks.clear()
    async with (
        open_nodes("tests.node.hop_stages:film", directory=tmp_path, workers=2) as nodes,
        onepiece.connect(str(nodes[0].http)) as client,
    ):
        one, two = (node.info.node_id for node in nodes[1:])
        await client.drain(one)
        await becomes(client, one, "drained")
        await client.drain(two)
        await becomes(client, two, "draining")
        table = nodes[0].env.routes
        await until(lambda: {actor.state for actor in table.table.actors} == {ActorState.DRAINING})
        for number in range(3):
            request = await client.submit("film", {"text": f"{number}"}, timeout=SECONDS)
            assert await request.result() == f"{number}, drawn, refined, rendered"
        await until(lambda: nodes[2].host is not None and nodes[2].host.is_idle)
        assert not nodes[2].draining.holds_nothing()
        assert {node.node: node.state for node in await client.nodes()}[two] == "draining"
        stages = ", ".join(f"tests.node.hop_stages:{stage}" for stage in ("draw", "refine", "render"))
        await until(lambda: nodes[2].env.retainer.metrics()["outputs"] == 0)
        assert list((await client.node(two)).waits_for) == [
            f"stages that no other worker has room for ({stages})"
        ]
        await client.resume(one)
        await becomes(client, two, "drained")


async def test_an_actor_closed_before_its_first_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The routes still name it: what is sent to it goes to the other one, and nothing is lost (fault 19)."""
    hop_stages.runs.clear()
    hop_stages.hooks.clear()
    workflow = "tests.node.hop_stages:film"
    async with open_nodes(workflow, directory=tmp_path, workers=2) as nodes:
        proxy = proxy_of(nodes[0])
        stage = "tests.node.hop_stages:refine"
        await until(lambda: len(nodes[0].env.routes.table.actors_for(stage)) == 2)
        [actor, _] = nodes[0].env.routes.table.actors_for(stage)
        [host] = [node.host for node in nodes if node.env.identity.life == actor.life]
        assert host is not None
        monkeypatch.setattr(Routes, "update", lambda *_: None)
        host._on_unassign(Unassign(actor.actor_id, "closed by the test", host._manager_epoch))
        await until(lambda: actor.actor_id not in {report.actor_id for report in host.reports()})
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(run(proxy, "film", {"text": f"{number}"}, SECONDS)) for number in range(8)
            ]
        assert [task.result() for task in running] == [f"{n}, drawn, refined, rendered" for n in range(8)]
        assert hop_stages.runs["refine"] == 8
