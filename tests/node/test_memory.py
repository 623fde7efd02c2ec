"""What a node holds of requests when all have ended: nothing, but the records it keeps by design."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from onepiece.errors import OnePieceError
from onepiece.node.node import Node
from onepiece.node.proxy_service import ProxyService
from tests.node.hop_stages import runs
from tests.node.in_process import ended, open_nodes, proxy_of
from tests.node.proxy_set import until

CANCELLED_EACH = 5


def held(node: Node) -> dict[str, Any]:
    """Everything of a node that must be empty while no request is in flight, by name."""
    env = node.env
    found: dict[str, Any] = {}
    found["retained outputs"] = env.retainer.keys()
    found["spilled names"] = env.retainer._names
    found["targets of retained outputs"] = env.retainer._targets
    found["messages under way"] = env.under_way
    found["checkpoints on their way"] = env.checkpoints._waiting
    for address, link in env.outbox._links.items():
        found[f"messages that {address} has not taken"] = link._under_way
        found[f"control messages for {address}"] = link._queue
        found[f"reports for {address}"] = link._reports
    if node.checkpoints is not None:
        found["checkpoints"] = node.checkpoints.owners()
    if node.host is not None:
        for hosted in node.host._hosted.values():
            actor = hosted.actor
            assert actor is not None
            found[f"stage tasks of {actor.spec.name}"] = list(actor._scheduler.all_tasks())
            found[f"queued marks of {actor.spec.name}"] = actor._scheduler._queued
            found[f"running in {actor.spec.name}"] = actor._running
            found[f"messages in hand of {actor.spec.name}"] = range(actor._intake.in_hand)
            found[f"outputs leaving {actor.spec.name}"] = range(actor._leaving)
            found[f"bytes of joins of {actor.spec.name}"] = range(actor._scheduler.join_bytes)
    if node.proxy is not None:
        found.update(held_by_proxy(node.proxy))
    return found


def held_by_proxy(proxy: ProxyService) -> dict[str, Any]:
    """The same of a proxy."""
    owner = proxy.owner
    return {
        "live requests": owner.table.live_uids(),
        "inputs of live requests": owner._owned,
        "followers": owner._followers,
        "places in the budget": range(owner._admission.budget.in_flight),
        "questions without an answer": proxy._calls._waiting,
        "messages held back for adoptions": owner.adopter._held_back,
        "doubtful requests": owner.adopter._doubtful,
        "misdirected messages": owner._misdirected._pending,
    }


def left_over(nodes: list[Node]) -> dict[str, Any]:
    """What is not empty."""
    return {name: what for node in nodes for name, what in held(node).items() if len(what)}


def named_memory() -> set[str]:
    """What this process has mapped of /dev/shm; another test's semaphores, too."""
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("workflow", ["film", "film_kept"])
@pytest.mark.parametrize("count", [60, pytest.param(2500, marks=pytest.mark.full)])
async def test_nothing_is_left_of_requests_that_have_ended(count: int, workflow: str, tmp_path: Path) -> None:
    """That finish, are cancelled at once, or while they run: no more than their records stays (fault 66)."""
    runs.clear()
    mapped_before = named_memory()
    async with open_nodes(f"tests.node.hop_stages:{workflow}", directory=tmp_path, workers=1) as nodes:
        proxy = proxy_of(nodes[0])
        uids = []
        for number in range(count):
            accepted = await proxy.submit(workflow, {"text": "ahoy"}, timeout_seconds=30.0, key=f"k{number}")
            uids.append(accepted.uid)
            if number % CANCELLED_EACH == 0:
                await proxy.cancel(accepted.uid)
            elif number % CANCELLED_EACH == 1:
                await until(lambda: runs["draw"] > 0)
                await proxy.cancel(accepted.uid)
                runs.clear()
        states = [(await ended(proxy, uid)).state.value for uid in uids]
        assert states.count("finished") >= count * 3 // CANCELLED_EACH
        assert states.count("cancelled") >= count // CANCELLED_EACH
        with suppress(TimeoutError):
            await until(lambda: not left_over(nodes))
        assert not left_over(nodes)
        assert len(proxy.requests(limit=1000, state=None)) == min(count, 1000)
        with pytest.raises(OnePieceError):
            await proxy.result(uids[0])
    assert named_memory() <= mapped_before
