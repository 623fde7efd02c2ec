"""Draining: a node takes no new work, finishes what it holds, and says when nothing is left.

::

            drain                nothing is held
    taking ---------> draining ------------------> drained        what it holds: requests of its proxy,
      ^                  |                            |           work of its actors, outputs it retains,
      +---- resume ------+----------- resume ---------+           copies that other store nodes lack

Where no other worker has room for what its actors run, they go on serving, as nobody else can: new work
still comes here, and the node stays draining until somebody else serves those stages.

Two things ask for it: an operator (``onepiece drain``), behind which the node waits until it is stopped
or told to resume; and SIGTERM, behind which it stops, and never resumes.
"""

import asyncio
from typing import Final, Self

from attrs import define

from onepiece.errors import NotReady, OnePieceError
from onepiece.log import get_logger
from onepiece.messages import DrainingSet, SetDraining
from onepiece.node.actor_host import ActorHost
from onepiece.node.control import ControlService
from onepiece.node.leftovers import Leftovers
from onepiece.node.member import Member
from onepiece.node.proxy_service import ProxyService
from onepiece.node.replica_service import ReplicaService
from onepiece.runtime.environment import Environment

_LAST_WORDS_SECONDS: Final = 5.0
"""Nothing is held then; what a peer that takes nothing for so long was to be told, it hears from nobody."""


@define(eq=False)
class Drain:
    """Takes the parts of one node out of use, and back."""

    _env: Environment
    _member: Member
    _host: ActorHost | None
    _proxy: ProxyService | None
    _copies: ReplicaService | None
    _leftovers: Leftovers
    _is_stopping: bool = False

    def attached(self, control: ControlService) -> Self:
        """Receive what operators want, and let heartbeats say when nothing is held."""
        control.on(SetDraining, self._on_set)
        self._member.holds_nothing = self.holds_nothing
        return self

    def begin(self) -> None:
        """Take no new work from now on."""
        self._member.set_draining(True)
        self._leftovers.in_haste = True
        if self._proxy is not None:
            self._proxy.draining = True

    def resume(self) -> None:
        """Take work again; raises ``NotReady`` if the node is about to stop."""
        if self._is_stopping:
            raise NotReady(f"{self._env.node_id} was told to stop, and does not resume; start it again")
        self._member.set_draining(False)
        self._leftovers.in_haste = False
        if self._proxy is not None:
            self._proxy.draining = False

    def holds_nothing(self) -> bool:
        """Whether nothing would be lost with this node that others do not have, nor will be."""
        return not self.waits_for()

    def waits_for(self) -> tuple[str, ...]:
        """In words, what is still here that would be lost with this node, or that nobody else would do."""
        owned = 0 if self._proxy is None else self._proxy.owner.table.live_count()
        retained = self._env.retainer.metrics()["outputs"]
        found = {
            f"requests of its proxy ({owned})": owned > 0,
            "work of its stages": self._host is not None and not self._host.is_idle,
            f"outputs that the next stages are not done with ({retained})": retained > 0,
            "results that other store nodes are to have, too": self._copies is not None
            and not self._copies.is_settled,
            f"stages that no other worker has room for ({', '.join(self._served_here_alone())})": bool(
                self._served_here_alone()
            ),
        }
        return tuple(what for what, is_held in found.items() if is_held)

    def _served_here_alone(self) -> list[str]:
        """The stages whose new work is still sent to an actor here, as no other one takes it."""
        table, life = self._env.routes.table, self._env.identity.life
        mine = [actor for actor in table.actors if actor.life == life]
        return sorted({actor.stage for actor in mine if actor in table.actors_for(actor.stage)})

    async def finish(self) -> None:
        """Drain for good: take no new work, and return when nothing is held any more."""
        self._is_stopping = self._member.is_stopping = True
        self.begin()
        if self._proxy is not None:
            await self._proxy.owner.settled()
        if self._host is not None:
            await self._host.idle()
            await self._env.retainer.emptied()
        if self._copies is not None:
            await self._copies.settled()
        try:
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                await self._env.outbox.flushed()
        except TimeoutError:
            get_logger().warning("peers_not_told", addresses=self._env.outbox.unquiet())

    def _on_set(self, ask: SetDraining) -> None:
        error: OnePieceError | None = None
        if ask.draining is not None:
            error = self._told(draining=ask.draining)
            get_logger().info("node_told", draining=ask.draining, refused=error is not None)
        wire = None if error is None else error.to_wire()
        waits_for = self.waits_for() if self._member.draining else ()
        self._env.outbox.post(ask.reply_to, DrainingSet(ask.call, wire, waits_for))

    def _told(self, *, draining: bool) -> OnePieceError | None:
        try:
            if draining:
                self.begin()
            else:
                self.resume()
        except NotReady as refusal:
            return refusal
        return None
