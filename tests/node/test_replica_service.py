"""Copies between store nodes that run: real stores, rings and messages."""

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path

import lmdb
import pytest
from attrs import evolve

from onepiece.codec import pack
from onepiece.core.replication import copy_holders
from onepiece.errors import StageFailed, StoreFull, UnknownRequest
from onepiece.ids import new_uid
from onepiece.messages import KIND_COPY, STORE_REGION
from onepiece.node.calls import Calls
from onepiece.node.checkpoint_service import CheckpointService
from onepiece.node.checkpoint_store import CheckpointStore
from onepiece.node.copy_messages import CopyInput
from onepiece.node.result_reader import ResultReader
from onepiece.node.store_service import StoreService
from onepiece.store import RequestLog, ResultStore
from tests.node.store_nodes import CONFIG, OPTIONS, StoreNode, StoreNodes, until
from tests.store.disks import read_only_disk

LARGE = 200_000
"""Takes several transactions in these stores."""


def uid_for(*holders: str, among: str = "abc") -> str:
    """A UID that is held by these nodes, the first choice first."""
    return next(u for u in map(str, range(10_000)) if copy_holders(u, among, len(holders)) == holders)


async def test_a_result_is_copied_to_its_other_holder(tmp_path: Path) -> None:
    """Small, large and empty values, and errors, arrive bit for bit with their times; nowhere else."""
    async with StoreNodes(tmp_path).run_all("a", "b", "c") as (a, b, c):
        uid = uid_for("a", "b")
        values = {f"{uid}": bytes(range(250)) * (LARGE // 250)}
        values |= {u: b"small" for u in map(str, range(100)) if copy_holders(u, "abc", 2) == ("a", "b")}
        for number, (each, value) in enumerate(values.items()):
            await a.put(each, b"" if number == 1 else value)
        failed = uid_for("b", "a")
        error = StageFailed("broken " * 25_000)  # nearly as long as a record may be
        await a.store.put_error(failed, error.to_wire(), now=a.env.now())
        a.copies.stored(failed)
        await a.settled()
        for each in values:
            assert await b.read(each) == await a.read(each)
            assert await c.read(each) == "UnknownRequest"
        assert await b.read(failed) == "StageFailed"
        mine, theirs = await a.store.records(list(values)), await b.store.records(list(values))
        assert [(r.stored_at, r.expires_at) for r in mine] == [(r.stored_at, r.expires_at) for r in theirs]


async def test_a_purge_reaches_every_store_node(tmp_path: Path) -> None:
    """A purged result is gone everywhere, and a copy that comes late is not kept."""
    async with StoreNodes(tmp_path).run_all("a", "b", "c") as nodes:
        a, b, c = nodes
        uid = uid_for("a", "b")
        await a.put(uid, b"x" * LARGE)
        await a.settled()
        (late,) = await a.store.records([uid])
        await b.purge(uid)
        await b.settled()
        for node in nodes:
            assert await node.read(uid) == "ResultGone"
        await c.store.put_copy(late, [b"x" * LARGE], c.env.now())
        assert await c.read(uid) == "ResultGone"


async def test_a_purge_beats_a_copy_that_is_under_way(tmp_path: Path) -> None:
    """A result that is fetched and purged at once, before its copy was made, is gone on all nodes."""
    async with StoreNodes(tmp_path).run_all("a", "b", "c") as nodes:
        uids = [u for u in map(str, range(60)) if "a" in copy_holders(u, "abc", 2)]
        for uid in uids:
            await nodes[0].put(uid, b"x" * 30_000)
            await nodes[0].purge(uid)
        for node in nodes:
            await node.settled()
        for node in nodes:
            assert {await node.read(uid) for uid in uids} == {"ResultGone"}


async def test_who_has_what_was_purged_is_told(tmp_path: Path) -> None:
    """A copy that meets a tombstone is answered with it: the sender does not keep the value."""
    async with StoreNodes(tmp_path).run_all("a", "b", "c") as (a, b, _):
        uid = uid_for("a", "b")
        await b.store.purge(uid, b.env.now())  # nobody was told
        await a.put(uid, b"late")
        await until_read(a, uid, "ResultGone")


async def test_the_first_of_two_writers_stands_on_both(tmp_path: Path) -> None:
    """Two nodes that stored one result each, cut off from each other, come to hold the earlier one."""
    async with StoreNodes(tmp_path).run_all("a", "b") as (a, b):
        for uid in ("1", "2"):
            first, second = (a, b) if uid == "1" else (b, a)
            await first.store.put(uid, [b"first"], content_type="x", now=first.env.now() - 10)
            await second.store.put(uid, [b"second"], content_type="x", now=second.env.now())
            second.copies.stored(uid)
            first.copies.stored(uid)
        for node in (a, b):
            await until_read(node, "1", b"first")
            await until_read(node, "2", b"first")


async def until_read(node: StoreNode, uid: str, expected: bytes | str) -> None:
    """Wait until a reader gets this."""
    async with asyncio.timeout(20.0):
        while await node.read(uid) != expected:  # noqa: ASYNC110 - a view, nobody is told of its change
            await asyncio.sleep(0.005)


# --- nodes that come and go --------------------------------------------------------------------


@pytest.mark.parametrize("is_wiped", [False, True])
async def test_a_node_that_returns_gets_what_it_missed(tmp_path: Path, is_wiped: bool) -> None:
    """Results and purges of its absence, and all it had if its disk is gone, page by page."""
    stores = StoreNodes(tmp_path)
    async with stores.run_all("a", "b") as (a, _):
        pass
    async with stores.run("a", incarnation=2) as a:
        async with stores.run("b", incarnation=2) as b:
            stores.publish()
            for number in range(30):
                await a.put(f"old{number:02}", b"%d" % number)
            await stores.settled()
        stores.publish()
        for number in range(30):
            await a.put(f"new{number:02}", b"%d" % number * 1000)
        for number in range(0, 30, 3):
            await a.purge(f"old{number:02}")
        if is_wiped:
            stores.directory = tmp_path / "another disk"
        async with stores.run("b", incarnation=3) as b:
            stores.publish()
            await stores.settled()
            for number in range(30):
                assert await b.read(f"new{number:02}") == b"%d" % number * 1000
                expected = "ResultGone" if number % 3 == 0 else b"%d" % number
                assert await b.read(f"old{number:02}") == expected
            await b.store.check_invariants()


async def test_when_a_node_is_lost_others_hold_in_its_place(tmp_path: Path) -> None:
    """Each result has its number of copies again, though a holder and its disk are gone for good."""
    stores = StoreNodes(tmp_path)
    uids = [f"u{number}" for number in range(40)]
    async with stores.run("a") as a, stores.run("b") as b:
        async with stores.run("c") as c:
            stores.publish()
            await stores.settled()
            for uid in uids:
                await c.put(uid, uid.encode())
            await c.settled()
        stores.publish()
        await stores.settled()
        for uid in uids:
            assert [await node.read(uid) for node in (a, b)] == [uid.encode()] * 2


async def test_a_draining_node_hands_over_what_it_alone_has(tmp_path: Path) -> None:
    """With one copy of each result, a drain moves them: once the node has settled it may go."""
    stores = StoreNodes(tmp_path, copies=1)
    uids = [f"u{number}" for number in range(40)]
    async with stores.run("a") as a, stores.run("b") as b:
        async with stores.run("c") as c:
            stores.publish()
            await stores.settled()
            for uid in uids:
                await c.store.put(uid, [uid.encode()], content_type="x", now=c.env.now())
            stores.publish(draining="c")
            await c.settled()
        for uid in uids:
            found = [await node.read(uid) for node in (a, b)]
            assert sorted(map(repr, found)) == sorted([repr(uid.encode()), "'UnknownRequest'"])


async def test_a_peer_that_does_not_answer_holds_up_nobody(tmp_path: Path) -> None:
    """Copies for a node that is gone and not yet declared dead are tried, and do not delay the others'."""
    stores = StoreNodes(tmp_path)
    async with stores.run("a") as a, stores.run("b") as b:
        async with stores.run("c"):
            stores.publish()
            await stores.settled()
        for number in range(60):
            await a.put(f"u{number}", b"x")
        for number in range(60):
            if "b" in copy_holders(f"u{number}", "abc", 2) and "a" in copy_holders(f"u{number}", "abc", 2):
                await until_read(b, f"u{number}", b"x")
        assert not a.copies._machine.is_settled


async def test_a_peer_that_said_good_bye_is_not_waited_for(tmp_path: Path) -> None:
    """Where all nodes stop, no manager is left to tell the last one who has gone; a new life counts again."""
    stores = StoreNodes(tmp_path)
    async with stores.run("a") as a:
        async with stores.run("b") as b:
            stores.publish()
            await stores.settled()
            b.copies.farewell()
            await b.env.outbox.flushed()
        await a.put("alone", b"x")
        await a.settled()
        async with stores.run("b", incarnation=2) as b:
            stores.publish()
            await a.settled()
            await until_read(b, "alone", b"x")


# --- disks and bounds --------------------------------------------------------------------------


async def test_a_full_peer_is_asked_again_later(tmp_path: Path) -> None:
    """A copy that finds no room is refused by name and tried again; when there is room it is taken."""
    stores = StoreNodes(tmp_path, options=evolve(OPTIONS, byte_budget=1 << 20))
    async with stores.run_all("a", "b") as (a, b):
        await b.store.put("filler", [bytes(400_000)], content_type="x", now=b.env.now())
        await a.put("u1", bytes(200_000))
        await until(lambda: a.copies.metrics()["copies_failed"] >= CONFIG.attempts_max)
        assert await b.read("u1") == "UnknownRequest"
        assert await a.read("u1") == bytes(200_000)
        await b.store.purge("filler", b.env.now())
        await until_read(b, "u1", bytes(200_000))


async def test_a_read_only_disk_refuses_copies_and_results_by_name(tmp_path: Path) -> None:
    """The node with such a disk stays up, answers reads, and takes copies again when it can."""
    async with StoreNodes(tmp_path).run_all("a", "b") as (a, b):
        await a.put("u0", b"before")
        await a.settled()
        with read_only_disk(b.store._database._file, lmdb.Error("Read-only file system")):
            await a.put("u1", b"after")
            await until(lambda: a.copies.metrics()["copies_failed"])
            assert await b.read("u0") == b"before"
            with pytest.raises(StoreFull, match="took no more"):
                await b.put("u2", b"x")
        await until_read(b, "u1", b"after")


async def test_a_value_larger_than_a_peers_ring_is_pulled(tmp_path: Path) -> None:
    """Copies are as large as results may be, whatever the inbox."""
    async with StoreNodes(tmp_path, inbox_bytes=1 << 20).run_all("a", "b") as (a, b):
        await a.put("large", bytes(2 << 20))
        await until_read(b, "large", bytes(2 << 20))


async def test_a_value_too_large_to_be_pulled_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that can never be sent is given up for a while; others go on."""
    monkeypatch.setattr("onepiece.runtime.link_opening.EXPORTED_BYTES_MAX", 1 << 20)
    stores = StoreNodes(tmp_path, inbox_bytes=1 << 20)
    async with stores.run_all("a", "b") as (a, b):
        await a.put("large", bytes(2 << 20))
        await a.put("small", b"x")
        await until_read(b, "small", b"x")
        await until(lambda: a.copies.metrics()["copies_failed"] >= CONFIG.attempts_max)
        assert await b.read("large") == "UnknownRequest"


async def test_bytes_in_hand_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many large copies only some are read at once; a value beyond the bound goes alone."""
    monkeypatch.setattr("onepiece.node.replica_service.COPY_BYTES_MAX", 250_000)
    most = 0
    async with StoreNodes(tmp_path).run_all("a", "b", "c") as (a, b, c):
        for number in range(12):
            await a.put(f"u{number}", bytes(300_000 if number == 5 else 100_000))
            most = max(most, a.copies._bytes_in_hand)
        while not a.copies._machine.is_settled:
            most = max(most, a.copies._bytes_in_hand)
            await asyncio.sleep(0)
        assert 100_000 <= most <= 300_000
        for number in range(12):
            holders = copy_holders(f"u{number}", "abc", 2)
            for node in (b, c):
                if node.env.node_id in holders:
                    assert len(await node.read(f"u{number}")) >= 100_000


SOUND = CopyInput(1, "", "a", "u9", "result", "x", {}, 1.0, 2.0)


@pytest.mark.parametrize(
    "header",
    [
        evolve(SOUND, kind="unheard-of"),
        evolve(SOUND, stored_at=float("nan")),
        evolve(SOUND, expires_at=float("inf")),
        evolve(SOUND, uid="ü"),
        evolve(SOUND, uid=""),
        SOUND,
    ],
)
async def test_an_unusable_copy_costs_nothing_else(tmp_path: Path, header: CopyInput) -> None:
    """A copy that follows no rule, or is out of time, is not kept; the next one is taken."""
    async with StoreNodes(tmp_path).run_all("a", "b") as (a, b):
        packed = pack(evolve(header, reply_to=a.env.control_address), {"value": b"x"})
        await a.env.outbox.send(f"{b.route.address}/{STORE_REGION}", packed.parts, kind=KIND_COPY)
        await a.put("u1", b"x")
        await a.settled()
        assert await b.read("u1") == b"x"
        assert (await b.store.stats()).results == 1


# --- reading -----------------------------------------------------------------------------------


async def test_a_result_is_found_before_its_copies_are_made(tmp_path: Path) -> None:
    """A proxy that polls right after completion gets the result, whichever node stored it first.

    It knows nothing of the request: another proxy had it. The stores that it asks first may not have
    their copy yet; they say so, and the next one is asked.
    """
    async with StoreNodes(tmp_path).run_all("a", "b", "c") as nodes, AsyncExitStack() as stack:
        for node in nodes:
            log = await stack.enter_async_context(
                RequestLog.open(tmp_path / f"{node.route.node_id}-requests")
            )
            kept = await stack.enter_async_context(
                ResultStore.open(tmp_path / f"{node.route.node_id}-checkpoints")
            )
            checkpoints = CheckpointService(CheckpointStore(kept), node.env, node.tasks)
            service = StoreService(node.store, log, node.copies, checkpoints, node.env, node.tasks)
            service.attach(node.control)
        c = nodes[2]
        calls = Calls(c.env)
        calls.answered_by(c.control, *ResultReader.answers)
        for number in range(30):
            uid = new_uid(c.env.now(), random.Random(number))
            await nodes[number % 2].put(uid, b"%d" % number)
            reader = ResultReader(c.env, calls)
            result = await reader.open(uid)
            assert b"".join([piece async for piece in result.read(0, result.total_bytes)]) == b"%d" % number
        for node in nodes:
            await node.settled()
        with pytest.raises(UnknownRequest):
            await ResultReader(c.env, calls).open(new_uid(c.env.now(), random.Random(99)))


async def test_a_result_is_read_from_the_copy_when_its_first_node_is_gone(tmp_path: Path) -> None:
    """What was copied outlives the node that stored it first."""
    stores = StoreNodes(tmp_path)
    async with stores.run("b") as b:
        async with stores.run("a") as a:
            stores.publish()
            await a.put("u1", b"x" * LARGE)
            await a.settled()
        assert await b.read("u1") == b"x" * LARGE
