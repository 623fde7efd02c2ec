"""How a request ends is told when it is durable, and whatever was durable first is what is told."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import define, evolve, field

import onepiece
from onepiece.core.request_events import EndStands, KeepError
from onepiece.errors import (
    DeadlineExceeded,
    OnePieceError,
    PayloadTooLarge,
    RequestCancelled,
    StageFailed,
    StoreFull,
)
from onepiece.ids import new_uid
from onepiece.messages import (
    CONTROL_REGION,
    STORE,
    AskEnded,
    ReleaseRequests,
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
from onepiece.node.leftovers import EndedRequests
from onepiece.node.record_keeper import RecordKeeper
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
    """Store nodes with their services; the owner of requests is at the first one."""

    all: StoreNodes
    nodes: list[StoreNode]
    services: dict[str, StoreService]
    heard: list[Any] = field(factory=list)
    """What the owner is told of results."""
    asked: list[str] = field(factory=list)
    """The nodes that were asked to take an intent, one entry for each time."""
    silent: set[str] = field(factory=set)
    """The nodes that do not answer that."""
    keeper: ErrorKeeper = field(init=False)
    calls: Calls = field(init=False)

    async def store_failure(
        self, node: StoreNode, uid: str, error: OnePieceError, *, is_settled: bool = True
    ) -> ResultDescribed:
        """Ask one store node to keep an error, or an intent."""
        address, reply_to = f"{node.route.address}/{CONTROL_REGION}", self.nodes[0].env.control_address
        failure = StoreFailure(0, reply_to, uid, "film", error.to_wire(), is_settled)
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
        """Have the owner's part store an error."""
        return await self.keeper.keep(wanted(uid, error))


@asynccontextmanager
async def opened(directory: Path, *names: str) -> AsyncIterator[Ends]:
    """The nodes, ready; two of them hold what belongs to a request."""
    all_nodes = StoreNodes(directory)
    async with all_nodes.run_all(*(names or ("a", "b"))) as nodes, AsyncExitStack() as stack:
        ends = Ends(all_nodes, nodes, {})
        for node in nodes:
            name = node.route.node_id
            log = await stack.enter_async_context(RequestLog.open(directory / f"{name}-requests"))
            kept = await stack.enter_async_context(ResultStore.open(directory / f"{name}-checkpoints"))
            checkpoints = CheckpointService(CheckpointStore(kept), node.env, node.tasks)
            service = StoreService(node.store, log, node.copies, checkpoints, node.env, node.tasks)
            ends.services[name] = service
            _attach(service, node, ends)
        env, control = nodes[0].env, nodes[0].control
        ends.calls = Calls(env)
        ends.calls.answered_by(control, ResultDescribed)
        ends.keeper = ErrorKeeper(env, ends.calls, RecordKeeper(env, ends.calls, copies=2))
        control.on(ResultStored, ends.heard.append)
        control.on(RequestErrored, ends.heard.append)
        env.outbox.deliver_locally(env.control_address, control.dispatch)
        yield ends


def _attach(service: StoreService, node: StoreNode, ends: Ends) -> None:
    """Have a node's service answer, unless the node is to be silent."""
    name, store_failure = node.route.node_id, service._store_failure

    async def store_failure_if_heard(failure: StoreFailure) -> None:
        if not failure.is_settled:
            ends.asked.append(name)
        if name not in ends.silent:
            await store_failure(failure)

    service._store_failure = store_failure_if_heard  # type: ignore[method-assign]  # the wire in between
    service.attach(node.control)


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner waits for store nodes as often as else, but not as long."""
    monkeypatch.setattr("onepiece.node.error_keeper._STORE_SECONDS", 0.2)
    monkeypatch.setattr("onepiece.node.error_keeper._AGAIN_SECONDS", 0.01)
    monkeypatch.setattr("onepiece.node.error_keeper._ASKS_MIN", 3)
    monkeypatch.setattr("onepiece.node.error_keeper.DELIVERY_PATIENCE_SECONDS", 0.0)


def uid_of(number: int) -> str:
    """A request's UID."""
    return new_uid(1.0, random.Random(number))


def wanted(uid: str, error: OnePieceError) -> KeepError:
    """An error that is to be stored."""
    return KeepError(uid, "film", error.to_wire())


def refusing(failure: Exception) -> Any:
    """What a store does that takes nothing."""

    async def refuse(*_: Any, **__: Any) -> None:
        raise failure

    return refuse


# --- what stands ---------------------------------------------------------------------------------


