"""Copies between result stores: which of two stands, and that the order of copying plays no part."""

import asyncio
import itertools
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import lmdb
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from onepiece.errors import InvalidInput, OnePieceError, ResultGone, StageFailed, StoreFull, UnknownRequest
from onepiece.store import CopyOutcome, RecordKind, ResultStore, StoredRecord, StoreOptions
from onepiece.store.records import chunk_pages_bytes
from tests.store.disks import read_only_disk

NOW = 1_000_000.0
OPTIONS = StoreOptions(byte_budget=4 << 20, chunk_bytes=4096, transaction_bytes=8192, ttl_seconds=100.0)
LARGE = 50_000
"""Takes several transactions under these options."""


def make_record(
    uid: str = "u1",
    kind: RecordKind = RecordKind.RESULT,
    *,
    stored_at: float = NOW,
    seconds: float = 100.0,
    content_type: str = "x",
) -> StoredRecord:
    """Another node's record; its place there means nothing here."""
    return StoredRecord(
        uid, kind, content_type, {"workflow": "movie"}, 77, 33, 99, stored_at, stored_at + seconds
    )


async def read(store: ResultStore, uid: str = "u1") -> bytes:
    """The whole result."""
    return b"".join([piece async for piece in store.read(uid)])


async def copy(source: ResultStore, target: ResultStore, uid: str, now: float = NOW) -> StoredRecord | None:
    """What replication does: bring over what stands under a UID."""
    (record,) = await source.records([uid])
    return (await target.put_copy(record, await source.value(record), now)).standing


