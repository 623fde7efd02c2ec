"""What the result store survives: death at any moment, a full disk, cancelled writers, dead readers."""

import asyncio
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import lmdb
import pytest

import onepiece
from onepiece.errors import ConfigError, ResultGone, StoreFull, UnknownRequest
from onepiece.store import Durability, PutOutcome, RecordKind, ResultStore, StoreOptions
from onepiece.store._changes import U64
from onepiece.store._database import LAYOUT_VERSION
from onepiece.store._flusher import Flusher
from onepiece.store._lmdb import LAYOUT_KEY

NOW = 1_000_000.0
WRITER = Path(__file__).with_name("writer.py")
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(Path(onepiece.__path__[0]).parent), os.environ.get("PYTHONPATH", "")])
}
"""Child processes import the same package as this one, installed or not."""


def value_of(number: int) -> bytes:
    """What ``writer.py`` stores under a number."""
    return number.to_bytes(8, "big") * (50_000 if number % 3 == 0 else 500)


def write_until_killed(directory: Path, first: int, lines: int) -> tuple[set[int], set[int]]:
    """Let a process store results, and kill it when it has acknowledged some; what it acknowledged."""
    process = subprocess.Popen(
        [sys.executable, str(WRITER), str(directory), str(first)],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(lines)]
        process.kill()
        said += process.stdout.readlines()
    finally:
        process.kill()
        process.communicate()
    words = [line.split() for line in said if line.endswith("\n")]
    assert len(words) >= lines, "the writer ended by itself"
    stored = {int(number) for word, number in words if word == "stored"}
    purged = {int(number) for word, number in words if word == "purged"}
    return stored, purged


@pytest.mark.parametrize("lines", [1, 4, 9])
async def test_what_was_acknowledged_survives_kill_9(tmp_path: Path, lines: int) -> None:
    """After SIGKILL amid writing, each acknowledged result is whole, each purge holds, nothing is left over.

    Survives: death of the process at any instruction. The store is opened again by the next life,
    which writes on, and is killed too.
    """
    options = StoreOptions(byte_budget=256 << 20)
    first = 0
    stored: set[int] = set()
    purged: set[int] = set()
    for _ in range(3):
        more_stored, more_purged = write_until_killed(tmp_path, first, lines)
        stored |= more_stored
        purged |= more_purged
        first = max(stored) + 10
        async with ResultStore.open(tmp_path, options) as store:
            await store.check_invariants()
            stats = await store.stats()
            assert stats.unfinished == 0
            # One more than was heard of may have been committed when the process died.
            assert len(stored) - len(purged) - 1 <= stats.results <= len(stored) + 3
            for number in stored - purged:
                await check_stored(store, number)
            for number in purged:
                with pytest.raises(ResultGone):
                    await store.meta(f"u{number}")


async def check_stored(store: ResultStore, number: int) -> None:
    """The value is whole; only the one whose purge nobody heard of may be gone."""
    try:
        pieces = [piece async for piece in store.read(f"u{number}")]
    except ResultGone:
        assert number % 5 == 0, f"u{number} was acknowledged and is gone"
    else:
        assert b"".join(pieces) == value_of(number)


async def test_a_half_written_value_is_invisible_and_reclaimed(tmp_path: Path) -> None:
    """A value whose writer died between its transactions is not there, and its bytes are free again."""
    options = StoreOptions(byte_budget=1 << 20, chunk_bytes=4096, transaction_bytes=4096)
    async with ResultStore.open(tmp_path, options) as store:
        record = store._record("u1", RecordKind.RESULT, "x", {}, 40_000, None, NOW)
        database = store._database
        draft = await store._thread.run(database.begin, record, NOW)
        assert not isinstance(draft, PutOutcome)
        await store._thread.run(database.append, draft, 0, [bytes(4096)])
        with pytest.raises(UnknownRequest):
            await store.meta("u1")
        assert (await store.stats()).bytes_in_use > 40_000
    async with ResultStore.open(tmp_path, options) as store:
        stats = await store.stats()
        assert (stats.unfinished, stats.bytes_in_use) == (0, 0)
        assert await store.put("u1", [bytes(40_000)], content_type="x", now=NOW) is PutOutcome.STORED


