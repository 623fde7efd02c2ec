"""The request log: what a store node knows of accepted requests that have not ended.

Whoever owns a request next finds here what it needs to go on: which workflow, the inputs, the deadline,
and who owned it so far.

Promises:

- *Acknowledged is durable*, as ``StoreOptions.durability`` says. By default what ``put`` has acknowledged
  survives ``kill -9`` of the process at any moment.
- *First writer wins*, by key and by UID. A key that is known answers with the request it stands for, as
  long as that one is open and for ``keep_seconds`` after its end.
- *The higher adoption wins.* An entry changes its owner only to a later one, so that of two proxies that
  want the same request one is told so, in whatever order their messages arrive.
- *An end beats late copies.* A request that was removed is not entered or adopted again, for
  ``keep_seconds``.
- *Never more than the budget.* A put beyond it, or one that the disk does not take, is refused with
  ``StoreFull``; the log goes on working, and marks of ended requests always find a place within the map.

It does not promise copies on other disks: the proxy writes each record to several nodes. Entries that
nobody removes are dropped ``keep_seconds`` after their deadline.

All work is done by one thread, in the order in which it was asked for.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

from attrs import define, field, frozen

from onepiece.errors import ConfigError, InvalidInput, UnknownRequest
from onepiece.store._request_database import RequestDatabase
from onepiece.store._request_tables import LogEntry, check_entry
from onepiece.store._thread import Jobs, OpenJobs, open_on_thread
from onepiece.store.records import StoreOptions, check_ttl
from transports.operations import Bytes

__all__ = ["LogEntry", "LogStats", "RequestLog"]

KEEP_SECONDS: Final = 3600.0


@frozen
class LogStats:
    """The log in numbers."""

    open_entries: int
    """Requests that have not ended."""
    ended_entries: int
    """Marks of requests that have."""
    bytes_in_use: int
    byte_budget: int
    file_bytes: int
    """What the file occupies on the disk."""


@define(eq=False)
class RequestLog:
    """An open request log; made by ``RequestLog.open``. Its methods may be called concurrently."""

    options: StoreOptions
    _database: RequestDatabase = field(repr=False)
    _thread: Jobs = field(repr=False)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        path: Path | str,
        options: StoreOptions | None = None,
        *,
        keep_seconds: float = KEEP_SECONDS,
        open_jobs: OpenJobs = open_on_thread,
    ) -> "AsyncIterator[RequestLog]":
        """Open or create the log in a directory, and close it behind the block.

        Args:
            path: The directory; made if it is not there. One process at a time may have it open.
            options: Budget, map, pieces and durability; times to live play no part.
            keep_seconds: How long a key is known after its request has ended, and an entry after its
                deadline.
            open_jobs: Where the work on the file is done.

        Raises:
            ConfigError: The directory is in use, unusable, or of another layout.
            StoreFull: The disk has no room for the file's first pages.
        """
        options = options or StoreOptions()
        check_ttl(keep_seconds, "the request log's keep_seconds", ConfigError)
        opening = partial(RequestDatabase.open, Path(path), options, keep_seconds)
        async with open_jobs("onepiece-requests", opening) as (database, thread):
            yield cls(options, database, thread)

    async def put(self, entry: LogEntry, body: Sequence[Bytes], now: float) -> str:
        """Keep an entry; it is durable when this returns its UID.

        Args:
            entry: What is known of the request.
            body: Its inputs, in pieces of any size; they must not change until this returns.
            now: Seconds since the epoch.

        Returns:
            The UID that holds the key: the entry's own, or that of an earlier request, and then nothing
            was stored. An entry that is there already stays; only a higher ``adoptions`` replaces its
            owner. One that has ended stays ended.

        Raises:
            StoreFull: The budget is used up, or the disk is full; nothing was stored.
            InvalidInput: The entry cannot be kept: a name is empty or too long.

        Cancelled: the entry is kept wholly or not at all, and which is not known; putting it again is
        safe.
        """
        check_entry(entry)
        return await self._thread.run(self._database.put, entry, body, now)

    async def adopt(self, uid: str, owner_life: str, owner: str, adoptions: int) -> bool:
        """Give a request another owner, if ``adoptions`` is higher than what is stored.

        Asked again by the same owner the answer is the same. A request that has ended has no owner.

        Returns:
            Whether ``owner_life`` owns the request now.

        Raises:
            UnknownRequest: Nothing is known of it here.
            StoreFull: The disk did not take the change.
            InvalidInput: The UID or the life is unusable.
        """
        adopted = await self._thread.run(self._database.adopt, uid, owner_life, owner, adoptions)
        if adopted is None:
            raise _unknown(uid)
        return adopted

    async def orphans(self, living: frozenset[str], limit: int) -> list[LogEntry]:
        """At most ``limit`` open requests whose owner's life is not among the ``living``."""
        return await self._thread.run(self._database.orphans, living, limit)

    async def entry(self, uid: str) -> LogEntry | None:
        """What is known of an open request; None if nothing is, or if it has ended.

        Raises:
            InvalidInput: The UID is unusable.
        """
        return await self._thread.run(self._database.entry, uid)

    async def holder_of(self, key: str, now: float) -> str | None:
        """The UID of the request that a key stands for, as ``put`` would return it; None if it is free."""
        return await self._thread.run(self._database.holder_of, key, now)

    async def body(self, uid: str, start: int = 0, length: int | None = None) -> bytes:
        """The inputs of an open request, or a range of them.

        Raises:
            UnknownRequest: Nothing is known of it, or it has ended.
            InvalidInput: The UID or the range is unusable.
        """
        if start < 0 or (length is not None and length < 0):
            raise InvalidInput(f"{length!r} bytes from {start} are no range of the inputs of {uid}", uid=uid)
        body = await self._thread.run(self._database.body, uid, start, length)
        if body is None:
            raise _unknown(uid)
        return body

    async def remove(self, uid: str, now: float) -> bool:
        """Note that a request has ended, heard of or not; true if it was open.

        Raises:
            StoreFull: The disk did not take the mark.
            InvalidInput: The UID is unusable.
        """
        return await self._thread.run(self._database.remove, uid, now)

    async def expire(self, now: float) -> int:
        """Drop marks, and overdue entries, whose time is over. Returns how many.

        Raises:
            StoreFull: The disk did not take the change.

        Cancelled: the rest stays for the next call.
        """
        await self._thread.run(self._database.check_readers)
        ended = 0
        while count := await self._thread.run(self._database.expire, now):
            ended += count
        return ended

    async def stats(self) -> LogStats:
        """The log in numbers."""
        totals = await self._thread.run(self._database.totals)
        return LogStats(
            open_entries=totals.open_entries,
            ended_entries=totals.ended_entries,
            bytes_in_use=totals.bytes_in_use,
            byte_budget=self.options.byte_budget,
            file_bytes=await self._thread.run(self._database.file_bytes),
        )

    async def check_invariants(self) -> None:
        """Assert that the tables agree with each other and with the totals; for tests and inspection."""
        await self._thread.run(self._database.check_invariants)


def _unknown(uid: str) -> UnknownRequest:
    return UnknownRequest(f"the request log has no open request {uid}", uid=uid)
