"""Load shifts from one workflow to another on real processes: devices follow it, and nothing is lost.

With ``-s`` it prints what each second finished; how close that comes to the model's optimum depends on how
busy this machine is otherwise, and is for people to read.
"""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onepiece
from onepiece.client import Client
from tests.acceptance.node_set import READY_SECONDS, NodeSet, open_set

RED_RATE, BLUE_RATE = 6.0, 18.0
RED_REQUESTS = 18
OUTSTANDING_MAX = 40
BLUE_WANTED = 4
STAGES = "tests.acceptance.shifting_stages"
RED, BLUE = f"{STAGES}:red_stage", f"{STAGES}:blue_stage"


def start_all(a_set: NodeSet) -> None:
    """Three workers of two devices each."""
    a_set.start(
        *("--roles", "proxy,manager,store", "--workers", "3"),
        *("--workflow", f"{STAGES}:red", "--workflow", f"{STAGES}:blue"),
        *("--rebalance", "on", "--rebalance-seconds", "3", "--limits", f"{BLUE}=1..5"),
    )
    joining = ("--roles", "worker", "--join", a_set.seed.address)
    for _ in range(3):
        a_set.start(*joining, "--devices", "cpu:0=1GiB,cpu:1=1GiB")
    a_set.wait_ready()


class Load:
    """Requests at a steady rate, however long they take."""

    def __init__(self, client: Client, finished: Counter[tuple[str, int]]) -> None:
        self._client = client
        self._finished = finished
        self.submitted = 0

    async def offer(self, workflow: str, rate: float, is_over: Callable[[], bool]) -> None:
        """Submit until it is over, with a bound on what is outstanding; return when all have their result."""
        outstanding = asyncio.Semaphore(OUTSTANDING_MAX)
        async with asyncio.TaskGroup() as tasks:
            while not is_over():
                await outstanding.acquire()
                self.submitted += 1
                request = tasks.create_task(self._request(workflow, self.submitted))
                request.add_done_callback(lambda _: outstanding.release())
                await asyncio.sleep(1 / rate)

    async def _request(self, workflow: str, number: int) -> None:
        handle = await self._client.submit(workflow, {"number": number}, timeout=60.0)
        assert await handle.result() == (number if workflow == "red" else -number)
        self._finished[workflow, int(time.monotonic())] += 1


def ready_of(view: Mapping[str, Any]) -> tuple[int, int]:
    """Ready instances of both stages."""
    ready = {stage["stage"]: stage["ready"] for stage in view["stages"]}
    return ready[RED], ready[BLUE]


async def test_devices_follow_a_shift_of_the_load(tmp_path: Path) -> None:
    """Of four red and two blue at least two become blue, in three moves; nothing is lost (fault 89)."""
    with open_set(tmp_path / "set") as a_set:
        await asyncio.to_thread(start_all, a_set)
        async with onepiece.connect(a_set.seed.http) as client:
            await _shift(client)
        prefetched = [node.log().count("prefetched") for node in a_set.nodes]
        assert sum(prefetched) >= 1, "what comes behind another one is read in advance"


async def _shift(client: Client) -> None:
    finished: Counter[tuple[str, int]] = Counter()
    load = Load(client, finished)
    async with asyncio.timeout(READY_SECONDS):  # the set is ready with one instance of each
        while ready_of(await client.placement()) != (4, 2):  # noqa: ASYNC110 - a view
            await asyncio.sleep(0.1)
    await load.offer("red", RED_RATE, lambda: load.submitted >= RED_REQUESTS)
    assert ready_of(await client.placement()) == (4, 2)
    has_moved = False
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.offer("blue", BLUE_RATE, lambda: has_moved))
        async with asyncio.timeout(READY_SECONDS):
            while ready_of(await client.placement())[1] < BLUE_WANTED:  # noqa: ASYNC110 - a view
                await asyncio.sleep(0.2)
        has_moved = True
    view = await client.placement()
    assert sum(finished.values()) == load.submitted
    red, blue = ready_of(view)
    assert (red, blue) in {(2, 4), (1, 5)}
    assert view["done"] <= 3
    assert view["abandoned"] == 0
    assert {(move["stage"], move["donor"], move["outcome"]) for move in view["moves"]} == {
        (BLUE, RED, "done")
    }
    _print_table(finished, blue, view)


def _print_table(finished: Counter[tuple[str, int]], blue: int, view: Mapping[str, Any]) -> None:
    seconds = {stage["stage"]: stage["seconds"] for stage in view["stages"]}
    first = min(second for _, second in finished)
    lines = [f"bound of blue now: {blue / seconds[BLUE]:.1f}/s; {view['done']} moves"]
    lines.append("second   red  blue")
    lines += [
        f"{second - first:6} {finished['red', second]:5} {finished['blue', second]:5}"
        for second in range(first, max(second for _, second in finished) + 1)
    ]
    sys.stdout.write("\n".join(["", *lines, ""]))
