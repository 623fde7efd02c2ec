"""Results, read on behalf of a proxy from whichever node stores them.

Where a result is the proxy learns when it is stored. If it does not know, because another proxy owned
the request or because it was started anew since, it asks the stores: they outlive proxies.
"""

from collections.abc import AsyncIterator, Callable
from typing import Final

from attrs import define

from onepiece.core.owned_request import state_of
from onepiece.core.routing import NodeRoute, ranked
from onepiece.errors import NodeUnreachable, NotReady, OnePieceError, UnknownRequest
from onepiece.ids import uid_time
from onepiece.limits import RECORDS_MAX, RESULT_PIECE_BYTES_MAX
from onepiece.messages import (
    CONTROL_REGION,
    DescribeResult,
    PurgeResult,
    ReadResult,
    ResultDescribed,
    ResultPiece,
)
from onepiece.node.calls import Calls
from onepiece.requests import RequestState, RequestStatus
from onepiece.runtime.environment import Environment

_READ_SECONDS: Final = 10.0
_FIND_SECONDS: Final = 3.0

Ask = Callable[[int], ReadResult | PurgeResult]
"""Makes the message for a call of this number."""


class ResultReader:
    """Asks result stores."""

    answers: Final = (ResultPiece, ResultDescribed)
    """What its questions are answered by."""

    def __init__(self, env: Environment, calls: Calls) -> None:
        self._env = env
        self._calls = calls
        self._stored_at: dict[str, str] = {}

    def note(self, uid: str, node_id: str) -> None:
        """Remember where a result is; the oldest of too many are forgotten, and asked for again."""
        self._stored_at[uid] = node_id
        while len(self._stored_at) > RECORDS_MAX:
            del self._stored_at[next(iter(self._stored_at))]

    async def open(self, uid: str) -> "RemoteResult":
        """Open a result.

        Raises the error that the request ended in, ``UnknownRequest`` if no store has heard of it,
        ``ResultGone`` if it was there, and ``NotReady`` if a node that may have it does not answer.
        """
        piece = await self.read(uid, 0, 0)
        return RemoteResult(self, uid, piece.total_bytes, piece.content_type)

    async def read(self, uid: str, start: int, length: int) -> ResultPiece:
        """At most ``length`` bytes of a result; raises as ``open``."""
        reply_to = self._env.control_address
        return await self._ask(uid, lambda call: ReadResult(call, reply_to, uid, start, length))

    async def purge(self, uid: str) -> None:
        """Drop a result; raises as ``open``."""
        await self._ask(uid, lambda call: PurgeResult(call, self._env.control_address, uid))

    async def describe(self, uid: str) -> RequestStatus:
        """How a request ended, as the stores know it; raises ``open``'s errors but the request's own."""
        node, described = await self._find(uid)
        self.note(uid, node.node_id)
        failure = described.failure
        state = RequestState.FINISHED
        if failure is not None:
            state = state_of(failure)
        return RequestStatus(
            uid=uid,
            workflow=described.workflow,
            state=state,
            accepted_at=uid_time(uid),
            deadline_at=None,
            finished_at=described.stored_at,
            stages={},
            error=failure,
            result_bytes=described.result_bytes if failure is None else None,
            content_type=described.content_type if failure is None else None,
        )

    async def _ask(self, uid: str, ask: Ask) -> ResultPiece:
        """Ask the node that has it; if that one is silent or does not know, look where else it is."""
        known = self._env.routes.table.node(self._stored_at.get(uid, ""))
        if known is not None:
            try:
                return await self._call(known, uid, ask)
            except (NotReady, UnknownRequest):
                self._stored_at.pop(uid, None)
        node, _ = await self._find(uid)
        self.note(uid, node.node_id)
        return await self._call(node, uid, ask)

    async def _find(self, uid: str) -> tuple[NodeRoute, ResultDescribed]:
        """The node that has what is stored of a request; the stores are asked one by one, likeliest first."""
        stores = {node.node_id: node for node in self._env.routes.table.nodes if "store" in node.roles}
        missing: OnePieceError | None = None
        if not stores:
            missing = NotReady("no node with the role store is there; results cannot be looked up", uid=uid)
        for name in ranked(uid, stores):
            try:
                described = await self._describe_at(stores[name], uid)
            except NodeUnreachable as error:
                missing = NotReady(error.message, uid=uid)
                continue
            if described.error is None:
                return stores[name], described
            refusal = OnePieceError.from_wire(described.error)
            if not isinstance(refusal, UnknownRequest):
                raise refusal
        raise missing or UnknownRequest(
            f"no request {uid!r} is known here, and no result of it is stored; it may have ended long ago",
            uid=uid,
        )

    async def _describe_at(self, node: NodeRoute, uid: str) -> ResultDescribed:
        address, reply_to = f"{node.address}/{CONTROL_REGION}", self._env.control_address
        return await self._calls.ask(
            ResultDescribed,
            lambda call: self._env.outbox.post(address, DescribeResult(call, reply_to, uid)),
            what=f"{node.node_id} was asked for the result of {uid}",
            timeout_seconds=_FIND_SECONDS,
        )

    async def _call(self, node: NodeRoute, uid: str, ask: Ask) -> ResultPiece:
        address = f"{node.address}/{CONTROL_REGION}"
        try:
            piece = await self._calls.ask(
                ResultPiece,
                lambda call: self._env.outbox.post(address, ask(call)),
                what=f"{node.node_id} was asked for the result of {uid}",
                timeout_seconds=_READ_SECONDS,
            )
        except NodeUnreachable as error:
            raise NotReady(error.message, uid=uid) from error
        if piece.error is not None:
            raise OnePieceError.from_wire(piece.error)
        return piece


@define(eq=False)
class RemoteResult:
    """An open result, read from the store that holds it."""

    _reader: ResultReader
    uid: str
    total_bytes: int
    content_type: str

    async def read(self, start: int, length: int) -> AsyncIterator[bytes]:
        """The bytes from ``start`` on, in pieces of a bounded size."""
        end = min(start + length, self.total_bytes)
        while start < end:
            wanted = min(end - start, RESULT_PIECE_BYTES_MAX)
            piece = await self._reader.read(self.uid, start, wanted)
            if not piece.data:
                raise NotReady(f"the result of {self.uid} ended at byte {start} of {self.total_bytes}")
            start += len(piece.data)
            yield piece.data
