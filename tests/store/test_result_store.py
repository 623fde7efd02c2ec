"""The result store's promises, on a real file."""

from pathlib import Path

import pytest

from onepiece.errors import (
    ConfigError,
    InvalidInput,
    PayloadTooLarge,
    ResultGone,
    StageFailed,
    StoreFull,
    UnknownRequest,
)
from onepiece.store import PutOutcome, RecordKind, ResultStore, StoreOptions
from onepiece.store._chunks import cut
from transports.operations import Bytes

SMALL = StoreOptions(
    byte_budget=4 << 20, chunk_bytes=4096, transaction_bytes=16384, ttl_seconds=100, tombstone_ttl_seconds=50
)
NOW = 1_000_000.0


async def read_all(store: ResultStore, uid: str, start: int = 0, length: int | None = None) -> bytes:
    """All pieces of a range, joined."""
    return b"".join([piece async for piece in store.read(uid, start, length)])


def pattern(length: int, seed: int = 1) -> bytes:
    """Bytes of which no two stretches are alike."""
    return b"".join((seed * 1_000_003 + word).to_bytes(8, "big") for word in range(length // 8 + 1))[:length]


@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 4097, 16384, 16385, 100_000])
async def test_a_value_comes_back_as_it_was_put(tmp_path: Path, length: int) -> None:
    """Values of every size around chunk and transaction bounds are read back equal, with their record."""
    value = pattern(length)
    parts: list[Bytes] = [value[:100], memoryview(value)[100:5000], bytearray(value[5000:])]
    async with ResultStore.open(tmp_path, SMALL) as store:
        outcome = await store.put("u1", parts, content_type="video/mp4", meta={"frames": 17}, now=NOW)
        assert outcome is PutOutcome.STORED
        assert await read_all(store, "u1") == value
        record = await store.meta("u1")
        assert (record.total_bytes, record.content_type, record.meta) == (length, "video/mp4", {"frames": 17})
        assert record.expires_at == NOW + 100
        await store.check_invariants()


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [
        (0, 0, (0, 0)),
        (4095, 2, (4095, 4097)),
        (5000, None, (5000, 50_000)),
        (49_999, 10, (49_999, 50_000)),
        (50_000, 10, (50_000, 50_000)),
        (4096, 4096, (4096, 8192)),
    ],
)
async def test_a_range_is_what_lies_in_it(
    tmp_path: Path, start: int, length: int | None, expected: tuple[int, int]
) -> None:
    """Any range gives its bytes, cut at the value's end."""
    value = pattern(50_000)
    async with ResultStore.open(tmp_path, SMALL) as store:
        await store.put("u1", [value], content_type="x", now=NOW)
        assert await read_all(store, "u1", start, length) == value[slice(*expected)]


async def test_a_range_outside_the_value_is_refused(tmp_path: Path) -> None:
    """A range that begins behind the end is the reader's error, and names the size."""
    async with ResultStore.open(tmp_path, SMALL) as store:
        await store.put("u1", [b"12345"], content_type="x", now=NOW)
        with pytest.raises(InvalidInput, match="5 bytes"):
            await read_all(store, "u1", 6)
        with pytest.raises(InvalidInput):
            await read_all(store, "u1", 0, -1)


async def test_an_intent_keeps_results_out_and_is_no_end(tmp_path: Path) -> None:
    """Readers do not see what is only intended; an error is written over it, and over a value."""
    error = StageFailed("it broke").to_wire()
    async with ResultStore.open(tmp_path, SMALL) as store:
        assert await store.put_error("u1", error, is_intent=True, now=NOW) is PutOutcome.STORED
        assert (await store.standing("u1")).meta == error
        with pytest.raises(UnknownRequest):
            await store.meta("u1")
        with pytest.raises(UnknownRequest):
            [piece async for piece in store.read("u1")]
        assert await store.put("u1", [b"late"], content_type="x", now=NOW) is PutOutcome.ALREADY
        assert await store.put_error("u1", error, now=NOW) is PutOutcome.REPLACED
        with pytest.raises(StageFailed):
            [piece async for piece in store.read("u1")]
        await store.put("u2", [b"of a node that was away"], content_type="x", now=NOW)
        assert await store.put_error("u2", error, now=NOW + 1) is PutOutcome.REPLACED


