"""A key stands for one request, though two proxies are given it and one of them stops in the middle."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from attrs import define, field

from onepiece.core.replication import copy_holders
from onepiece.errors import NotReady, StoreFull
from onepiece.ids import new_uid
from onepiece.node import key_claim
from onepiece.node.calls import Calls
from onepiece.node.key_claim import KeyClaim
from onepiece.node.record_keeper import RecordKeeper
from onepiece.node.record_service import RecordService
from onepiece.record_messages import ClaimKey, RequestRecord
from onepiece.store import RequestLog
from tests.node.store_nodes import StoreNode, StoreNodes, until

NAMES: Final = ("a", "b", "c")
COPIES: Final = 2
NUMBERS: Final = itertools.count(1)
ORDERS: Final = (("a", "b"), ("c", "a"), ("b", "c"))
"""The holders of a key, of which node a is the first, the second, or none."""


@define(eq=False)
class Proxy:
    """A proxy on a store node."""

    node: StoreNode
    keeper: RecordKeeper
    log: RequestLog
    doubted: list[str] = field(factory=list)

    def record(self, key: str | None) -> RequestRecord:
        """A new request that it is about to accept."""
        uid, env = new_uid(1.0, random.Random(next(NUMBERS))), self.node.env
        return RequestRecord(0, uid, "film", env.control_address, env.identity.life, key, 1.0, 1e12)

    async def keep(self, record: RequestRecord) -> str:
        """Keep its record."""
        return await self.keeper.keep(record, {"n": 1}, self.doubted.append)

    async def accept(self, key: str | None) -> str:
        """Keep a new request, as often as a client comes again; the UID that the client is told."""
        while True:
            try:
                return await self.keep(self.record(key))
            except NotReady:
                await asyncio.sleep(0.01)


@define(eq=False)
class Keys:
    """Three nodes, each a proxy and a store."""

    all: StoreNodes
    proxies: dict[str, Proxy]

    async def kept(self) -> dict[str, set[str]]:
        """Where each request that has not ended is kept, by UID."""
        found: dict[str, set[str]] = {}
        for name, proxy in self.proxies.items():
            for entry in await proxy.log.orphans(frozenset(), 100):
                found.setdefault(entry.uid, set()).add(name)
        return found

    def leave(self, name: str) -> None:
        """A node is declared dead: the others have no route to it, and it has not heard of that."""
        node = self.all.nodes.pop(name)
        self.all.publish()
        self.all.nodes[name] = node


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[Keys]:
    """The nodes, ready."""
    all_nodes = StoreNodes(directory, copies=COPIES)
    async with all_nodes.run_all(*NAMES) as nodes, AsyncExitStack() as stack:
        keys = Keys(all_nodes, {})
        for node in nodes:
            name, env = node.route.node_id, node.env
            log = await stack.enter_async_context(RequestLog.open(directory / f"{name}-requests"))
            service = RecordService(log, env, node.tasks)
            service.attach(node.control)
            node.take_record = service.take
            calls = Calls(env)
            keeper = RecordKeeper(env, calls, COPIES)
            calls.answered_by(node.control, *keeper.answers)
            env.outbox.deliver_locally(env.control_address, node.control.dispatch)
            keys.proxies[name] = Proxy(node, keeper, log)
        yield keys


def key_of(first: str, second: str) -> str:
    """A key whose holders are these, in this order."""
    keys = (f"key-{number}" for number in itertools.count())
    return next(key for key in keys if copy_holders(key, NAMES, COPIES) == (first, second))


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that do not answer are not waited for as long as else."""
    monkeypatch.setattr(key_claim, "_ASK_SECONDS", 0.3)
    monkeypatch.setattr(key_claim, "CLAIM_SECONDS_MAX", 1.0)


# --- one proxy -----------------------------------------------------------------------------------


