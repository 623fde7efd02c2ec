"""An owner's way to checkpoints: finds the store node that has one, and has it sent."""

import asyncio
from collections.abc import Callable
from typing import Final

from attrs import evolve

from onepiece.checkpoint_messages import OutputRestored, RestoreOutput
from onepiece.core.request_events import CheckpointFound, CheckpointMissing
from onepiece.core.request_record import RestoreCheckpoint
from onepiece.core.routing import ranked
from onepiece.errors import NodeUnreachable
from onepiece.log import get_logger
from onepiece.messages import CONTROL_REGION
from onepiece.node.calls import Calls
from onepiece.runtime.environment import Environment

_FIND_SECONDS: Final = 3.0


class Restorer:
    """Asks the store nodes one by one, likeliest first: they may have been others when it was kept."""

    answers: Final = (OutputRestored,)
    """What its questions are answered by."""

    def __init__(
        self,
        env: Environment,
        tasks: asyncio.TaskGroup,
        calls: Calls,
        handle: Callable[[CheckpointFound | CheckpointMissing], None],
    ) -> None:
        self._env = env
        self._tasks = tasks
        self._calls = calls
        self._handle = handle

    def restore(self, sending: RestoreCheckpoint, stage: str) -> None:
        """Have an output sent to its target, which calls ``stage``; the outcome is handled as an event."""
        name = f"restore {sending.uid}/{sending.source}"
        self._tasks.create_task(self._restore(sending, stage), name=name)

    async def _restore(self, sending: RestoreCheckpoint, stage: str) -> None:
        uid, source, target = sending.uid, sending.source, sending.target
        ask = RestoreOutput(0, self._env.control_address, uid, source, target, stage, sending.attempt)
        stores = {node.node_id: node for node in self._env.routes.table.nodes if "store" in node.roles}
        for name in ranked(uid, stores):
            address = f"{stores[name].address}/{CONTROL_REGION}"
            try:
                found = await self._calls.ask(
                    OutputRestored,
                    lambda call, address=address: self._env.outbox.post(  # type: ignore[misc]  # lambda with defaults
                        address, evolve(ask, call=call)
                    ),
                    what=f"{name} was asked for the checkpoint of {source} of request {uid}",
                    timeout_seconds=_FIND_SECONDS,
                )
            except NodeUnreachable as error:
                get_logger().warning("checkpoint_unknown", request=uid, store=name, error=error.message)
                continue
            if found.is_held:
                get_logger().info("checkpoint_restored", request=uid, stage=source, target=target, store=name)
                self._handle(CheckpointFound(uid, source, target, found.life))
                return
        get_logger().warning("checkpoint_missing", request=uid, stage=source, target=target)
        self._handle(CheckpointMissing(uid, source, target))
