"""What a node has of requests that have ended without its being told.

Word that a request has ended goes to the nodes that its owner knows to have something of it. It can miss
one: the owner died before it was sent, or a stage ran twice and the owner never heard of the second run.
So a node asks about what it has had for some time, and more often while it drains: it waits to be rid
of that. Whoever owns the request answers, or, if nobody is known to, any proxy: it looks for the request's
record, which is there until the request has ended.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from onepiece.errors import OnePieceError
from onepiece.messages import AskEnded, ReleaseRequests
from onepiece.node.control import ControlService
from onepiece.node.record_keeper import RecordKeeper
from onepiece.record_messages import DropRecords
from onepiece.runtime.environment import Environment

LOOK_SECONDS: Final = 1.0
FIRST_SECONDS: Final = 2.0
"""What was held so long is asked about; most is let go of sooner."""
AGAIN_SECONDS: Final = 20.0
"""It is asked about again after so long, or after ``FIRST_SECONDS`` by a node that drains."""
ASK_MAX: Final = 256
"""Requests in one question."""


class Leftovers:
    """Asks about what this node has had for long.

    Args:
        env: The node.
        held: The owner's control address, as far as this node knows, of each request it has something of.
    """

    def __init__(self, env: Environment, held: Callable[[], Mapping[str, str]]) -> None:
        self._env = env
        self._held = held
        self._seen_at: dict[str, float] = {}
        """When each request was first seen here, or last asked about."""
        self._asked: set[str] = set()
        self.in_haste = False
        """Whether this node drains."""

    async def look(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._look(self._env.monotonic())

    def _look(self, now: float) -> None:
        held = self._held()
        self._seen_at = {uid: self._seen_at.get(uid, now) for uid in held}
        self._asked.intersection_update(held)
        old = [uid for uid, seen_at in self._seen_at.items() if now >= seen_at + self._patience(uid)]
        by_address: dict[str, list[str]] = {}
        for uid in sorted(old, key=self._seen_at.__getitem__)[:ASK_MAX]:
            self._seen_at[uid] = now
            self._asked.add(uid)
            by_address.setdefault(self._env.owner_of(uid, held[uid]), []).append(uid)
        for address, uids in by_address.items():
            self._env.outbox.post(address, AskEnded(self._env.control_address, tuple(uids)))

    def _patience(self, uid: str) -> float:
        return AGAIN_SECONDS if uid in self._asked and not self.in_haste else FIRST_SECONDS


class EndedRequests:
    """A proxy's answers about requests that may have ended.

    Args:
        env: The node.
        tasks: Where answers are worked out.
        is_over: Whether nothing of a request known here is needed any more; raises ``UnknownRequest``.
        records: Where other requests are looked for.
    """

    def __init__(
        self,
        env: Environment,
        tasks: asyncio.TaskGroup,
        is_over: Callable[[str], bool],
        records: RecordKeeper,
    ) -> None:
        self._env = env
        self._tasks = tasks
        self._is_over = is_over
        self._records = records

    def attach(self, control: ControlService) -> None:
        """Receive the questions."""
        control.on(AskEnded, lambda ask: self._tasks.create_task(self._answer(ask)))

    async def _answer(self, ask: AskEnded) -> None:
        ended = [uid for uid in ask.uids if await self._has_ended(uid)]
        if ended:
            answer = (DropRecords if ask.of_records else ReleaseRequests)(tuple(ended))
            self._env.outbox.post(ask.reply_to, answer)

    async def _has_ended(self, uid: str) -> bool:
        """False if it is not known for sure."""
        try:
            return self._is_over(uid)
        except OnePieceError:
            pass
        try:
            return await self._records.find(uid) is None
        except OnePieceError:
            return False
