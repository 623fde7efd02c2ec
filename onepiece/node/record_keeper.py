"""The records of a proxy's requests, kept on store nodes: whoever owns a request next finds it there.

A record (who, which workflow, the inputs, the deadline, the key) is durable on ``copies`` store nodes
before a client hears "accepted", or on as many as live if those are fewer. It is dropped when the
request has ended.

Where a request has a key, its record goes to the key's holders, and their order matters::

    claim the key at each --all grant it--> keep the record at each other node --> keep it on this node
              |                                            |
              +-- the key stands for another request       +-- none has it: on this node neither

A proxy that is a store node, too, keeps its own copy last: if it dies in the middle, its disk goes with it,
and either another holder has the record or nobody has. Else the client's next try might find no trace of
the request, become another one, and this one come back with the disk.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from attrs import evolve

from onepiece.codec import Packed
from onepiece.core.replication import copy_holders
from onepiece.core.routing import NodeRoute
from onepiece.errors import NodeUnreachable, NotReady, OnePieceError, StoreFull
from onepiece.limits import KEY_CLAIM_SECONDS, RESULT_PIECE_BYTES_MAX
from onepiece.log import get_logger
from onepiece.messages import CONTROL_REGION, KIND_RECORD, STORE_REGION, ResultPiece
from onepiece.node.calls import Calls
from onepiece.node.key_claim import CLAIM_SECONDS_MAX, KeyClaim
from onepiece.record_messages import (
    DropRecords,
    FindRecord,
    KeyClaimed,
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

assert CLAIM_SECONDS_MAX + 2 * _KEEP_SECONDS < KEY_CLAIM_SECONDS, "a claim stands until the record is kept"


class RecordKeeper:
    """A proxy's way to the records on store nodes."""

    answers: Final = (KeyClaimed, RecordKept, RecordFound, OrphansListed, TakenOver, ResultPiece)
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

    def record_holders(self, uid: str, key: str | None) -> list[NodeRoute]:
        """The store nodes that should hold a request's record: those of its key, if it has one."""
        return self.holders(uid if key is None else key)

    async def keep(
        self, record: RequestRecord, inputs: dict[str, object], doubt: Callable[[str], None]
    ) -> str:
        """Make the record durable; returns the UID that its key stands for.

        That is another request's UID if the key is known already. Raises ``NotReady`` if no store node
        takes it, or if what the key stands for is not known now, ``StoreFull`` if their budget is used up.
        If it raises, is cancelled, or returns another UID, though the record may have been kept, it calls
        ``doubt`` with the request's own UID.
        """
        if record.key is None:
            nodes = self.holders(record.uid)
            if not nodes:
                raise NotReady("no node with the role store is there; requests cannot be kept")
            with _doubted(record.uid, doubt):
                return _outcome(record.uid, await self._keep_at_each(nodes, record, inputs))
        key = record.key
        claim = KeyClaim(self._env, self._calls, record, lambda: self.holders(key))
        try:
            claimed = await claim.obtain()
            if isinstance(claimed, str):
                return claimed
            with _doubted(record.uid, doubt):
                uid = await self._keep_claimed(claim, claimed, record, inputs)
            if uid != record.uid:  # two have the key, where more went wrong than copies make good: both run
                doubt(record.uid)
            return uid
        finally:
            claim.release()

    async def _keep_claimed(
        self, claim: KeyClaim, nodes: Sequence[NodeRoute], record: RequestRecord, inputs: dict[str, object]
    ) -> str:
        """This node's own store comes last; see the module's text."""
        own = [node for node in nodes if node.node_id == self._env.node_id]
        others = [node for node in nodes if node.node_id != self._env.node_id]
        outcomes = await self._keep_at_each(others, record, inputs, claim)
        if own and _may_follow(record.uid, outcomes):
            if record.owner_life != self._env.identity.life:
                raise NotReady(
                    f"{self._env.node_id} was declared dead while it accepted request {record.uid}; submit "
                    "it again with the same key",
                    uid=record.uid,
                )
            outcomes += await self._keep_at_each(own, record, inputs, claim)
        return _outcome(record.uid, outcomes)

    async def _keep_at_each(
        self,
        nodes: Sequence[NodeRoute],
        record: RequestRecord,
        inputs: dict[str, object],
        claim: KeyClaim | None = None,
    ) -> "list[str | OnePieceError]":
        """For each node the UID that the key stands for there, or why the record was not kept."""

        async def keep(node: NodeRoute) -> str | OnePieceError:
            try:
                uid = await self._keep_at(node, record, inputs)
            except OnePieceError as error:
                return error
            if claim is not None:
                claim.kept_at(node)
            return uid

        return list(await asyncio.gather(*map(keep, nodes)))

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
        for node in self.record_holders(uid, key):
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

    async def body(self, uid: str, key: str | None) -> bytes:
        """The packed inputs of a request's record; raises ``UnknownRequest`` if no store node has it."""
        last: OnePieceError = NotReady(f"no store node has the inputs of request {uid}")
        for node in [*self.record_holders(uid, key), *self.stores().values()]:
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


@contextmanager
def _doubted(uid: str, doubt: Callable[[str], None]) -> Iterator[None]:
    """What fails in the block may have been done all the same."""
    try:
        yield
    except BaseException:
        doubt(uid)
        raise


def _may_follow(uid: str, outcomes: "Sequence[str | OnePieceError]") -> bool:
    """Whether this node may keep a record behind the others: one has it, or they have no room for it."""
    taken = [each for each in outcomes if isinstance(each, str)]
    if taken:
        return all(each == uid for each in taken)
    return all(isinstance(each, StoreFull) for each in outcomes)


def _outcome(uid: str, outcomes: "Sequence[str | OnePieceError]") -> str:
    """The UID that a request's key stands for; raises the first error if no node has the record."""
    taken = [each for each in outcomes if isinstance(each, str)]
    if not taken:
        raise next(each for each in outcomes if isinstance(each, OnePieceError))
    return next((each for each in taken if each != uid), uid)
