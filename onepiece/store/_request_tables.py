"""The request log's tables, and what one write transaction does to them.

Tables::

    entries  uid                            -> LoggedRequest
    bodies   body id (u64) | number (u32)   -> raw bytes
    keys     hash of the key                -> uid
    owners   owner life | 0 | uid           -> nothing               entries that are open, by owner
    expiry   keep until (u64, us) | uid     -> nothing               what ends first stands first
    totals   "totals"                       -> next body id, bytes in use, open entries, ended entries
             "layout"                       -> version (u64)

An entry is *open* until its request has ended; then its body goes, and a *mark* stays for a while: it
refuses late copies of the record, and holds the key. All of one change is one transaction, ``totals``
too, so they agree after any death.
"""

import hashlib
import struct
from collections.abc import Iterator
from typing import Final

from attrs import define, evolve, frozen

from onepiece.codec import decode_control, encode_control, register
from onepiece.errors import InvalidInput, StoreFull
from onepiece.store._lmdb import Table, Transaction
from onepiece.store.records import chunk_pages_bytes, uid_key
from transports.operations import Bytes

U64: Final = struct.Struct(">Q")
TOTALS_KEY: Final = b"totals"
LIFE_BYTES_MAX: Final = 255
TEXT_BYTES_MAX: Final = 1024
"""Names, addresses and keys in an entry; longer ones are refused."""

_BODY_KEY = struct.Struct(">QI")
_TOTALS = struct.Struct(">4Q")
_ENTRY_OVERHEAD_BYTES = 512
"""What an entry takes in the tables beside its own bytes: key, owner, moment, and LMDB's headers."""


@register
@frozen
class LogEntry:
    """What is known of an accepted request; its inputs lie beside it.

    ``owner_life`` is the life of the node whose proxy owns it, ``owner`` that node's control address;
    ``adoptions`` counts how often the owner has changed.
    """

    uid: str
    workflow: str
    owner_life: str
    owner: str
    key: str | None
    accepted_at: float
    deadline_at: float
    adoptions: int


@register
@frozen
class LoggedRequest:
    """An entry as it is stored; ``entry`` is None once the request has ended."""

    uid: str
    entry: LogEntry | None
    key_hash: bytes | None
    body_id: int
    body_bytes: int
    chunk_bytes: int
    keep_until: float
    occupied_bytes: int


@frozen
class RequestTables:
    """The handles of the tables above."""

    entries: Table
    bodies: Table
    keys: Table
    owners: Table
    expiry: Table
    totals: Table


@define
class LogTotals:
    """What the log holds, in numbers."""

    next_body_id: int = 1
    bytes_in_use: int = 0
    open_entries: int = 0
    ended_entries: int = 0

    @classmethod
    def read(cls, transaction: Transaction, tables: RequestTables) -> "LogTotals":
        """The totals as the last transaction left them."""
        raw = transaction.get(TOTALS_KEY, db=tables.totals)
        return cls() if raw is None else cls(*_TOTALS.unpack(raw))

    def encoded(self) -> bytes:
        """The totals as they are stored."""
        assert self.bytes_in_use >= 0, "more bytes were given back than were taken"
        return _TOTALS.pack(self.next_body_id, self.bytes_in_use, self.open_entries, self.ended_entries)

    def count(self, logged: LoggedRequest, change: int) -> None:
        """Note that an entry came (1) or went (-1)."""
        self.bytes_in_use += change * logged.occupied_bytes
        if logged.entry is None:
            self.ended_entries += change
        else:
            self.open_entries += change


