"""The result store's file: each method is one or two transactions, blocks, and runs on one thread."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from attrs import define, evolve, field, frozen

from onepiece.errors import StoreFull
from onepiece.store._changes import (
    CHUNK_KEY,
    TOTALS_KEY,
    U64,
    Change,
    Tables,
    Totals,
    decode,
    encode,
    expiry_key,
    microseconds,
)
from onepiece.store._lmdb import FileOptions, LmdbFile
from onepiece.store.records import (
    PutOutcome,
    RecordKind,
    StoredRecord,
    StoreOptions,
    StoreStats,
    chunk_pages_bytes,
    record_occupied_bytes,
    uid_key,
)
from transports.operations import Bytes

LAYOUT_VERSION: Final = 1
SWEEP_RECORDS: Final = 256
"""How many records one transaction of ``expire`` takes away: reads get their turn between them."""

T = TypeVar("T")


@frozen
class Draft:
    """A large value whose writing has begun: its record, not yet visible, and what it occupies."""

    record: StoredRecord
    occupied_bytes: int
    is_copy: bool


@define(eq=False)
class Database:
    """The open file. All methods block; all of them belong on one thread."""

    options: StoreOptions
    """Bounds and times."""
    _file: LmdbFile[Tables] = field(repr=False)

    @classmethod
    def open(cls, path: Path, options: StoreOptions) -> "Database":
        """Open or create the store in this directory, and reclaim what a dead process left.

        Raises:
            ConfigError: The directory is in use by another process, of another layout, or unusable.
            StoreFull: The disk has no room for the file's first pages.
        """
        file_options = FileOptions(
            what="result store",
            relief="purge results",
            map_size=options.map_size,
            durability=options.durability,
            flush_seconds=options.flush_seconds,
        )
        file = LmdbFile.open(path, file_options, Tables)
        database = cls(options, file)
        try:
            database._file.check_layout(
                LAYOUT_VERSION, database._file.tables.totals, "if its results are fetched"
            )
            database.check_readers()
            database.reclaim()
        except BaseException:
            database.close()
            raise
        return database

    @property
    def path(self) -> Path:
        """The directory."""
        return self._file.path

    def close(self) -> None:
        """Close the file and let others open it."""
        self._file.close()

    def put(
        self, record: StoredRecord, chunks: Sequence[Bytes], now: float, *, is_copy: bool = False
    ) -> PutOutcome:
        """Write a value that fits in one transaction; a copy replaces what it beats."""
        encoded = encode(record)
        occupied = chunk_pages_bytes(record.total_bytes, record.chunk_bytes)

        def write(change: Change) -> PutOutcome:
            found = change.current(record.uid, now)
            refused = _refused(record, found, is_copy=is_copy)
            if refused is not None:
                return refused
            if found is not None:
                change.remove(found)
            change.take(occupied + record_occupied_bytes(len(encoded), record.uid), record.uid)
            numbered = evolve(record, value_id=change.new_value_id() if chunks else 0)
            change.write_chunks(numbered.value_id, 0, chunks)
            change.totals.bytes_in_use += occupied
            change.write_record(numbered, encode(numbered))
            return _written(found)

        return self._with_room(write, now)

    def begin(self, record: StoredRecord, now: float, *, is_copy: bool = False) -> Draft | PutOutcome:
        """Begin a large value: take its bytes from the budget, and note that it is unfinished."""
        encoded = encode(record)
        occupied = chunk_pages_bytes(record.total_bytes, record.chunk_bytes)

        def write(change: Change) -> Draft | PutOutcome:
            refused = _refused(record, change.current(record.uid, now), is_copy=is_copy)
            if refused is not None:
                return refused
            change.take(occupied + record_occupied_bytes(len(encoded), record.uid), record.uid)
            value_id = change.new_value_id()
            change.totals.bytes_in_use += occupied
            change.transaction.put(U64.pack(value_id), U64.pack(occupied), db=self._file.tables.unfinished)
            return Draft(evolve(record, value_id=value_id), occupied, is_copy)

        return self._with_room(write, now)

    def append(self, draft: Draft, first: int, chunks: Sequence[Bytes]) -> None:
        """Write some of a large value's chunks."""
        with self._change() as change:
            change.write_chunks(draft.record.value_id, first, chunks)

    def commit(self, draft: Draft, now: float) -> PutOutcome:
        """Make a large value visible, unless another writer was first or it was purged meanwhile."""
        with self._change() as change:
            change.transaction.delete(U64.pack(draft.record.value_id), db=self._file.tables.unfinished)
            found = change.current(draft.record.uid, now)
            refused = _refused(draft.record, found, is_copy=draft.is_copy)
            if refused is not None:
                change.drop_chunks(draft.record.value_id)
                change.totals.bytes_in_use -= draft.occupied_bytes
                return refused
            if found is not None:
                change.remove(found)
            change.write_record(draft.record, encode(draft.record))
            return _written(found)

    def abandon(self, value_id: int) -> None:
        """Take away a value that was begun and will not be finished; idempotent."""
        with self._change() as change:
            raw = change.transaction.pop(U64.pack(value_id), db=self._file.tables.unfinished)
            if raw is None:
                return
            change.drop_chunks(value_id)
            change.totals.bytes_in_use -= U64.unpack(raw)[0]

    def purge(self, uid: str, now: float) -> bool:
        """Leave a tombstone under the UID; true if a value was there."""
        with self._change() as change:
            record = change.current(uid, now)
            if record is not None and record.kind is RecordKind.TOMBSTONE:
                return False
            if record is not None:
                change.remove(record)
            change.bury(uid, now, "purged")
            return record is not None

    def put_tombstone(self, tombstone: StoredRecord, now: float) -> PutOutcome:
        """Write a tombstone that another node sent; it lasts longer than what it replaces."""
        with self._change() as change:
            found = change.current(tombstone.uid, now)
            if tombstone.expires_at <= now or (found and found.kind is RecordKind.TOMBSTONE):
                return PutOutcome.TOMBSTONED
            if found is not None:
                change.remove(found)
                tombstone = evolve(tombstone, expires_at=max(tombstone.expires_at, found.expires_at))
            change.write_record(tombstone, encode(tombstone))
            return _written(found)

    def expire(self, now: float) -> int:
        """Take away at most ``SWEEP_RECORDS`` records whose time is over; returns how many."""
        with self._change() as change:
            return self._expire(change, now)

    def record(self, uid: str) -> StoredRecord | None:
        """What stands under the UID."""
        with self._file.reading() as transaction:
            raw = transaction.get(uid_key(uid), db=self._file.tables.records)
        return None if raw is None else decode(raw)

    def records(self, uids: Sequence[str]) -> list[StoredRecord]:
        """What stands under these UIDs, tombstones too; fewer where nothing does."""
        with self._file.reading() as transaction:
            found = [transaction.get(uid_key(uid), db=self._file.tables.records) for uid in uids]
        return [decode(raw) for raw in found if raw is not None]

    def scan(self, after_uid: str, limit: int) -> list[StoredRecord]:
        """At most ``limit`` records in the order of UIDs, behind ``after_uid``; tombstones too."""
        found: list[StoredRecord] = []
        with self._file.reading() as transaction, transaction.cursor(self._file.tables.records) as cursor:
            more = cursor.set_range(uid_key(after_uid) + b"\0") if after_uid else cursor.first()
            while more and len(found) < limit:
                found.append(decode(cursor.value()))
                more = cursor.next()
        return found

    def chunk(self, value_id: int, number: int) -> bytes | None:
        """One piece of a value, copied out; None if the value is gone."""
        with self._file.reading() as transaction:
            found: bytes | None = transaction.get(
                CHUNK_KEY.pack(value_id, number), db=self._file.tables.chunks
            )
        return found

    def stats(self) -> StoreStats:
        """The store in numbers."""
        with self._file.reading() as transaction:
            totals = Totals.read(transaction, self._file.tables)
            unfinished = transaction.stat(self._file.tables.unfinished)["entries"]
        return StoreStats(
            path=self.path,
            results=totals.results,
            errors=totals.errors,
            tombstones=totals.tombstones,
            unfinished=unfinished,
            bytes_in_use=totals.bytes_in_use,
            byte_budget=self.options.byte_budget,
            file_bytes=self._file.occupied_bytes(),
            map_bytes=self.options.map_size,
        )

    def check_readers(self) -> int:
        """Clear the reader slots of processes that died; returns how many there were."""
        return self._file.check_readers()

    def reclaim(self, skip: frozenset[int] = frozenset()) -> int:
        """Take away unfinished values, except those still being written; returns how many."""
        with self._file.reading() as transaction, transaction.cursor(self._file.tables.unfinished) as cursor:
            value_ids = [U64.unpack(key)[0] for key in cursor.iternext(keys=True, values=False)]
        left = [value_id for value_id in value_ids if value_id not in skip]
        for value_id in left:
            self.abandon(value_id)
        return len(left)

    def check_invariants(self) -> None:
        """Assert that the totals and the tables agree; reads all of the tables' keys."""
        with self._file.reading() as transaction:
            totals = Totals.read(transaction, self._file.tables)
            expected = Totals(next_value_id=totals.next_value_id)
            value_ids: set[int] = set()
            with transaction.cursor(self._file.tables.records) as cursor:
                for _, raw in cursor:
                    record = decode(raw)
                    expected.count(record.kind, 1)
                    expected.bytes_in_use += chunk_pages_bytes(record.total_bytes, record.chunk_bytes)
                    expected.bytes_in_use += record_occupied_bytes(len(raw), record.uid)
                    value_ids.add(record.value_id)
                    assert transaction.get(expiry_key(record), db=self._file.tables.expiry) == b"", record.uid
            with transaction.cursor(self._file.tables.unfinished) as cursor:
                for key, raw in cursor:
                    expected.bytes_in_use += U64.unpack(raw)[0]
                    value_ids.add(U64.unpack(key)[0])
            assert expected == totals, f"counted {expected}, noted {totals}"
            entries = transaction.stat(self._file.tables.expiry)["entries"]
            assert entries == totals.results + totals.errors + totals.tombstones, "expiry has stray entries"
            with transaction.cursor(self._file.tables.chunks) as cursor:
                for key in cursor.iternext(keys=True, values=False):
                    assert CHUNK_KEY.unpack(key)[0] in value_ids, "a chunk belongs to no value"

    def _with_room(self, write: Callable[[Change], T], now: float) -> T:
        """Carry out a put; if it finds no room, take away what is due and try once more."""
        try:
            with self._change() as change:
                return write(change)
        except StoreFull:
            if not self._expire_all(now):
                raise
        with self._change() as change:
            return write(change)

    def _expire_all(self, now: float) -> int:
        ended = 0
        while count := self.expire(now):
            ended += count
        return ended

    def _expire(self, change: Change, now: float) -> int:
        due: list[str] = []
        with change.transaction.cursor(db=self._file.tables.expiry) as cursor:
            for key in cursor.iternext(keys=True, values=False):
                if U64.unpack(key[:8])[0] > microseconds(now) or len(due) == SWEEP_RECORDS:
                    break
                due.append(key[8:].decode())
        for uid in due:
            raw = change.transaction.get(uid_key(uid), db=self._file.tables.records)
            assert raw is not None, f"{uid} stands in the table of expiry and has no record"
            change.end(decode(raw), now)
        return len(due)

    @contextmanager
    def _change(self) -> Iterator[Change]:
        """A write transaction with the totals; the caller's change and theirs are one."""
        with self._file.writing() as transaction:
            change = Change(
                transaction, self._file.tables, Totals.read(transaction, self._file.tables), self.options
            )
            yield change
            transaction.put(TOTALS_KEY, change.totals.encoded(), db=self._file.tables.totals)


def _written(found: StoredRecord | None) -> PutOutcome:
    """What became of a put that was not refused where ``found`` stood."""
    return PutOutcome.STORED if found is None else PutOutcome.REPLACED


def _refused(record: StoredRecord, found: StoredRecord | None, *, is_copy: bool) -> PutOutcome | None:
    """Why a value may not be written where ``found`` stands; None if it may, then in its place."""
    if found is None:
        return None
    if found.kind is RecordKind.TOMBSTONE:
        return PutOutcome.TOMBSTONED
    decides = is_copy or record.kind is RecordKind.ERROR
    if decides and record.version.beats(found.version):
        return None
    return PutOutcome.ALREADY