async def test_a_record_is_kept_at_the_holders_of_its_key(tmp_path: Path) -> None:
    """So whoever is given the key next asks where it is; no claim is left behind, and dropping finds it."""
    async with opened(tmp_path) as keys:
        a, b, c = keys.proxies.values()
        uid = await c.accept(key_of("b", "a"))
        assert await keys.kept() == {uid: {"a", "b"}}
        assert [await each.accept(key_of("b", "a")) for each in (a, b, c)] == [uid] * 3
        assert await keys.kept() == {uid: {"a", "b"}}
        assert not any(each.doubted for each in (a, b, c)), "what was kept nowhere is looked for"
        a.keeper.drop(uid, key_of("b", "a"))
        for each in (a, b):
            await _until_dropped(each, uid)
        assert await b.accept(key_of("b", "a")) == uid, "an ended request's key is known for a while"


async def _until_dropped(proxy: Proxy, uid: str) -> None:
    async with asyncio.timeout(5.0):
        while await proxy.log.entry(uid) is not None:  # noqa: ASYNC110 - a view, nobody is told of its change
            await asyncio.sleep(0.005)


async def test_without_a_key_its_own_holders_keep_it(tmp_path: Path) -> None:
    """Two requests without keys are two requests."""
    async with opened(tmp_path) as keys:
        a = keys.proxies["a"]
        first, second = await a.accept(None), await a.accept(None)
        assert await keys.kept() == {uid: set(copy_holders(uid, NAMES, COPIES)) for uid in (first, second)}


async def test_a_holder_that_does_not_answer_is_waited_for_until_it_is_declared_dead(tmp_path: Path) -> None:
    """It may know what the key stands for; then the next one of the order takes its place."""
    async with opened(tmp_path) as keys:
        c, key = keys.proxies["c"], key_of("a", "b")
        asked: list[object] = []
        keys.proxies["a"].node.control._handlers[ClaimKey] = [asked.append]
        with pytest.raises(NotReady, match="a was asked for the key"):
            await c.keep(c.record(key))
        assert not c.doubted
        assert await keys.kept() == {}
        asked.clear()
        accepting = asyncio.create_task(c.accept(key))
        await until(lambda: asked)
        keys.leave("a")
        uid = await accepting
        assert await keys.kept() == {uid: {"b", "c"}}


async def test_a_full_holder_costs_a_copy_not_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One record is enough; if only this very node has room it has it."""

    async def refuse(*_: Any) -> str:
        raise StoreFull("no room")

    async with opened(tmp_path) as keys:
        a, b = keys.proxies["a"], keys.proxies["b"]
        b.node.take_record = _service_of(b, refuse).take
        uid = await a.accept(key_of("a", "b"))
        assert await keys.kept() == {uid: {"a"}}
        a.node.take_record = _service_of(a, refuse).take
        with pytest.raises(StoreFull):
            await a.keep(a.record(key_of("b", "a")))


def _service_of(proxy: Proxy, put: Callable[..., Awaitable[str]]) -> RecordService:
    """What takes a node's records, with another log."""
    service = RecordService(proxy.log, proxy.node.env, proxy.node.tasks)
    service._log = _Log(put)  # type: ignore[assignment]  # all that it is asked for here
    return service


@define
class _Log:
    put: Callable[..., Awaitable[str]]


# --- two proxies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
async def test_of_proxies_that_are_given_a_key_at_once_one_gets_it(
    order: tuple[str, str], tmp_path: Path
) -> None:
    """All clients are told the same request, which alone is kept; each proxy is given the key twice."""
    async with opened(tmp_path) as keys:
        key = key_of(*order)
        told = await asyncio.gather(*(proxy.accept(key) for proxy in [*keys.proxies.values()] * 2))
        assert len(set(told)) == 1
        assert await keys.kept() == {told[0]: set(order)}


