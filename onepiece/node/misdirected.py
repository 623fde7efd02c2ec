"""Word for a request's owner that came to a proxy which is not its owner.

A stage tells the owner that its inputs named. If that one died, another proxy has adopted the request, and
its nodes were told so. But a node that joined since was not; and the dead owner's node may be back at
the old address. So a proxy that is told about a request it does not know looks for the record, and passes
the word on to whom it names.
"""

import asyncio
from collections import OrderedDict
from typing import Final

from onepiece.errors import OnePieceError
from onepiece.log import get_logger
from onepiece.node.record_keeper import RecordKeeper
from onepiece.runtime.environment import Environment

_PENDING_MAX: Final = 256
"""Messages about one request while its owner is looked for."""
_REQUESTS_MAX: Final = 4096
"""Requests whose owner is looked for at a time; word about others is dropped, and logged."""
_KNOWN_MAX: Final = 4096


class Misdirected:
    """Passes on what is not this proxy's to know."""

    def __init__(self, env: Environment, tasks: asyncio.TaskGroup, records: RecordKeeper) -> None:
        self._env = env
        self._tasks = tasks
        self._records = records
        self._pending: dict[str, list[object]] = {}
        self._known: OrderedDict[str, str] = OrderedDict()
        """Control address of the owner found last, by UID."""

    def pass_on(self, uid: str, message: object) -> None:
        """Send a message to whoever owns the request, if anybody does."""
        known = self._known.get(uid)
        if known is not None and known in self._env.routes.proxies.values():
            self._env.outbox.post(known, message)
            return
        pending = self._pending.get(uid)
        if pending is not None:
            if len(pending) < _PENDING_MAX:
                pending.append(message)
        elif len(self._pending) >= _REQUESTS_MAX:
            get_logger().warning("word_dropped", request=uid, message=type(message).__name__)
        else:
            self._pending[uid] = [message]
            self._tasks.create_task(self._look(uid), name=f"owner of {uid}")

    async def _look(self, uid: str) -> None:
        owner = None
        try:
            record = await self._records.find(uid)
            owner = None if record is None else record.owner
        except OnePieceError as error:
            get_logger().warning("owner_unknown", request=uid, error=error.message)
        messages = self._pending.pop(uid)
        if owner is None or owner == self._env.control_address:
            return  # it has ended, or is adopted here just now: then every node is asked what it has
        self._known[uid] = owner
        if len(self._known) > _KNOWN_MAX:
            self._known.popitem(last=False)
        for message in messages:
            self._env.outbox.post(owner, message)
