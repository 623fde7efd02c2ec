"""The checkpoints that one store node keeps: a result store of their own, and what it holds by request.

A checkpoint is one output on one edge of one request. The first that comes stands: a stage that ran
twice put out the same thing as far as anybody may rely on. It is released when its request ends, and
expires behind the request's deadline whatever happens. A request that was released is remembered for as
long as stragglers may come, so that none of them is kept for nobody.

It has a byte budget of its own, so that checkpoints never cost a result its place. One that finds no room
is refused, and the stage runs again if it is needed.
"""

import hashlib
from collections import OrderedDict
from typing import Final, Self

from attrs import define, field

from onepiece.checkpoint_messages import CheckpointInput
from onepiece.errors import OnePieceError, StoreFull, UnknownRequest
from onepiece.limits import CHECKPOINT_LINGER_SECONDS, STOPPED_UIDS_MAX
from onepiece.log import get_logger
from onepiece.store import PutOutcome, ResultStore, StoreStats
from transports import Bytes

_CONTENT_TYPE: Final = "application/vnd.onepiece.checkpoint"
_PAGE: Final = 256


@define(eq=False)
class CheckpointStore:
    """What is kept, and of which request; use ``load``."""

    _store: ResultStore
    _held: dict[str, dict[tuple[str, str], float]] = field(factory=dict)
    """By UID: the edges, and when each expires."""
    _owners: dict[str, str] = field(factory=dict)
    _ended: "OrderedDict[str, None]" = field(factory=OrderedDict)

    @classmethod
    async def load(cls, store: ResultStore) -> Self:
        """Find what an earlier process of this node kept."""
        found = cls(store)
        after = ""
        while page := await store.scan(after, _PAGE):
            for record in page:
                meta = record.meta
                if "source" in meta:  # a tombstone has none
                    found._note(
                        meta["uid"], (meta["source"], meta["target"]), meta["owner"], record.expires_at
                    )
            after = page[-1].uid
        return found

    def sources_of(self, uid: str) -> tuple[str, ...]:
        """The graph nodes of a request whose outputs are kept here."""
        return tuple(sorted({source for source, _ in self._held.get(uid, ())}))

    def owners(self) -> dict[str, str]:
        """The owner's control address, as the outputs name it, of each request with checkpoints here."""
        return dict(self._owners)

    async def keep(self, header: CheckpointInput, message: Bytes, now: float) -> None:
        """Keep one output; it is durable when this returns.

        Raises ``StoreFull``, and ``UnknownRequest`` if the request has ended.
        """
        uid = header.uid
        if uid in self._ended:
            raise _ended(uid)
        deadline_at = header.deadline_at
        seconds = None if deadline_at is None else max(0.0, deadline_at - now) + CHECKPOINT_LINGER_SECONDS
        outcome = await self._put(header, message, seconds, now)
        expires_at = now + (self._store.options.ttl_seconds if seconds is None else seconds)
        if outcome is PutOutcome.STORED:
            self._note(uid, (header.source, header.target), header.owner, expires_at)
        if uid in self._ended:  # while it was written
            await self._purge(uid, now)
        if uid in self._ended or outcome is PutOutcome.TOMBSTONED:
            raise _ended(uid)

    async def _put(
        self, header: CheckpointInput, message: Bytes, seconds: float | None, now: float
    ) -> PutOutcome:
        meta = {
            "uid": header.uid,
            "source": header.source,
            "target": header.target,
            "owner": header.owner,
            "life": header.life,
            "attempt": header.attempt,
        }
        try:
            return await self._store.put(
                _name(header.uid, header.source, header.target),
                [message],
                content_type=_CONTENT_TYPE,
                meta=meta,
                ttl_seconds=seconds,
                now=now,
            )
        except StoreFull as error:
            raise StoreFull(
                f"no room for the {len(message)} bytes that {header.source} of request {header.uid} sends to "
                f"{header.target}: raise --checkpoint-bytes, or make room on the disk ({error.message})",
                uid=header.uid,
            ) from error

    async def stats(self) -> StoreStats:
        """The store in numbers."""
        return await self._store.stats()

    def holds(self, uid: str, source: str, target: str) -> bool:
        """Whether this output is here."""
        return (source, target) in self._held.get(uid, ())

    async def read(self, uid: str, source: str, target: str) -> bytes | None:
        """One output as it was sent; None if it cannot be read, and then it is held no longer."""
        try:
            return b"".join([piece async for piece in self._store.read(_name(uid, source, target))])
        except OnePieceError as error:
            get_logger().warning("checkpoint_unreadable", request=uid, stage=source, error=error.message)
            self._held.get(uid, {}).pop((source, target), None)
            return None

    async def release(self, uid: str, now: float) -> None:
        """The request has ended: nothing of it is kept, or taken any more."""
        if self.end(uid):
            await self._purge(uid, now)

    def end(self, uid: str) -> bool:
        """Take nothing more of a request; true if something is here that is to be released."""
        self._ended[uid] = None
        self._ended.move_to_end(uid)
        if len(self._ended) > STOPPED_UIDS_MAX:
            self._ended.popitem(last=False)
        return uid in self._held

    async def expire(self, now: float) -> None:
        """Drop what is out of time."""
        for uid, edges in list(self._held.items()):
            if all(expires_at <= now for expires_at in edges.values()):
                self._forget(uid)
        await self._store.expire(now)

    async def _purge(self, uid: str, now: float) -> None:
        for source, target in self._held.get(uid, {}).copy():
            try:
                await self._store.purge(_name(uid, source, target), now)
            except OnePieceError as error:
                get_logger().warning("checkpoint_not_released", request=uid, error=error.message)
        self._forget(uid)

    def _note(self, uid: str, edge: tuple[str, str], owner: str, expires_at: float) -> None:
        self._held.setdefault(uid, {})[edge] = expires_at
        self._owners[uid] = owner

    def _forget(self, uid: str) -> None:
        self._held.pop(uid, None)
        self._owners.pop(uid, None)


def _name(uid: str, source: str, target: str) -> str:
    """The store's key for an edge: names of graph nodes may be long, and in any script."""
    edge = hashlib.blake2b(f"{source}\0{target}".encode(), digest_size=16).hexdigest()
    return f"{uid}-{edge}"


def _ended(uid: str) -> UnknownRequest:
    return UnknownRequest(f"request {uid} has ended: its checkpoints are kept no longer", uid=uid)
