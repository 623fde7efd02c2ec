"""ResultDeliver: where a stage's value goes, and getting it there.

A value is cut into one message for each graph node that uses a part of it, holding just the
parameters that node takes from it, and one for the result store if the workflow returns it. Each goes
to an actor of the next stage: of those that take work the one to which this actor has the fewest
messages under way, or, where inputs of several sources must meet, the one that the request's owner
named when it accepted the request.

If the actor cannot be reached, or is lost before it took the message, the message goes to another
one; if there is none, delivery waits for the manager to place one, for a bounded time, and then the
request ends in a named error. What an actor has *taken* and loses with its node is not sent again
here: ``on_lost`` of the outbox is the seam at which retention until ``Finished`` is added.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from attrs import define, field, frozen

from onepiece.codec import Packed, pack, select, value_to_bytes
from onepiece.core.routing import ActorRoute, rendezvous
from onepiece.errors import NodeLost, NodeUnreachable, OnePieceError
from onepiece.limits import DELIVERY_PATIENCE_SECONDS
from onepiece.messages import (
    KIND_RESULT,
    KIND_STAGE_INPUT,
    STORE,
    STORE_REGION,
    RequestErrored,
    ResultInput,
    StageInput,
    Trail,
)
from onepiece.runtime.environment import Environment
from onepiece.runtime.plan import BYTES_TYPE, Entry, NodePlan, Onward


@frozen
class StageTarget:
    """A graph node that takes parameters from a stage's value."""

    header: StageInput
    onward: Onward

    @property
    def stage(self) -> str:
        """The stage's key."""
        return self.onward.stage

    def pack(self, value: Any) -> Packed:
        """The message with this node's parameters."""
        return pack(self.header, {name: select(value, path) for name, path in self.onward.parts.items()})


@frozen
class InputTarget:
    """A graph node that takes parameters from the workflow's inputs."""

    header: StageInput
    entry: Entry

    @property
    def stage(self) -> str:
        """The stage's key."""
        return self.entry.stage

    def pack(self, inputs: Mapping[str, Any]) -> Packed:
        """The message with this node's inputs."""
        return pack(self.header, {name: inputs[source] for name, source in self.entry.names.items()})


@frozen
class StoreTarget:
    """The result store, for the workflow's own output."""

    header: ResultInput
    path: tuple[int | str, ...]

    def pack(self, value: Any) -> Packed:
        """The message with the result: as it is where it is bytes, else in the project's own form."""
        result = select(value, self.path)
        if self.header.content_type != BYTES_TYPE:
            result = b"".join(value_to_bytes(result))
        return pack(self.header, {"value": result})


Target = StageTarget | InputTarget | StoreTarget


def targets_of(plan: NodePlan, header: StageInput, trail: Trail, now: float) -> dict[str, Target]:
    """Where the value of ``plan``'s node goes, by graph node (or ``STORE``)."""
    found: dict[str, Target] = {
        each.node: StageTarget(_onward(header, each.node, plan.node, trail, now), each)
        for each in plan.onward
    }
    if plan.result_path is not None:
        result = ResultInput(header.uid, header.workflow, header.owner, plan.content_type, now, trail)
        found[STORE] = StoreTarget(result, plan.result_path)
    return found


def input_targets(entries: Iterable[Entry], header: StageInput) -> dict[str, Target]:
    """Where the workflow's inputs go, by graph node."""
    return {
        entry.node: InputTarget(
            _onward(header, entry.node, header.source, header.trail, header.sent_at), entry
        )
        for entry in entries
    }


def _onward(header: StageInput, node: str, source: str, trail: Trail, now: float) -> StageInput:
    """The header for the next graph node; what is said of the request stays."""
    return StageInput(
        header.uid,
        header.workflow,
        node,
        source,
        header.owner,
        header.received_at,
        header.deadline_at,
        now,
        header.attempt,
        header.joins,
        trail,
    )


