"""Errors that requests end in, made durable before clients hear of them.

The store nodes are asked one by one, in the order in which results are sent to them, until one answers. So an
error and a result of one request meet at the same node, and the one that comes first stands everywhere: its
copies are made from there.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from attrs import evolve

from onepiece.core.request_events import EndNotStored, EndStored, StoreEnd
from onepiece.core.routing import ranked
from onepiece.errors import NodeUnreachable
from onepiece.limits import END_SECONDS
from onepiece.log import get_logger
from onepiece.messages import CONTROL_REGION, FailureStored, StoreFailure
from onepiece.node.calls import Calls
from onepiece.node.result_reader import ResultReader
from onepiece.runtime.environment import Environment

_STORE_SECONDS: Final = END_SECONDS / 3


class EndKeeper:
    """Carries out ``StoreEnd``."""

    answers: Final = (FailureStored,)
    """What its questions are answered by."""

    def __init__(
        self,
        env: Environment,
        tasks: asyncio.TaskGroup,
        *,
        calls: Calls,
        results: ResultReader,
        handle: Callable[[EndStored | EndNotStored], None],
    ) -> None:
        self._env = env
        self._tasks = tasks
        self._calls = calls
        self._results = results
        self._handle = handle

    def keep(self, end: StoreEnd) -> None:
        """Have an error stored; the outcome is handled as an event."""
        self._tasks.create_task(self._keep(end), name=f"end of {end.uid}")

    async def _keep(self, end: StoreEnd) -> None:
        stores = {node.node_id: node for node in self._env.routes.table.nodes if "store" in node.roles}
        failure = StoreFailure(0, self._env.control_address, end.uid, end.workflow, end.error)
        for name in ranked(end.uid, stores):
            address = f"{stores[name].address}/{CONTROL_REGION}"
            try:
                stored = await self._calls.ask(
                    FailureStored,
                    lambda call, address=address: self._env.outbox.post(  # type: ignore[misc]  # lambda with defaults
                        address, evolve(failure, call=call)
                    ),
                    what=f"{name} was asked to keep how request {end.uid} ended",
                    timeout_seconds=_STORE_SECONDS,
                )
            except NodeUnreachable as error:
                get_logger().warning("end_not_stored", request=end.uid, store=name, error=error.message)
                continue
            if stored.error is None:
                self._results.note(end.uid, stored.node_id)
                self._handle(EndStored(end.uid, stored.failure, stored.result_bytes, stored.content_type))
                return
        get_logger().warning("end_told_unstored", request=end.uid, error=str(end.error.get("message")))
        self._handle(EndNotStored(end.uid))
