"""What a result store occupies over a long time, and batches in which something has expired."""

import asyncio
from pathlib import Path

import pytest

from onepiece.errors import ResultGone, StoreFull
from onepiece.store import ResultStore, StoreOptions

NOW = 1_000_000.0


async def test_one_expired_result_does_not_spoil_a_batch(tmp_path: Path) -> None:
    """Of results that are fetched at once the expired one is gone, and the others are whole (fault 79)."""
    async with ResultStore.open(tmp_path) as store:
        for number in range(8):
            ttl = 10.0 if number == 3 else 100.0
            await store.put(f"u{number}", [b"%d" % number], content_type="x", ttl_seconds=ttl, now=NOW)
        await store.expire(NOW + 20)

        async def fetch(number: int) -> bytes:
            return b"".join([piece async for piece in store.read(f"u{number}")])

        found = await asyncio.gather(*(fetch(number) for number in range(8)), return_exceptions=True)
        assert isinstance(found[3], ResultGone)
        assert [found[number] for number in range(8) if number != 3] == [
            b"%d" % n for n in range(8) if n != 3
        ]


async def test_results_that_nobody_fetches_do_not_pile_up(tmp_path: Path) -> None:
    """An hour of results at a steady rate, none fetched: once they expire the store stays flat (fault 99).

    Time is scaled: results live for a minute, and arrive at ten a second.
    """
    options = StoreOptions(byte_budget=64 << 20, ttl_seconds=60.0, tombstone_ttl_seconds=60.0)
    in_use: list[int] = []
    on_disk: list[int] = []
    async with ResultStore.open(tmp_path, options) as store:
        for minute in range(12):
            for number in range(100):
                now = NOW + 60 * minute + number * 0.6
                await store.put(f"u{minute}-{number}", [bytes(20_000)], content_type="x", now=now)
                if number % 10 == 0:
                    await store.expire(now)
            stats = await store.stats()
            in_use.append(stats.bytes_in_use)
            on_disk.append(stats.file_bytes)
            assert stats.results <= 110
            assert stats.tombstones <= 110
        await store.check_invariants()
    assert max(in_use[3:]) < 1.3 * in_use[2]
    assert max(on_disk[3:]) < 1.5 * on_disk[2]


async def test_a_reader_that_holds_on_bounds_the_file_and_harms_nobody_else(tmp_path: Path) -> None:
    """While a reader pins old pages the file grows to its map, no further (fault 81).

    Puts are then refused by name; when the reader ends, they are taken again.
    """
    options = StoreOptions(byte_budget=2 << 20, map_bytes=12 << 20)
    async with ResultStore.open(tmp_path, options) as store:
        await store.put("first", [bytes(100_000)], content_type="x", ttl_seconds=1e7, now=NOW)
        with store._database._file._environment.begin() as held:
            held.get(b"records")
            with pytest.raises(StoreFull, match="map of 12582912 bytes"):
                await put_and_purge(store, 1000)
            assert (await store.stats()).file_bytes <= 12 << 20
            assert len(b"".join([piece async for piece in store.read("first")])) == 100_000
        await put_and_purge(store, 300)
        assert (await store.stats()).file_bytes <= 12 << 20
        await store.check_invariants()


async def put_and_purge(store: ResultStore, count: int) -> None:
    """Results that come and go; the file needs no more room than a few of them."""
    for number in range(count):
        await store.put(f"u{number}", [bytes(100_000)], content_type="x", now=NOW)
        await store.purge(f"u{number}", NOW)
        await store.expire(NOW + 1e6)
