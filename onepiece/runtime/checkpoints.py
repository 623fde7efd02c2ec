"""Checkpoints on their way out: what a stage puts out is kept by store nodes, too.

The store nodes are picked by rendezvous hashing of the UID, ``copies`` of them. This node is none of them
unless it is the only one: what it keeps is lost with it. Nor is one that drains, unless all do.
"""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from attrs import define, field

from onepiece.checkpoint_messages import CheckpointInput, CheckpointKept, with_header
from onepiece.codec import PackedAnywhere
from onepiece.core.membership import NodeState
from onepiece.core.replication import copy_holders
from onepiece.core.routing import NodeRoute
from onepiece.errors import OnePieceError
from onepiece.log import get_logger
from onepiece.messages import KIND_CHECKPOINT, STORE_REGION, StageInput
from onepiece.runtime.outbox import Outbox
from onepiece.runtime.result_targets import StageTarget

if TYPE_CHECKING:
    from onepiece.runtime.environment import Environment
    from onepiece.runtime.shipment import Shipment

_KEEP_SECONDS: Final = 10.0
"""How long a store node may take. One that died is noticed sooner; one that hangs holds up no worker, but
the stage does not count as finished."""


@define(eq=False)
class Checkpoints:
    """The checkpoints that this node's actors are having kept.

    Args:
        copies: How many store nodes keep each.
    """

    copies: int = 2
    _waiting: dict[int, "asyncio.Future[CheckpointKept]"] = field(factory=dict)

    def on_kept(self, answer: CheckpointKept) -> None:
        """A store node has answered; too late is no harm."""
        waiting = self._waiting.get(answer.call)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    async def keep(
        self, outbox: Outbox, node: NodeRoute, checkpoint: CheckpointInput, packed: PackedAnywhere
    ) -> bool:
        """Have one store node keep one output; false if it does not, which is logged.

        Cancelled: it may be kept or not.
        """
        answer: asyncio.Future[CheckpointKept] = asyncio.get_running_loop().create_future()
        self._waiting[checkpoint.call] = answer
        why = ""
        try:
            async with asyncio.timeout(_KEEP_SECONDS):
                address = f"{node.address}/{STORE_REGION}"
                parts = with_header(packed.parts, checkpoint)
                await outbox.send(address, parts, kind=KIND_CHECKPOINT)
                kept = await answer
            if kept.error is None:
                return True
            why = OnePieceError.from_wire(kept.error).message
        except TimeoutError:
            why = f"no answer within {_KEEP_SECONDS:.0f} s"
        except OnePieceError as error:
            why = error.message
        finally:
            del self._waiting[checkpoint.call]
        get_logger().warning(
            "checkpoint_not_kept",
            request=checkpoint.uid,
            stage=checkpoint.source,
            store=node.node_id,
            error=why,
        )
        return False

    def holders(self, uid: str, stores: Mapping[str, NodeRoute], own: str) -> list[NodeRoute]:
        """The store nodes that are to keep a request's checkpoints."""
        staying = {
            name: node
            for name, node in stores.items()
            if node.state not in {NodeState.DRAINING, NodeState.DRAINED} and name != own
        }
        chosen = staying or {name: node for name, node in stores.items() if name != own} or stores
        return [chosen[name] for name in copy_holders(uid, chosen, self.copies)]


async def keep_outputs(env: "Environment", uid: str, shipment: "Shipment", attempt: int) -> None:
    """Have what a stage sends to others kept by store nodes, as far as they take it.

    Cancelled: some of it may be kept.
    """
    outputs = [
        (target.header, shipment.packed[name])
        for name, target in shipment.targets.items()
        if isinstance(target, StageTarget)  # the result store keeps the rest
    ]
    stores = {node.node_id: node for node in env.routes.table.nodes if "store" in node.roles}
    holders = env.checkpoints.holders(uid, stores, env.node_id)

    def checkpoint_of(header: StageInput) -> CheckpointInput:
        return CheckpointInput(
            call=next(env.call_numbers),
            reply_to=env.control_address,
            uid=uid,
            source=header.source,
            target=header.node,
            owner=header.owner,
            life=env.identity.life,
            attempt=attempt,
            deadline_at=header.deadline_at,
        )

    await asyncio.gather(
        *(
            env.checkpoints.keep(env.outbox, node, checkpoint_of(header), packed)
            for header, packed in outputs
            for node in holders
        )
    )