@pytest.mark.parametrize("length", [10, 40_000])
async def test_the_first_writer_wins(tmp_path: Path, length: int) -> None:
    """A second put of a UID changes nothing, whatever its size, and gives its bytes back."""
    async with ResultStore.open(tmp_path, SMALL) as store:
        await store.put("u1", [b"first"], content_type="x", now=NOW)
        in_use = (await store.stats()).bytes_in_use
        assert await store.put("u1", [bytes(length)], content_type="y", now=NOW) is PutOutcome.ALREADY
        late = StageFailed("late").to_wire()
        assert await store.put_error("u1", late, is_intent=True, now=NOW) is PutOutcome.ALREADY
        assert await read_all(store, "u1") == b"first"
        assert (await store.stats()).bytes_in_use == in_use


async def test_an_error_is_stored_like_a_result(tmp_path: Path) -> None:
    """Reading a request that failed raises its own error, with its fields."""
    async with ResultStore.open(tmp_path, SMALL) as store:
        error = StageFailed("denoise raised ValueError", stage="denoise", node="n1")
        assert await store.put_error("u1", error.to_wire(), now=NOW) is PutOutcome.STORED
        assert (await store.meta("u1")).kind is RecordKind.ERROR
        with pytest.raises(StageFailed, match="denoise raised") as caught:
            await read_all(store, "u1")
        assert caught.value.fields == {"stage": "denoise", "node": "n1"}


async def test_a_tombstone_beats_later_puts_until_its_time_is_over(tmp_path: Path) -> None:
    """A purged UID takes no late copy, of any size; when the tombstone ends it is a new UID again."""
    async with ResultStore.open(tmp_path, SMALL) as store:
        await store.put("u1", [b"v"], content_type="x", now=NOW)
        assert await store.purge("u1", NOW)
        assert not await store.purge("u1", NOW)
        for value in (b"late", bytes(60_000)):
            assert await store.put("u1", [value], content_type="x", now=NOW + 49) is PutOutcome.TOMBSTONED
        with pytest.raises(ResultGone, match=r"purged.*another"):
            await store.meta("u1")
        assert await store.put("u1", [b"new"], content_type="x", now=NOW + 50) is PutOutcome.STORED
        assert await read_all(store, "u1") == b"new"
        await store.check_invariants()


async def test_a_uid_may_be_purged_before_anything_is_stored(tmp_path: Path) -> None:
    """The result of a request that was cancelled in time is refused when it comes."""
    async with ResultStore.open(tmp_path, SMALL) as store:
        assert not await store.purge("u1", NOW)
        assert await store.put("u1", [b"late"], content_type="x", now=NOW) is PutOutcome.TOMBSTONED
        with pytest.raises(UnknownRequest):
            await store.meta("u2")


async def test_expired_values_leave_tombstones_and_tombstones_nothing(tmp_path: Path) -> None:
    """``expire`` ends what is due, and only that; at last the store is as empty as at first."""
    async with ResultStore.open(tmp_path, SMALL) as store:
        empty = (await store.stats()).bytes_in_use
        await store.put("short", [bytes(9000)], content_type="x", ttl_seconds=10, now=NOW)
        await store.put("long", [bytes(9000)], content_type="x", ttl_seconds=1000, now=NOW)
        assert await store.expire(NOW + 9) == 0
        assert await store.expire(NOW + 10) == 1
        with pytest.raises(ResultGone, match="expired"):
            await store.meta("short")
        assert (await store.meta("long")).total_bytes == 9000
        assert await store.expire(NOW + 60) == 1
        with pytest.raises(UnknownRequest):
            await store.meta("short")
        assert await store.expire(NOW + 1000) == 1
        assert await store.expire(NOW + 1050) == 1
        stats = await store.stats()
        assert (stats.bytes_in_use, stats.results, stats.tombstones) == (empty, 0, 0)
        await store.check_invariants()


