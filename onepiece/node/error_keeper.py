"""How requests end that have no result: the error is stored before anybody hears of it, as a result is.

Every node that is to hold what is stored of the request is asked, so that whoever adopts it meanwhile
meets the error on one of them, or has stored something there before. What was first stands, by the rule by
which copies come to be alike (``Version.beats``), and that is how the request has ended.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from typing import Final

from attrs import frozen

from onepiece.core.request_events import EndStands, KeepError
from onepiece.core.routing import NodeRoute
from onepiece.errors import NodeUnreachable, OnePieceError, ResultGone
from onepiece.limits import DELIVERY_PATIENCE_SECONDS
from onepiece.log import get_logger
from onepiece.messages import CONTROL_REGION, ResultDescribed, StoreFailure
from onepiece.node.calls import Calls
from onepiece.node.record_keeper import RecordKeeper
from onepiece.runtime.environment import Environment

_STORE_SECONDS: Final = 3.0
_AGAIN_SECONDS: Final = 1.0
_ASKS_MIN: Final = int(DELIVERY_PATIENCE_SECONDS / (_STORE_SECONDS + _AGAIN_SECONDS))
"""How often holders are asked before patience ends: who stood still has waited, and has asked nobody."""


@frozen
class Kept:
    """What stands in the stores, and whether it does so there, or nowhere since none of them takes it."""

    stands: EndStands
    is_stored: bool


class ErrorKeeper:
    """A proxy's way to have errors stored."""

    def __init__(self, env: Environment, calls: Calls, records: RecordKeeper) -> None:
        self._env = env
        self._calls = calls
        self._records = records

    async def keep(self, wanted: KeepError) -> Kept:
        """Store an error; returns what stands then.

        Waits until every holder has answered, but not longer than ``DELIVERY_PATIENCE_SECONDS``: no client is
        to wait for ever for holders that are gone, or out of reach but not for the manager. Then one is
        enough. Where none has taken it by then, or all refuse, as their disks are full, the error stands
        though it is stored nowhere.
        """
        loop = asyncio.get_running_loop()
        patient_until = loop.time() + DELIVERY_PATIENCE_SECONDS
        for asks in itertools.count(1):
            changed = self._env.routes.changed
            holders = self._records.holders(wanted.uid)
            answers = [each for each in await self._ask(holders, wanted) if each is not None]
            stored = [each for each in answers if _is_stored(each)]
            has_all = bool(holders) and len(answers) == len(holders)
            if has_all or (asks >= _ASKS_MIN and loop.time() >= patient_until):
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_SECONDS):
                    await changed.wait()
        if stored:
            return Kept(_first(wanted.uid, stored), is_stored=True)
        get_logger().warning("error_told_unstored", request=wanted.uid)
        return Kept(EndStands(wanted.uid, wanted.error), is_stored=False)

    async def keep_late(self, wanted: KeepError) -> None:
        """Store an error that no holder took, as soon as one does, unless something stands by then."""
        is_stored = False
        while not is_stored:
            await asyncio.sleep(_AGAIN_SECONDS)
            is_stored = (await self.keep(wanted)).is_stored

    async def _ask(self, nodes: Sequence[NodeRoute], wanted: KeepError) -> list[ResultDescribed | None]:
        return await asyncio.gather(*(self._ask_one(node, wanted) for node in nodes))

    async def _ask_one(self, node: NodeRoute, wanted: KeepError) -> ResultDescribed | None:
        """What stands on a node; None if it does not answer."""
        address, reply_to = f"{node.address}/{CONTROL_REGION}", self._env.control_address
        try:
            return await self._calls.ask(
                ResultDescribed,
                lambda call: self._env.outbox.post(
                    address, StoreFailure(call, reply_to, wanted.uid, wanted.workflow, wanted.error)
                ),
                what=f"{node.node_id} was asked to store how request {wanted.uid} ended",
                timeout_seconds=_STORE_SECONDS,
            )
        except NodeUnreachable as error:
            get_logger().warning("error_not_stored", request=wanted.uid, error=error.message)
            return None


def _is_stored(answer: ResultDescribed) -> bool:
    return answer.error is None or _is_gone(answer)


def _is_gone(answer: ResultDescribed) -> bool:
    """There was a result, and it was fetched."""
    return answer.error is not None and isinstance(OnePieceError.from_wire(answer.error), ResultGone)


def _first(uid: str, stored: Sequence[ResultDescribed]) -> EndStands:
    """What came first; a tombstone comes before all else."""
    first = min(stored, key=lambda answer: (not _is_gone(answer), answer.stored_at))
    if first.failure is not None:
        return EndStands(uid, first.failure)
    return EndStands(uid, None, first.result_bytes, first.content_type)
