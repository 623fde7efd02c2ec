"""The records of accepted requests on a store node: kept, passed on to a new owner, dropped."""

import asyncio
from typing import Final

from onepiece.codec import CodecError, unpack
from onepiece.core.key_claims import KeyClaims
from onepiece.errors import NotReady, OnePieceError, StoreFull, UnknownRequest
from onepiece.limits import KEY_CLAIM_SECONDS, KEY_CLAIMS_MAX, RESULT_PIECE_BYTES_MAX
from onepiece.log import get_logger
from onepiece.messages import STORE_REGION, AskEnded, ResultPiece
from onepiece.node.control import ControlService
from onepiece.record_messages import (
    ClaimKey,
    DropRecords,
    FindRecord,
    KeyClaimed,
    ListOrphans,
    OrphansListed,
    ReadRecord,
    RecordFound,
    RecordKept,
    ReleaseClaim,
    RequestRecord,
    TakenOver,
    TakeOver,
)
from onepiece.runtime.environment import Environment
from onepiece.store import LogEntry, RequestLog
from transports import Delivery, Receiver

_LOOKS_PER_QUESTION: Final = 4
_ASKED_MAX: Final = 1024
_CONTENT_TYPE: Final = "application/vnd.onepiece.record"


class RecordService:
    """Connects a ``RequestLog`` with the proxies of the set."""

    def __init__(self, log: RequestLog, env: Environment, tasks: asyncio.TaskGroup) -> None:
        self._log = log
        self._env = env
        self._tasks = tasks
        self._claims = KeyClaims(KEY_CLAIMS_MAX, KEY_CLAIM_SECONDS)
        self._looks = 0

    def attach(self, control: ControlService) -> None:
        """Receive what proxies ask, and what they answer."""
        control.on(ClaimKey, self._on_claim)
        control.on(ReleaseClaim, lambda message: self._claims.release(message.key, message.uid))
        control.on(DropRecords, lambda message: self._start(self._drop(message.uids)))
        control.on(ListOrphans, lambda message: self._start(self._list(message)))
        control.on(TakeOver, lambda message: self._start(self._take_over(message)))
        control.on(ReadRecord, lambda message: self._start(self._read(message)))
        control.on(FindRecord, lambda message: self._start(self._find(message)))

    def _start(self, work: "asyncio._CoroutineLike[None]") -> None:
        self._tasks.create_task(work)

    async def take(self, inbox: Receiver, delivery: Delivery) -> None:
        """Keep a record that came through the store's ring, and say so."""
        try:
            record = unpack(delivery.payload, RequestRecord).header
            body = bytes(delivery.payload)
        except CodecError as error:
            get_logger().warning("message_refused", region=STORE_REGION, error=str(error))
            return
        finally:
            inbox.release(delivery)
        try:
            holder = await self._keep(record, body)
            answer = RecordKept(record.call, holder)
        except OnePieceError as error:
            answer = RecordKept(record.call, record.uid, error.to_wire())
        self._env.outbox.post(record.owner, answer)

    async def _keep(self, record: RequestRecord, body: bytes) -> str:
        """Make a record durable; returns the UID that its key stands for."""
        if record.key is not None and not self._is_claimable(record.key, record.uid):
            raise NotReady(
                f"the key of request {record.uid} has been claimed by another one; submit it again with the "
                "same key",
                uid=record.uid,
            )
        holder = await self._log.put(_entry(record), [body], self._env.now())
        if record.key is not None:
            self._claims.release(record.key, record.uid)
        return holder

    def _lives(self) -> frozenset[str]:
        return frozenset(node.life for node in self._env.routes.table.nodes)

    def _is_claimable(self, key: str, uid: str) -> bool:
        return self._claims.is_free(key, uid, living=self._lives(), now=self._env.monotonic())

    def _on_claim(self, ask: ClaimKey) -> None:
        granted = self._claims.claim(
            ask.key, ask.uid, ask.owner_life, living=self._lives(), now=self._env.monotonic()
        )
        self._start(self._answer_claim(ask, granted=granted))

    async def _answer_claim(self, ask: ClaimKey, *, granted: bool) -> None:
        """Look into the log only now: what was to be kept before the claim was made is in it by then."""
        holder = await self._log.holder_of(ask.key, self._env.now())
        if holder not in {None, ask.uid}:
            self._claims.release(ask.key, ask.uid)
            answer = KeyClaimed(ask.call, granted=False, uid=holder)
        else:
            answer = KeyClaimed(ask.call, granted=granted and self._is_claimable(ask.key, ask.uid))
        self._env.outbox.post(ask.reply_to, answer)

    async def expire(self) -> None:
        """Drop what is out of time, and now and then ask about the rest."""
        await self._log.expire(self._env.now())
        self._looks += 1
        if self._looks % _LOOKS_PER_QUESTION == 0:
            await self._ask_owners()

    async def _ask_owners(self) -> None:
        """Word that a request has ended may have missed this node: it was not there, or out of reach.

        A record whose owner is gone is none of this: whoever adopts the request sees to it.
        """
        entries = await self._log.orphans(frozenset(), _ASKED_MAX)
        by_owner: dict[str, list[str]] = {}
        for entry in entries:
            by_owner.setdefault(entry.owner, []).append(entry.uid)
        for owner, uids in by_owner.items():
            self._env.outbox.post(owner, AskEnded(self._env.control_address, tuple(uids), True))

    async def _drop(self, uids: tuple[str, ...]) -> None:
        for uid in uids:
            try:
                await self._log.remove(uid, self._env.now())
            except StoreFull as error:
                get_logger().warning("record_not_dropped", request=uid, error=error.message)

    async def _list(self, ask: ListOrphans) -> None:
        entries = await self._log.orphans(frozenset(ask.living), ask.limit)
        records = tuple(_record(entry) for entry in entries)
        self._env.outbox.post(ask.reply_to, OrphansListed(ask.call, records))

    async def _find(self, ask: FindRecord) -> None:
        entry = await self._log.entry(ask.uid)
        found = RecordFound(ask.call, None if entry is None else _record(entry))
        self._env.outbox.post(ask.reply_to, found)

    async def _take_over(self, ask: TakeOver) -> None:
        try:
            granted = await self._log.adopt(ask.uid, ask.owner_life, ask.owner, ask.adoptions)
        except UnknownRequest:
            granted = True  # this node has no such record, so it is in nobody's way
        except OnePieceError as error:
            get_logger().warning("record_not_passed_on", request=ask.uid, error=error.message)
            granted = False
        if granted:
            self._env.owners[ask.uid] = ask.owner
        self._env.outbox.post(ask.reply_to, TakenOver(ask.call, ask.uid, granted))

    async def _read(self, ask: ReadRecord) -> None:
        length = min(ask.length, RESULT_PIECE_BYTES_MAX)
        try:
            body = await self._log.body(ask.uid)
            piece = body[ask.start : ask.start + length]
            answer = ResultPiece(ask.call, len(body), _CONTENT_TYPE, piece)
        except OnePieceError as error:
            answer = ResultPiece(ask.call, 0, "", b"", error.to_wire())
        self._env.outbox.post(ask.reply_to, answer)


def _entry(record: RequestRecord) -> LogEntry:
    return LogEntry(
        uid=record.uid,
        workflow=record.workflow,
        owner_life=record.owner_life,
        owner=record.owner,
        key=record.key,
        accepted_at=record.accepted_at,
        deadline_at=record.deadline_at,
        adoptions=record.adoptions,
    )


def _record(entry: LogEntry) -> RequestRecord:
    return RequestRecord(
        call=0,
        uid=entry.uid,
        workflow=entry.workflow,
        owner=entry.owner,
        owner_life=entry.owner_life,
        key=entry.key,
        accepted_at=entry.accepted_at,
        deadline_at=entry.deadline_at,
        adoptions=entry.adoptions,
    )
