"""The request log: keys, adoption, bounds, and what it survives."""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import lmdb
import pytest
from attrs import evolve
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import onepiece
from onepiece.errors import ConfigError, InvalidInput, StoreFull, UnknownRequest
from onepiece.store import LogEntry, RequestLog, StoreOptions
from tests.store.disks import read_only_disk, small_disk

NOW = 1_000_000.0
WRITER = Path(__file__).with_name("log_writer.py")
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(Path(onepiece.__path__[0]).parent), os.environ.get("PYTHONPATH", "")])
}
"""Child processes import the same package as this one, installed or not."""


def make_entry(
    uid: str = "u1", key: str | None = None, *, owner: str = "p1.1", adoptions: int = 0
) -> LogEntry:
    """A request of the test's workflow that ends in a minute."""
    return LogEntry(uid, "movie", owner, f"tcp://{owner}/control", key, NOW, NOW + 60, adoptions)


async def test_what_was_put_is_there(tmp_path: Path) -> None:
    """An entry and its inputs come back as they were, whole or by range, and after the log was closed."""
    body = bytes(range(256)) * 100
    entry = make_entry(key="ordér 17")
    options = StoreOptions(chunk_bytes=4096)
    async with RequestLog.open(tmp_path, options) as log:
        assert await log.put(entry, [body[:5000], body[5000:5001], body[5001:]], NOW) == "u1"
    async with RequestLog.open(tmp_path, options) as log:
        assert await log.entry("u1") == entry
        assert await log.body("u1") == body
        for start, length in [
            (0, 0),
            (0, 1),
            (4095, 2),
            (4096, 4096),
            (100, 12_000),
            (25_599, 9),
            (30_000, 4),
        ]:
            assert await log.body("u1", start, length) == body[start : start + length], (start, length)
        await log.check_invariants()


async def test_a_key_stands_for_its_first_request(tmp_path: Path) -> None:
    """A second request under a key stores nothing and is told the first one's UID; other keys are free."""
    async with RequestLog.open(tmp_path) as log:
        assert await log.put(make_entry("u1", "k"), [b"first"], NOW) == "u1"
        assert await log.put(make_entry("u2", "k"), [b"second"], NOW) == "u1"
        assert await log.put(make_entry("u3", "K"), [b"third"], NOW) == "u3"
        assert await log.entry("u2") is None
        assert await log.body("u1") == b"first"
        await log.check_invariants()


async def test_of_requests_that_race_for_a_key_one_wins(tmp_path: Path) -> None:
    """Of many puts at once under one key exactly one is kept, and all hear the same UID."""
    async with RequestLog.open(tmp_path) as log:
        said = await asyncio.gather(*(log.put(make_entry(f"u{n}", "k"), [b"%d" % n], NOW) for n in range(20)))
        (winner,) = set(said)
        assert await log.body(winner) == winner[1:].encode()
        assert (await log.stats()).open_entries == 1


async def test_a_key_is_known_for_a_while_after_the_end(tmp_path: Path) -> None:
    """The key of a request that has ended still answers with its UID; when that time is over it is free."""
    async with RequestLog.open(tmp_path, keep_seconds=100.0) as log:
        await log.put(make_entry("u1", "k"), [b"x"], NOW)
        assert await log.remove("u1", NOW + 10) is True
        assert [await log.holder_of(key, NOW + 109) for key in ("k", "K")] == ["u1", None]
        assert await log.put(make_entry("u2", "k"), [b"y"], NOW + 109) == "u1"
        assert await log.holder_of("k", NOW + 110) is None
        assert await log.put(make_entry("u3", "k"), [b"z"], NOW + 110) == "u3", "free without a sweep, too"
        await log.check_invariants()


async def test_an_ended_request_stays_ended(tmp_path: Path) -> None:
    """Neither a late copy of the record nor a late adoption brings a removed request back."""
    async with RequestLog.open(tmp_path) as log:
        await log.put(make_entry("u1"), [bytes(100_000)], NOW)
        assert await log.remove("u1", NOW) is True
        assert await log.remove("u1", NOW) is False
        assert await log.remove("u2", NOW) is False, "its end may arrive before its record"
        for uid in ("u1", "u2"):
            assert await log.put(make_entry(uid), [b"late"], NOW) == uid
            assert await log.adopt(uid, "p2.1", "tcp://p2/control", 5) is False
            assert await log.entry(uid) is None
            with pytest.raises(UnknownRequest, match=uid):
                await log.body(uid)
        assert await log.orphans(frozenset(), 10) == []
        await log.check_invariants()


