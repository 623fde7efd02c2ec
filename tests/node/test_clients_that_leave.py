"""Clients that give up and try again: their requests do not pile up, and what nobody wants is stopped."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

import onepiece
from onepiece.client import Client
from onepiece.log import get_logger
from onepiece.requests import EventKind, RequestState
from tests.node import waiting_stages
from tests.node.in_process import open_nodes
from tests.node.proxy_set import until

CLIENTS: Final = 6
TRIES: Final = 4


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[Client]:
    """A set with a stage that takes as long as the test wants, and a client of it."""
    waiting_stages.reset()
    async with (
        open_nodes("tests.node.waiting_stages:film", directory=directory) as nodes,
        onepiece.connect(str(nodes[0].http)) as client,
    ):
        yield client


async def none_alive(client: Client) -> None:
    """Wait until every request has ended."""
    for status in await client.requests():
        await client.attach(status.uid).wait()


async def test_tries_under_a_key_are_one_request(tmp_path: Path) -> None:
    """Clients that lose patience and submit again run their stage once each, not once a try (fault 100)."""
    async with served(tmp_path) as client:

        async def impatient(name: str) -> str:
            for turn in range(TRIES):
                handle = await client.submit("film", {"name": name}, key=f"order of {name}")
                async with aclosing(handle.events()) as events:
                    async for event in events:
                        if turn + 1 < TRIES or event.kind is EventKind.FINISHED:
                            break  # it has waited long enough
            waiting_stages.may_step.release()
            return str(await handle.result())

        names = [f"client {number}" for number in range(CLIENTS)]
        async with asyncio.TaskGroup() as tasks:
            trying = [tasks.create_task(impatient(name)) for name in names]
            await until(lambda: bool(waiting_stages.running))
            for _ in range(CLIENTS * waiting_stages.STEPS):
                waiting_stages.may_step.release()
        assert [task.result() for task in trying] == [f"{name}, slowly, shown" for name in names]
        assert waiting_stages.begun == dict.fromkeys(names, 1)


async def test_tries_that_are_given_up_do_not_pile_up(tmp_path: Path) -> None:
    """Without a key each try is a request, which ends with its client's connection (fault 100)."""
    async with served(tmp_path) as client:

        async def impatient(name: str) -> None:
            handle = await client.submit("film", {"name": name})
            async with aclosing(handle.events(cancel_on_disconnect=True)) as events:
                await anext(events)

        for turn in range(TRIES):
            async with asyncio.TaskGroup() as tasks:
                for number in range(CLIENTS):
                    tasks.create_task(impatient(f"client {number}, try {turn}"))
            await none_alive(client)
            await until(lambda: not waiting_stages.running)
        for _ in range(waiting_stages.STEPS):
            waiting_stages.may_step.release()
        patient = await client.submit("film", {"name": "patient"})
        assert await patient.result() == "patient, slowly, shown"
        assert waiting_stages.steps == {"patient": waiting_stages.STEPS}


async def test_a_stage_stops_when_its_client_leaves(tmp_path: Path) -> None:
    """The connection is lost amid its second step of fifty: it takes no third one (fault 103)."""
    async with served(tmp_path) as client:
        handle = await client.submit("film", {"name": "lost"})
        async with aclosing(handle.events(cancel_on_disconnect=True)) as events:
            waiting_stages.may_step.release()
            await until(lambda: waiting_stages.steps["lost"] == 1)
            await anext(events)
        await until(lambda: not waiting_stages.running)
        for _ in range(waiting_stages.STEPS):
            waiting_stages.may_step.release()
        next_one = await client.submit("film", {"name": "next"})
        assert await next_one.result() == "next, slowly, shown"
        assert waiting_stages.steps["lost"] == 1
        assert (await handle.status()).state is RequestState.CANCELLED


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_a_minute_of_clients_that_retry(tmp_path: Path) -> None:
    """Clients of one second's patience at a stage of ten: no more runs at once than workers (fault 100).

    How late the node's loop was meanwhile is logged (``pytest -s``).
    """
    late: list[float] = []

    async def watch() -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + 0.01
            await asyncio.sleep(0.01)
            late.append(loop.time() - due)

    async with served(tmp_path) as client, asyncio.TaskGroup() as tasks:
        most = 0

        async def impatient(name: str) -> None:
            nonlocal most
            for turn in range(60):
                handle = await client.submit("film", {"name": f"{name}, try {turn}"})
                with suppress(TimeoutError):
                    async with (
                        asyncio.timeout(1.0),
                        aclosing(handle.events(cancel_on_disconnect=True)) as events,
                    ):
                        async for _ in events:
                            most = max(most, len(waiting_stages.running))

        watching = tasks.create_task(watch())
        async with asyncio.TaskGroup() as clients:
            for number in range(20):
                clients.create_task(impatient(f"client {number}"))
        await none_alive(client)
        watching.cancel()
        begun = sum(waiting_stages.begun.values())
    late.sort()
    p99, worst = (round(late[at], 3) for at in (-len(late) // 100, -1))
    get_logger().info("retries", runs=begun, at_once=most, loop_late_p99=p99, loop_late_worst=worst)
    assert 0 < most <= 2
    assert begun <= 1200
