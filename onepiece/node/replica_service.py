"""Copies of results between store nodes: the driver of ``ReplicationMachine``.

What a store node has stored first it sends to the other holders, what was purged to every store node;
and it goes through all it has, now and then and whenever the set of store nodes changes, to bring
whoever should hold something up to date. When, to whom and how often is the machine's decision; here
copies are read, sent, taken in and acknowledged. A copy is acknowledged when it is durable.

Values travel through the ``store`` ring of the receiver like any result, and wait where it is full;
at most ``COPY_BYTES_MAX`` of them are in this node's hands at once.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

from attrs import evolve

from onepiece.codec import CodecError, materialise, pack, unpack
from onepiece.core.membership import NodeState
from onepiece.core.replication import ReplicationMachine
from onepiece.core.replication_events import (
    CopyFailed,
    CopyRefused,
    CopyReplaced,
    CopyTaken,
    Pull,
    Purged,
    ReplicationConfig,
    ReplicationEvent,
    SendCopy,
    SendSummary,
    Stored,
    StoreNode,
    StoresChanged,
    SummaryAnswered,
    SummaryFailed,
    SummaryReceived,
    Tick,
)
from onepiece.core.routing import NodeRoute, life_of
from onepiece.errors import NodeUnreachable, OnePieceError, ResultGone
from onepiece.limits import MIB
from onepiece.log import get_logger
from onepiece.messages import CONTROL_REGION, KIND_COPY, STORE_REGION, Farewell
from onepiece.node.calls import Calls
from onepiece.node.control import ControlService
from onepiece.node.copy_messages import CopiesOffered, CopiesWanted, CopyAnswered, CopyInput
from onepiece.runtime.environment import Environment
from onepiece.runtime.signal import Signal
from onepiece.store import RecordKind, ResultStore, StoredRecord
from onepiece.types import BYTES
from transports import Delivery, Receiver

COPY_BYTES_MAX: Final = 256 * MIB
"""Bytes of values being sent at once; a larger value is sent alone."""
_COPY_SECONDS: Final = 60.0
"""How long a peer may take for a copy: a large value waits for room in its ring, and for its disk."""
_PAGE_SECONDS: Final = 10.0
_READ_ATTEMPTS: Final = 3
"""How often a value may be exchanged while it is read."""


class ReplicaService:
    """Connects a ``ResultStore`` with those of the other store nodes.

    Args:
        store: This node's results.
        env: The node.
        tasks: Where copies are sent and compared.
        copies: How many store nodes hold each result.
        config: Bounds and times; ``copies`` counts, whatever it says.
    """

    def __init__(
        self,
        store: ResultStore,
        env: Environment,
        tasks: asyncio.TaskGroup,
        copies: int = 2,
        config: ReplicationConfig | None = None,
    ) -> None:
        self._store = store
        self._env = env
        self._tasks = tasks
        self._calls = Calls(env)
        self._config = evolve(config or ReplicationConfig(), copies=copies)
        self._machine = ReplicationMachine(node_id=env.node_id, config=self._config)
        self._stores: tuple[StoreNode, ...] = ()
        self._left: set[str] = set()
        """Lives of store nodes that have said good-bye, as long as the routes still have them."""
        self._wake = asyncio.Event()
        self._changed = Signal()
        self._bytes_in_hand = 0
        self._room = Signal()
        self._counts = {"copies_sent": 0, "copies_failed": 0, "copies_taken": 0, "pages_offered": 0}

    def attach(self, control: ControlService) -> None:
        """Receive what other store nodes offer and answer."""
        control.on(CopiesOffered, self._on_offered)
        control.on(Farewell, self._on_farewell)
        self._calls.answered_by(control, CopyAnswered, CopiesWanted)

    def farewell(self) -> None:
        """Tell the other store nodes that this one leaves: where all leave, no manager may be left to."""
        table, me = self._env.routes.table, self._env.identity
        for node in table.nodes:
            if "store" in node.roles and node.life not in self._left | {me.life}:
                message = Farewell(me.node_id, me.incarnation)
                self._env.outbox.post(f"{node.address}/{CONTROL_REGION}", message)

    def _on_farewell(self, message: Farewell) -> None:
        self._left.add(life_of(message.node_id, message.incarnation))
        self.routes_changed()

    def stored(self, uid: str) -> None:
        """A result or an error was put here first, and is durable."""
        self._handle(Stored(uid))

    def purged(self, uid: str) -> None:
        """A result was purged here."""
        self._handle(Purged(uid))

    def routes_changed(self) -> None:
        """There is a newer route table."""
        nodes = [node for node in self._env.routes.table.nodes if "store" in node.roles]
        self._left &= {node.life for node in nodes}
        stores = tuple(
            StoreNode(node.node_id, node.life, node.state not in {NodeState.DRAINING, NodeState.DRAINED})
            for node in nodes
            if node.life not in self._left
        )
        if stores != self._stores:
            self._stores = stores
            self._handle(StoresChanged(stores))

    async def run(self) -> None:
        """Follow the routes and the time until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_routes(), name="store nodes")
            while True:
                self._wake.clear()
                now = self._env.monotonic()
                deadline = self._machine.next_deadline(now)
                try:
                    async with asyncio.timeout(None if deadline is None else max(0.0, deadline - now)):
                        await self._wake.wait()
                except TimeoutError:
                    self._handle(Tick())

    @property
    def is_settled(self) -> bool:
        """Whether nothing is known to be missing on any other store node."""
        return self._machine.is_settled

    async def settled(self) -> None:
        """Wait until nothing is known to be missing on any other store node.

        A draining node whose route says so has then handed over all it had.
        """
        await self._changed.wait_for(lambda: self._machine.is_settled)

    def metrics(self) -> Mapping[str, int]:
        """Copies in numbers, for people."""
        return {"copies_pending": self._machine.pending, **self._counts}

    async def take_copy(self, inbox: Receiver, delivery: Delivery) -> None:
        """Take in a message of ``KIND_COPY`` from the store's ring, and answer when it is durable."""
        try:
            unpacked = unpack(delivery.payload, CopyInput)
            header = unpacked.header
            value = materialise(unpacked.values["value"], BYTES, "cpu") if unpacked.values else b""
            record = _record(header, value)
        except (CodecError, KeyError) as error:
            get_logger().warning("message_refused", region=STORE_REGION, error=repr(error))
            return
        finally:
            inbox.release(delivery)
        try:
            outcome = await self._store.put_copy(record, [value] if value else [], self._env.now())
        except OnePieceError as error:
            self._env.outbox.post(header.reply_to, CopyAnswered(header.call, error.to_wire()))
            return
        self._counts["copies_taken"] += 1
        self._env.outbox.post(header.reply_to, CopyAnswered(header.call))
        standing = outcome.standing
        if standing is not None and standing.version.beats(record.version):
            self._handle(CopyRefused(header.uid, header.node_id))
        elif outcome.has_replaced:
            is_tombstone = record.kind is RecordKind.TOMBSTONE
            self._handle(CopyReplaced(header.uid, header.node_id, is_tombstone))

    # --- the machine ---------------------------------------------------------------------------

    async def _follow_routes(self) -> None:
        while True:
            changed = self._env.routes.changed
            self.routes_changed()
            await changed.wait()

    def _handle(self, event: ReplicationEvent) -> tuple[str, ...]:
        """Tell the machine, and carry out what it says; returns what it wants of a peer's page."""
        wanted: tuple[str, ...] = ()
        for effect in self._machine.handle(event, self._env.monotonic()):
            match effect:
                case SendCopy():
                    self._tasks.create_task(self._send_copy(effect), name=f"copy {effect.uid}")
                case SendSummary():
                    self._tasks.create_task(self._send_page(effect), name=f"copies for {effect.peer}")
                case Pull(uids=uids):
                    wanted = uids
        self._wake.set()
        self._changed.notify()
        return wanted

    def _node(self, node_id: str) -> NodeRoute:
        node = self._env.routes.table.node(node_id)
        if node is None:
            raise NodeUnreachable(f"the store node {node_id} is not there", node=node_id)
        return node

    # --- copies --------------------------------------------------------------------------------

    async def _send_copy(self, order: SendCopy) -> None:
        try:
            await self._bring(order.peer, order.uid)
        except OnePieceError as error:
            self._counts["copies_failed"] += 1
            get_logger().warning("copy_failed", request=order.uid, peer=order.peer, error=error.message)
            self._handle(CopyFailed(order.number))
        else:
            self._counts["copies_sent"] += 1
            self._handle(CopyTaken(order.number))

    async def _bring(self, peer: str, uid: str) -> None:
        """Have the peer hold what stands here under the UID; raises why it does not."""
        for attempt in range(1, _READ_ATTEMPTS + 1):
            found = await self._store.records([uid])
            if not found:
                return
            try:
                async with self._in_hand(found[0].total_bytes):
                    value = b"".join(await self._store.value(found[0]))
                    await self._call_copy(self._node(peer), found[0], value)
                return
            except ResultGone:
                if attempt == _READ_ATTEMPTS:
                    raise

    @asynccontextmanager
    async def _in_hand(self, length: int) -> AsyncIterator[None]:
        """Hold so many bytes of a value, when those that are held leave room."""

        def has_room() -> bool:
            return self._bytes_in_hand == 0 or self._bytes_in_hand + length <= COPY_BYTES_MAX

        await self._room.wait_for(has_room)
        self._bytes_in_hand += length
        try:
            yield
        finally:
            self._bytes_in_hand -= length
            self._room.notify()

    async def _call_copy(self, node: NodeRoute, record: StoredRecord, value: bytes) -> None:
        async def send(call: int) -> None:
            header = CopyInput(
                call=call,
                reply_to=self._env.control_address,
                node_id=self._env.node_id,
                uid=record.uid,
                kind=record.kind.value,
                content_type=record.content_type,
                meta=record.meta,
                stored_at=record.stored_at,
                expires_at=record.expires_at,
            )
            packed = pack(header, {"value": value} if record.kind is RecordKind.RESULT else {})
            await self._env.outbox.send(f"{node.address}/{STORE_REGION}", packed.parts, kind=KIND_COPY)

        answer = await self._calls.ask(
            CopyAnswered,
            send,
            what=f"{node.node_id} was sent a copy of the result of {record.uid}",
            timeout_seconds=_COPY_SECONDS,
        )
        if answer.error is not None:
            raise OnePieceError.from_wire(answer.error)

    # --- rounds --------------------------------------------------------------------------------

    async def _send_page(self, order: SendSummary) -> None:
        try:
            answered = await self._offer(order)
        except OnePieceError as error:
            get_logger().warning("copies_not_offered", peer=order.peer, error=error.message)
            self._handle(SummaryFailed(order.number))
        else:
            self._counts["pages_offered"] += 1
            self._handle(answered)

    async def _offer(self, order: SendSummary) -> SummaryAnswered:
        limit = self._config.page_records_max
        scanned = await self._store.scan(order.after_uid, limit)
        up_to = scanned[-1].uid if len(scanned) == limit else None
        now = self._env.now()
        page = {
            record.uid: record.version
            for record in scanned
            if record.expires_at > now
            and record.kind is not RecordKind.INTENT  # it is of use only where it was asked for
            and self._machine.should_hold(order.peer, record.uid)
        }
        if not page:
            return SummaryAnswered(order.number, (), up_to)
        node = self._node(order.peer)
        offered = tuple(page.values())
        answer = await self._calls.ask(
            CopiesWanted,
            lambda call: self._env.outbox.post(
                f"{node.address}/{CONTROL_REGION}",
                CopiesOffered(call, self._env.control_address, self._env.node_id, offered),
            ),
            what=f"{node.node_id} was offered copies",
            timeout_seconds=_PAGE_SECONDS,
        )
        if answer.error is not None:
            raise OnePieceError.from_wire(answer.error)
        return SummaryAnswered(order.number, tuple(uid for uid in answer.uids if uid in page), up_to)

    def _on_offered(self, offered: CopiesOffered) -> None:
        self._tasks.create_task(self._compare(offered), name=f"compare with {offered.node_id}")

    async def _compare(self, offered: CopiesOffered) -> None:
        try:
            found = await self._store.records([version.uid for version in offered.versions])
        except OnePieceError as error:
            answer = CopiesWanted(offered.call, (), error.to_wire())
        else:
            mine = tuple(record.version for record in found)
            wanted = self._handle(SummaryReceived(offered.node_id, offered.versions, mine))
            answer = CopiesWanted(offered.call, wanted)
        self._env.outbox.post(offered.reply_to, answer)


def _record(header: CopyInput, value: bytes) -> StoredRecord:
    """The record that a copy brings; raises ``CodecError`` for one that cannot be."""
    try:
        kind = RecordKind(header.kind)
    except ValueError as error:
        raise CodecError(f"a copy of kind {header.kind[:40]!r}") from error
    if not (math.isfinite(header.stored_at) and math.isfinite(header.expires_at)):
        raise CodecError(f"a copy from {header.stored_at!r} to {header.expires_at!r}")
    return StoredRecord(
        uid=header.uid,
        kind=kind,
        content_type=header.content_type,
        meta=dict(header.meta),
        total_bytes=len(value),
        chunk_bytes=max(1, len(value)),
        value_id=0,
        stored_at=header.stored_at,
        expires_at=header.expires_at,
    )