async def test_a_cancelled_put_leaves_the_whole_value_or_nothing(tmp_path: Path) -> None:
    """Wherever a put is cancelled, the value is whole or absent, and no bytes are lost to the budget."""
    options = StoreOptions(byte_budget=4 << 20, chunk_bytes=4096, transaction_bytes=4096)
    value = bytes(range(256)) * 160
    async with ResultStore.open(tmp_path, options) as store:
        for turns in range(40):
            uid = f"u{turns}"
            putting = asyncio.ensure_future(store.put(uid, [value], content_type="x", now=NOW))
            for _ in range(turns):
                await asyncio.sleep(0)
                await store.stats()  # one job of the store's thread: the put moves on meanwhile
            putting.cancel()
            await asyncio.gather(putting, return_exceptions=True)
            stats = await store.stats()
            assert stats.unfinished == 0, f"cancelled after {turns} turns"
            if stats.results:
                assert b"".join([piece async for piece in store.read(uid)]) == value
                await store.purge(uid, NOW)
            await store.check_invariants()


async def test_two_writers_of_one_large_value_leave_one(tmp_path: Path) -> None:
    """Of writers that run at once exactly one stores; the others' chunks are gone."""
    options = StoreOptions(byte_budget=4 << 20, chunk_bytes=4096, transaction_bytes=4096)
    async with ResultStore.open(tmp_path, options) as store:
        values = [bytes([number]) * 60_000 for number in range(4)]
        outcomes = await asyncio.gather(
            *(store.put("u1", [value], content_type="x", now=NOW) for value in values)
        )
        assert sorted(outcome.value for outcome in outcomes) == ["already"] * 3 + ["stored"]
        winner = values[outcomes.index(PutOutcome.STORED)]
        assert b"".join([piece async for piece in store.read("u1")]) == winner
        await store.check_invariants()


async def test_a_purge_beats_a_large_value_still_being_written(tmp_path: Path) -> None:
    """A request purged while its result is on the way into the store stays purged."""
    options = StoreOptions(byte_budget=4 << 20, chunk_bytes=4096, transaction_bytes=4096)
    async with ResultStore.open(tmp_path, options) as store:
        putting = asyncio.ensure_future(store.put("u1", [bytes(400_000)], content_type="x", now=NOW))
        for _ in range(100):
            if (await store.stats()).unfinished:
                break
        else:
            pytest.fail("the put did not begin")
        await store.purge("u1", NOW)
        assert await putting is PutOutcome.TOMBSTONED
        await store.check_invariants()


FULL_DISK = """
import asyncio, resource, sys
from onepiece.errors import StoreFull
from onepiece.store import PutOutcome, RecordKind, ResultStore, StoreOptions
from onepiece.store._changes import U64
from onepiece.store._lmdb import LAYOUT_KEY
from onepiece.store._database import LAYOUT_VERSION
from onepiece.store._changes import U64
from onepiece.store._lmdb import LAYOUT_KEY
from onepiece.store._database import LAYOUT_VERSION

async def main(directory):
    options = StoreOptions(chunk_bytes=65536, transaction_bytes=262144)
    async with ResultStore.open(directory, options) as store:
        await store.put("kept", [bytes(100_000)], content_type="x", now=1.0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, resource.RLIM_INFINITY))
        for length in (200_000, 8 << 20):
            for number in range(40):
                try:
                    await store.put(f"u{length}-{number}", [bytes(length)], content_type="x", now=1.0)
                except StoreFull as error:
                    assert "the disk below" in error.message, error
                    break
            else:
                raise SystemExit("the disk was never full")
        assert len(b"".join([piece async for piece in store.read("kept")])) == 100_000
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert await store.put("next", [bytes(8 << 20)], content_type="x", now=1.0) is PutOutcome.STORED
        await store.expire(1.0)
        await store.check_invariants()
        assert (await store.stats()).unfinished == 0
    print("went on")

asyncio.run(main(sys.argv[1]))
"""