class Gate:
    """The moment at which a proxy stops, as a process that is sent SIGSTOP, until it goes on."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opens = asyncio.Event()

    async def pass_through(self) -> None:
        """Wait here."""
        self.reached.set()
        await self.opens.wait()


MOMENTS = ("nothing claimed", "first claimed", "all claimed", "kept at others", "kept everywhere")


def stop_at(moment: str, proxy: Proxy, gate: Gate, patch: pytest.MonkeyPatch) -> None:
    """Have this proxy stop at a moment of its next acceptance; only it, and only then."""
    ask, obtain, keep_at_each = KeyClaim._ask, KeyClaim.obtain, RecordKeeper._keep_at_each
    asked = itertools.count()

    async def stopped_ask(self: KeyClaim, node: Any) -> Any:
        if self._env is proxy.node.env:
            number = next(asked)
            if (moment, number) in {("nothing claimed", 0), ("nothing claimed", 1), ("first claimed", 1)}:
                await gate.pass_through()
        return await ask(self, node)

    async def stopped_obtain(self: KeyClaim) -> Any:
        obtained = await obtain(self)
        if self._env is proxy.node.env and moment == "all claimed":
            await gate.pass_through()
        return obtained

    async def stopped_keep(self: RecordKeeper, nodes: Any, *arguments: Any) -> Any:
        kept = await keep_at_each(self, nodes, *arguments)
        is_own = [node.node_id for node in nodes] == [proxy.node.route.node_id]
        if self is proxy.keeper and moment == ("kept everywhere" if is_own else "kept at others"):
            await gate.pass_through()
        return kept

    patch.setattr(KeyClaim, "_ask", stopped_ask)
    patch.setattr(KeyClaim, "obtain", stopped_obtain)
    patch.setattr(RecordKeeper, "_keep_at_each", stopped_keep)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_proxy_that_stops_with_its_store_leaves_one_request(
    moment: str, order: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node a stops while it accepts, is declared dead, and comes back when b has the key (fault 131).

    Whether a knows that it was declared dead when it goes on, or not, makes no difference.
    """
    async with opened(tmp_path) as keys:
        a, b = keys.proxies["a"], keys.proxies["b"]
        gate, key = Gate(), key_of(*order)
        if moment == "kept everywhere" and "a" not in order:
            return  # there is no such moment
        stop_at(moment, a, gate, monkeypatch)
        mine = a.record(key)
        accepting = asyncio.create_task(a.keep(mine))
        await gate.reached.wait()
        if moment != "nothing claimed":
            await a.node.env.outbox.flushed()
        keys.leave("a")
        uid = await b.accept(key)
        if moment.startswith("kept"):
            assert uid == mine.uid, "what is kept is found"
        elsewhere = {each for each, where in (await keys.kept()).items() if where - {"a"}}
        assert elsewhere == {uid}
        keys.all.publish()
        gate.opens.set()
        (outcome,) = await asyncio.gather(accepting, return_exceptions=True)
        assert isinstance(outcome, NotReady) or outcome == uid
        assert set(await keys.kept()) == {uid}, "two requests have the key"
        assert [await each.accept(key) for each in keys.proxies.values()] == [uid] * 3


async def test_what_a_dead_proxy_left_is_adopted_and_is_what_its_key_stands_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that other nodes have is found as an orphan by whoever looks, once."""
    async with opened(tmp_path) as keys:
        a, b = keys.proxies["a"], keys.proxies["b"]
        gate, key = Gate(), key_of("a", "c")
        stop_at("kept at others", a, gate, monkeypatch)
        accepting = asyncio.create_task(a.keep(a.record(key)))
        await gate.reached.wait()
        keys.leave("a")
        uid = await b.accept(key)
        orphans = await b.keeper.orphans(["b.1", "c.1"])
        assert list(orphans) == [uid]
        assert await b.keeper.body(uid, key), "its inputs are where the record is"
        accepting.cancel()
        await asyncio.wait([accepting])
        assert a.doubted == [uid], "cancelled in the middle it may have been kept"


async def test_claims_of_a_dead_proxy_and_of_one_that_gave_up_stand_in_nobodys_way(tmp_path: Path) -> None:
    """The first is overridden when the node is declared dead, the second is released."""
    async with opened(tmp_path) as keys:
        a, b, key = keys.proxies["a"], keys.proxies["b"], key_of("b", "c")
        env = a.node.env
        claim = KeyClaim(env, a.keeper._calls, a.record(key), partial(a.keeper.holders, key))
        assert await claim.obtain() == a.keeper.holders(key)
        with pytest.raises(NotReady, match="is being accepted just now"):
            await b.keep(b.record(key))
        claim.release()
        uid = await b.accept(key)
        other = key_of("c", "b")
        await KeyClaim(env, a.keeper._calls, a.record(other), partial(a.keeper.holders, other)).obtain()
        keys.leave("a")
        second = await b.accept(other)
        assert await keys.kept() == {uid: {"b", "c"}, second: {"b", "c"}}
        await until(lambda: not b.doubted)
