"""Requests of which their owner has heard nothing for long: have they ended without it?

Two proxies may drive one request: each took it over while it could not reach the other, or one was taken for
dead and is not. Then one of them ends it, all nodes let go of it, and the other would wait for ever. So an
owner asks the stores about what has been quiet; what stands there is the end.

Nodes that let go of a request say so to whoever sends them more of it (``let_go``). That is no end for an
owner that still drives it, and no reason to wait: it asks at once.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from onepiece.core.request import RequestTable
from onepiece.core.request_events import EndFound, EndStands
from onepiece.errors import OnePieceError, ResultGone
from onepiece.node.result_reader import ResultReader
from onepiece.runtime.environment import Clock

_LOOK_SECONDS: Final = 5.0
_QUIET_SECONDS: Final = 20.0
"""What was quiet for so long is asked about, and again after as long."""
_AT_ONCE: Final = 16
_LET_GO: Final = "let_go"


def let_go(uid: str) -> OnePieceError:
    """Why a node does no more of a request: it was told that it has ended."""
    return OnePieceError(f"request {uid} has ended", uid=uid, **{_LET_GO: True})


def says_let_go(error: Mapping[str, Any]) -> bool:
    """Whether this is such a word, as of ``to_wire``."""
    fields = error.get("fields")
    return isinstance(fields, Mapping) and fields.get(_LET_GO) is True


class QuietRequests:
    """Asks about requests that are quiet.

    Args:
        table: The owner's requests.
        results: Who knows how they ended.
        handle: Takes word of an end.
        clock: Monotonic seconds.
    """

    def __init__(
        self, table: RequestTable, results: ResultReader, handle: Callable[[EndFound], None], clock: Clock
    ) -> None:
        self._table = table
        self._results = results
        self._handle = handle
        self._clock = clock
        self._heard: dict[str, tuple[int, float]] = {}
        """How many events each live request had, and since when, or when it was last asked about."""
        self._doubted: set[str] = set()
        self._wake = asyncio.Event()

    def doubt(self, uid: str) -> None:
        """Somebody says that a live request has ended: ask soon."""
        self._doubted.add(uid)
        self._wake.set()

    async def look(self) -> None:
        """Look now and then, until cancelled."""
        room = asyncio.Semaphore(_AT_ONCE)

        async def ask(uid: str) -> None:
            async with room:
                await self._ask(uid)

        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._wake.wait()
            self._wake.clear()
            wanted = self._doubted.intersection(self._table.live_uids()).union(self._quiet(self._clock()))
            self._doubted.clear()
            await asyncio.gather(*(ask(uid) for uid in sorted(wanted)))

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
            self._handle(EndFound(uid, EndStands(uid, None)))
        except OnePieceError:
            return  # it has not ended, or that is not known
        else:
            ended = EndStands(uid, status.error, status.result_bytes or 0, status.content_type or "")
            self._handle(EndFound(uid, ended))
