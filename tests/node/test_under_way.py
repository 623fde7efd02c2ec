"""Messages go where the sender has the fewest under way: nobody queues behind what takes long."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from onepiece.core.inventory import ActorState
from onepiece.core.retention import OutputKey
from onepiece.core.routing import ActorRoute, RouteEpoch, RouteTable
from onepiece.runtime.environment import Environment
from onepiece.runtime.result_deliver import ResultDeliver
from onepiece.runtime.under_way import UnderWay
from tests.node import held_stages
from tests.node.in_process import open_nodes, proxy_of, run
from tests.node.proxy_set import until

REQUESTS = 6
SECONDS = 30.0


@pytest.mark.parametrize(("workflow", "messages"), [("at_once", 1), ("behind", 1), ("joined", 3)])
async def test_nobody_queues_behind_a_request_that_takes_long(
    workflow: str, messages: int, tmp_path: Path
) -> None:
    """One of two instances is held up: all that come meanwhile go to the other one."""
    held_stages.reset()
    async with open_nodes(f"tests.node.held_stages:{workflow}", directory=tmp_path) as nodes:
        proxy = proxy_of(nodes[0])

        def is_quiet() -> bool:
            return sum(len(node.env.under_way) for node in nodes) == messages

        async with asyncio.TaskGroup() as tasks:
            held = tasks.create_task(run(proxy, workflow, {"is_held": True}, SECONDS))
            for _ in range(REQUESTS):
                await until(is_quiet)
                assert await run(proxy, workflow, {"is_held": False}, SECONDS) == "done"
            held_stages.let_go.set()
        assert held.result() == "done"
        await until(lambda: not any(len(node.env.under_way) for node in nodes))
        assert not any(node.env.under_way.counts for node in nodes)


def test_stages_that_are_sent_to_by_turns_have_turns_of_their_own() -> None:
    """A fork sends to one stage, then to the other: all instances of both get their share."""
    actors = tuple(
        ActorRoute(number, stage, "n", 1, ("cpu:0",), "a", ActorState.READY)
        for number, stage in enumerate(["left", "left", "right", "right"])
    )
    routes = SimpleNamespace(table=RouteTable(RouteEpoch(1, 1), actors=actors))
    env = cast("Environment", SimpleNamespace(routes=routes, under_way=UnderWay(), node_id="n"))
    deliver = ResultDeliver(env)
    chosen = [deliver.choose(stage) for _ in range(4) for stage in ("left", "right")]
    counts = [sum(each is actor for each in chosen) for actor in actors]
    assert counts == [2, 2, 2, 2]


def test_what_is_under_way_is_counted_once_and_leaves_nothing() -> None:
    """Sent again it counts for the other actor alone; done twice, or with its request, it is gone."""
    under_way = UnderWay()
    first, second = OutputKey("u", "a", "b"), OutputKey("u", "a", "c")
    under_way.sent(first, 1)
    under_way.sent(second, 1)
    assert under_way.counts == {1: 2}
    under_way.sent(first, 2)
    assert under_way.counts == {1: 1, 2: 1}
    under_way.done(first)
    under_way.done(first)
    assert under_way.counts == {1: 1}
    under_way.ended("u")
    under_way.ended("u")
    assert under_way.counts == {}
    assert len(under_way) == 0
