"""ResultDeliver: getting a stage's messages to where they go.

Each message goes to an actor of the next stage: of those that take work the one to which this node
has the fewest messages under way (``UnderWay``), of equals the one picked longest ago, or, where inputs of
several sources must meet, the one that the request's owner named when it accepted the request.

If the actor cannot be reached, or is lost before it took the message, the message goes to another
one; if there is none, delivery waits for the manager to place one, for a bounded time, and then the
request ends in a named error. What an actor has *taken* and loses with its node is sent again when the
request's owner asks for it (``Retainer``).
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence

from attrs import define, evolve, frozen

from onepiece.core.retention import OutputKey
from onepiece.core.routing import ActorRoute, first_of, rendezvous
from onepiece.errors import NodeLost, NodeUnreachable, OnePieceError
from onepiece.limits import LOSSES_PER_MESSAGE_MAX
from onepiece.messages import (
    KIND_RESULT,
    KIND_STAGE_INPUT,
    STORE,
    STORE_REGION,
    OutputHeaded,
    RequestErrored,
    with_attempt,
)
from onepiece.runtime.counts import PEER_LOST
from onepiece.runtime.environment import Environment
from onepiece.runtime.result_targets import StoreTarget, Target
from transports.operations import Content


@frozen
class Letter:
    """A message and where it goes.

    ``attempt`` is the round of the request's owner that it belongs to (``StageProgress.advance``);
    ``on_taken`` is called once the target's ring has handed it over; ``losses`` counts the nodes that were
    lost before that was seen. ``is_wanted`` says whether it is worth being sent again after a loss: not if
    the request has ended meanwhile. With a ``key`` it counts as under way until ``UnderWay`` hears of it.
    """

    target: Target
    parts: Sequence[Content]
    attempt: int = 1
    on_taken: Callable[[], None] | None = None
    is_wanted: Callable[[], bool] = lambda: True
    losses: int = 0
    key: OutputKey | None = None


@define(eq=False)
class ResultDeliver:
    """Sends messages on behalf of one actor, or of a proxy."""

    env: Environment

    async def deliver(self, letters: Mapping[str, Letter]) -> dict[str, str]:
        """Send every message; returns the life of the node that each went to.

        Waits while rings are full. Raises the first error that leaves a message undelivered; if the
        caller is cancelled, some messages may have been sent.
        """
        if len(letters) == 1:
            [(name, letter)] = letters.items()
            return {name: await self.send(letter)}
        heading: dict[str, str] = {}

        async def send(name: str, letter: Letter) -> None:
            heading[name] = await self.send(letter)

        try:
            async with asyncio.TaskGroup() as sends:
                for name, letter in letters.items():
                    sends.create_task(send(name, letter))
        except* OnePieceError as errors:
            raise errors.exceptions[0] from errors
        return heading

    async def send(self, letter: Letter) -> str:
        """Send one message; as ``deliver``."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self.env.delivery_seconds
        last: OnePieceError | None = None
        while True:
            changed = self.env.routes.changed
            for place in self._places(letter.target):
                try:
                    await self._send_to(place, letter)
                except NodeUnreachable as error:
                    last = error
                    continue
                return place.life
            left = give_up_at - loop.time()
            if left <= 0:
                raise self._undeliverable(letter.target, last)
            await asyncio.sleep(0)  # a timeout belongs to a task; this may have begun without one (``begin``)
            try:
                async with asyncio.timeout(min(left, 1.0)):
                    await changed.wait()
            except TimeoutError:
                continue

    async def _send_to(self, place: "_Place", letter: Letter) -> None:
        async def on_lost() -> None:
            await self._send_again(evolve(letter, losses=letter.losses + 1))

        parts = letter.parts
        if place.kind != KIND_RESULT:
            parts = with_attempt(parts, letter.attempt, was_lost=letter.losses > 0)
        key, under_way = letter.key, self.env.under_way
        if key is not None and place.kind != KIND_RESULT:
            under_way.sent(key, place.actor_id)
        try:
            await self.env.outbox.send(
                place.address,
                parts,
                kind=place.kind,
                on_lost=on_lost,
                on_taken=letter.on_taken,
            )
        except BaseException:
            if key is not None:
                under_way.done(key)
            raise
        if key is not None and not letter.is_wanted():
            under_way.done(key)  # it ended while this was sent: nobody says so again

    async def _send_again(self, letter: Letter) -> None:
        """A message was lost with its ring before anybody was seen to take it: send it elsewhere.

        The request's owner is told where: it has to go on from there if that node dies, and to tell that
        node of the end, which may be near, or over, if somebody took the message all the same.
        """
        target = letter.target
        if not letter.is_wanted():
            return
        uid, owner = target.header.uid, target.header.owner
        stage = None if isinstance(target, StoreTarget) else target.header.node
        try:
            if letter.losses > LOSSES_PER_MESSAGE_MAX:
                raise self._deadly(letter)
            self.env.counts.resent[target.stage, PEER_LOST] += 1
            life = await self.send(letter)
        except OnePieceError as error:
            lost = RequestErrored(uid, stage, self.env.node_id, error.to_wire())
            self.env.break_request(owner, lost)
        else:
            self.env.tell_owner(uid, owner, OutputHeaded(uid, {stage or STORE: life}))

    def _places(self, target: Target) -> Iterator["_Place"]:
        table = self.env.routes.table
        if isinstance(target, StoreTarget):
            stores = {n.node_id: n for n in table.nodes if "store" in n.roles}
            while stores:
                chosen = stores.pop(rendezvous(target.header.uid, stores))
                yield _Place(chosen.life, -1, f"{chosen.address}/{STORE_REGION}", KIND_RESULT)
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
        under_way = self.env.under_way
        first = first_of(self.env.node_id)
        actor = self.env.routes.table.pick(stage, under_way.counts, under_way.picked, first)
        if actor is not None:
            under_way.pick(actor.actor_id)
        return actor

    def _deadly(self, letter: Letter) -> OnePieceError:
        uid = letter.target.header.uid
        return NodeLost(
            f"{letter.losses} nodes died with a message of request {uid} that they may just have begun to "
            "work on: it may be what kills them; submit the request again if they died of something else",
            uid=uid,
        )

    def _undeliverable(self, target: Target, last: OnePieceError | None) -> OnePieceError:
        what = "the result store" if isinstance(target, StoreTarget) else target.stage
        why = f": {last}" if last is not None else ""
        return NodeLost(
            f"no node took request {target.header.uid} for {what} within "
            f"{self.env.delivery_seconds:g} s{why}; see `onepiece nodes`, or give the nodes a longer "
            "--delivery-seconds",
            uid=target.header.uid,
        )


@frozen
class _Place:
    life: str
    actor_id: int
    address: str
    kind: int


def _place_of(actor: ActorRoute) -> _Place:
    return _Place(actor.life, actor.actor_id, actor.address, KIND_STAGE_INPUT)