async def test_an_error_that_came_first_stands(tmp_path: Path) -> None:
    """A result and another error that come later are refused, and whoever sent them hears what stands."""
    async with opened(tmp_path) as ends:
        (a, b), uid = ends.nodes, uid_of(1)
        stored = await ends.store_failure(a, uid, LATE)
        assert (stored.failure, stored.workflow, stored.error) == (LATE.to_wire(), "film", None)
        told = await ends.put_result(a, uid)
        assert isinstance(told, RequestErrored)
        assert OnePieceError.from_wire(told.error).message == LATE.message
        assert (await ends.store_failure(a, uid, STOPPED)).failure == LATE.to_wire()
        assert await ends.end(uid, STOPPED) == Kept(EndStands(uid, LATE.to_wire()), is_stored=True)
        await ends.all.settled()
        assert await b.read(uid) == "DeadlineExceeded", "copies do not agree"


async def test_a_result_that_came_first_stands(tmp_path: Path) -> None:
    """An error that comes later is refused, and the owner hears of the result."""
    async with opened(tmp_path) as ends:
        a, uid = ends.nodes[0], uid_of(1)
        assert isinstance(await ends.put_result(a, uid), ResultStored)
        stored = await ends.store_failure(a, uid, LATE, is_settled=False)
        assert (stored.failure, stored.result_bytes, stored.content_type) == (None, 6, "text/plain")
        assert await ends.end(uid, LATE) == Kept(EndStands(uid, None, 6, "text/plain"), is_stored=True)
        await ends.all.settled()
        assert [await node.read(uid) for node in ends.nodes] == [b"result"] * 2


@pytest.mark.parametrize("first", ["result", "error", "fetched"])
async def test_what_holders_have_apart_is_told_as_they_will_agree(first: str, tmp_path: Path) -> None:
    """One holder was out of reach for whoever stored at the other: what came first stands, fetched or not."""
    async with opened(tmp_path) as ends:
        (a, b), uid = ends.nodes, uid_of(1)
        now = a.env.now()
        stands = EndStands(uid, None, 1, "x")
        if first == "error":
            await b.store.put_error(uid, LATE.to_wire(), now=now - 2.0)
            stands = EndStands(uid, LATE.to_wire())
        await a.store.put(uid, [b"1"], content_type="x", now=now - 1.0)
        if first == "fetched":
            await a.store.purge(uid, now)
            stands = EndStands(uid, None)
        assert await ends.end(uid, STOPPED) == Kept(stands, is_stored=True)


async def test_every_holder_has_an_error_before_it_is_told(tmp_path: Path) -> None:
    """Wherever a result of the request goes later it meets the error: none of two comes into being."""
    async with opened(tmp_path) as ends:
        for number in range(4):
            uid = uid_of(number)
            ends.asked.clear()
            assert await ends.end(uid, STOPPED) == Kept(EndStands(uid, STOPPED.to_wire()), is_stored=True)
            assert sorted(ends.asked) == ["a", "b"]
            assert [await node.read(uid) for node in ends.nodes] == ["RequestCancelled"] * 2
            assert isinstance(await ends.put_result(ends.nodes[number % 2], uid), RequestErrored)


async def test_an_intent_is_no_end_and_keeps_results_out(tmp_path: Path) -> None:
    """Where an owner died before it decided: readers see nothing, results are refused, an end can follow."""
    async with opened(tmp_path) as ends:
        a, uid = ends.nodes[0], uid_of(1)
        stored = await ends.store_failure(a, uid, LATE, is_settled=False)
        assert (stored.failure, stored.is_intent) == (LATE.to_wire(), True)
        assert await a.read(uid) == "UnknownRequest"
        assert isinstance(await ends.put_result(a, uid), RequestErrored)
        assert await ends.end(uid, STOPPED) == Kept(EndStands(uid, LATE.to_wire()), is_stored=True)
        assert await a.read(uid) == "DeadlineExceeded"


# --- for how long nobody is told -----------------------------------------------------------------