async def test_the_higher_adoption_wins(tmp_path: Path) -> None:
    """An owner replaces an earlier one only; the same answer is given to the same question."""
    async with RequestLog.open(tmp_path) as log:
        await log.put(make_entry(owner="p1.1"), [b"inputs"], NOW)
        assert await log.adopt("u1", "p2.1", "tcp://p2/control", 1) is True
        assert await log.adopt("u1", "p2.1", "tcp://p2/control", 1) is True, "its answer may have been lost"
        assert await log.adopt("u1", "p3.1", "tcp://p3/control", 1) is False
        assert await log.adopt("u1", "p1.1", "tcp://p1/control", 0) is False
        assert await log.adopt("u1", "p3.1", "tcp://p3/control", 2) is True
        entry = await log.entry("u1")
        assert entry is not None
        assert (entry.owner_life, entry.owner, entry.adoptions) == ("p3.1", "tcp://p3/control", 2)
        assert await log.body("u1") == b"inputs"
        with pytest.raises(UnknownRequest):
            await log.adopt("u9", "p3.1", "tcp://p3/control", 1)
        await log.check_invariants()


async def test_a_record_from_a_later_owner_replaces_the_owner(tmp_path: Path) -> None:
    """A copy of the record that an adopter wrote tells of the adoption; an older one changes nothing."""
    async with RequestLog.open(tmp_path) as log:
        await log.put(make_entry(owner="p1.1"), [b"inputs"], NOW)
        await log.put(make_entry(owner="p2.1", adoptions=1), [b"inputs"], NOW)
        await log.put(make_entry(owner="p1.1"), [b"inputs"], NOW)
        assert await log.entry("u1") == make_entry(owner="p2.1", adoptions=1)


async def test_orphans_are_those_whose_owner_does_not_live(tmp_path: Path) -> None:
    """Requests of other lives are listed, up to the limit, and those of living owners are not.

    Names that begin alike are told apart: ``p1.1`` and ``p1.10`` are two lives.
    """
    async with RequestLog.open(tmp_path) as log:
        owners = ["p1.1", "p1.10", "p1.2", "p2.1"]
        for number in range(40):
            await log.put(make_entry(f"u{number:02}", owner=owners[number % 4]), [b""], NOW)
        found = await log.orphans(frozenset({"p1.1", "p2.1"}), 100)
        assert Counter(entry.owner_life for entry in found) == {"p1.10": 10, "p1.2": 10}
        assert len(await log.orphans(frozenset({"p1.1"}), 7)) == 7
        assert await log.orphans(frozenset(owners), 100) == []
        await log.adopt("u01", "p2.1", "tcp://p2/control", 1)
        assert len(await log.orphans(frozenset({"p1.1", "p2.1"}), 100)) == 19


async def test_a_full_log_refuses_and_works_on(tmp_path: Path) -> None:
    """A record beyond the budget is refused by name and nothing of it stays; an end makes room again."""
    async with RequestLog.open(tmp_path, StoreOptions(byte_budget=1 << 20)) as log:
        for number in range(3):
            await log.put(make_entry(f"u{number}", f"k{number}"), [bytes(300_000)], NOW)
        with pytest.raises(StoreFull, match="request u3 needs") as caught:
            await log.put(make_entry("u3", "k3"), [bytes(300_000)], NOW)
        assert caught.value.fields["byte_budget"] == 1 << 20
        assert await log.put(make_entry("u4", "k0"), [bytes(300_000)], NOW) == "u0", (
            "a known key takes nothing"
        )
        await log.remove("u0", NOW)
        assert await log.put(make_entry("u3", "k3"), [bytes(300_000)], NOW) == "u3", (
            "the refused key was free"
        )
        await log.check_invariants()


