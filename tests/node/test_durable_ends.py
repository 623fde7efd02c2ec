"""How a request ends is told when it is durable, and whatever was durable first is what is told."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import define, evolve, field

import onepiece
from onepiece.core.request_events import EndStands, KeepError
from onepiece.errors import DeadlineExceeded, OnePieceError, RequestCancelled
from onepiece.ids import new_uid
from onepiece.messages import (
    CONTROL_REGION,
    RequestErrored,
    ResultDescribed,
    ResultInput,
    ResultStored,
    StoreFailure,
)
from onepiece.node.calls import Calls
from onepiece.node.checkpoint_service import CheckpointService
from onepiece.node.checkpoint_store import CheckpointStore
from onepiece.node.error_keeper import ErrorKeeper, Kept
from onepiece.node.record_keeper import RecordKeeper
from onepiece.node.store_service import StoreService
from onepiece.store import RequestLog, ResultStore
from tests.node import hop_stages
from tests.node.hop_crashes import Trap, open_hop_set, set_trap
from tests.node.store_nodes import StoreNode, StoreNodes, until

REQUEST_SECONDS = 40.0
LATE = DeadlineExceeded("it was late")
STOPPED = RequestCancelled("it was cancelled")


@define(eq=False)
class Ends:
    """Two store nodes with their services, and what the owner of requests, at the first one, hears."""

    nodes: list[StoreNode]
    services: dict[str, StoreService]
    calls: Calls
    keeper: ErrorKeeper
    heard: list[Any] = field(factory=list)

    async def store_failure(self, node: StoreNode, uid: str, error: OnePieceError) -> ResultDescribed:
        """Ask one store node to keep an error; what stands there then."""
        address, reply_to = f"{node.route.address}/{CONTROL_REGION}", self.nodes[0].env.control_address
        failure = StoreFailure(0, reply_to, uid, "film", error.to_wire())
        return await self.calls.ask(
            ResultDescribed,
            lambda call: self.nodes[0].env.outbox.post(address, evolve(failure, call=call)),
            what="asked",
            timeout_seconds=5.0,
        )

    async def put_result(self, node: StoreNode, uid: str) -> Any:
        """A stage's output comes to one store node; what the owner is told of it."""
        before = len(self.heard)
        header = ResultInput(uid, "film", self.nodes[0].env.control_address, "text/plain", 0.0)
        await self.services[node.route.node_id].put(header, b"result")
        await until(lambda: len(self.heard) > before)
        return self.heard[-1]

    async def end(self, uid: str, error: OnePieceError) -> Kept:
        """The owner has an error stored."""
        return await self.keeper.keep(KeepError(uid, "film", error.to_wire()))


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[Ends]:
    """The nodes, ready."""
    async with StoreNodes(directory).run_all("a", "b") as nodes:
        services = {}
        logs = [RequestLog.open(directory / f"{node.route.node_id}-requests") for node in nodes]
        kept = [ResultStore.open(directory / f"{node.route.node_id}-checkpoints") for node in nodes]
        async with logs[0] as log_a, logs[1] as log_b, kept[0] as kept_a, kept[1] as kept_b:
            for node, log, store in zip(nodes, (log_a, log_b), (kept_a, kept_b), strict=True):
                checkpoints = CheckpointService(CheckpointStore(store), node.env, node.tasks)
                service = StoreService(node.store, log, node.copies, checkpoints, node.env, node.tasks)
                service.attach(node.control)
                services[node.route.node_id] = service
            env, control = nodes[0].env, nodes[0].control
            calls = Calls(env)
            calls.answered_by(control, ResultDescribed)
            ends = Ends(nodes, services, calls, ErrorKeeper(env, calls, RecordKeeper(env, calls, 2)))
            control.on(ResultStored, ends.heard.append)
            control.on(RequestErrored, ends.heard.append)
            env.outbox.deliver_locally(env.control_address, control.dispatch)
            yield ends


def uid_of(number: int) -> str:
    """A request's UID."""
    return new_uid(1.0, random.Random(number))


def _told(kept: Kept) -> tuple[Any, bool]:
    """The error that stands, and whether it does so in a store."""
    return kept.stands.error, kept.is_stored