async def test_more_records_than_one_sweep_takes_are_expired(tmp_path: Path) -> None:
    """``expire`` goes on until nothing is due."""
    async with ResultStore.open(tmp_path, SMALL) as store:
        for number in range(300):
            await store.purge(f"u{number}", NOW)
        assert await store.expire(NOW + 50) == 300
        assert (await store.stats()).tombstones == 0


@pytest.mark.parametrize("length", [8192, 300_000])
async def test_the_budget_is_never_exceeded_and_the_store_goes_on(tmp_path: Path, length: int) -> None:
    """A put beyond the budget is refused by a named error; room made by purging is room again."""
    options = StoreOptions(byte_budget=1 << 20, chunk_bytes=4096, transaction_bytes=16384)
    async with ResultStore.open(tmp_path, options) as store:
        stored = 0

        async def fill() -> None:
            nonlocal stored
            for stored in range(1000):
                await store.put(f"u{stored}", [bytes(length)], content_type="x", now=NOW)

        with pytest.raises(StoreFull, match="in use") as caught:
            await fill()
        assert caught.value.fields["byte_budget"] == 1 << 20
        assert caught.value.retryable
        assert (await store.stats()).bytes_in_use <= 1 << 20
        for number in range(stored):
            assert len(await read_all(store, f"u{number}")) == length
        await store.purge("u0", NOW)
        assert await store.put("again", [bytes(length)], content_type="x", now=NOW) is PutOutcome.STORED
        await store.check_invariants()


async def test_a_full_store_makes_room_from_what_is_due(tmp_path: Path) -> None:
    """What is out of time does not stand in a new result's way, though nobody has swept yet."""
    options = StoreOptions(byte_budget=1 << 20, chunk_bytes=65536)
    async with ResultStore.open(tmp_path, options) as store:
        await store.put("old", [bytes(900_000)], content_type="x", ttl_seconds=10, now=NOW)
        with pytest.raises(StoreFull):
            await store.put("new", [bytes(900_000)], content_type="x", now=NOW + 9)
        assert await store.put("new", [bytes(900_000)], content_type="x", now=NOW + 10) is PutOutcome.STORED


async def test_a_full_map_is_a_named_error_and_the_store_goes_on(tmp_path: Path) -> None:
    """LMDB's own limit is mapped like the budget; nothing of the refused value is left."""
    options = StoreOptions(byte_budget=64 << 20, map_bytes=1 << 20, chunk_bytes=4096, transaction_bytes=65536)
    async with ResultStore.open(tmp_path, options) as store:
        await store.put("kept", [bytes(200_000)], content_type="x", now=NOW)
        with pytest.raises(StoreFull, match="map_bytes"):
            await store.put("large", [bytes(4 << 20)], content_type="x", now=NOW)
        await store.expire(NOW)
        assert (await store.stats()).unfinished == 0
        assert len(await read_all(store, "kept")) == 200_000
        assert await store.put("next", [bytes(200_000)], content_type="x", now=NOW) is PutOutcome.STORED
        await store.check_invariants()


async def test_purging_while_reading_ends_the_reading_with_an_error(tmp_path: Path) -> None:
    """A reader never takes a part of a value for the whole of it."""
    async with ResultStore.open(tmp_path, SMALL) as store:
        await store.put("u1", [pattern(50_000)], content_type="x", now=NOW)
        pieces = store.read("u1")
        assert len(await anext(pieces)) == 4096
        await store.purge("u1", NOW)
        with pytest.raises(ResultGone, match="while it was read"):
            await anext(pieces)


async def test_the_file_stays_small_when_results_come_and_go(tmp_path: Path) -> None:
    """Freed pages are used again: a thousand purged results leave a file of a few results' size."""
    options = StoreOptions(byte_budget=8 << 20, chunk_bytes=65536)
    async with ResultStore.open(tmp_path, options) as store:
        for number in range(200):
            await store.put(
                f"u{number}", [bytes(256 << 10)], content_type="x", ttl_seconds=5, now=NOW + number
            )
            await store.fetched(f"u{number}", NOW + number)
        assert (await store.stats()).file_bytes < 4 << 20