async def test_overdue_entries_are_dropped(tmp_path: Path) -> None:
    """What nobody removed is dropped some time after its deadline, and a full log drops it to make room."""
    async with RequestLog.open(tmp_path, StoreOptions(byte_budget=1 << 20), keep_seconds=10.0) as log:
        for number in range(3):
            await log.put(make_entry(f"u{number}"), [bytes(300_000)], NOW)
        assert await log.expire(NOW + 69) == 0
        late = evolve(make_entry("u9"), deadline_at=NOW + 200)
        assert await log.put(late, [bytes(300_000)], NOW + 70) == "u9"
        assert (await log.stats()).open_entries == 1
        assert await log.expire(NOW + 300) == 1
        assert (await log.stats()).bytes_in_use == 0
        await log.check_invariants()


@pytest.mark.parametrize(
    "entry",
    [
        make_entry(""),
        make_entry("ü"),
        make_entry(owner=""),
        make_entry(owner="a\0b"),
        make_entry(owner="x" * 300),
        make_entry(key="k" * 2000),
    ],
)
async def test_unusable_names_are_refused(tmp_path: Path, entry: LogEntry) -> None:
    """What the tables cannot hold is refused before anything is written."""
    async with RequestLog.open(tmp_path) as log:
        with pytest.raises(InvalidInput):
            await log.put(entry, [b"x"], NOW)
        await log.put(make_entry("known"), [b"x"], NOW)
        with pytest.raises(InvalidInput):
            await log.adopt("known", "", "tcp://a/control", 1)
        with pytest.raises(InvalidInput):
            await log.body("known", -1)


async def test_one_process_at_a_time(tmp_path: Path) -> None:
    """A directory that is open, or holds something else, is refused by a message that says so."""
    async with RequestLog.open(tmp_path):
        with pytest.raises(ConfigError, match=r"request log in .* is in use by process"):
            async with RequestLog.open(tmp_path):
                pass
    with pytest.raises(ConfigError, match="keep_seconds"):
        async with RequestLog.open(tmp_path, keep_seconds=0.0):
            pass


@pytest.mark.parametrize("lines", [1, 6])
async def test_what_was_acknowledged_survives_kill_9(tmp_path: Path, lines: int) -> None:
    """After SIGKILL amid writing, each acknowledged record, adoption and end is there, whole.

    Survives: death of the process at any instruction. The log is opened again by the next life, which
    writes on, and is killed too.
    """
    said: dict[str, set[int]] = {"kept": set(), "adopted": set(), "removed": set()}
    first = 0
    for _ in range(3):
        for word, number in run_until_killed(tmp_path, first, lines):
            said[word].add(number)
        async with RequestLog.open(tmp_path, StoreOptions(chunk_bytes=65536)) as log:
            await log.check_invariants()
            for number in said["kept"]:
                await check_kept(log, number, said["adopted"], said["removed"])
        first = max(said["kept"]) + 10


