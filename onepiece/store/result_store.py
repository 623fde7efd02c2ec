"""The result store: what requests ended with, kept until it is fetched, purged or out of time.

Promises:

- *Acknowledged is durable.* When ``put`` returns ``STORED`` the whole value is committed; a process
  killed at any moment later, or while it writes another, has it after ``open``. Loss of power is
  survived only with ``Durability.POWER``.
- *First writer wins*, by UID. A stage that ran twice stores one result.
- *A tombstone beats later puts*: what was purged or has expired does not come back by a late copy.
- *Never more than the budget.* A put beyond it is refused with ``StoreFull``, and so is one that
  the disk does not take; the store goes on working.
- *Ranges.* Values lie in chunks; reading a range touches its chunks only.

It does not promise copies on other disks, nor an order among UIDs. Time is ``now``, seconds since
the epoch, given by the caller; whoever owns the store calls ``expire`` now and then.

All work on the file is done by one thread of the store's own, in the order in which it was asked
for, so the event loop never waits for a disk.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from attrs import define, evolve, field

from onepiece.errors import InvalidInput, OnePieceError, ResultGone, StoreFull, UnknownRequest
from onepiece.log import get_logger
from onepiece.store._chunks import cut
from onepiece.store._database import Database, Draft
from onepiece.store._thread import Jobs, OpenJobs, open_on_thread
from onepiece.store.records import (
    CopyOutcome,
    PutOutcome,
    RecordKind,
    StoredRecord,
    StoreOptions,
    StoreStats,
    check_ttl,
    uid_key,
)
from transports.operations import Bytes

ERROR_CONTENT_TYPE: Final = "application/vnd.onepiece.error"

_log = get_logger(part="store")


@define(eq=False)
class _LargePut:
    """A put of several transactions; ``draft`` is set on the store's thread, when the first is through."""

    draft: Draft | None = None


