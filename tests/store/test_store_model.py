"""The result store against a model of a few lines, over any sequence of calls and reopenings."""

import asyncio
import tempfile
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from attrs import frozen
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from onepiece.errors import ResultGone, StageFailed, StoreFull, UnknownRequest
from onepiece.store import PutOutcome, RecordKind, ResultStore, StoreOptions
from onepiece.store.records import chunk_pages_bytes

T = TypeVar("T")
OPTIONS = StoreOptions(
    byte_budget=1 << 20,
    chunk_bytes=4096,
    transaction_bytes=8192,
    ttl_seconds=20.0,
    tombstone_ttl_seconds=10.0,
)
UIDS = st.sampled_from([f"u{number}" for number in range(6)])
RECORD_BYTES = 1000
"""More than any record here takes."""
LENGTHS = st.sampled_from([0, 1, 4096, 8192, 8193, 50_000, 150_000])


@frozen
class Entry:
    """What the model holds under a UID."""

    kind: RecordKind
    value: bytes
    expires_at: int


class StoreModel(RuleBasedStateMachine):
    """The store does what a dictionary with moments does."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.runner = asyncio.Runner()
        self.entries: dict[str, Entry] = {}
        self.now = 1000

    @initialize()
    def open(self) -> None:
        """Open the store."""
        self.opened: AbstractAsyncContextManager[ResultStore] = ResultStore.open(self.directory.name, OPTIONS)
        self.store = self.runner.run(self.opened.__aenter__())

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

    @rule(seconds=st.integers(0, 12))
    def wait(self, seconds: int) -> None:
        """Time goes on."""
        self.now += seconds

    @rule(uid=UIDS, length=LENGTHS, filler=st.integers(0, 255), ttl=st.sampled_from([None, 1.0, 5.0]))
    def put(self, uid: str, length: int, filler: int, ttl: float | None) -> None:
        """A put is stored, or refused for the reason that the model gives."""
        value = bytes([filler]) * length
        in_use = self.runner.run(self.store.stats()).bytes_in_use
        if in_use + chunk_pages_bytes(length, 4096) + RECORD_BYTES > OPTIONS.byte_budget:
            # The put may find no room, and would sweep before it tries again: the model follows.
            self.expire()
        try:
            outcome = self.runner.run(
                self.store.put(uid, [value], content_type="x", ttl_seconds=ttl, now=self.now)
            )
        except StoreFull:
            # What is left is alive, and too much.
            assert self.occupied() + chunk_pages_bytes(length, 4096) + 10 * RECORD_BYTES > OPTIONS.byte_budget
            return
        assert outcome is self.expected(uid)
        if outcome is PutOutcome.STORED:
            self.entries[uid] = Entry(RecordKind.RESULT, value, self.now + int(ttl or 20))

    @rule(uid=UIDS)
    def put_error(self, uid: str) -> None:
        """An error stands under the same rules, and takes the place of a result."""
        outcome = self.runner.run(self.store.put_error(uid, StageFailed("x").to_wire(), now=self.now))
        expected = self.expected(uid)
        if expected is PutOutcome.ALREADY and self.entries[uid].kind is RecordKind.RESULT:
            expected = PutOutcome.REPLACED
        assert outcome is expected
        if outcome in {PutOutcome.STORED, PutOutcome.REPLACED}:
            self.entries[uid] = Entry(RecordKind.ERROR, b"", self.now + 20)

    @rule(uid=UIDS)
    def purge(self, uid: str) -> None:
        """A purge says whether a value was there, and leaves a tombstone."""
        self.end_if_due(uid)
        entry = self.entries.get(uid)
        was_there = entry is not None and entry.kind is not RecordKind.TOMBSTONE
        assert self.runner.run(self.store.purge(uid, self.now)) is was_there
        if entry is None or was_there:
            self.entries[uid] = Entry(RecordKind.TOMBSTONE, b"", self.now + 10)

    @rule()
    def expire(self) -> None:
        """Exactly what is due ends."""
        due = self.sweep()
        assert self.runner.run(self.store.expire(self.now)) == due

    @rule(uid=UIDS, start=st.integers(0, 150_000), length=st.integers(0, 60_000))
    def read(self, uid: str, start: int, length: int) -> None:
        """Any range of a result is the model's; a result that is due but not swept may be read."""
        entry = self.entries.get(uid)
        if entry is not None and entry.kind is RecordKind.RESULT:
            start = min(start, len(entry.value))
            found = self.runner.run(self.collect(uid, start, length))
            assert found == entry.value[start : start + length]
            return
        try:
            self.runner.run(self.collect(uid, 0, 0))
        except UnknownRequest:
            assert entry is None
        except ResultGone:
            assert entry is not None
            assert entry.kind is RecordKind.TOMBSTONE
        except StageFailed:
            assert entry is not None
            assert entry.kind is RecordKind.ERROR

    @invariant()
    def numbers_agree(self) -> None:
        """Tables, totals and model count the same, and the budget holds."""
        if not hasattr(self, "store"):
            return
        self.runner.run(self.store.check_invariants())
        stats = self.runner.run(self.store.stats())
        kinds = [entry.kind for entry in self.entries.values()]
        assert stats.results == kinds.count(RecordKind.RESULT)
        assert stats.errors == kinds.count(RecordKind.ERROR)
        assert stats.tombstones == kinds.count(RecordKind.TOMBSTONE)
        assert stats.unfinished == 0
        assert self.occupied() <= stats.bytes_in_use <= OPTIONS.byte_budget

    async def collect(self, uid: str, start: int, length: int) -> bytes:
        """The range, joined."""
        return b"".join([piece async for piece in self.store.read(uid, start, length)])

    def occupied(self) -> int:
        """What the values of the model occupy, records aside."""
        return sum(chunk_pages_bytes(len(entry.value), 4096) for entry in self.entries.values())

    def expected(self, uid: str) -> PutOutcome:
        """What a put must say."""
        self.end_if_due(uid)
        entry = self.entries.get(uid)
        if entry is None:
            return PutOutcome.STORED
        return PutOutcome.TOMBSTONED if entry.kind is RecordKind.TOMBSTONE else PutOutcome.ALREADY

    def end_if_due(self, uid: str) -> bool:
        """End the entry if its time is over."""
        entry = self.entries.get(uid)
        if entry is None or entry.expires_at > self.now:
            return False
        if entry.kind is RecordKind.TOMBSTONE:
            del self.entries[uid]
        else:
            self.entries[uid] = Entry(RecordKind.TOMBSTONE, b"", self.now + 10)
        return True

    def sweep(self) -> int:
        """End all that is due."""
        return sum(self.end_if_due(uid) for uid in list(self.entries))


TestStoreModel = StoreModel.TestCase
TestStoreModel.__doc__ = "Whatever the order of calls, the store is its model."
TestStoreModel.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
