"""What other nodes ask of this one about outputs it retains, and about requests it works on."""

import asyncio
import functools
from collections.abc import Callable

from onepiece.checkpoint_messages import CheckpointKept
from onepiece.core.retention import OutputKey
from onepiece.errors import OnePieceError
from onepiece.messages import (
    Consumed,
    OutputHeaded,
    OutputNotHeld,
    ReleaseRequests,
    RequestErrored,
    ResendOutput,
    StopRequest,
)
from onepiece.node.control import ControlService
from onepiece.record_messages import AdoptRequests, HeldRequest, RequestsHeld
from onepiece.runtime.counts import ASKED
from onepiece.runtime.environment import Environment
from onepiece.runtime.result_deliver import Letter, ResultDeliver


class RetainService:
    """Sends retained outputs again when a request's owner asks, and lets go of them when told to.

    Args:
        env: The node.
        tasks: Where sending again runs.
        active_of: What is queued or runs of a request on this node, by graph node.
        checkpoints_of: The graph nodes of a request whose outputs this node keeps as a store node.
    """

    def __init__(
        self,
        env: Environment,
        tasks: asyncio.TaskGroup,
        active_of: Callable[[str], dict[str, str]],
        checkpoints_of: Callable[[str], tuple[str, ...]],
    ) -> None:
        self._env = env
        self._tasks = tasks
        self._active_of = active_of
        self._checkpoints_of = checkpoints_of
        self._deliver = ResultDeliver(env)

    def attach(self, control: ControlService) -> None:
        """Receive what actors and owners say."""
        control.on(Consumed, self._on_consumed)
        control.on(ResendOutput, self._on_resend)
        control.on(ReleaseRequests, self._on_release)
        control.on(StopRequest, self._on_stop)
        control.on(AdoptRequests, self._on_adopt)
        control.on(CheckpointKept, self._env.checkpoints.on_kept)

    def _on_consumed(self, message: Consumed) -> None:
        for uid, source, target in message.outputs:
            self._env.retainer.release(OutputKey(uid, source, target))

    def _on_release(self, message: ReleaseRequests) -> None:
        for uid in message.uids:
            self._env.retainer.release_request(uid)
            self._env.owners.pop(uid, None)

    def _on_stop(self, message: StopRequest) -> None:
        self._env.retainer.release_request(message.uid)
        self._env.owners.pop(message.uid, None)

    def _on_resend(self, ask: ResendOutput) -> None:
        self._tasks.create_task(self._resend(ask), name=f"resend {ask.uid}")

    async def _resend(self, ask: ResendOutput) -> None:
        key = OutputKey(ask.uid, ask.source, ask.target)
        output = await self._env.retainer.fetch(key)
        if output is None:
            self._env.outbox.post(ask.owner, OutputNotHeld(ask.uid, ask.source, ask.target))
            return
        try:
            is_wanted = functools.partial(self._env.retainer.holds, key)
            letter = Letter(output.target, output.parts, ask.attempt, is_wanted=is_wanted, key=key)
            self._env.counts.resent[output.target.stage, ASKED] += 1
            life = await self._deliver.send(letter)
        except OnePieceError as error:
            errored = RequestErrored(ask.uid, ask.target, self._env.node_id, error.to_wire())
            self._env.outbox.post(ask.owner, errored)
            return
        self._env.outbox.post(ask.owner, OutputHeaded(ask.uid, {ask.target: life}))

    def _on_adopt(self, message: AdoptRequests) -> None:
        held = []
        for uid in message.uids:
            self._env.owners[uid] = message.owner
            active, retained = self._active_of(uid), self._env.retainer.sources_of(uid)
            checkpoints = self._checkpoints_of(uid)
            if active or retained or checkpoints:
                held.append(HeldRequest(uid, active, retained, checkpoints))
        answer = RequestsHeld(message.call, self._env.identity.life, tuple(held))
        self._env.outbox.post(message.owner, answer)