async def test_a_holder_that_is_silent_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have a result: while patience lasts nothing is told without it, and then it counts."""
    monkeypatch.setattr("onepiece.node.error_keeper._STORE_SECONDS", 0.2)
    monkeypatch.setattr("onepiece.node.error_keeper._AGAIN_SECONDS", 0.01)
    async with opened(tmp_path) as ends, asyncio.TaskGroup() as tasks:
        uid = uid_of(1)
        b = ends.nodes[1]
        await b.store.put(uid, [b"1"], content_type="x", now=b.env.now() - 1.0)
        ends.silent.add("b")
        keeping = tasks.create_task(ends.end(uid, LATE))
        await until(lambda: ends.asked.count("b") == 3)
        assert not keeping.done()
        ends.silent.clear()
        assert await keeping == Kept(EndStands(uid, None, 1, "x"), is_stored=True)


@pytest.mark.usefixtures("short_patience")
async def test_a_holder_that_stays_silent_is_done_without(tmp_path: Path) -> None:
    """Patience is over, and the holder was asked often enough: what the other one has is told."""
    async with opened(tmp_path) as ends:
        ends.silent.add("b")
        uid = uid_of(1)
        assert await ends.end(uid, LATE) == Kept(EndStands(uid, LATE.to_wire()), is_stored=True)
        assert ends.asked.count("b") == 3, "it was given up after a moment in which this node stood still"


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("why", ["silent", "none there"])
async def test_an_error_that_no_holder_takes_is_told_within_a_bound(why: str, tmp_path: Path) -> None:
    """No client waits for ever; the error is stored as soon as a store node is back."""
    async with opened(tmp_path) as ends:
        a, uid = ends.nodes[0], uid_of(1)
        if why == "silent":
            ends.silent |= {"a", "b"}
        else:
            routes = a.env.routes
            routes.update(evolve(routes.table, nodes=()), {}, {})
        assert await ends.end(uid, LATE) == Kept(EndStands(uid, LATE.to_wire()), is_stored=False)
        assert await a.read(uid) == "UnknownRequest"
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(ends.keeper.keep_late(wanted(uid, LATE)))
            ends.silent.clear()
            ends.all.publish()
            await keeping
        assert [await node.read(uid) for node in ends.nodes] == ["DeadlineExceeded"] * 2


@pytest.mark.parametrize("failure", [StoreFull("the disk is full"), RuntimeError("nobody foresaw it")])
async def test_an_error_that_all_holders_refuse_is_told_at_once(
    failure: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a store fails with is an answer: the node lives on, and the owner waits for nothing."""
    monkeypatch.setattr("onepiece.runtime.environment.STORES_RETURN_SECONDS", 0.0)
    async with opened(tmp_path) as ends:
        uid = uid_of(1)
        with monkeypatch.context() as patch:
            patch.setattr(ResultStore, "put_error", refusing(failure))
            assert await ends.end(uid, LATE) == Kept(EndStands(uid, LATE.to_wire()), is_stored=False)
            assert sorted(ends.asked) == ["a", "b"], "it was asked again"
        await ends.keeper.keep_late(wanted(uid, LATE))
        assert [await node.read(uid) for node in ends.nodes] == ["DeadlineExceeded"] * 2


async def test_a_store_node_that_is_away_is_waited_for_where_the_others_have_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told and stored nowhere it would be lost with its owner, and the request would end otherwise."""
    monkeypatch.setattr("onepiece.runtime.environment.STORES_RETURN_SECONDS", 0.0)
    monkeypatch.setattr("onepiece.node.error_keeper._AGAIN_SECONDS", 0.01)
    put_error = ResultStore.put_error
    async with opened(tmp_path) as ends, asyncio.TaskGroup() as tasks:
        (a, b), uid = ends.nodes, uid_of(1)

        async def put_unless_full(store: ResultStore, *what: Any, **how: Any) -> Any:
            if store is a.store:
                raise StoreFull("the disk is full")
            return await put_error(store, *what, **how)

        monkeypatch.setattr(ResultStore, "put_error", put_unless_full)
        routes = a.env.routes
        routes.update(evolve(routes.table, nodes=(a.route,)), {}, {})
        keeping = tasks.create_task(ends.end(uid, LATE))
        await until(lambda: ends.asked.count("a") == 3)
        assert not keeping.done()
        ends.all.publish()
        assert await keeping == Kept(EndStands(uid, LATE.to_wire()), is_stored=True)
        assert await b.read(uid) == "DeadlineExceeded"


async def test_any_store_node_will_do_where_no_holder_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found there by whoever asks, and keeps results out."""
    put_error = ResultStore.put_error
    async with opened(tmp_path, "a", "b", "c") as ends:
        uid = uid_of(1)
        holders = {route.node_id for route in ends.keeper._records.holders(uid)}
        [other] = [node for node in ends.nodes if node.route.node_id not in holders]

        async def put_elsewhere(store: ResultStore, *what: Any, **how: Any) -> Any:
            if store is not other.store:
                raise StoreFull("the disk is full")
            return await put_error(store, *what, **how)

        monkeypatch.setattr(ResultStore, "put_error", put_elsewhere)
        assert await ends.end(uid, LATE) == Kept(EndStands(uid, LATE.to_wire()), is_stored=True)
        assert await other.read(uid) == "DeadlineExceeded"


