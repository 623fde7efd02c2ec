"""The records of a proxy's requests, kept on store nodes: whoever owns a request next finds it there.

A record (who, which workflow, the inputs, the deadline, the key) is durable on ``copies`` store nodes
before a client hears "accepted", or on as many as live if those are fewer. It is dropped when the
request has ended.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Final

from attrs import evolve

from onepiece.codec import Packed
from onepiece.core.replication import copy_holders
from onepiece.core.routing import NodeRoute
from onepiece.errors import NodeUnreachable, NotReady, OnePieceError
from onepiece.limits import RESULT_PIECE_BYTES_MAX
from onepiece.log import get_logger
from onepiece.messages import CONTROL_REGION, KIND_RECORD, STORE_REGION, ResultPiece
from onepiece.node.calls import Calls
from onepiece.record_messages import (
    DropRecords,
    FindRecord,
    ListOrphans,
    OrphansListed,
    ReadRecord,
    RecordFound,
    RecordKept,
    RequestRecord,
    TakenOver,
    TakeOver,
)
from onepiece.runtime.environment import Environment
from onepiece.runtime.result_targets import pack_record

_KEEP_SECONDS: Final = 10.0
_FIND_SECONDS: Final = 3.0
_ORPHANS_MAX: Final = 256


class RecordKeeper:
    """A proxy's way to the records on store nodes."""

    answers: Final = (RecordKept, RecordFound, OrphansListed, TakenOver, ResultPiece)
    """What its questions are answered by."""

    def __init__(self, env: Environment, calls: Calls, copies: int) -> None:
        self._env = env
        self._calls = calls
        self._copies = copies

    def stores(self) -> dict[str, NodeRoute]:
        """The living store nodes by name."""
        return {node.node_id: node for node in self._env.routes.table.nodes if "store" in node.roles}

    def holders(self, uid: str) -> list[NodeRoute]:
        """The store nodes that should hold what belongs to a request."""
        stores = self.stores()
        return [stores[name] for name in copy_holders(uid, stores, self._copies)]

    async def keep(self, record: RequestRecord, inputs: dict[str, object]) -> str:
        """Make the record durable; returns the UID that its key stands for.

        That is another request's UID if the key is known already: then nothing was kept. Raises
        ``NotReady`` if no store node takes it, ``StoreFull`` if their budget is used up.
        """
        if record.key is not None:
            holder = await self._claim(record, inputs)
            if holder != record.uid:
                return holder
        nodes = self.holders(record.uid)
        if not nodes:
            raise NotReady("no node with the role store is there; requests cannot be kept")
        outcomes = await asyncio.gather(
            *(self._keep_at(node, record, inputs) for node in nodes), return_exceptions=True
        )
        errors = [each for each in outcomes if isinstance(each, BaseException)]
        for error in errors:
            if not isinstance(error, OnePieceError):
                raise error
        if len(errors) == len(nodes):
            raise errors[0]
        others = [each for each in outcomes if isinstance(each, str) and each != record.uid]
        return others[0] if others else record.uid

    async def _claim(self, record: RequestRecord, inputs: dict[str, object]) -> str:
        """Whoever has the key first has it: one node decides, the same for every proxy."""
        assert record.key is not None
        stores = self.stores()
        for name in copy_holders(record.key, stores, len(stores)):
            try:
                return await self._keep_at(stores[name], record, inputs)
            except NodeUnreachable:
                continue
        raise NotReady("no node with the role store answers; requests cannot be kept")

    async def _keep_at(self, node: NodeRoute, record: RequestRecord, inputs: dict[str, object]) -> str:
        async def send(call: int) -> None:
            packed: Packed = pack_record(evolve(record, call=call), inputs)
            await self._env.outbox.send(f"{node.address}/{STORE_REGION}", packed.parts, kind=KIND_RECORD)

        kept = await self._calls.ask(
            RecordKept,
            send,
            what=f"{node.node_id} was asked to keep request {record.uid}",
            timeout_seconds=_KEEP_SECONDS,
        )
        if kept.error is not None:
            raise OnePieceError.from_wire(kept.error)
        return kept.uid

    def drop(self, uid: str, key: str | None) -> None:
        """The request has ended."""
        nodes = {node.node_id: node for node in self.holders(uid)}
        if key is not None:
            stores = self.stores()
            nodes.update({name: stores[name] for name in copy_holders(key, stores, 1)})
        for node in nodes.values():
            self._env.outbox.post(f"{node.address}/{CONTROL_REGION}", DropRecords((uid,)), lingers=True)

    def drop_everywhere(self, uid: str) -> None:
        """The request has ended, and store nodes may have its record that should not, or were not told."""
        for node in self.stores().values():
            self._env.outbox.post(f"{node.address}/{CONTROL_REGION}", DropRecords((uid,)), lingers=True)

    async def orphans(self, living: Sequence[str]) -> dict[str, RequestRecord]:
        """Records whose owner is not among the ``living``, by UID; of several copies the newest."""

        async def ask(node: NodeRoute) -> Sequence[RequestRecord]:
            address = f"{node.address}/{CONTROL_REGION}"
            try:
                listed = await self._calls.ask(
                    OrphansListed,
                    lambda call: self._env.outbox.post(
                        address, ListOrphans(call, self._env.control_address, tuple(living), _ORPHANS_MAX)
                    ),
                    what=f"{node.node_id} was asked for orphaned requests",
                    timeout_seconds=_FIND_SECONDS,
                )
            except NodeUnreachable as error:
                get_logger().warning("orphans_unknown", node=node.node_id, error=error.message)
                return ()
            return listed.records

        found: dict[str, RequestRecord] = {}
        for records in await asyncio.gather(*map(ask, self.stores().values())):
            for record in records:
                known = found.get(record.uid)
                if known is None or known.adoptions < record.adoptions:
                    found[record.uid] = record
        return found

    async def find(self, uid: str) -> RequestRecord | None:
        """The record of a request that has not ended, as its last owner wrote it; None if there is none.

        Raises ``NotReady`` if a store node that may have it does not answer, or is away.
        """
        stores, why_unsure = self.stores(), self._env.routes.why_unsure()
        if not stores:
            raise NotReady(
                f"no node with the role store is there; who owns request {uid} is not known", uid=uid
            )

        async def ask(node: NodeRoute) -> RequestRecord | None:
            address = f"{node.address}/{CONTROL_REGION}"
            found = await self._calls.ask(
                RecordFound,
                lambda call: self._env.outbox.post(address, FindRecord(call, self._env.control_address, uid)),
                what=f"{node.node_id} was asked who owns request {uid}",
                timeout_seconds=_FIND_SECONDS,
            )
            return found.record

        answers = await asyncio.gather(*map(ask, stores.values()), return_exceptions=True)
        records = [answer for answer in answers if isinstance(answer, RequestRecord)]
        if records:
            # Of two proxies that took it over at once, each in one place, all name the same one.
            return max(records, key=lambda record: (record.adoptions, record.owner_life))
        for answer in answers:
            if isinstance(answer, NodeUnreachable):
                raise NotReady(f"who owns request {uid} is not known: {answer.message}", uid=uid) from answer
            if isinstance(answer, BaseException):
                raise answer
        if why_unsure is not None:  # a node that has come back since was not asked
            raise NotReady(f"whether request {uid} has ended is not known: {why_unsure}", uid=uid)
        return None

    async def take_over(self, record: RequestRecord) -> bool:
        """Own a request from now on; False if another proxy was quicker.

        ``record`` names the new owner. Every node that answers must grant it.
        """

        async def ask(node: NodeRoute) -> bool | None:
            address = f"{node.address}/{CONTROL_REGION}"
            order = TakeOver(
                0, self._env.control_address, record.uid, record.owner, record.owner_life, record.adoptions
            )
            try:
                taken = await self._calls.ask(
                    TakenOver,
                    lambda call: self._env.outbox.post(address, evolve(order, call=call)),
                    what=f"{node.node_id} was asked to pass on request {record.uid}",
                    timeout_seconds=_FIND_SECONDS,
                )
            except NodeUnreachable:
                return None
            return taken.granted

        answers = await asyncio.gather(*map(ask, self.stores().values()))
        return True in answers and False not in answers

    async def body(self, uid: str) -> bytes:
        """The packed inputs of a record; raises ``UnknownRequest`` if no store node has it."""
        last: OnePieceError = NotReady(f"no store node has the inputs of request {uid}")
        for node in [*self.holders(uid), *self.stores().values()]:
            try:
                return b"".join([piece async for piece in self._pieces(node, uid)])
            except OnePieceError as error:
                last = error
        raise last

    async def _pieces(self, node: NodeRoute, uid: str) -> AsyncIterator[bytes]:
        address = f"{node.address}/{CONTROL_REGION}"
        start, total = 0, 1
        while start < total:
            piece = await self._calls.ask(
                ResultPiece,
                lambda call, start=start: self._env.outbox.post(  # type: ignore[misc]  # lambda with defaults
                    address, ReadRecord(call, self._env.control_address, uid, start, RESULT_PIECE_BYTES_MAX)
                ),
                what=f"{node.node_id} was asked for the inputs of request {uid}",
                timeout_seconds=_KEEP_SECONDS,
            )
            if piece.error is not None:
                raise OnePieceError.from_wire(piece.error)
            total = piece.total_bytes
            start += len(piece.data)
            yield piece.data
            if not piece.data:
                return
