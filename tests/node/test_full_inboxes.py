"""Full inboxes: senders wait for room, and yet nobody waits in a circle."""

import asyncio
from pathlib import Path
from typing import Any, Final

import pytest

from onepiece.graph import check_inputs
from stages.synthetic import expected_digest
from tests.node.in_process import open_nodes, proxy_of, run
from tests.node.proxy_set import until

REQUESTS: Final = 60
INBOX_BYTES: Final = 1 << 18
TEXT: Final = "x" * 60_000
"""An inbox holds four of them."""
SECONDS: Final = 50.0

ENDS: Final = {"eastward": "<>", "westward": "><", "circle": "<<<", "there_and_back": "<><", "diamond": "<<>"}


@pytest.mark.parametrize(
    "names",
    [("eastward", "westward"), ("circle",), ("there_and_back",), ("diamond",), tuple(ENDS)],
    ids=" and ".join,
)
async def test_no_circle_of_full_inboxes(names: tuple[str, ...], tmp_path: Path) -> None:
    """Inboxes are full, their actors send to each other, or to themselves: all finish (faults 13, 92)."""
    workflows = [f"tests.node.crossing_stages:{name}" for name in names]
    async with open_nodes(*workflows, directory=tmp_path, inbox_bytes=INBOX_BYTES) as nodes:
        proxy = proxy_of(nodes[0])

        async def one(number: int) -> tuple[Any, str]:
            name = names[number % len(names)]
            got = await run(proxy, name, {"text": f"{number:04}{TEXT}"}, SECONDS)
            return got, f"{number:04}{TEXT}{ENDS[name]}"

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(number)) for number in range(REQUESTS)]
        wrong = [got[-40:] for got, wanted in (task.result() for task in running) if got != wanted]
        assert not wrong
        await until(lambda: all(node.env.retainer.held_bytes == 0 for node in nodes))


async def test_values_larger_than_an_inbox_arrive(tmp_path: Path) -> None:
    """They are pulled; small inboxes, joins and many at a time included."""
    payload_bytes = INBOX_BYTES + 5
    async with open_nodes("stages.synthetic:diamond", directory=tmp_path, inbox_bytes=INBOX_BYTES) as nodes:
        proxy = proxy_of(nodes[0])
        graph = proxy.workflows()["diamond"]

        async def one(seed: int) -> None:
            inputs = check_inputs(graph, {"seed": seed, "payload_bytes": payload_bytes})
            got = await run(proxy, "diamond", inputs, SECONDS)
            assert got.digest == expected_digest("diamond", payload_bytes, seed)

        async with asyncio.TaskGroup() as tasks:
            for seed in range(4):
                tasks.create_task(one(seed))
        await until(lambda: all(node.env.retainer.held_bytes == 0 for node in nodes))
