"""Results, read on behalf of a proxy from whichever node stores them.

Where a result is the proxy learns when it is stored. If it does not know, because another proxy owned
the request or because it was started anew since, it asks the stores: they outlive proxies.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final

from attrs import define

from onepiece.core.routing import NodeRoute, rendezvous
from onepiece.errors import NotReady, OnePieceError, UnknownRequest
from onepiece.limits import RECORDS_MAX, RESULT_PIECE_BYTES_MAX
from onepiece.messages import CONTROL_REGION, PurgeResult, ReadResult, ResultPiece
from onepiece.node.control import ControlService
from onepiece.runtime.environment import Environment

_READ_SECONDS: Final = 10.0

Ask = Callable[[int], ReadResult | PurgeResult]
"""Makes the message for a call of this number."""


class ResultReader:
    """Calls result stores and matches their answers."""

    def __init__(self, env: Environment, control_address: str) -> None:
        self._env = env
        self._control_address = control_address
        self._stored_at: dict[str, str] = {}
        self._calls: dict[int, asyncio.Future[ResultPiece]] = {}

    def attach(self, control: ControlService) -> None:
        """Receive the stores' answers."""
        control.on(ResultPiece, self._on_piece)

    def note(self, uid: str, node_id: str) -> None:
        """Remember where a result is; the oldest of too many are forgotten, and asked for again."""
        self._stored_at[uid] = node_id
        while len(self._stored_at) > RECORDS_MAX:
            del self._stored_at[next(iter(self._stored_at))]

    async def open(self, uid: str) -> "RemoteResult":
        """Open a result.

        Raises ``UnknownRequest`` if no store has heard of it, ``ResultGone`` if it was there, and
        ``NotReady`` if the node that may have it does not answer.
        """
        piece = await self.read(uid, 0, 0)
        return RemoteResult(self, uid, piece.total_bytes, piece.content_type)

    async def read(self, uid: str, start: int, length: int) -> ResultPiece:
        """At most ``length`` bytes of a result; raises as ``open``."""
        return await self._call(await self._holder(uid), uid, self._ask_read(uid, start, length))

    async def purge(self, uid: str) -> None:
        """Drop a result; raises as ``open``."""
        await self._call(
            await self._holder(uid), uid, lambda call: PurgeResult(call, self._control_address, uid)
        )

    def _ask_read(self, uid: str, start: int, length: int) -> Ask:
        return lambda call: ReadResult(call, self._control_address, uid, start, length)

    async def _holder(self, uid: str) -> NodeRoute:
        node_id = self._stored_at.get(uid)
        if node_id is None:
            return await self._find(uid)
        node = self._env.routes.table.node(node_id)
        if node is None:
            raise NotReady(f"the node {node_id} that stores the result of {uid} is not there", uid=uid)
        return node

    async def _find(self, uid: str) -> NodeRoute:
        """Ask the stores one after the other, the likeliest first."""
        stores = {node.node_id: node for node in self._env.routes.table.nodes if "store" in node.roles}
        silent: OnePieceError | None = None
        while stores:
            node = stores.pop(rendezvous(uid, stores))
            try:
                await self._call(node, uid, self._ask_read(uid, 0, 0))
            except UnknownRequest:
                continue
            except NotReady as error:
                silent = error
                continue
            self.note(uid, node.node_id)
            return node
        raise silent or UnknownRequest(
            f"no request {uid!r} is known here, and no result of it is stored; it may have ended long ago",
            uid=uid,
        )

    async def _call(self, node: NodeRoute, uid: str, ask: Ask) -> ResultPiece:
        number = next(self._env.call_numbers)
        answer: asyncio.Future[ResultPiece] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            self._env.outbox.post(f"{node.address}/{CONTROL_REGION}", ask(number))
            async with asyncio.timeout(_READ_SECONDS):
                piece = await answer
        except TimeoutError:
            raise NotReady(
                f"{node.node_id} did not answer within {_READ_SECONDS:.0f} s for the result of {uid}", uid=uid
            ) from None
        finally:
            del self._calls[number]
        if piece.error is not None:
            raise OnePieceError.from_wire(piece.error)
        return piece

    def _on_piece(self, piece: ResultPiece) -> None:
        answer = self._calls.get(piece.call)
        if answer is not None and not answer.done():
            answer.set_result(piece)


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
