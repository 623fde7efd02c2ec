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
        is_idle = self._host is None or self._host.is_idle
        owns_none = self._proxy is None or self._proxy.owner.table.live_count() == 0
        has_copied = self._copies is None or self._copies.is_settled
        retains_none = self._env.retainer.metrics()["outputs"] == 0
        return is_idle and owns_none and has_copied and retains_none and not self._takes_work()

    def _takes_work(self) -> bool:
        """Whether new work is still sent to an actor here, as no other one takes it."""
        table, life = self._env.routes.table, self._env.identity.life
        return any(actor.life == life and actor in table.actors_for(actor.stage) for actor in table.actors)

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
        try:
            if ask.draining:
                self.begin()
            else:
                self.resume()
        except NotReady as refusal:
            error = refusal
        get_logger().info("node_told", draining=ask.draining, refused=error is not None)
        wire = None if error is None else error.to_wire()
        self._env.outbox.post(ask.reply_to, DrainingSet(ask.call, wire))
