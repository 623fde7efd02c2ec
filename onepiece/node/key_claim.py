"""A proxy's claim of a key at all store nodes that are to keep the request's record.

All are asked at once. Who has the first of them (in the order that all proxies share) asks the others
again for a while; who has not lets go of all, so that two proxies do not hold half of them each.

A holder that does not answer is waited for, or found to have left the set: whatever it knows of the key
is on its disk, and it may be back at any time. Only one that was declared dead is done without.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Final

from onepiece.core.routing import NodeRoute
from onepiece.errors import NodeUnreachable, NotReady
from onepiece.messages import CONTROL_REGION
from onepiece.node.calls import Calls
from onepiece.record_messages import ClaimKey, KeyClaimed, ReleaseClaim, RequestRecord
from onepiece.runtime.environment import Environment

CLAIM_SECONDS_MAX: Final = 6.0
"""How long a claim may take until the client is told to come again, and what the last question takes."""
_ASK_SECONDS: Final = 2.0
_PAUSE_SECONDS: Final = 0.02
_PAUSE_SECONDS_MAX: Final = 0.5

Holders = Callable[[], Sequence[NodeRoute]]
"""The store nodes that are to keep the record, the first choice first, as they are known now."""


class KeyClaim:
    """The claim of one request."""

    def __init__(self, env: Environment, calls: Calls, record: RequestRecord, holders: Holders) -> None:
        assert record.key is not None, "what has no key claims none"
        self._env = env
        self._calls = calls
        self._key = record.key
        self._uid = record.uid
        self._owner_life = record.owner_life
        self._holders = holders
        self._asked: dict[str, NodeRoute] = {}
        """Nodes that may have granted it, by life."""
        self._granted: set[str] = set()
        """The lives of those that have."""
        self._refusal = ""

    async def obtain(self) -> Sequence[NodeRoute] | str:
        """Claim the key; returns the nodes that hold it for this request, or the UID that has it already.

        Raises ``NotReady`` if that can't be told now. Call ``release`` in any case.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + CLAIM_SECONDS_MAX - _ASK_SECONDS
        pause = _PAUSE_SECONDS
        while True:
            changed = self._env.routes.changed
            nodes = self._holders()
            if not nodes:
                raise NotReady("no node with the role store is there; requests cannot be kept")
            missing = [node for node in nodes if node.life not in self._granted]
            if not missing:
                return nodes
            if loop.time() >= give_up_at:
                raise NotReady(f"{self._refusal}; submit the request again with the same key")
            answers = await asyncio.gather(*map(self._ask, missing))
            holder = next((uid for uid in answers if uid is not None), None)
            if holder is not None:
                return holder
            if all(node.life in self._granted for node in nodes):
                continue
            if nodes[0].life not in self._granted:
                self.release()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause * (0.5 + self._env.rng.random())):
                    await changed.wait()
            pause = min(2 * pause, _PAUSE_SECONDS_MAX)

    async def _ask(self, node: NodeRoute) -> str | None:
        """Claim the key at one node; returns the UID that the key stands for there, if any."""
        address, reply_to = f"{node.address}/{CONTROL_REGION}", self._env.control_address
        self._asked[node.life] = node
        try:
            claimed = await self._calls.ask(
                KeyClaimed,
                lambda call: self._env.outbox.post(
                    address, ClaimKey(call, reply_to, self._key, self._uid, self._owner_life)
                ),
                what=f"{node.node_id} was asked for the key of request {self._uid}",
                timeout_seconds=_ASK_SECONDS,
            )
        except NodeUnreachable as error:
            self._refusal = f"what the key stands for is not known: {error.message}"
            return None
        if claimed.granted:
            self._granted.add(node.life)
        else:
            del self._asked[node.life]
            self._refusal = "another request with the same key is being accepted just now"
        return claimed.uid

    def kept_at(self, node: NodeRoute) -> None:
        """This node has the record, and needs no claim any more."""
        self._asked.pop(node.life, None)

    def release(self) -> None:
        """Let go of the key wherever it may have been granted."""
        for node in self._asked.values():
            self._env.outbox.post(f"{node.address}/{CONTROL_REGION}", ReleaseClaim(self._key, self._uid))
        self._asked.clear()
        self._granted.clear()
