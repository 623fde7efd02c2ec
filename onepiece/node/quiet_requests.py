"""Requests of which their owner has heard nothing for long: have they ended without it?

Two proxies may drive one request: each took it over while it could not reach the other, or one was taken for
dead and is not. Then one of them ends it, all nodes let go of it, and the other would wait for ever. So an
owner asks the stores about what has been quiet; what stands there is the end.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from onepiece.core.request import RequestTable
from onepiece.core.request_events import EndStands
from onepiece.errors import OnePieceError, ResultGone
from onepiece.node.result_reader import ResultReader
from onepiece.runtime.environment import Clock

_LOOK_SECONDS: Final = 5.0
_QUIET_SECONDS: Final = 20.0
"""What was quiet for so long is asked about, and again after as long."""
_AT_ONCE: Final = 16


class QuietRequests:
    """Asks about requests that are quiet.

    Args:
        table: The owner's requests.
        results: Who knows how they ended.
        handle: Takes word of an end.
        clock: Monotonic seconds.
    """

    def __init__(
        self, table: RequestTable, results: ResultReader, handle: Callable[[EndStands], None], clock: Clock
    ) -> None:
        self._table = table
        self._results = results
        self._handle = handle
        self._clock = clock
        self._heard: dict[str, tuple[int, float]] = {}
        """How many events each live request had, and since when, or when it was last asked about."""

    async def look(self) -> None:
        """Look now and then, until cancelled."""
        room = asyncio.Semaphore(_AT_ONCE)

        async def ask(uid: str) -> None:
            async with room:
                await self._ask(uid)

        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await asyncio.gather(*(ask(uid) for uid in self._quiet(self._clock())))

    def _quiet(self, now: float) -> list[str]:
        events = {uid: self._table.event_count(uid) for uid in self._table.live_uids()}
        known = {uid: self._heard.get(uid, (-1, now)) for uid in events}
        self._heard = {
            uid: known[uid] if known[uid][0] == count else (count, now) for uid, count in events.items()
        }
        quiet = [uid for uid, (_, since) in self._heard.items() if now >= since + _QUIET_SECONDS]
        for uid in quiet:
            self._heard[uid] = (events[uid], now)
        return quiet

    async def _ask(self, uid: str) -> None:
        try:
            status = await self._results.describe(uid)
        except ResultGone:
            self._handle(EndStands(uid, None))
        except OnePieceError:
            return  # it has not ended, or that is not known
        else:
            ended = EndStands(uid, status.error, status.result_bytes or 0, status.content_type or "")
            self._handle(ended)