async def test_an_error_that_came_first_stands(tmp_path: Path) -> None:
    """A result and another error that come later are refused, and whoever sent them hears what stands."""
    async with opened(tmp_path) as ends:
        a, uid = ends.nodes[0], uid_of(1)
        assert (await ends.store_failure(a, uid, LATE)).failure == LATE.to_wire()
        told = await ends.put_result(a, uid)
        assert isinstance(told, RequestErrored)
        assert OnePieceError.from_wire(told.error).message == LATE.message
        assert (await ends.store_failure(a, uid, STOPPED)).failure == LATE.to_wire()
        for node in ends.nodes:
            await node.settled()
        assert await ends.nodes[1].read(uid) == "DeadlineExceeded", "it has no copy"


async def test_a_result_that_came_first_stands(tmp_path: Path) -> None:
    """An error that comes later is refused, and the owner hears of the result, wherever it is."""
    async with opened(tmp_path) as ends:
        for number, node in enumerate(ends.nodes):
            uid = uid_of(number)
            assert isinstance(await ends.put_result(node, uid), ResultStored)
            stored = await ends.store_failure(node, uid, LATE)
            assert (stored.failure, stored.result_bytes, stored.content_type) == (None, 6, "text/plain")
            kept = await ends.end(uid, STOPPED)
            assert kept == Kept(EndStands(uid, None, 6, "text/plain"), is_stored=True)
            for each in ends.nodes:
                await each.settled()
            assert [await each.read(uid) for each in ends.nodes] == [b"result", b"result"]


async def test_an_end_meets_a_result_at_every_holder(tmp_path: Path) -> None:
    """When the owner tells of an error, each node that a result could go to refuses it."""
    async with opened(tmp_path) as ends:
        for number in range(6):
            uid = uid_of(number)
            assert _told(await ends.end(uid, STOPPED)) == (STOPPED.to_wire(), True)
            assert [await node.read(uid) for node in ends.nodes] == ["RequestCancelled"] * 2
            assert isinstance(await ends.put_result(ends.nodes[number % 2], uid), RequestErrored)
            assert _told(await ends.end(uid, LATE)) == (STOPPED.to_wire(), True)


async def test_an_end_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store node that does not answer is waited for within a bound; if none does, that is said."""
    for name, value in {
        "_STORE_SECONDS": 2.0,
        "_AGAIN_SECONDS": 0.05,
        "_ASKS_MIN": 1,
        "DELIVERY_PATIENCE_SECONDS": 0.3,
    }.items():
        monkeypatch.setattr(f"onepiece.node.error_keeper.{name}", value)
    async with opened(tmp_path) as ends:
        a, b = ends.nodes
        monkeypatch.setattr(a.control, "_handlers", {**a.control._handlers, StoreFailure: []})
        assert _told(await ends.end(uid_of(1), LATE)) == (LATE.to_wire(), True)
        assert await b.read(uid_of(1)) == "DeadlineExceeded"
        monkeypatch.setattr(b.control, "_handlers", {**b.control._handlers, StoreFailure: []})
        assert _told(await ends.end(uid_of(2), LATE)) == (LATE.to_wire(), False)


@pytest.mark.timeout(120)
async def test_owner_dies_between_storing_and_telling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancellation that was stored is what every proxy tells, though its owner told nobody."""
    trap = Trap("running")
    set_trap(trap, monkeypatch)
    stored, keep = asyncio.Event(), ErrorKeeper.keep

    async def keep_and_fall_silent(self: ErrorKeeper, wanted: KeepError) -> Kept:
        kept = await keep(self, wanted)
        if not stored.is_set():
            stored.set()
            await asyncio.Event().wait()
        return kept

    monkeypatch.setattr(ErrorKeeper, "keep", keep_and_fall_silent)
    async with open_hop_set(tmp_path, trap) as a_set, asyncio.timeout(REQUEST_SECONDS):
        first, second = (a_set.living[name].node for name in ("proxy-1", "proxy-2"))
        assert first.proxy is not None
        accepted = await first.proxy.submit("film", {"text": "ahoy"}, timeout_seconds=60.0, key="order-17")
        await trap.caught.wait()
        async with asyncio.TaskGroup() as tasks:
            cancelling = tasks.create_task(first.proxy.cancel(accepted.uid))
            await stored.wait()
            assert not cancelling.done(), "it was told before it was stored"
            assert not (await first.proxy.status(accepted.uid)).state.is_final
            cancelling.cancel()
        await a_set.die("proxy-1")
        trap.let_go.set()
        async with onepiece.connect(str(second.http)) as client:
            handle = await client.submit("film", {"text": "ahoy"}, timeout=60.0, key="order-17")
            assert handle.uid == accepted.uid
            with pytest.raises(RequestCancelled):
                await handle.result()
        assert hop_stages.runs["render"] == 1, "it was driven on"