@define(eq=False)
class ResultDeliver:
    """Sends messages on behalf of one actor, or of a proxy."""

    env: Environment
    _under_way: Counter[int] = field(factory=Counter)
    _turn: int = 0

    async def deliver(self, targets: Mapping[str, Target], packed: Mapping[str, Packed]) -> dict[str, str]:
        """Send every message; returns the cluster node that each went to.

        Waits while rings are full. Raises the first error that leaves a message undelivered; if the
        caller is cancelled, some messages may have been sent.
        """
        if len(targets) == 1:
            [(name, target)] = targets.items()
            return {name: await self._send(target, packed[name])}
        heading: dict[str, str] = {}

        async def send(name: str, target: Target) -> None:
            heading[name] = await self._send(target, packed[name])

        try:
            async with asyncio.TaskGroup() as sends:
                for name, target in targets.items():
                    sends.create_task(send(name, target))
        except* OnePieceError as errors:
            raise errors.exceptions[0] from errors
        return heading

    async def _send(self, target: Target, packed: Packed) -> str:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + DELIVERY_PATIENCE_SECONDS
        last: OnePieceError | None = None
        while True:
            changed = self.env.routes.changed
            for place in self._places(target):
                try:
                    await self._send_to(place, target, packed)
                except NodeUnreachable as error:
                    last = error
                    continue
                return place.node_id
            left = give_up_at - loop.time()
            if left <= 0:
                raise self._undeliverable(target, last)
            try:
                async with asyncio.timeout(min(left, 1.0)):
                    await changed.wait()
            except TimeoutError:
                continue

    async def _send_to(self, place: "_Place", target: Target, packed: Packed) -> None:
        async def on_lost() -> None:
            await self._send_again(target, packed)

        self._under_way[place.actor_id] += 1
        try:
            await self.env.outbox.send(place.address, packed.parts, kind=place.kind, on_lost=on_lost)
        finally:
            self._under_way[place.actor_id] -= 1

    async def _send_again(self, target: Target, packed: Packed) -> None:
        """A message was lost with its ring before anybody took it: send it elsewhere."""
        try:
            await self._send(target, packed)
        except OnePieceError as error:
            stage = None if isinstance(target, StoreTarget) else target.header.node
            lost = RequestErrored(target.header.uid, stage, self.env.node_id, error.to_wire())
            self.env.break_request(target.header.owner, lost)

    def _places(self, target: Target) -> Iterator["_Place"]:
        table = self.env.routes.table
        if isinstance(target, StoreTarget):
            stores = {n.node_id: n for n in table.nodes if "store" in n.roles}
            while stores:
                chosen = stores.pop(rendezvous(target.header.uid, stores))
                yield _Place(chosen.node_id, -1, f"{chosen.address}/{STORE_REGION}", KIND_RESULT)
            return
        named = target.header.joins.get(target.header.node)
        if named is not None:
            met = table.actor(named)
            if met is None or not met.address:
                met = table.meeting_point(target.stage, target.header.uid)
            if met is not None:
                yield _place_of(met)
            return
        picked = self.choose(target.stage)
        if picked is not None:
            yield _place_of(picked)
        for actor in table.actors_for(target.stage):
            if actor != picked:
                yield _place_of(actor)

    def choose(self, stage: str) -> ActorRoute | None:
        """An actor for a message that may go to any; None if none takes work."""
        self._turn += 1
        return self.env.routes.table.pick(stage, self._under_way, self._turn)

    def _undeliverable(self, target: Target, last: OnePieceError | None) -> OnePieceError:
        what = "the result store" if isinstance(target, StoreTarget) else target.stage
        why = f": {last}" if last is not None else ""
        return NodeLost(
            f"no node took request {target.header.uid} for {what} within "
            f"{DELIVERY_PATIENCE_SECONDS:.0f} s{why}; see `onepiece nodes`",
            uid=target.header.uid,
        )


@frozen
class _Place:
    node_id: str
    actor_id: int
    address: str
    kind: int


def _place_of(actor: ActorRoute) -> _Place:
    return _Place(actor.node_id, actor.actor_id, actor.address, KIND_STAGE_INPUT)