async def test_what_is_too_much_for_a_store_is_stored_shortened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is asked for ever: bounds hold whoever wrote an error, and else the least of it is stored."""
    async with opened(tmp_path) as ends:
        much = StageFailed("y").to_wire() | {"message": "y" * 600_000, "fields": {"list": ["z"] * 200_000}}
        kept = await ends.keeper.keep(KeepError(uid_of(1), "film", much))
        assert kept.is_stored
        assert kept.stands.error is not None
        assert kept.stands.error["message"].startswith("yyy")
        assert sorted(ends.asked) == ["a", "b"]
        put_error = ResultStore.put_error

        async def refuse_much(store: ResultStore, uid: str, wire: Any, **options: Any) -> Any:
            if wire["fields"]:
                raise PayloadTooLarge("the record is too large", uid=uid)
            return await put_error(store, uid, wire, **options)

        monkeypatch.setattr(ResultStore, "put_error", refuse_much)
        kept = await ends.end(uid_of(2), StageFailed("it broke", stage="draw"))
        assert kept == Kept(EndStands(uid_of(2), StageFailed("it broke").to_wire()), is_stored=True)
        assert [await node.read(uid_of(2)) for node in ends.nodes] == ["StageFailed"] * 2


# --- the owner -----------------------------------------------------------------------------------


@pytest.mark.timeout(120)
async def test_owner_dies_between_storing_and_telling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancellation that was stored is what every proxy tells, though its owner told nobody."""
    trap = Trap("running")
    set_trap(trap, monkeypatch)
    stored, keep = asyncio.Event(), ErrorKeeper.keep

    async def keep_and_fall_silent(self: ErrorKeeper, error: KeepError) -> Kept:
        kept = await keep(self, error)
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
            assert not cancelling.done(), "it was told before its owner knew that it was stored"
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


@define
class Answered:
    """Questions of store nodes about their records that a proxy has answered, or left unanswered."""

    of_records: int = 0


def count_answers(monkeypatch: pytest.MonkeyPatch) -> Answered:
    """Let store nodes ask often whether requests have ended, and count how often they do."""
    monkeypatch.setattr("onepiece.runtime.environment.STORES_RETURN_SECONDS", 0.0)
    monkeypatch.setattr("onepiece.node.store_service._EXPIRE_SECONDS", 0.05)
    monkeypatch.setattr("onepiece.node.record_service._LOOKS_PER_QUESTION", 1)
    answered, answer = Answered(), EndedRequests._answer

    async def counted(self: EndedRequests, ask: AskEnded) -> None:
        await answer(self, ask)
        answered.of_records += ask.of_records

    monkeypatch.setattr(EndedRequests, "_answer", counted)
    return answered


@pytest.mark.timeout(120)
async def test_the_record_is_kept_until_the_error_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All disks are full: the client is told; store nodes that ask whether it is over keep the record."""
    trap, answered = Trap("running"), count_answers(monkeypatch)
    set_trap(trap, monkeypatch)
    async with open_hop_set(tmp_path, trap) as a_set, asyncio.timeout(REQUEST_SECONDS):
        proxy = a_set.living["proxy-1"].node.proxy
        assert proxy is not None
        accepted = await proxy.submit("film", {"text": "ahoy"}, timeout_seconds=60.0, key=None)
        await trap.caught.wait()
        with monkeypatch.context() as patch:
            patch.setattr(ResultStore, "put_error", refusing(StoreFull("the disk is full")))
            assert (await proxy.cancel(accepted.uid)).state is RequestState.CANCELLED
            before = answered.of_records
            await until(lambda: answered.of_records >= before + 8)
            assert await proxy._records.find(accepted.uid) is not None
        await until(lambda: proxy.owner.is_over(accepted.uid))
        while await proxy._records.find(accepted.uid) is not None:  # noqa: ASYNC110 - it is elsewhere
            await asyncio.sleep(0.01)
        trap.let_go.set()
        assert (await proxy._results.describe(accepted.uid)).state is RequestState.CANCELLED


@pytest.mark.timeout(120)
async def test_a_release_drops_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is told to let go of outputs while an error is being stored keeps the record.

    The owner may die before that is done: then another proxy goes on from the record.
    """
    trap, answered = Trap("running"), count_answers(monkeypatch)
    set_trap(trap, monkeypatch)
    async with open_hop_set(tmp_path, trap) as a_set, asyncio.timeout(REQUEST_SECONDS):
        proxy = a_set.living["proxy-1"].node.proxy
        assert proxy is not None
        accepted = await proxy.submit("film", {"text": "ahoy"}, timeout_seconds=60.0, key=None)
        await trap.caught.wait()
        await until(lambda: answered.of_records >= 4)
        for node in proxy._records.stores().values():  # no worker: it would stop what runs
            proxy._env.outbox.post(f"{node.address}/control", ReleaseRequests((accepted.uid,)))
        before = answered.of_records
        await until(lambda: answered.of_records >= before + 4)
        assert await proxy._records.find(accepted.uid) is not None
        trap.let_go.set()
        await proxy.cancel(accepted.uid)