async def test_a_copy_is_like_the_original(tmp_path: Path) -> None:
    """Value, type, metadata and times are the original's; so it ends when the original does."""
    async with (
        ResultStore.open(tmp_path / "a", OPTIONS) as source,
        ResultStore.open(tmp_path / "b", evolve(OPTIONS, chunk_bytes=8192)) as target,
    ):
        for uid, length in [("u0", 0), ("u1", 10), ("u2", LARGE)]:
            value = bytes(range(250)) * (length // 250 + 1)
            await source.put(uid, [value[:length]], content_type="video/mp4", meta={"a": 1}, now=NOW)
            standing = await copy(source, target, uid, NOW + 50)
            assert standing is not None
            assert await read(target, uid) == value[:length]
            assert (standing.content_type, standing.meta) == ("video/mp4", {"a": 1})
            assert (standing.stored_at, standing.expires_at) == (NOW, NOW + 100)
        await source.put_error("u3", StageFailed("broken", uid="u3").to_wire(), now=NOW)
        await copy(source, target, "u3")
        with pytest.raises(StageFailed, match="broken"):
            await read(target, "u3")
        await target.check_invariants()
        assert await target.expire(NOW + 100) == 4


@pytest.mark.parametrize("length", [100, LARGE])
@pytest.mark.parametrize("first", [0, 1])
async def test_the_earlier_of_two_values_stands(tmp_path: Path, length: int, first: int) -> None:
    """Whichever comes first, the value stored earlier stands in the end, and only its bytes are kept."""
    async with ResultStore.open(tmp_path, OPTIONS) as store:
        replaced = []
        for number in (first, 1 - first):
            record = make_record(stored_at=NOW + number)
            outcome = await store.put_copy(record, [bytes([number]) * length], NOW + 5)
            replaced.append(outcome.has_replaced)
            await store.check_invariants()
        assert replaced == [False, first == 1]
        assert await read(store) == bytes(length)
        stats = await store.stats()
        assert (stats.results, stats.unfinished) == (1, 0)
        assert stats.bytes_in_use < chunk_pages_bytes(length, OPTIONS.chunk_bytes) + 1000


async def test_a_put_is_no_copy(tmp_path: Path) -> None:
    """What a stage stores again does not replace a copy, even if this node's clock says it is earlier."""
    async with ResultStore.open(tmp_path, OPTIONS) as store:
        await store.put_copy(make_record(stored_at=NOW + 10), [b"copy"], NOW)
        await store.put("u1", [b"put"], content_type="x", now=NOW)
        assert await read(store) == b"copy"


@pytest.mark.parametrize("length", [100, LARGE])
async def test_a_tombstone_beats_copies(tmp_path: Path, length: int) -> None:
    """A late copy of a purged result is not kept, and a copied tombstone takes the value away."""
    tombstone = make_record(kind=RecordKind.TOMBSTONE, stored_at=NOW + 10, seconds=20.0)
    async with ResultStore.open(tmp_path, OPTIONS) as store:
        await store.purge("u1", NOW)
        standing = (await store.put_copy(make_record(), [bytes(length)], NOW)).standing
        assert standing is not None
        assert standing.kind is RecordKind.TOMBSTONE
        await store.put("u2", [bytes(length)], content_type="x", now=NOW)
        assert (await store.put_copy(evolve(tombstone, uid="u2"), [], NOW + 10)).has_replaced
        assert not (await store.put_copy(evolve(tombstone, uid="u2"), [], NOW + 10)).has_replaced
        with pytest.raises(ResultGone):
            await read(store, "u2")
        (buried,) = await store.records(["u2"])
        assert buried.expires_at == NOW + 100, "no copy of what it replaced lasts longer"
        await store.check_invariants()


async def test_a_purge_beats_a_large_copy_still_being_written(tmp_path: Path) -> None:
    """A result that is purged while its copy is on the way into the store stays purged."""
    async with ResultStore.open(tmp_path, OPTIONS) as store:
        copying = asyncio.ensure_future(store.put_copy(make_record(), [bytes(400_000)], NOW))
        for _ in range(100):
            if (await store.stats()).unfinished:
                break
        else:
            pytest.fail("the copy did not begin")
        await store.purge("u1", NOW)
        standing = (await copying).standing
        assert standing is not None
        assert standing.kind is RecordKind.TOMBSTONE
        await store.check_invariants()


async def test_what_is_out_of_time_is_not_copied(tmp_path: Path) -> None:
    """A copy that comes after its own end is not kept, be it a value or a tombstone."""
    async with ResultStore.open(tmp_path, OPTIONS) as store:
        for kind in (RecordKind.RESULT, RecordKind.ERROR, RecordKind.TOMBSTONE):
            outcome = await store.put_copy(make_record(kind=kind), [], NOW + 100)
            assert outcome == CopyOutcome(None, False)
        assert (await store.stats()).bytes_in_use == 0


async def test_a_copy_beyond_the_budget_leaves_what_stood(tmp_path: Path) -> None:
    """A better value that finds no room is refused by name, and the worse one stays whole."""
    async with ResultStore.open(tmp_path, evolve(OPTIONS, byte_budget=300_000)) as store:
        await store.put_copy(make_record(stored_at=NOW + 1), [b"worse" * 20_000], NOW)
        with pytest.raises(StoreFull, match="u1 needs"):
            await store.put_copy(make_record(), [bytes(300_000)], NOW)
        assert await read(store) == b"worse" * 20_000
        with (
            read_only_disk(store._database._file, lmdb.DiskError("EROFS")),
            pytest.raises(StoreFull, match="took no more"),
        ):
            await store.put_copy(make_record(), [b"better"], NOW)
        assert await read(store) == b"worse" * 20_000
        await store.put_copy(make_record(), [b"better"], NOW)
        assert await read(store) == b"better"
        await store.check_invariants()


async def test_the_value_of_a_replaced_record_is_gone(tmp_path: Path) -> None:
    """A record is never sent with another one's bytes: what was replaced or purged meanwhile is gone."""
    async with ResultStore.open(tmp_path, OPTIONS) as store:
        await store.put_copy(make_record(stored_at=NOW + 1), [b"later"], NOW)
        (record,) = await store.records(["u1"])
        await store.put_copy(make_record(), [b"earlier"], NOW)
        with pytest.raises(ResultGone):
            await store.value(record)


async def test_scanning_goes_through_all_in_order(tmp_path: Path) -> None:
    """Pages of any size give each record once, tombstones too, in the order of UIDs."""
    async with ResultStore.open(tmp_path, OPTIONS) as store:
        uids = [f"u{number:03}" for number in range(50)] + ["u", "u00", "v"]
        for uid in uids:
            await store.put(uid, [b"x"], content_type="x", now=NOW)
        await store.purge("u007", NOW)
        for limit in (1, 7, 100):
            found: list[str] = []
            while page := await store.scan(found[-1] if found else "", limit):
                found += [record.uid for record in page]
            assert found == sorted(uids)
        kinds = {record.uid: record.kind for record in await store.records(["u007", "none", "v"])}
        assert kinds == {"u007": RecordKind.TOMBSTONE, "v": RecordKind.RESULT}
        with pytest.raises(InvalidInput):
            await store.records(["ü"])


@given(
    puts=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["put", "purge", "error"]), st.integers(0, 9)),
        max_size=6,
        unique_by=lambda put: put[2],
    )
)
@settings(max_examples=25, deadline=None)
def test_copying_in_any_order_gives_the_same(puts: list[tuple[int, str, int]]) -> None:
    """Three nodes with any history, copied between in any order until nothing changes, are alike."""

    async def check() -> None:
        with tempfile.TemporaryDirectory() as directory:
            async with AsyncExitStack() as stack:
                stores = [
                    await stack.enter_async_context(ResultStore.open(Path(directory) / str(n), OPTIONS))
                    for n in range(3)
                ]
                for node, what, second in puts:
                    await change(stores[node], what, second)
                for _ in range(2):
                    for source, target in itertools.permutations(stores, 2):
                        if await source.records(["u1"]):
                            await copy(source, target, "u1", NOW + 10)
                found = [await standing(store) for store in stores]
                assert found[0] == found[1] == found[2]
                if any(what == "purge" for _, what, _ in puts):
                    assert found[0] == "ResultGone"

    asyncio.run(check())


async def change(store: ResultStore, what: str, second: int) -> None:
    """Put, fail or purge at a moment."""
    match what:
        case "put":
            await store.put("u1", [b"%d" % second], content_type="x", now=NOW + second)
        case "error":
            await store.put_error("u1", StageFailed(f"at {second}").to_wire(), now=NOW + second)
        case _:
            await store.purge("u1", NOW + second)


async def standing(store: ResultStore) -> str:
    """What a reader of the store gets, in a word."""
    try:
        return (await read(store)).decode()
    except UnknownRequest:
        return "nothing"
    except StageFailed as error:
        return error.message
    except OnePieceError as error:
        return type(error).__name__
