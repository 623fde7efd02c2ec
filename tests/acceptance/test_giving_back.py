"""An instance that the load does not need any more, on real processes: given back, lent, and taken again."""

import asyncio
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onepiece
from onepiece.client import Client
from tests.acceptance.node_set import READY_SECONDS, NodeSet, open_set
from tests.acceptance.shifting_stages import RUN_STEPS, STEP_SECONDS

BLUE = "tests.acceptance.shifting_stages:blue"
_OUTSTANDING = 6
"""More than two instances bear for long."""
_JOB = "import time; time.sleep(3600)"


def _start(a_set: NodeSet) -> None:
    a_set.start(
        *("--roles", "proxy,manager,store", "--workflow", BLUE),
        *("--rebalance", "on", "--rebalance-seconds", "1"),
    )
    a_set.start(
        *("--roles", "worker", "--join", a_set.seed.address, "--devices", "cpu:0=1GiB,cpu:1=1GiB"),
        *("--lend", shlex.join([sys.executable, "-c", _JOB]), "--lend-idle-seconds", "0.2"),
    )
    a_set.wait_ready()


async def _run(client: Client, number: int) -> None:
    handle = await client.submit("blue", {"number": number}, timeout=60.0)
    assert await handle.result() == -number


async def _serving(client: Client, wanted: int) -> Mapping[str, Any]:
    """The view, once so many instances are ready and the others gone, and what is idle is lent."""
    while True:
        view = await client.placement()
        (stage,) = view["stages"]
        is_lent = all(device["job"] == "running" for device in view["idle"])
        if (stage["ready"], stage["leaving"]) == (wanted, 0) and is_lent:
            return view
        await asyncio.sleep(0.1)


async def _load(client: Client, first: int) -> None:
    """Until it is cancelled; what was begun is finished."""
    number = first
    async with asyncio.TaskGroup() as tasks:
        try:
            while True:
                running = [tasks.create_task(_run(client, number + more)) for more in range(_OUTSTANDING)]
                number += _OUTSTANDING
                await asyncio.sleep(STEP_SECONDS * RUN_STEPS)
                await asyncio.wait(running[: _OUTSTANDING // 2])
        except asyncio.CancelledError:
            pass


async def test_what_is_not_needed_is_given_back_and_lent_until_it_is_needed(tmp_path: Path) -> None:
    """Of two instances one ends, a job has its device, and goes when load comes; nothing is lost."""
    with open_set(tmp_path / "set") as a_set:
        await asyncio.to_thread(_start, a_set)
        async with onepiece.connect(a_set.seed.http) as client, asyncio.timeout(READY_SECONDS):
            await _serving(client, 2)
            await _run(client, 1)
            view = await _serving(client, 1)
            assert view["given_back"] == 1
            (device,) = view["idle"]
            assert device["command"].endswith(shlex.quote(_JOB))
            assert [move["outcome"] for move in view["moves"]] == ["given back"]
            load = asyncio.create_task(_load(client, 2))
            view = await _serving(client, 2)
            load.cancel()
            await load
            assert view["idle"] == []
            (taken,) = [move for move in view["moves"] if move["outcome"] == "done"]
            assert (taken["donor"], taken["devices"]) == (None, [device["device"]])
