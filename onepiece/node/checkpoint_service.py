"""A store node's part in checkpoints: takes them in, sends them when an owner asks, lets go of them."""

import asyncio
from typing import Final

from attrs import evolve

from onepiece.checkpoint_messages import (
    CheckpointKept,
    OutputRestored,
    RestoreOutput,
    split_header,
)
from onepiece.codec import CodecError, pack, unpack
from onepiece.errors import OnePieceError
from onepiece.log import get_logger
from onepiece.messages import (
    STORE_REGION,
    OutputHeaded,
    OutputNotHeld,
    ReleaseRequests,
    RequestErrored,
    StageInput,
    StopRequest,
)
from onepiece.node.checkpoint_store import CheckpointStore
from onepiece.node.control import ControlService
from onepiece.record_messages import DropRecords
from onepiece.runtime.counts import CHECKPOINT
from onepiece.runtime.environment import Environment
from onepiece.runtime.result_deliver import Letter, ResultDeliver
from onepiece.runtime.result_targets import StageTarget
from transports import Delivery, Receiver

_AT_ONCE: Final = 4
"""Checkpoints in this node's hands at a time."""


class CheckpointService:
    """Connects a ``CheckpointStore`` with actors and owners."""

    def __init__(self, store: CheckpointStore, env: Environment, tasks: asyncio.TaskGroup) -> None:
        self.store = store
        self._env = env
        self._tasks = tasks
        self._deliver = ResultDeliver(env)
        self._room = asyncio.Semaphore(_AT_ONCE)

    def attach(self, control: ControlService) -> None:
        """Receive what owners ask, and that requests have ended."""
        control.on(RestoreOutput, self._on_restore)
        control.on(DropRecords, lambda message: self._release(message.uids))
        control.on(ReleaseRequests, lambda message: self._release(message.uids))
        control.on(StopRequest, lambda message: self._release((message.uid,)))

    async def take(self, inbox: Receiver, delivery: Delivery) -> None:
        """Keep a checkpoint that came through the store's ring, straight out of it, and say so."""
        try:
            message, header = split_header(delivery.payload)
            try:
                await self.store.keep(header, message, self._env.now())
                answer = CheckpointKept(header.call)
            except OnePieceError as error:
                answer = CheckpointKept(header.call, error.to_wire())
        except CodecError as error:
            get_logger().warning("message_refused", region=STORE_REGION, error=str(error))
            return
        finally:
            inbox.release(delivery)
        self._env.outbox.post(header.reply_to, answer)

    def _release(self, uids: tuple[str, ...]) -> None:
        for uid in uids:
            if self.store.end(uid):
                release = self.store.release(uid, self._env.now())
                self._tasks.create_task(release, name=f"checkpoints of {uid}")

    def _on_restore(self, ask: RestoreOutput) -> None:
        is_held = self.store.holds(ask.uid, ask.source, ask.target)
        self._env.outbox.post(ask.owner, OutputRestored(ask.call, self._env.identity.life, is_held))
        if is_held:
            self._tasks.create_task(self._restore(ask), name=f"restore {ask.uid}/{ask.source}")

    async def _restore(self, ask: RestoreOutput) -> None:
        async with self._room:
            message = await self.store.read(ask.uid, ask.source, ask.target)
            letter = None if message is None else self._letter(ask, message)
            if letter is None:
                self._env.tell_owner(ask.uid, ask.owner, OutputNotHeld(ask.uid, ask.source, ask.target))
                return
            self._env.counts.resent[ask.stage, CHECKPOINT] += 1
            try:
                life = await self._deliver.send(letter)
            except OnePieceError as error:
                errored = RequestErrored(ask.uid, ask.target, self._env.node_id, error.to_wire())
                self._env.break_request(ask.owner, errored)
                return
        self._env.tell_owner(ask.uid, ask.owner, OutputHeaded(ask.uid, {ask.target: life}))

    def _letter(self, ask: RestoreOutput, message: bytes) -> Letter | None:
        """The output for its target: it reports to the owner of now, and nobody retains it any more."""
        try:
            unpacked = unpack(memoryview(message), StageInput)
        except CodecError as error:
            get_logger().warning("checkpoint_unusable", request=ask.uid, stage=ask.source, error=str(error))
            return None
        header = evolve(unpacked.header, owner=ask.owner, sent_at=self._env.now(), retained_by=None)
        return Letter(StageTarget(header, ask.stage, {}), pack(header, unpacked.values).parts, ask.attempt)
