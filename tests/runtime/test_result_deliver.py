"""Delivery where nobody takes anything."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from onepiece.core.routing import RouteEpoch, RouteTable
from onepiece.errors import NodeLost
from onepiece.graph import INPUTS
from onepiece.messages import StageInput
from onepiece.runtime.environment import Environment
from onepiece.runtime.result_deliver import Letter, ResultDeliver
from onepiece.runtime.result_targets import input_targets
from onepiece.runtime.under_way import UnderWay
from stages.echo import echo


async def test_what_nobody_takes_ends_its_request_when_the_time_is_over() -> None:
    """A stage without an actor: the error says how long was waited, and which option that is."""
    routes = SimpleNamespace(table=RouteTable(RouteEpoch(1, 1)), changed=asyncio.Event())
    env = SimpleNamespace(routes=routes, under_way=UnderWay(), node_id="n", delivery_seconds=0.02)
    header = StageInput("uid", "echo", echo.graph.nodes[0].id, INPUTS, "owner", 0.0, None, 0.0)
    [(_, target)] = input_targets(echo.graph, header)
    with pytest.raises(NodeLost, match=r"within 0\.02 s.*--delivery-seconds"):
        await ResultDeliver(cast("Environment", env)).send(Letter(target, ()))
