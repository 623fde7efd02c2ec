"""The result store of one node: takes results from a ring, and serves them by range.

A result is acknowledged to the request's owner only when it is durable. Results of any size pass
through one ring; while it is full, the stages that produce results wait, which is their back-pressure.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from onepiece.codec import CodecError, Wire, WireBytes, in_host, unpack
from onepiece.errors import OnePieceError
from onepiece.limits import RESULT_PIECE_BYTES_MAX
from onepiece.log import get_logger
from onepiece.messages import (
    KIND_CHECKPOINT,
    KIND_COPY,
    KIND_RECORD,
    KIND_RESULT,
    STORE,
    STORE_REGION,
    DescribeResult,
    PurgeResult,
    ReadResult,
    RequestErrored,
    ResultDescribed,
    ResultInput,
    ResultPiece,
    ResultStored,
    StoreFailure,
)
from onepiece.node.checkpoint_service import CheckpointService
from onepiece.node.control import ControlService
from onepiece.node.record_service import RecordService
from onepiece.node.replica_service import ReplicaService
from onepiece.runtime.environment import Environment
from onepiece.store import PutOutcome, RecordKind, RequestLog, ResultStore, StoredRecord
from transports import Bytes, Delivery, Geometry, Receiver

_EXPIRE_SECONDS: Final = 5.0
_SLOTS: Final = 1024
_WORKFLOW: Final = "workflow"
"""What is stored of a request beside its result or error."""


Look = Callable[[str], Awaitable[StoredRecord]]
"""What stands under a UID, for whom it is told to."""


class StoreService:
    """Connects a ``ResultStore`` with the rest of the set."""

    def __init__(
        self,
        store: ResultStore,
        log: RequestLog,
        copies: ReplicaService,
        checkpoints: CheckpointService,
        env: Environment,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._store = store
        self._copies = copies
        self._checkpoints = checkpoints
        self._records = RecordService(log, env, tasks)
        self._env = env
        self._tasks = tasks

    def start(self, control: ControlService) -> None:
        """Take in results, and answer what comes as control messages."""
        self.attach(control)
        self._tasks.create_task(self.serve(), name="result store")
        self._tasks.create_task(self.expire(), name="result expiry")

    def attach(self, control: ControlService) -> None:
        """Answer reads and purges that come as control messages."""
        control.on(ReadResult, self._on_read)
        control.on(PurgeResult, self._on_purge)
        look = self._store.meta
        control.on(DescribeResult, lambda ask: self._tasks.create_task(self._describe(ask, look)))
        control.on(StoreFailure, lambda failure: self._tasks.create_task(self._store_failure(failure)))
        self._records.attach(control)
        self._checkpoints.attach(control)

    def _on_read(self, ask: ReadResult) -> None:
        self._tasks.create_task(self._answer(ask))

    def _on_purge(self, ask: PurgeResult) -> None:
        self._tasks.create_task(self._purge(ask))

    async def serve(self) -> None:
        """Take in results until cancelled."""
        geometry = Geometry(slot_count=_SLOTS, payload_bytes=self._env.inbox_bytes, session_count=_SLOTS)
        async with self._env.inboxes.open(STORE_REGION, geometry) as inbox:
            while True:
                delivery = await inbox.receive()
                await self._take(inbox, delivery)

    async def expire(self) -> None:
        """Remove what is out of time, now and then, until cancelled."""
        while True:
            await asyncio.sleep(_EXPIRE_SECONDS)
            try:
                await self._store.expire(self._env.now())
                await self._records.expire()
                await self._checkpoints.store.expire(self._env.now())
            except OnePieceError as error:
                get_logger().warning("store_expire_failed", error=str(error))

    async def _take(self, inbox: Receiver, delivery: Delivery) -> None:
        """Write a result straight out of the ring, whose bytes are given back when it is stored."""
        if delivery.kind == KIND_RECORD:
            await self._records.take(inbox, delivery)
            return
        if delivery.kind == KIND_COPY:
            await self._copies.take_copy(inbox, delivery)
            return
        if delivery.kind == KIND_CHECKPOINT:
            await self._checkpoints.take(inbox, delivery)
            return
        try:
            if delivery.kind != KIND_RESULT:
                raise CodecError(f"a message of kind {delivery.kind} came to the result store")
            unpacked = unpack(delivery.payload, ResultInput)
            await self.put(unpacked.header, _bytes_of(unpacked.values.get("value")))
        except CodecError as error:
            get_logger().warning("message_refused", region=STORE_REGION, error=repr(error))
        finally:
            inbox.release(delivery)

    async def put(self, header: ResultInput, value: Bytes) -> None:
        """Store a result and tell its owner how it went."""
        try:
            outcome = await self._store.put(
                header.uid,
                [value],
                content_type=header.content_type,
                meta={_WORKFLOW: header.workflow},
                now=self._env.now(),
            )
            if outcome is PutOutcome.ALREADY:
                record = await self._store.standing(header.uid)
                if record.kind is not RecordKind.RESULT:
                    # It was cancelled, say, by an owner that has died since: that stands.
                    raise OnePieceError.from_wire(record.meta)
                total_bytes, content_type = record.total_bytes, record.content_type
            else:
                total_bytes, content_type = len(value), header.content_type
            if outcome is PutOutcome.STORED:
                self._copies.stored(header.uid)
        except Exception as error:  # noqa: BLE001 - whatever it is, the owner must hear of it
            errored = RequestErrored(header.uid, None, self._env.node_id, self._wire_of(error))
            self._env.break_request(header.owner, errored)
            return
        owner = self._env.owner_of(header.uid, header.owner)
        if header.retained_by is not None:
            self._env.outbox.consumed(header.retained_by, (header.uid, header.source, STORE))
        self._env.outbox.post(
            owner,
            ResultStored(header.uid, self._env.node_id, total_bytes, content_type, header.trail),
        )

    async def _store_failure(self, failure: StoreFailure) -> None:
        try:
            wire = {**failure.error, _WORKFLOW: failure.workflow}
            outcome = await self._store.put_error(
                failure.uid, wire, is_intent=not failure.is_settled, now=self._env.now()
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, the owner must hear of it
            get_logger().warning("failure_not_stored", request=failure.uid, error=str(error))
            answer = ResultDescribed(failure.call, error=self._wire_of(error))
            self._env.outbox.post(failure.reply_to, answer)
            return
        if failure.is_settled and outcome in {PutOutcome.STORED, PutOutcome.REPLACED}:
            self._copies.stored(failure.uid)
        await self._describe(failure, self._store.standing)

    async def _describe(self, ask: DescribeResult | StoreFailure, look: Look) -> None:
        try:
            record = await look(ask.uid)
            answer = ResultDescribed(
                ask.call,
                str(record.meta.get(_WORKFLOW, "")),
                record.stored_at,
                record.total_bytes,
                record.content_type,
                None if record.kind is RecordKind.RESULT else _failure_of(record),
                is_intent=record.kind is RecordKind.INTENT,
            )
        except OnePieceError as error:
            answer = ResultDescribed(ask.call, error=error.to_wire())
        self._env.outbox.post(ask.reply_to, answer)

    async def _answer(self, ask: ReadResult) -> None:
        length = min(ask.length, RESULT_PIECE_BYTES_MAX)
        try:
            record = await self._store.meta(ask.uid)
            pieces = [piece async for piece in self._store.read(ask.uid, ask.start, length)]
            answer = ResultPiece(ask.call, record.total_bytes, record.content_type, b"".join(pieces))
        except Exception as error:  # noqa: BLE001 - whatever it is, the asker must hear of it
            answer = ResultPiece(ask.call, 0, "", b"", self._wire_of(error))
        self._env.outbox.post(ask.reply_to, answer)

    async def _purge(self, ask: PurgeResult) -> None:
        try:
            await self._store.purge(ask.uid, self._env.now())
            self._copies.purged(ask.uid)
            answer = ResultPiece(ask.call, 0, "", b"")
        except Exception as error:  # noqa: BLE001 - whatever it is, the asker must hear of it
            answer = ResultPiece(ask.call, 0, "", b"", self._wire_of(error))
        self._env.outbox.post(ask.reply_to, answer)

    def _wire_of(self, error: Exception) -> dict[str, Any]:
        """The error for whoever waits; one that nobody foresaw is logged, and told without its insides."""
        if not isinstance(error, OnePieceError):
            get_logger().error("store_failed", exc_info=error)
            error = OnePieceError(f"the result store of {self._env.node_id} failed; its log has the cause")
        return error.to_wire()


def _failure_of(record: StoredRecord) -> dict[str, Any]:
    """The error as its request's owner put it: whoever asks the owner, or a store node, is told the same."""
    return {name: value for name, value in record.meta.items() if name != _WORKFLOW}


def _bytes_of(value: Wire) -> Bytes:
    """The bytes of a received result, where they lie."""
    if isinstance(value, WireBytes):
        return in_host(value.buffer)
    if isinstance(value, bytes):
        return value
    raise CodecError(f"a result that is a {type(value).__name__} where bytes are wanted")
