"""How requests end that have no result: the error is stored before anybody hears of it, as a result is.

::

    intent --every holder has it--> what stands best? --the intent, or an error--> error --one has it--> told
                                          |
                                          +-- a result, or its tombstone --> told

Every node that is to hold what is stored of the request is asked, so that whoever adopts it meanwhile
meets the intent on one of them, or has stored something there before. What stands best, by the rule by
which copies come to be alike (``Version.beats``), is how the request has ended.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Final

from attrs import evolve, frozen

from onepiece.core.replication_events import Version
from onepiece.core.request_events import EndStands, KeepError
from onepiece.core.routing import NodeRoute
from onepiece.errors import (
    CodecError,
    NodeUnreachable,
    OnePieceError,
    PayloadTooLarge,
    ResultGone,
    fitting,
    shortened,
)
from onepiece.limits import DELIVERY_PATIENCE_SECONDS
from onepiece.log import get_logger
from onepiece.messages import CONTROL_REGION, ResultDescribed, StoreFailure
from onepiece.node.calls import Calls
from onepiece.node.record_keeper import RecordKeeper
from onepiece.runtime.environment import Environment
from onepiece.store import RecordKind

_STORE_SECONDS: Final = 3.0
_AGAIN_SECONDS: Final = 1.0
_ASKS_MIN: Final = int(DELIVERY_PATIENCE_SECONDS / (_STORE_SECONDS + _AGAIN_SECONDS))
"""How often holders are asked before patience ends: a process that stood still waited, and asked nobody."""


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
        """Store an error, unless the request has ended already; returns how it has ended.

        Waits until every holder has answered, but not longer than ``DELIVERY_PATIENCE_SECONDS``: no client is
        to wait for ever for holders that are gone, or out of reach but not for the manager. Then one is
        enough. Where all refuse, as their disks are full, the other store nodes are asked, and as long as
        one is away, it is waited for, too. Where none has taken it by then, the error stands though it is
        stored nowhere: if this owner dies, another one may end the request otherwise.

        What a store refuses for its size, it would refuse for ever: the least of the error is stored then.
        """
        wanted = evolve(wanted, error=fitting(wanted.error))
        least = evolve(wanted, error=shortened(wanted.error))
        patience = self._patience()
        while True:
            changed = self._env.routes.changed
            answers, has_all = await self._ask_holders(wanted, is_settled=False)
            stored = [each for each in answers if _is_stored(each)]
            if wanted is not least and any(map(_is_too_much, answers)):
                get_logger().warning("error_stored_shortened", request=wanted.uid)
                wanted = least
                continue
            is_known = has_all and (bool(stored) or self._env.routes.why_unsure() is None)
            if is_known or not next(patience):
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_SECONDS):
                    await changed.wait()
        if stored:
            return await self._settle(wanted, _best(wanted.uid, stored))
        get_logger().warning("error_told_unstored", request=wanted.uid)
        return Kept(EndStands(wanted.uid, wanted.error), is_stored=False)

    async def _settle(self, wanted: KeepError, stands: EndStands) -> Kept:
        """The end is decided: where it is an error, say so on the holders, of which one is enough.

        Where none answers for ``DELIVERY_PATIENCE_SECONDS`` it is told with intents alone in the stores.
        """
        if stands.error is None:
            return Kept(stands, is_stored=True)
        settled = evolve(wanted, error=stands.error)
        patience = self._patience()
        while True:
            answers, _ = await self._ask_holders(settled, is_settled=True)
            if any(_is_stored(each) for each in answers):
                return Kept(stands, is_stored=True)
            if not next(patience):
                return Kept(stands, is_stored=False)
            await asyncio.sleep(_AGAIN_SECONDS)

    def _patience(self) -> Iterator[bool]:
        """Whether there is some left, behind each time that holders were asked."""
        loop = asyncio.get_running_loop()
        patient_until = loop.time() + DELIVERY_PATIENCE_SECONDS
        for asks in itertools.count(1):
            yield asks < _ASKS_MIN or loop.time() < patient_until

    async def keep_late(self, wanted: KeepError) -> None:
        """Store an error that no holder took, as soon as one does, unless something stands by then."""
        is_stored = False
        while not is_stored:
            await asyncio.sleep(_AGAIN_SECONDS)
            is_stored = (await self.keep(wanted)).is_stored

    async def _ask_holders(
        self, wanted: KeepError, *, is_settled: bool
    ) -> tuple[list[ResultDescribed], bool]:
        """The answers, and whether there is one from each that was asked.

        Where no holder has room any other store node will do: readers ask them all.
        """
        holders = self._records.holders(wanted.uid)
        answers = await self._ask(holders, wanted, is_settled=is_settled)
        if not holders or len(answers) < len(holders):
            return answers, False
        if any(map(_is_stored, answers)):
            return answers, True
        others = [node for node in self._records.stores().values() if node not in holders]
        more = await self._ask(others, wanted, is_settled=is_settled)
        return answers + more, len(more) == len(others)

    async def _ask(
        self, nodes: Sequence[NodeRoute], wanted: KeepError, *, is_settled: bool
    ) -> list[ResultDescribed]:
        """The answers of those that answer."""
        asking = (self._ask_one(node, wanted, is_settled=is_settled) for node in nodes)
        return [each for each in await asyncio.gather(*asking) if each is not None]

    async def _ask_one(
        self, node: NodeRoute, wanted: KeepError, *, is_settled: bool
    ) -> ResultDescribed | None:
        """What stands on a node; None if it does not answer."""
        address, reply_to = f"{node.address}/{CONTROL_REGION}", self._env.control_address
        try:
            return await self._calls.ask(
                ResultDescribed,
                lambda call: self._env.outbox.post(
                    address,
                    StoreFailure(call, reply_to, wanted.uid, wanted.workflow, wanted.error, is_settled),
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


def _is_too_much(answer: ResultDescribed) -> bool:
    """The error as it is has no form in the store, or is larger than a record may be."""
    if answer.error is None:
        return False
    return isinstance(OnePieceError.from_wire(answer.error), PayloadTooLarge | CodecError)


def _best(uid: str, stored: Sequence[ResultDescribed]) -> EndStands:
    """The best of what stands on the holders."""
    best = min(stored, key=lambda answer: _version(uid, answer).order)
    if best.failure is not None:
        return EndStands(uid, best.failure)
    return EndStands(uid, None, best.result_bytes, best.content_type)


def _version(uid: str, answer: ResultDescribed) -> Version:
    if _is_gone(answer):
        kind = RecordKind.TOMBSTONE
    elif answer.failure is None:
        kind = RecordKind.RESULT
    else:
        kind = RecordKind.INTENT if answer.is_intent else RecordKind.ERROR
    return Version(uid, kind.value, answer.stored_at)
