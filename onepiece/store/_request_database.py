"""The request log's file: each method is one transaction, blocks, and runs on one thread."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from attrs import define, evolve, field

from onepiece.errors import StoreFull
from onepiece.store._chunks import cut
from onepiece.store._lmdb import FileOptions, LmdbFile, Transaction
from onepiece.store._request_tables import (
    TOTALS_KEY,
    U64,
    LogChange,
    LogEntry,
    LoggedRequest,
    LogTotals,
    RequestTables,
    body_id_of,
    body_keys,
    check_entry,
    decode,
    expiry_key,
    hash_of,
    microseconds,
    occupied_bytes,
    owner_key,
)
from onepiece.store.records import StoreOptions, uid_key
from transports.operations import Bytes

LAYOUT_VERSION: Final = 1
SWEEP_ENTRIES: Final = 256
"""How many entries one transaction of ``expire`` takes away."""


@define(eq=False)
class RequestDatabase:
    """The open file. All methods block; all of them belong on one thread."""

    options: StoreOptions
    keep_seconds: float
    _file: LmdbFile[RequestTables] = field(repr=False)

    @classmethod
    def open(cls, path: Path, options: StoreOptions, keep_seconds: float) -> "RequestDatabase":
        """Open or create the log in this directory.

        Raises:
            ConfigError: The directory is in use by another process, of another layout, or unusable.
            StoreFull: The disk has no room for the file's first pages.
        """
        file_options = FileOptions(
            what="request log",
            relief="wait until requests have ended",
            map_size=options.map_size,
            durability=options.durability,
            flush_seconds=options.flush_seconds,
        )
        file = LmdbFile.open(path, file_options, RequestTables)
        database = cls(options, keep_seconds, file)
        try:
            database._file.check_layout(
                LAYOUT_VERSION, database._file.tables.totals, "once no request is open"
            )
            database.check_readers()
        except BaseException:
            database.close()
            raise
        return database

    def close(self) -> None:
        """Close the file and let others open it."""
        self._file.close()

    def put(self, entry: LogEntry, body: Sequence[Bytes], now: float) -> str:
        """Write an entry and its body, unless the UID or the key is known."""
        try:
            return self._put(entry, body, now)
        except StoreFull:
            swept = 0
            while count := self.expire(now):
                swept += count
            if not swept:
                raise
        return self._put(entry, body, now)

    def _put(self, entry: LogEntry, body: Sequence[Bytes], now: float) -> str:
        hashed = None if entry.key is None else hash_of(entry.key)
        with self._change() as change:
            known = change.current(entry.uid, now)
            if known is not None:
                _adopt(change, known, entry)
                return entry.uid
            holder = None if hashed is None else change.holder_of(hashed, now)
            if holder is not None:
                return holder
            body_bytes = sum(len(part) for part in body)
            occupied = occupied_bytes(entry, body_bytes, self.options.chunk_bytes)
            change.take(occupied, self.options.byte_budget, entry.uid)
            logged = LoggedRequest(
                uid=entry.uid,
                entry=entry,
                key_hash=hashed,
                body_id=change.write_body(cut(body, self.options.chunk_bytes)),
                body_bytes=body_bytes,
                chunk_bytes=self.options.chunk_bytes,
                keep_until=entry.deadline_at + self.keep_seconds,
                occupied_bytes=occupied,
            )
            change.write(logged)
            return entry.uid

    def adopt(self, uid: str, owner_life: str, owner: str, adoptions: int) -> bool | None:
        """Give an open entry another owner, if ``adoptions`` is higher than before; None: unknown UID."""
        with self._change() as change:
            known = change.find(uid)
            if known is None:
                return None
            if known.entry is None:
                return False
            wanted = evolve(known.entry, owner_life=owner_life, owner=owner, adoptions=adoptions)
            check_entry(wanted)
            return _adopt(change, known, wanted)

    def remove(self, uid: str, now: float) -> bool:
        """Put a mark in an entry's place; true if it was open."""
        with self._change() as change:
            known = change.find(uid)
            if known is not None and known.entry is None:
                return False
            change.end(uid, known, now + self.keep_seconds)
            return known is not None

    def expire(self, now: float) -> int:
        """Take away at most ``SWEEP_ENTRIES`` of those whose time is over; returns how many."""
        with self._change() as change:
            due: list[str] = []
            with change.transaction.cursor(db=self._file.tables.expiry) as cursor:
                for key in cursor.iternext(keys=True, values=False):
                    if U64.unpack(key[:8])[0] > microseconds(now) or len(due) == SWEEP_ENTRIES:
                        break
                    due.append(key[8:].decode())
            for uid in due:
                known = change.find(uid)
                assert known is not None, f"{uid} stands in the table of expiry and has no entry"
                change.remove(known)
            return len(due)

    def entry(self, uid: str) -> LogEntry | None:
        """The open entry under the UID."""
        with self._file.reading() as transaction:
            known = self._find(transaction, uid)
        return None if known is None else known.entry

    def holder_of(self, key: str, now: float) -> str | None:
        """The request that a key stands for, open or ended."""
        with self._file.reading() as transaction:
            raw = transaction.get(hash_of(key), db=self._file.tables.keys)
            known = None if raw is None else self._find(transaction, raw.decode())
        return None if known is None or known.keep_until <= now else known.uid

    def body(self, uid: str, start: int, length: int | None) -> bytes | None:
        """A range of an open entry's body; None if there is no such entry."""
        with self._file.reading() as transaction:
            known = self._find(transaction, uid)
            if known is None or known.entry is None:
                return None
            end = known.body_bytes if length is None else min(start + length, known.body_bytes)
            first, last = start // known.chunk_bytes, -(-end // known.chunk_bytes)
            keys = list(body_keys(known))[first:last]
            pieces: list[bytes] = []
            for key in keys:
                piece = transaction.get(key, db=self._file.tables.bodies)
                assert piece is not None, f"the body of {uid} lacks a piece"
                pieces.append(piece)
        offset = first * known.chunk_bytes
        return b"".join(pieces)[start - offset : max(0, end - offset)]

    def orphans(self, living: frozenset[str], limit: int) -> list[LogEntry]:
        """Open entries whose owner's life is not among the living; each life's are skipped in one step."""
        found: list[LogEntry] = []
        with (
            self._file.reading() as transaction,
            transaction.cursor(db=self._file.tables.owners) as cursor,
        ):
            more = cursor.first()
            while more and len(found) < limit:
                life, _, uid = cursor.key().partition(b"\0")
                if life.decode() in living:
                    more = cursor.set_range(life + b"\1")
                    continue
                known = self._find(transaction, uid.decode())
                assert known is not None, f"{uid!r} stands in the table of owners and has no entry"
                assert known.entry is not None, f"{uid!r} has ended and stands in the table of owners"
                found.append(known.entry)
                more = cursor.next()
        return found

    def totals(self) -> LogTotals:
        """The log in numbers."""
        with self._file.reading() as transaction:
            return LogTotals.read(transaction, self._file.tables)

    def file_bytes(self) -> int:
        """What the file occupies on the disk."""
        return self._file.occupied_bytes()

    def check_readers(self) -> int:
        """Clear the reader slots of processes that died; returns how many there were."""
        return self._file.check_readers()

    def check_invariants(self) -> None:
        """Assert that the tables agree with each other and with the totals; reads all of their keys."""
        tables = self._file.tables
        with self._file.reading() as transaction:
            totals = LogTotals.read(transaction, tables)
            counted = LogTotals(next_body_id=totals.next_body_id)
            keyed, bodies, pieces = 0, set(), 0
            with transaction.cursor(db=tables.entries) as cursor:
                for _, raw in cursor:
                    logged = decode(raw)
                    counted.count(logged, 1)
                    assert transaction.get(expiry_key(logged), db=tables.expiry) == b"", logged.uid
                    if logged.key_hash is not None:
                        keyed += 1
                        assert transaction.get(logged.key_hash, db=tables.keys) == logged.uid.encode()
                    if logged.entry is not None:
                        owner = owner_key(logged.entry.owner_life, logged.uid)
                        assert transaction.get(owner, db=tables.owners) == b"", logged.uid
                    bodies.add(logged.body_id)
                    pieces += len(list(body_keys(logged)))
            assert counted == totals, f"counted {counted}, noted {totals}"
            entries = totals.open_entries + totals.ended_entries
            assert transaction.stat(tables.expiry)["entries"] == entries
            assert transaction.stat(tables.keys)["entries"] == keyed
            assert transaction.stat(tables.owners)["entries"] == totals.open_entries
            assert transaction.stat(tables.bodies)["entries"] == pieces
            with transaction.cursor(db=tables.bodies) as cursor:
                for key in cursor.iternext(keys=True, values=False):
                    assert body_id_of(key) in bodies, "a piece belongs to no entry"

    def _find(self, transaction: Transaction, uid: str) -> LoggedRequest | None:
        raw = transaction.get(uid_key(uid), db=self._file.tables.entries)
        return None if raw is None else decode(raw)

    @contextmanager
    def _change(self) -> Iterator[LogChange]:
        """A write transaction with the totals; the caller's change and theirs are one."""
        with self._file.writing() as transaction:
            change = LogChange(transaction, self._file.tables, LogTotals.read(transaction, self._file.tables))
            yield change
            transaction.put(TOTALS_KEY, change.totals.encoded(), db=self._file.tables.totals)


def _adopt(change: LogChange, known: LoggedRequest, wanted: LogEntry) -> bool:
    """Replace the owner if ``wanted`` is a later adoption; whether it owns the request now."""
    if known.entry is None:
        return False
    if wanted.adoptions > known.entry.adoptions:
        owner = evolve(
            known.entry,
            owner_life=wanted.owner_life,
            owner=wanted.owner,
            adoptions=wanted.adoptions,
        )
        change.replace(known, owner)
        return True
    return (wanted.adoptions, wanted.owner_life) == (known.entry.adoptions, known.entry.owner_life)
