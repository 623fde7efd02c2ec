"""Requests over wires that lose, damage and cut: each ends, and none ends in a wrong result."""

import asyncio
import random
from pathlib import Path
from typing import Any, Final

import pytest

from onepiece.graph import check_inputs
from onepiece.node.parts import NodeParts
from stages.synthetic import expected_digest
from tests.node.in_process import open_nodes, proxy_of, run
from transports import transport_for
from transports.testing.faults import Faults, FaultyTransport

REQUESTS: Final = 24
SECONDS: Final = 40.0
"""A lost message holds up its ring for a lease of several seconds, and there are several."""

FAULTS: Final[dict[str, dict[str, Any]]] = {
    "dropped": {"drop_chance": 0.02, "remaining": 4},
    "flipped": {"flip_chance": 0.02, "remaining": 4},
    "cut": {"cut_chance": 0.01, "remaining": 12},
    "shuffled and late": {"shuffle_pieces": True, "delay_seconds": 0.002},
}


@pytest.mark.parametrize("name", FAULTS)
async def test_every_request_ends(name: str, tmp_path: Path) -> None:
    """Lost control and data messages come again; damaged ones are never taken for good (faults 8, 9)."""
    faults = Faults(random.Random(1), **FAULTS[name])
    sound = faults.remaining
    faults.remaining = 0  # until all have joined: what is tested is requests

    parts = NodeParts(find_transport=lambda address: FaultyTransport(transport_for(address), faults))
    async with open_nodes("stages.synthetic:diamond", directory=tmp_path, parts=parts) as nodes:
        proxy = proxy_of(nodes[0])
        graph = proxy.workflows()["diamond"]

        async def one(seed: int) -> tuple[Any, str]:
            inputs = check_inputs(graph, {"seed": seed, "payload_bytes": 5000 * seed})
            ended = await run(proxy, "diamond", inputs, SECONDS, key=f"order-{seed}")
            return ended, expected_digest("diamond", 5000 * seed, seed)

        faults.remaining = sound
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(seed)) for seed in range(REQUESTS)]
        faults.remaining = 0  # let them close in peace
        outcomes = [task.result() for task in running]
    finished = [(value.digest, wanted) for value, wanted in outcomes if not isinstance(value, str)]
    assert [got for got, _ in finished] == [wanted for _, wanted in finished]
    assert len(finished) == REQUESTS, [value for value, _ in outcomes if isinstance(value, str)]
    assert faults.happened or name == "shuffled and late"
