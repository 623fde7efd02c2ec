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
from onepiece.core.request_events import EndNotStored, EndStored, StoreEnd
from onepiece.core.routing import rendezvous
from onepiece.errors import DeadlineExceeded, OnePieceError, RequestCancelled
from onepiece.ids import new_uid
from onepiece.messages import (
    CONTROL_REGION,
    STORE,
    FailureStored,
    RequestErrored,
    ResultInput,
    ResultStored,
    StoreFailure,
)
from onepiece.node.calls import Calls
from onepiece.node.checkpoint_service import CheckpointService
from onepiece.node.checkpoint_store import CheckpointStore
from onepiece.node.end_keeper import EndKeeper
from onepiece.node.result_reader import ResultReader
from onepiece.node.store_service import StoreService
from onepiece.requests import RequestState
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
    heard: list[Any] = field(factory=list)
    keeper: EndKeeper = field(init=False)
    calls: Calls = field(init=False)

    async def store_failure(self, node: StoreNode, uid: str, error: OnePieceError) -> FailureStored:
        """Ask one store node to keep an error."""
        address, reply_to = f"{node.route.address}/{CONTROL_REGION}", self.nodes[0].env.control_address
        failure = StoreFailure(0, reply_to, uid, "film", error.to_wire())
        return await self.calls.ask(
            FailureStored,
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

    async def end(self, uid: str, error: OnePieceError) -> Any:
        """Have the owner's part carry out an end; what it makes of the answers."""
        before = len(self.heard)
        self.keeper.keep(StoreEnd(uid, "film", error.to_wire()))
        await until(lambda: len(self.heard) > before)
        return self.heard[-1]


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
            ends = Ends(nodes, services)
            env, control, tasks = nodes[0].env, nodes[0].control, nodes[0].tasks
            ends.calls = Calls(env)
            ends.calls.answered_by(control, *EndKeeper.answers)
            results = ResultReader(env, ends.calls)
            ends.keeper = EndKeeper(env, tasks, calls=ends.calls, results=results, handle=ends.heard.append)
            control.on(ResultStored, ends.heard.append)
            control.on(RequestErrored, ends.heard.append)
            env.outbox.deliver_locally(env.control_address, control.dispatch)
            yield ends


def uid_of(number: int) -> str:
    """A request's UID."""
    return new_uid(1.0, random.Random(number))


async def test_an_error_that_came_first_stands(tmp_path: Path) -> None:
    """A result and another error that come later are refused, and whoever sent them hears what stands."""
    async with opened(tmp_path) as ends:
        a, uid = ends.nodes[0], uid_of(1)
        stored = await ends.store_failure(a, uid, LATE)
        assert (stored.node_id, stored.failure, stored.result_bytes, stored.error) == ("a", None, None, None)
        told = await ends.put_result(a, uid)
        assert isinstance(told, RequestErrored)
        assert OnePieceError.from_wire(told.error).message == LATE.message
        second = await ends.store_failure(a, uid, STOPPED)
        assert second.failure == LATE.to_wire()
        for node in ends.nodes:
            await node.settled()
        assert await ends.nodes[1].read(uid) == "DeadlineExceeded", "it has no copy"


async def test_a_result_that_came_first_stands(tmp_path: Path) -> None:
    """An error that comes later is refused, and the owner hears of the result."""
    async with opened(tmp_path) as ends:
        a, uid = ends.nodes[0], uid_of(1)
        assert isinstance(await ends.put_result(a, uid), ResultStored)
        stored = await ends.store_failure(a, uid, LATE)
        assert (stored.failure, stored.result_bytes, stored.content_type) == (None, 6, "text/plain")
        assert await a.read(uid) == b"result"


async def test_an_end_goes_where_results_go(tmp_path: Path) -> None:
    """The owner's error meets a result at the node that results of this UID are sent to."""
    async with opened(tmp_path) as ends:
        for number in range(8):
            uid = uid_of(number)
            assert await ends.end(uid, STOPPED) == EndStored(uid)
            where = [node.route.node_id for node in ends.nodes if await node.read(uid) == "RequestCancelled"]
            assert rendezvous(uid, ["a", "b"]) in where, "it is not where results are sent to"
            for node in ends.nodes:
                await node.settled()
            assert isinstance(await ends.put_result(ends.nodes[number % 2], uid), RequestErrored)


async def test_an_end_is_kept_by_the_next_node_if_one_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store node that does not answer is passed over; if none answers, that is said."""
    monkeypatch.setattr("onepiece.node.end_keeper._STORE_SECONDS", 0.2)
    async with opened(tmp_path) as ends:
        a, b = ends.nodes
        monkeypatch.setattr(a.control, "_handlers", {**a.control._handlers, StoreFailure: []})
        for number in range(4):
            assert await ends.end(uid_of(number), LATE) == EndStored(uid_of(number))
            assert await b.read(uid_of(number)) == "DeadlineExceeded"
        monkeypatch.setattr(b.control, "_handlers", {**b.control._handlers, StoreFailure: []})
        assert await ends.end(uid_of(9), LATE) == EndNotStored(uid_of(9))


@pytest.mark.timeout(120)
async def test_owner_dies_between_storing_and_telling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancellation that was stored is what every proxy tells, though its owner told nobody."""
    trap = Trap("running")
    set_trap(trap, monkeypatch)
    stored, keep = asyncio.Event(), EndKeeper._keep

    async def keep_and_fall_silent(self: EndKeeper, end: StoreEnd) -> None:
        if not stored.is_set():
            self._handle = lambda _: stored.set()
        await keep(self, end)

    monkeypatch.setattr(EndKeeper, "_keep", keep_and_fall_silent)
    async with open_hop_set(tmp_path, trap) as a_set, asyncio.timeout(REQUEST_SECONDS):
        first, second = (a_set.living[name].node for name in ("proxy-1", "proxy-2"))
        assert first.proxy is not None
        assert second.proxy is not None
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


@pytest.mark.timeout(120)
async def test_cancelling_what_has_finished_unnoticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner has not heard that the result is stored when a client cancels: the result stands."""
    trap = Trap("finished", "render", STORE)
    set_trap(trap, monkeypatch)
    async with open_hop_set(tmp_path, trap) as a_set, asyncio.timeout(REQUEST_SECONDS):
        proxy = a_set.living["proxy-1"].node.proxy
        assert proxy is not None
        accepted = await proxy.submit("film", {"text": "ahoy"}, timeout_seconds=60.0, key=None)
        await trap.caught.wait()
        status = await proxy.cancel(accepted.uid)
        assert status.state is RequestState.FINISHED
        assert (await proxy.result(accepted.uid)).total_bytes == status.result_bytes