@define
class LogChange:
    """One write transaction, with the totals as it will leave them."""

    transaction: Transaction
    tables: RequestTables
    totals: LogTotals

    def find(self, uid: str) -> LoggedRequest | None:
        """What stands under the UID."""
        raw = self.transaction.get(uid_key(uid), db=self.tables.entries)
        return None if raw is None else decode(raw)

    def current(self, uid: str, now: float) -> LoggedRequest | None:
        """What stands under the UID; what is out of time is taken away first, as ``expire`` would."""
        known = self.find(uid)
        if known is not None and known.keep_until <= now:
            self.remove(known)
            return None
        return known

    def holder_of(self, hashed: bytes, now: float) -> str | None:
        """The request that holds a key."""
        raw = self.transaction.get(hashed, db=self.tables.keys)
        if raw is None:
            return None
        known = self.current(raw.decode(), now)
        return None if known is None else known.uid

    def write(self, logged: LoggedRequest) -> None:
        """Make an entry or a mark visible under a UID that has none."""
        self.transaction.put(uid_key(logged.uid), encode_control(logged), db=self.tables.entries)
        self.transaction.put(expiry_key(logged), b"", db=self.tables.expiry)
        if logged.key_hash is not None:
            self.transaction.put(logged.key_hash, logged.uid.encode(), db=self.tables.keys)
        if logged.entry is not None:
            self.transaction.put(owner_key(logged.entry.owner_life, logged.uid), b"", db=self.tables.owners)
        self.totals.count(logged, 1)

    def remove(self, logged: LoggedRequest, *, keep_body: bool = False) -> None:
        """Take away all that ``write`` wrote, and the body."""
        self.transaction.delete(uid_key(logged.uid), db=self.tables.entries)
        self.transaction.delete(expiry_key(logged), db=self.tables.expiry)
        if logged.key_hash is not None:
            self.transaction.delete(logged.key_hash, db=self.tables.keys)
        if logged.entry is not None:
            self.transaction.delete(owner_key(logged.entry.owner_life, logged.uid), db=self.tables.owners)
        if not keep_body:
            self._drop_body(logged)
        self.totals.count(logged, -1)

    def replace(self, logged: LoggedRequest, entry: LogEntry) -> None:
        """Write another owner into an open entry; its body stays."""
        self.remove(logged, keep_body=True)
        self.write(evolve(logged, entry=entry))

    def end(self, uid: str, logged: LoggedRequest | None, keep_until: float) -> None:
        """Put a mark in an entry's place."""
        if logged is not None:
            self.remove(logged)
        mark = LoggedRequest(
            uid=uid,
            entry=None,
            key_hash=None if logged is None else logged.key_hash,
            body_id=0,
            body_bytes=0,
            chunk_bytes=1,
            keep_until=keep_until,
            occupied_bytes=_ENTRY_OVERHEAD_BYTES,
        )
        self.write(mark)

    def write_body(self, chunks: Iterator[Bytes]) -> int:
        """Write a body in pieces; returns its number."""
        body_id = self.totals.next_body_id
        self.totals.next_body_id += 1
        for number, chunk in enumerate(chunks):
            self.transaction.put(_BODY_KEY.pack(body_id, number), chunk, db=self.tables.bodies)
        return body_id

    def _drop_body(self, logged: LoggedRequest) -> None:
        for key in body_keys(logged):
            self.transaction.delete(key, db=self.tables.bodies)

    def take(self, occupied_bytes: int, budget: int, uid: str) -> None:
        """Raise ``StoreFull`` unless the budget has room."""
        in_use = self.totals.bytes_in_use
        if in_use + occupied_bytes > budget:
            raise StoreFull(
                f"the record of request {uid} needs {occupied_bytes} bytes, and {in_use} of the request "
                f"log's {budget} are in use: send the request again when others have ended, or raise "
                "the store's byte budget",
                uid=uid,
                needed_bytes=occupied_bytes,
                bytes_in_use=in_use,
                byte_budget=budget,
            )


def occupied_bytes(entry: LogEntry, body_bytes: int, chunk_bytes: int) -> int:
    """What an entry and its body take from the budget."""
    texts = (entry.uid, entry.workflow, entry.owner_life, entry.owner, entry.key or "")
    return (
        sum(len(text.encode()) for text in texts)
        + chunk_pages_bytes(body_bytes, chunk_bytes)
        + _ENTRY_OVERHEAD_BYTES
    )


def check_entry(entry: LogEntry) -> None:
    """Raise ``InvalidInput`` for an entry that the tables cannot hold."""
    uid_key(entry.uid)
    owner_key(entry.owner_life, entry.uid)
    for name in ("workflow", "owner", "key"):
        text = getattr(entry, name)
        if text is not None and len(text.encode()) > TEXT_BYTES_MAX:
            raise InvalidInput(
                f"the {name} of request {entry.uid} has more than {TEXT_BYTES_MAX} bytes", field=name
            )


def owner_key(owner_life: str, uid: str) -> bytes:
    """Where an open entry stands in the table of owners; without a UID the beginning of all of an owner's.

    Raises:
        InvalidInput: The life is no name that fits.
    """
    life = owner_life.encode()
    if not life or b"\0" in life or len(life) > LIFE_BYTES_MAX:
        raise InvalidInput(
            f"owner_life {owner_life[:40]!r}: give 1 to {LIFE_BYTES_MAX} bytes without NUL",
            field="owner_life",
        )
    return life + b"\0" + uid.encode()


def hash_of(key: str) -> bytes:
    """A key of any length as one that the table of keys can hold; no two keys share one in practice."""
    return hashlib.blake2b(key.encode(), digest_size=32).digest()


def body_keys(logged: LoggedRequest) -> Iterator[bytes]:
    """Where the pieces of a body lie."""
    for number in range(-(-logged.body_bytes // logged.chunk_bytes)):
        yield _BODY_KEY.pack(logged.body_id, number)


def body_id_of(key: bytes) -> int:
    """Whose piece lies under a key of the table of bodies."""
    body_id: int = _BODY_KEY.unpack(key)[0]
    return body_id


def decode(raw: bytes) -> LoggedRequest:
    """The entry of these bytes."""
    logged = decode_control(raw)
    assert isinstance(logged, LoggedRequest), "the table of entries holds nothing else"
    return logged


def expiry_key(logged: LoggedRequest) -> bytes:
    """Where an entry stands in the table of expiry."""
    return U64.pack(microseconds(logged.keep_until)) + uid_key(logged.uid)


def microseconds(moment: float) -> int:
    """A moment as the table of expiry counts it."""
    return max(0, int(moment * 1_000_000))