def run_until_killed(directory: Path, first: int, lines: int) -> list[tuple[str, int]]:
    """Let a process write records, and kill it when it has acknowledged some; what it acknowledged."""
    process = subprocess.Popen(
        [sys.executable, str(WRITER), str(directory), str(first)],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        assert process.stdout is not None
        heard = [process.stdout.readline() for _ in range(lines)]
        process.kill()
        heard += process.stdout.readlines()
    finally:
        process.kill()
        process.communicate()
    words = [line.split() for line in heard if line.endswith("\n")]
    assert len(words) >= lines, "the writer ended by itself"
    return [(word, int(number)) for word, number in words]


async def check_kept(log: RequestLog, number: int, adopted: set[int], removed: set[int]) -> None:
    """The entry is as acknowledged; what was under way when the process died may have happened or not."""
    uid = f"u{number}"
    entry = await log.entry(uid)
    if number in removed:
        assert entry is None
    elif entry is None:
        assert number % 5 == 0, f"{uid} was acknowledged and is gone"
    else:
        body = number.to_bytes(8, "big") * (40_000 if number % 3 == 0 else 50)
        assert await log.body(uid) == body
        assert entry.adoptions == 1 or number not in adopted
        assert await log.put(make_entry("other", f"key {number}"), [b""], NOW) == uid


async def fill(log: RequestLog) -> None:
    """Keep records of 100 kB until the log refuses one."""
    for number in range(100):
        await log.put(make_entry(f"u{number}"), [bytes(100_000)], NOW)


async def test_a_full_map_is_a_named_error(tmp_path: Path) -> None:
    """When the file may not grow, puts are refused by a name that says what to do; what is there stays."""
    options = StoreOptions(byte_budget=64 << 20, map_bytes=2 << 20)
    async with RequestLog.open(tmp_path, options) as log:
        with pytest.raises(StoreFull, match=r"request log's file .* map of 2097152 bytes.*larger map_bytes"):
            await fill(log)
        assert (await log.stats()).open_entries > 3
        assert await log.body("u0") == bytes(100_000)
        await log.remove("u0", NOW)
        await log.remove("u1", NOW)
        await log.put(make_entry("next"), [bytes(100_000)], NOW)
        await log.check_invariants()


@pytest.mark.parametrize(
    "error",
    [lmdb.Error("mdb_txn_commit: Read-only file system"), lmdb.ReadonlyError("mdb_txn_commit: EACCES")],
)
async def test_a_read_only_disk_is_a_named_error(tmp_path: Path, error: lmdb.Error) -> None:
    """A file system that became read-only refuses changes by name and lets reads go on."""
    async with RequestLog.open(tmp_path) as log:
        await log.put(make_entry(), [b"x"], NOW)
        with read_only_disk(log._database._file, error):
            for change in (
                log.put(make_entry("u2"), [b"y"], NOW),
                log.adopt("u1", "p2.1", "tcp://p2/control", 1),
                log.remove("u1", NOW),
            ):
                with pytest.raises(StoreFull, match=r"request log .* took no more"):
                    await change
            assert await log.body("u1") == b"x"
        assert await log.entry("u1") == make_entry()
        assert await log.put(make_entry("u2"), [b"y"], NOW) == "u2"
        await log.check_invariants()


async def test_a_full_disk_is_a_named_error(tmp_path: Path) -> None:
    """A disk that is full refuses puts by name; what was there stays, and with room the log goes on."""
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        filler = disk / "filler"
        async with RequestLog.open(disk / "requests") as log:
            await log.put(make_entry("u0"), [bytes(100_000)], NOW)
            filler.write_bytes(bytes(2 << 20))
            with pytest.raises(StoreFull, match="the disk below the request log"):
                await fill(log)
            assert await log.body("u0") == bytes(100_000)
            filler.unlink()
            await log.put(make_entry("next"), [bytes(100_000)], NOW)
            await log.check_invariants()


class LogModel(RuleBasedStateMachine):
    """The log does what a dictionary does, over any sequence of calls and reopenings."""

    keep_seconds = 50

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.runner = asyncio.Runner()
        self.now = 1000
        self.entries: dict[str, LogEntry | None] = {}
        """None: the request has ended."""
        self.keep_until: dict[str, int] = {}
        self.keys: dict[str, str] = {}

    @initialize()
    def open(self) -> None:
        """Open the log."""
        self.opened: AbstractAsyncContextManager[RequestLog] = RequestLog.open(
            self.directory.name, StoreOptions(chunk_bytes=4096), keep_seconds=self.keep_seconds
        )
        self.log = self.runner.run(self.opened.__aenter__())

    def teardown(self) -> None:
        """Close all."""
        self.runner.run(self.opened.__aexit__(None, None, None))
        self.runner.close()
        self.directory.cleanup()

    @rule()
    def reopen(self) -> None:
        """Closing and opening changes nothing."""
        self.runner.run(self.opened.__aexit__(None, None, None))
        self.open()

    @rule(seconds=st.integers(0, 40))
    def wait(self, seconds: int) -> None:
        """Time goes on."""
        self.now += seconds

    @rule(
        uid=st.sampled_from(["u1", "u2", "u3"]),
        key=st.sampled_from([None, "k1", "k2"]),
        owner=st.sampled_from(["p1.1", "p1.2", "p2.1"]),
        adoptions=st.integers(0, 3),
    )
    def put(self, uid: str, key: str | None, owner: str, adoptions: int) -> None:
        """A put answers with the UID that the model gives, and stores only a new one."""
        entry = LogEntry(uid, "movie", owner, owner, key, self.now, self.now + 10, adoptions)
        said = self.runner.run(self.log.put(entry, [self.body_of(uid)], self.now))
        self.forget_if_due(uid)
        if uid in self.entries:
            assert said == uid
            self.model_adoption(uid, owner, adoptions)
            return
        holder = None if key is None else self.keys.get(key)
        if holder is not None:
            self.forget_if_due(holder)
            holder = self.keys.get(str(key))
        if holder is not None:
            assert said == holder
            return
        assert said == uid
        self.entries[uid] = entry
        self.keep_until[uid] = self.now + 10 + self.keep_seconds
        if key is not None:
            self.keys[key] = uid

    @rule(
        uid=st.sampled_from(["u1", "u2", "u3"]), owner=st.sampled_from(["p1.1", "p2.1"]), n=st.integers(0, 4)
    )
    def adopt(self, uid: str, owner: str, n: int) -> None:
        """An adoption is granted as the model grants it."""
        try:
            granted = self.runner.run(self.log.adopt(uid, owner, owner, n))
        except UnknownRequest:
            assert uid not in self.entries
        else:
            assert granted is self.model_adoption(uid, owner, n)

    @rule(uid=st.sampled_from(["u1", "u2", "u3"]))
    def remove(self, uid: str) -> None:
        """A removal says whether the request was open, and leaves a mark that holds the key."""
        was_open = self.entries.get(uid) is not None
        assert self.runner.run(self.log.remove(uid, self.now)) is was_open
        if was_open or uid not in self.entries:
            self.entries[uid] = None
            self.keep_until[uid] = self.now + self.keep_seconds

    @rule()
    def expire(self) -> None:
        """Exactly what is due goes."""
        due = sum(self.forget_if_due(uid) for uid in list(self.entries))
        assert self.runner.run(self.log.expire(self.now)) == due

    @rule(living=st.frozensets(st.sampled_from(["p1.1", "p1.2", "p2.1"])), limit=st.integers(1, 3))
    def orphans(self, living: frozenset[str], limit: int) -> None:
        """Open requests of other lives are listed."""
        found = self.runner.run(self.log.orphans(living, limit))
        expected = [e for e in self.entries.values() if e is not None and e.owner_life not in living]
        assert len(found) == min(limit, len(expected))
        assert all(entry in expected for entry in found)

    @invariant()
    def is_the_model(self) -> None:
        """Entries, inputs and numbers are the model's."""
        if not hasattr(self, "log"):
            return
        self.runner.run(self.log.check_invariants())
        for uid in ("u1", "u2", "u3"):
            entry = self.runner.run(self.log.entry(uid))
            assert entry == self.entries.get(uid)
            if entry is not None:
                assert self.runner.run(self.log.body(uid)) == self.body_of(uid)
        stats = self.runner.run(self.log.stats())
        assert stats.open_entries + stats.ended_entries == len(self.entries)

    def body_of(self, uid: str) -> bytes:
        """The inputs of a request: none, a piece, several."""
        return uid.encode() * {"u1": 0, "u2": 10, "u3": 5000}[uid]

    def model_adoption(self, uid: str, owner: str, adoptions: int) -> bool:
        """What an adoption does to the model."""
        entry = self.entries[uid]
        if entry is None:
            return False
        if adoptions > entry.adoptions:
            self.entries[uid] = evolve(entry, owner_life=owner, owner=owner, adoptions=adoptions)
            return True
        return (adoptions, owner) == (entry.adoptions, entry.owner_life)

    def forget_if_due(self, uid: str) -> bool:
        """Drop what is out of time."""
        if uid not in self.entries or self.keep_until[uid] > self.now:
            return False
        del self.entries[uid]
        self.keys = {key: holder for key, holder in self.keys.items() if holder != uid}
        return True


TestLogModel = LogModel.TestCase
TestLogModel.__doc__ = "Whatever the order of calls, the log is its model."
TestLogModel.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