def test_a_full_disk_is_a_named_error_and_the_store_goes_on(tmp_path: Path) -> None:
    """A disk that takes no more (here: a limit on file size) gives ``StoreFull``; with room it does."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY, (
        "the limit cannot be lifted"
    )
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env=ENVIRONMENT,
    )
    assert done.stdout == "went on\n", done.stderr


async def test_a_store_whose_root_page_could_not_be_written_is_opened_again(tmp_path: Path) -> None:
    """LMDB refuses all work after that; the put is told as a full disk, and the next one works."""
    async with ResultStore.open(tmp_path) as store:
        await store.put("kept", [b"v"], content_type="x", now=NOW)

        def panic() -> None:
            with store._database._file.writing():
                raise lmdb.PanicError("a failed write of the root page")

        with pytest.raises(StoreFull):
            await store._thread.run(panic)
        assert await store.put("next", [b"w"], content_type="x", now=NOW) is PutOutcome.STORED
        assert (await store.meta("kept")).total_bytes == 1


async def test_a_store_of_another_layout_is_refused(tmp_path: Path) -> None:
    """A directory that a later version wrote is named, with both versions, and let go."""
    async with ResultStore.open(tmp_path) as store:

        def write_layout() -> None:
            with store._database._file.writing() as transaction:
                transaction.put(LAYOUT_KEY, U64.pack(99), db=store._database._file.tables.totals)

        await store._thread.run(write_layout)
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"layout 99.*{LAYOUT_VERSION}"):
            async with ResultStore.open(tmp_path):
                pass


STALE_READER = """
import os, signal, sys, lmdb
environment = lmdb.open(sys.argv[1], map_size=1 << 28, max_dbs=5)
transaction = environment.begin()
transaction.get(b"x")
os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_a_dead_reader_does_not_make_the_file_grow(tmp_path: Path) -> None:
    """A tool that read the file and was killed pins no pages: ``expire`` clears its slot (fault 81).

    Without that each result's pages stay unused, and the file would reach the sum of all results.
    """
    options = StoreOptions(byte_budget=16 << 20, map_bytes=1 << 28, chunk_bytes=65536)
    async with ResultStore.open(tmp_path, options) as store:
        await store.put("first", [bytes(1000)], content_type="x", now=NOW)
        reader = await asyncio.create_subprocess_exec(sys.executable, "-c", STALE_READER, str(tmp_path))
        await reader.wait()
        for number in range(150):
            await store.put(f"u{number}", [bytes(256 << 10)], content_type="x", now=NOW)
            await store.purge(f"u{number}", NOW)
            if number % 10 == 0:
                await store.expire(NOW)
        assert (await store.stats()).file_bytes < 16 << 20


async def test_a_file_that_a_power_cut_may_have_broken_is_set_aside(tmp_path: Path) -> None:
    """Opened under another boot without having been closed, the store begins empty; the file is kept."""
    marker = tmp_path / "unflushed.boot"
    async with ResultStore.open(tmp_path) as store:
        await store.put("u1", [b"before"], content_type="x", now=NOW)
        assert marker.exists()
    assert not marker.exists(), "closed whole: nothing is in doubt"
    marker.write_text("another boot\n", encoding="ascii")
    async with ResultStore.open(tmp_path) as store:
        with pytest.raises(UnknownRequest):
            await store.meta("u1")
        assert await store.put("u1", [b"after"], content_type="x", now=NOW) is PutOutcome.STORED
    assert (tmp_path / "data.mdb.after-power-loss").exists()


async def test_a_killed_process_costs_nothing_under_the_same_boot(tmp_path: Path) -> None:
    """The marker of this boot is no reason to distrust the file: only the process died."""
    async with ResultStore.open(tmp_path) as store:
        await store.put("u1", [b"before"], content_type="x", now=NOW)
        left = (tmp_path / "unflushed.boot").read_text(encoding="ascii")
    (tmp_path / "unflushed.boot").write_text(left, encoding="ascii")
    async with ResultStore.open(tmp_path) as store:
        assert (await store.meta("u1")).total_bytes == len(b"before")


async def test_power_durability_flushes_each_commit_and_leaves_no_marker(tmp_path: Path) -> None:
    """With ``POWER`` there is never anything unflushed, so nothing is noted, and nothing set aside."""
    async with ResultStore.open(tmp_path, StoreOptions(durability=Durability.POWER)) as store:
        await store.put("u1", [b"value"], content_type="x", now=NOW)
        assert not (tmp_path / "unflushed.boot").exists()
        assert b"".join([piece async for piece in store.read("u1")]) == b"value"


def test_the_flusher_flushes_after_a_change_and_only_then() -> None:
    """One change leads to one flush; without a change nothing is flushed; ``stop`` ends the thread."""
    flushed = threading.Semaphore(0)
    flusher = Flusher(flushed.release, seconds=0.001)
    try:
        assert not flushed.acquire(timeout=0.05), "nothing had changed"
        flusher.note_change()
        assert flushed.acquire(timeout=10.0)
        assert not flushed.acquire(timeout=0.05), "nothing had changed since"
    finally:
        flusher.stop()
