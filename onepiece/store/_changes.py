"""The store's tables, and what one write transaction does to them.

Tables::

    records     uid                              -> StoredRecord
    chunks      value id (u64) | number (u32)    -> raw bytes
    expiry      expires at (u64, us) | uid       -> nothing          what ends first stands first
    unfinished  value id (u64)                   -> occupied (u64)   a value still being written
    totals      "totals"                         -> next value id, bytes in use, results, errors, tombstones
                "layout"                         -> version (u64)

*A value is there when its record is there*, and by nothing else. A small value's chunks and record
are written by one transaction. A large one takes several: the first enters it in ``unfinished`` and
takes its bytes from the budget, the last writes the record and deletes the entry. Death in between
leaves chunks that no record names and an entry in ``unfinished``, by which ``Database.open`` reclaims
them. ``totals`` change in the same transaction as what they count, so they are true after any death.
"""

import struct
from collections.abc import Sequence
from typing import Final

from attrs import define, frozen

from onepiece.codec import decode_control, encode_control
from onepiece.errors import PayloadTooLarge, StoreFull
from onepiece.store._lmdb import Table, Transaction
from onepiece.store.records import (
    RECORD_BYTES_MAX,
    RecordKind,
    StoredRecord,
    StoreOptions,
    chunk_pages_bytes,
    record_occupied_bytes,
    uid_key,
)
from transports.operations import Bytes

TOTALS_KEY: Final = b"totals"
U64: Final = struct.Struct(">Q")
CHUNK_KEY: Final = struct.Struct(">QI")
_TOTALS = struct.Struct(">5Q")


@frozen
class Tables:
    """The handles of the tables above."""

    records: Table
    chunks: Table
    expiry: Table
    unfinished: Table
    totals: Table


@define
class Totals:
    """What the store holds, in numbers."""

    next_value_id: int = 1
    bytes_in_use: int = 0
    results: int = 0
    errors: int = 0
    tombstones: int = 0

    def count(self, kind: RecordKind, change: int) -> None:
        """Note that records of this kind came or went."""
        match kind:
            case RecordKind.RESULT:
                self.results += change
            case RecordKind.ERROR | RecordKind.INTENT:
                self.errors += change
            case RecordKind.TOMBSTONE:
                self.tombstones += change

    @classmethod
    def read(cls, transaction: Transaction, tables: Tables) -> "Totals":
        """The totals as the last transaction left them."""
        raw = transaction.get(TOTALS_KEY, db=tables.totals)
        return cls() if raw is None else cls(*_TOTALS.unpack(raw))

    def encoded(self) -> bytes:
        """The totals as they are stored."""
        assert self.bytes_in_use >= 0, "more bytes were given back than were taken"
        return _TOTALS.pack(self.next_value_id, self.bytes_in_use, self.results, self.errors, self.tombstones)