@define(eq=False)
class ResultStore:
    """An open result store; made by ``ResultStore.open``. Its methods may be called concurrently."""

    options: StoreOptions
    _database: Database = field(repr=False)
    _thread: Jobs = field(repr=False)
    _being_written: set[int] = field(factory=set, repr=False)
    """Values of this process that are begun and not ended; touched on the store's thread only."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        path: Path | str,
        options: StoreOptions | None = None,
        *,
        open_jobs: OpenJobs = open_on_thread,
    ) -> "AsyncIterator[ResultStore]":
        """Open or create the store in a directory, and close it behind the block.

        Args:
            path: The directory; made if it is not there. One process at a time may have it open.
            options: Bounds and times.
            open_jobs: Where the work on the file is done.

        Raises:
            ConfigError: The directory is in use, unusable, or of another layout.
            StoreFull: The disk has no room for the file's first pages.
        """
        options = options or StoreOptions()
        opening = partial(Database.open, Path(path), options)
        async with open_jobs("onepiece-store", opening) as (database, thread):
            yield cls(options, database, thread)

    async def put(
        self,
        uid: str,
        parts: Sequence[Bytes],
        *,
        content_type: str,
        meta: Mapping[str, Any] | None = None,
        ttl_seconds: float | None = None,
        now: float,
    ) -> PutOutcome:
        """Store a result; it is durable when this returns ``STORED``.

        Args:
            uid: The request's UID.
            parts: The value, in pieces of any size; they must not change until this returns.
            content_type: What the bytes are.
            meta: Whatever the writer wants to say about them; plain values only.
            ttl_seconds: How long to keep it; the store's option unless given.
            now: Seconds since the epoch.

        Raises:
            StoreFull: The budget is used up, or the disk is full; nothing was stored.
            InvalidInput: The UID or the time to live is unusable.
            PayloadTooLarge: ``meta`` is larger than a record may be.

        Cancelled: the value is stored wholly or not at all, and which is not known; putting it
        again is safe.
        """
        total_bytes = sum(len(part) for part in parts)
        record = self._record(uid, RecordKind.RESULT, content_type, meta or {}, total_bytes, ttl_seconds, now)
        return await self._put(record, parts, now, is_copy=False)

    async def put_copy(self, record: StoredRecord, parts: Sequence[Bytes], now: float) -> CopyOutcome:
        """Keep what another node has under a UID, if it is better than what stands here.

        Of two values the one stored earlier stands, and a tombstone beats both (``Version.beats``), so that
        nodes that copy from each other come to hold the same, in whatever order. The copy keeps its times.

        Args:
            record: The other node's; where its value lies there plays no part.
            parts: The value, in pieces of any size; they must not change until this returns.
            now: Seconds since the epoch.

        Raises:
            StoreFull: The budget is used up, or the disk is full; what stood here still does.
            InvalidInput: The UID is unusable.

        Cancelled: as for ``put``.
        """
        uid_key(record.uid)
        copy = evolve(
            record,
            total_bytes=sum(len(part) for part in parts),
            chunk_bytes=self.options.chunk_bytes,
            value_id=0,
        )
        if copy.kind is RecordKind.TOMBSTONE:
            outcome = await self._thread.run(self._database.put_tombstone, copy, now)
        elif copy.expires_at > now:
            outcome = await self._put(copy, parts, now, is_copy=True)
        else:
            outcome = PutOutcome.TOMBSTONED
        standing = await self._thread.run(self._database.record, copy.uid)
        return CopyOutcome(standing, outcome is PutOutcome.REPLACED)

    async def _put(
        self, record: StoredRecord, parts: Sequence[Bytes], now: float, *, is_copy: bool
    ) -> PutOutcome:
        chunks = cut(parts, self.options.chunk_bytes)
        if record.total_bytes <= self.options.transaction_bytes:
            return await self._thread.run(self._database.put, record, tuple(chunks), now, is_copy=is_copy)
        return await self._put_large(record, chunks, now, is_copy=is_copy)

    async def put_error(
        self,
        uid: str,
        wire_error: Mapping[str, Any],
        *,
        is_intent: bool = False,
        ttl_seconds: float | None = None,
        now: float,
    ) -> PutOutcome:
        """Store that the request failed, with the error as of ``to_wire``; as durable as a result.

        An intent keeps results out and is no end yet: it is written where nothing stands, and readers do
        not see it. An error is written over all but a tombstone and an earlier error.

        Raises:
            StoreFull: The budget is used up, or the disk is full.
            InvalidInput: The UID or the time to live is unusable.
            PayloadTooLarge: The error is larger than a record may be.

        Cancelled: as for ``put``.
        """
        kind = RecordKind.INTENT if is_intent else RecordKind.ERROR
        record = self._record(uid, kind, ERROR_CONTENT_TYPE, wire_error, 0, ttl_seconds, now)
        return await self._thread.run(self._database.put, record, (), now)

    async def meta(self, uid: str) -> StoredRecord:
        """What stands under the UID: a result's size and type, or an error.

        Raises:
            UnknownRequest: Nothing was ever stored under it, or its tombstone's time is over too.
            ResultGone: It was purged, or its time to live is over.
            InvalidInput: The UID is unusable.
        """
        record = await self.standing(uid)
        if record.kind is RecordKind.INTENT:
            raise _unknown(uid)
        return record

    async def standing(self, uid: str) -> StoredRecord:
        """As ``meta``, but an intent is shown."""
        record = await self._thread.run(self._database.record, uid)
        if record is None:
            raise _unknown(uid)
        if record.kind is RecordKind.TOMBSTONE:
            raise _gone(uid, str(record.meta.get("why", "purged")))
        return record

    async def read(self, uid: str, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """The bytes of a result from ``start`` on, in pieces of at most ``chunk_bytes``.

        A result purged while it is read ends the iteration with ``ResultGone``: a reader never
        takes a part for the whole.

        Args:
            uid: The request's UID.
            start: The first byte wanted.
            length: How many; to the end unless given, and never beyond it.

        Raises:
            UnknownRequest: Nothing is stored under the UID.
            ResultGone: It was purged or has expired, perhaps during the reading.
            InvalidInput: The range does not begin within the value.
            OnePieceError: The request's own error, if that is what is stored.
        """
        record = await self.meta(uid)
        if record.kind is RecordKind.ERROR:
            raise OnePieceError.from_wire(record.meta)
        if not 0 <= start <= record.total_bytes or (length is not None and length < 0):
            raise InvalidInput(
                f"the range of {length!r} bytes from {start} does not lie in the {record.total_bytes} bytes "
                f"of the result of {uid}",
                uid=uid,
                total_bytes=record.total_bytes,
            )
        end = record.total_bytes if length is None else min(start + length, record.total_bytes)
        async for piece in self._pieces(record, start, end):
            yield piece

    async def value(self, record: StoredRecord) -> list[bytes]:
        """The value that belongs to just this record, for a copy; empty for an error or a tombstone.

        Raises:
            ResultGone: It is no longer there: purged, expired, or replaced by an earlier one.
        """
        return [piece async for piece in self._pieces(record, 0, record.total_bytes)]

    async def _pieces(self, record: StoredRecord, start: int, end: int) -> AsyncIterator[bytes]:
        while start < end:
            number, offset = divmod(start, record.chunk_bytes)
            chunk = await self._thread.run(self._database.chunk, record.value_id, number)
            if chunk is None:
                raise _gone(record.uid, "purged while it was read")
            piece = chunk[offset : offset + end - start]
            start += len(piece)
            yield piece

    async def records(self, uids: Sequence[str]) -> list[StoredRecord]:
        """What stands under these UIDs, tombstones too; none for a UID under which nothing does.

        Raises:
            InvalidInput: A UID is unusable.
        """
        return await self._thread.run(self._database.records, uids)

    async def scan(self, after_uid: str, limit: int) -> list[StoredRecord]:
        """At most ``limit`` records behind ``after_uid``, in the order of UIDs; tombstones too.

        Begin with "" and go on with the last one's UID; what comes or goes meanwhile may be missed.

        Raises:
            InvalidInput: The UID is unusable.
        """
        return await self._thread.run(self._database.scan, after_uid, limit)

    async def purge(self, uid: str, now: float) -> bool:
        """Drop what stands under the UID and leave a tombstone; true if there was a value.

        Raises:
            StoreFull: The disk did not take the tombstone.
            InvalidInput: The UID is unusable.
        """
        return await self._thread.run(self._database.purge, uid, now)

    async def fetched(self, uid: str, now: float) -> bool:
        """Note that the result was delivered whole; purges it where ``purge_after_fetch`` says so.

        Raises:
            StoreFull: The disk did not take the tombstone.
            InvalidInput: The UID is unusable.
        """
        return self.options.purge_after_fetch and await self.purge(uid, now)

    async def expire(self, now: float) -> int:
        """Take away what is out of time; results leave tombstones. Returns how many records ended.

        It also clears what cancelled writers and dead readers left.

        Raises:
            StoreFull: The disk did not take the change.

        Cancelled: the rest stays for the next call.
        """
        await self._thread.run(self._database.check_readers)
        await self._thread.run(self._reclaim)
        ended = 0
        while count := await self._thread.run(self._database.expire, now):
            ended += count
        return ended

    async def stats(self) -> StoreStats:
        """The store in numbers."""
        return await self._thread.run(self._database.stats)

    async def check_invariants(self) -> None:
        """Assert that the tables agree with each other and with the totals; for tests and inspection."""
        await self._thread.run(self._database.check_invariants)

    def _record(
        self,
        uid: str,
        kind: RecordKind,
        content_type: str,
        meta: Mapping[str, Any],
        total_bytes: int,
        ttl_seconds: float | None,
        now: float,
    ) -> StoredRecord:
        uid_key(uid)
        ttl_seconds = self.options.ttl_seconds if ttl_seconds is None else ttl_seconds
        check_ttl(ttl_seconds, f"the ttl_seconds of {uid}", InvalidInput)
        return StoredRecord(
            uid=uid,
            kind=kind,
            content_type=content_type,
            meta=dict(meta),
            total_bytes=total_bytes,
            chunk_bytes=self.options.chunk_bytes,
            value_id=0,
            stored_at=now,
            expires_at=now + ttl_seconds,
        )

    async def _put_large(
        self, record: StoredRecord, chunks: Iterator[Bytes], now: float, *, is_copy: bool
    ) -> PutOutcome:
        put = _LargePut()
        per_transaction = self.options.transaction_bytes // self.options.chunk_bytes
        try:
            refused = await self._thread.run(self._begin, put, record, now, is_copy=is_copy)
            if refused is not None:
                return refused
            first = 0
            while batch := tuple(islice(chunks, per_transaction)):
                await self._thread.run(self._append, put, first, batch)
                first += len(batch)
            return await self._thread.run(self._commit, put, now)
        except BaseException:
            # The thread works in order: this follows whatever of ours is still under way there. If
            # that was the commit, the value stands, and there is nothing left to abandon.
            self._thread.submit(self._abandon, put)
            raise

    def _begin(self, put: _LargePut, record: StoredRecord, now: float, *, is_copy: bool) -> PutOutcome | None:
        begun = self._database.begin(record, now, is_copy=is_copy)
        if isinstance(begun, PutOutcome):
            return begun
        put.draft = begun
        self._being_written.add(begun.record.value_id)
        return None

    def _append(self, put: _LargePut, first: int, chunks: Sequence[Bytes]) -> None:
        assert put.draft is not None, "append follows a begin that was not refused"
        self._database.append(put.draft, first, chunks)

    def _commit(self, put: _LargePut, now: float) -> PutOutcome:
        assert put.draft is not None, "commit follows a begin that was not refused"
        outcome = self._database.commit(put.draft, now)
        self._being_written.discard(put.draft.record.value_id)
        return outcome

    def _abandon(self, put: _LargePut) -> None:
        if put.draft is None:
            return
        self._being_written.discard(put.draft.record.value_id)
        try:
            self._database.abandon(put.draft.record.value_id)
        except StoreFull as error:  # even taking away needs pages; expire tries again
            _log.warning("store_reclaim_postponed", uid=put.draft.record.uid, error=error.message)

    def _reclaim(self) -> int:
        return self._database.reclaim(frozenset(self._being_written))


def _unknown(uid: str) -> UnknownRequest:
    return UnknownRequest(f"the result store has nothing under {uid}", uid=uid)


def _gone(uid: str, why: str) -> ResultGone:
    return ResultGone(
        f"the result of {uid} is gone: {why}; submit the request again, and "
        "if it had a key, under another one",
        uid=uid,
        why=why,
    )