async def test_fetched_purges_only_where_the_options_say_so(tmp_path: Path) -> None:
    """With ``purge_after_fetch`` off a result may be fetched until its time is over."""
    for purge in (True, False):
        async with ResultStore.open(tmp_path / str(purge), StoreOptions(purge_after_fetch=purge)) as store:
            await store.put("u1", [b"v"], content_type="x", now=NOW)
            assert await store.fetched("u1", NOW) is purge
            assert (await store.stats()).results == (0 if purge else 1)


async def test_a_store_belongs_to_one_owner(tmp_path: Path) -> None:
    """A second open of the directory is refused by an error that names the owner; later it works."""
    async with ResultStore.open(tmp_path) as store:
        await store.put("u1", [b"v"], content_type="x", now=NOW)
        with pytest.raises(ConfigError, match="in use by process"):
            async with ResultStore.open(tmp_path):
                pass
    async with ResultStore.open(tmp_path) as store:
        assert await read_all(store, "u1") == b"v"


async def test_an_unusable_directory_is_a_named_error(tmp_path: Path) -> None:
    """A path that cannot be a directory is the operator's error."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="unusable"):
        async with ResultStore.open(tmp_path / "file" / "store"):
            pass


async def test_a_file_that_is_no_store_is_a_named_error(tmp_path: Path) -> None:
    """Foreign bytes in the place of the store's file are refused, and the directory is let go."""
    (tmp_path / "data.mdb").write_bytes(b"not a database" * 1000)
    for _ in range(2):
        with pytest.raises(ConfigError, match="cannot be opened"):
            async with ResultStore.open(tmp_path):
                pass


@pytest.mark.parametrize("uid", ["", "x" * 200, "größe"])
async def test_an_unusable_uid_is_refused(tmp_path: Path, uid: str) -> None:
    """A UID that cannot be a key is named, on every way in."""
    async with ResultStore.open(tmp_path) as store:
        with pytest.raises(InvalidInput, match="uid"):
            await store.put(uid, [b""], content_type="x", now=NOW)
        with pytest.raises(InvalidInput, match="uid"):
            await store.meta(uid)


async def test_times_and_metadata_are_bounded(tmp_path: Path) -> None:
    """A time to live that is none and metadata without bound are refused."""
    async with ResultStore.open(tmp_path) as store:
        for ttl_seconds in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(InvalidInput, match="ttl_seconds"):
                await store.put("u1", [b""], content_type="x", ttl_seconds=ttl_seconds, now=NOW)
        with pytest.raises(PayloadTooLarge, match="u1"):
            await store.put("u1", [b""], content_type="x", meta={"m": "x" * 300_000}, now=NOW)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ttl_seconds", {"ttl_seconds": 0}),
        ("tombstone_ttl_seconds", {"tombstone_ttl_seconds": float("nan")}),
        ("byte_budget", {"byte_budget": 1}),
        ("chunk_bytes", {"chunk_bytes": 1}),
        ("chunk_bytes", {"chunk_bytes": 1 << 20, "transaction_bytes": 1 << 10}),
        ("map_bytes", {"map_bytes": 1}),
    ],
)
def test_options_out_of_range_are_named(name: str, options: dict[str, float]) -> None:
    """Each unusable option is refused by its name."""
    with pytest.raises(ConfigError, match=name):
        StoreOptions(**options)  # type: ignore[arg-type]  # one dictionary for options of several types


def test_chunks_within_a_part_are_views_of_it() -> None:
    """Only a chunk that spans parts is copied."""
    part = bytearray(pattern(10_000))
    chunks = list(cut([part], 4096))
    assert [len(chunk) for chunk in chunks] == [4096, 4096, 1808]
    assert all(isinstance(chunk, memoryview) and chunk.obj is part for chunk in chunks[:2])