@define
class Change:
    """One write transaction, with the totals as it will leave them."""

    transaction: Transaction
    tables: Tables
    totals: Totals
    options: StoreOptions

    def current(self, uid: str, now: float) -> StoredRecord | None:
        """The UID's record; one whose time is over is taken away first, as ``expire`` would."""
        raw = self.transaction.get(uid_key(uid), db=self.tables.records)
        if raw is None:
            return None
        record = decode(raw)
        if record.expires_at > now:
            return record
        return self.end(record, now)

    def end(self, record: StoredRecord, now: float) -> StoredRecord | None:
        """Take away a record whose time is over; a value leaves a tombstone, a tombstone nothing."""
        self.remove(record)
        if record.kind is RecordKind.TOMBSTONE:
            return None
        return self.bury(record.uid, now, "expired")

    def bury(self, uid: str, now: float, why: str) -> StoredRecord:
        """Write a tombstone; a budget that is used up does not refuse it."""
        tombstone = StoredRecord(
            uid=uid,
            kind=RecordKind.TOMBSTONE,
            content_type="",
            meta={"why": why},
            total_bytes=0,
            chunk_bytes=self.options.chunk_bytes,
            value_id=0,
            stored_at=now,
            expires_at=now + self.options.tombstone_ttl_seconds,
        )
        self.write_record(tombstone, encode_control(tombstone))
        return tombstone

    def write_record(self, record: StoredRecord, encoded: bytes) -> None:
        """Make the record visible."""
        key = uid_key(record.uid)
        self.transaction.put(key, encoded, db=self.tables.records)
        self.transaction.put(expiry_key(record), b"", db=self.tables.expiry)
        self.totals.bytes_in_use += record_occupied_bytes(len(encoded), record.uid)
        self.totals.count(record.kind, 1)

    def remove(self, record: StoredRecord) -> None:
        """Take away a record and its chunks."""
        encoded = self.transaction.pop(uid_key(record.uid), db=self.tables.records)
        assert encoded is not None, f"the record of {record.uid} was read in this transaction"
        self.transaction.delete(expiry_key(record), db=self.tables.expiry)
        self.drop_chunks(record.value_id)
        self.totals.bytes_in_use -= chunk_pages_bytes(record.total_bytes, record.chunk_bytes)
        self.totals.bytes_in_use -= record_occupied_bytes(len(encoded), record.uid)
        self.totals.count(record.kind, -1)

    def drop_chunks(self, value_id: int) -> None:
        """Take away all chunks of a value, written wholly or in part."""
        if value_id == 0:
            return
        with self.transaction.cursor(db=self.tables.chunks) as cursor:
            found = cursor.set_range(CHUNK_KEY.pack(value_id, 0))
            while found and cursor.key()[:8] == U64.pack(value_id):
                found = cursor.delete()

    def write_chunks(self, value_id: int, first: int, chunks: Sequence[Bytes]) -> None:
        """Write consecutive chunks; the buffers go to LMDB as they are."""
        for number, chunk in enumerate(chunks, first):
            self.transaction.put(CHUNK_KEY.pack(value_id, number), chunk, db=self.tables.chunks)

    def take(self, occupied_bytes: int, uid: str) -> None:
        """Raise ``StoreFull`` unless the budget has room."""
        in_use, budget = self.totals.bytes_in_use, self.options.byte_budget
        if in_use + occupied_bytes > budget:
            raise StoreFull(
                f"the result of {uid} needs {occupied_bytes} bytes, and {in_use} of the result store's "
                f"{budget} are in use: fetch or purge results, shorten their time to live, or raise the "
                "store's byte budget",
                uid=uid,
                needed_bytes=occupied_bytes,
                bytes_in_use=in_use,
                byte_budget=budget,
            )

    def new_value_id(self) -> int:
        """A number that no value had before."""
        value_id = self.totals.next_value_id
        self.totals.next_value_id += 1
        return value_id


def encode(record: StoredRecord) -> bytes:
    """The record's bytes.

    Raises:
        PayloadTooLarge: There are more of them than a record may have.
    """
    encoded = encode_control(record)
    if len(encoded) > RECORD_BYTES_MAX:
        raise PayloadTooLarge(
            f"what is said about the result of {record.uid} takes {len(encoded)} bytes, and may take "
            f"{RECORD_BYTES_MAX}: shorten its metadata or its error",
            uid=record.uid,
        )
    return encoded


def decode(raw: bytes) -> StoredRecord:
    """The record of these bytes."""
    record = decode_control(raw)
    assert isinstance(record, StoredRecord), "the table of records holds nothing else"
    return record


def microseconds(moment: float) -> int:
    """A moment as the table of expiry counts it."""
    return max(0, int(moment * 1_000_000))


def expiry_key(record: StoredRecord) -> bytes:
    """Where the record stands in the table of expiry."""
    return U64.pack(microseconds(record.expires_at)) + uid_key(record.uid)
