"""This node as a member of the set: heartbeats out, routes in, and what to do when expelled.

A heartbeat goes to the manager every ``heartbeat_seconds`` and at once when an actor's state changes.
It names the route table this node has, so that a table that was lost is sent again. A node that the
manager declared dead, for example since it was stopped for longer than the lease, is told so
(``Expel``), or finds that other nodes take nothing from it any more: it ends its actors, and when they are
gone, and the memory of their models with them, it takes a higher incarnation and joins anew with nothing.

Where several managers may lead, candidates tell it who does (``LeaderSearch``).
"""

import asyncio
import random
from collections.abc import Callable, Mapping

from attrs import evolve

from onepiece.core.inventory import NodeInfo
from onepiece.core.leader_search import LeaderSearch
from onepiece.core.membership import Expel
from onepiece.core.routing import RouteTable, diff
from onepiece.errors import OnePieceError
from onepiece.graph import WorkflowGraph
from onepiece.log import get_logger
from onepiece.messages import CONTROL_REGION, Farewell, Heartbeat, LeaderIs, PublishedRoutes, WhoLeads
from onepiece.node.actor_host import ActorHost
from onepiece.node.control import ControlService
from onepiece.runtime.environment import Identity, Inboxes, Routes
from onepiece.runtime.outbox import Outbox
from onepiece.runtime.workflows import WorkflowImports


class Member:
    """The node's side of membership."""

    def __init__(
        self,
        info: NodeInfo,
        search: LeaderSearch,
        *,
        outbox: Outbox,
        routes: Routes,
        imports: WorkflowImports,
        heartbeat_seconds: float,
        identity: Identity,
        inboxes: Inboxes,
        on_nodes_died: Callable[[frozenset[str]], None],
        on_new_life: Callable[[], None],
        on_must_stop: Callable[[str], None],
        next_incarnation: Callable[[int], int],
        rng: random.Random,
    ) -> None:
        self.info = info
        self._search = search
        self._rng = rng
        self._outbox = outbox
        self._routes = routes
        self._imports = imports
        self._heartbeat_seconds = heartbeat_seconds
        self._on_nodes_died = on_nodes_died
        self._on_must_stop = on_must_stop
        self._on_new_life = on_new_life
        self._identity = identity
        self._next_incarnation = next_incarnation
        self._inboxes = inboxes
        self._host: ActorHost | None = None
        self._news = asyncio.Event()
        self._newest: RouteTable | None = None
        self._table_came = asyncio.Event()
        self.draining = False
        self.holds_nothing: Callable[[], bool] = lambda: False
        """Whether a node that drains has drained."""
        self.offered: Callable[[], Mapping[str, Mapping[str, int]]] = dict
        """What the proxy of this process was asked for, by workflow and size class."""
        self.is_stopping = False
        """It asks nobody any more: what is not answered would keep it from having sent all."""
        self._has_left = False
        self._is_expelled = False
        self._no_nodes: set[str] = set()
        """Addresses at which an HTTP server answers."""
        self._newest_heard = 0
        """The highest incarnation of this id that the manager knows of."""

    def attach(self, control: ControlService, host: ActorHost | None) -> None:
        """Receive tables and expulsions."""
        self._host = host
        control.on(PublishedRoutes, self._on_routes)
        control.on(Expel, self._on_expel)
        control.on(LeaderIs, self._on_leader)
        self._outbox.on_refused = self._on_refused
        self._outbox.on_http_answered = self._on_http_answered

    @property
    def leader(self) -> str:
        """The control address of the manager that leads, as far as is known."""
        return self._search.leader

    def wake(self) -> None:
        """Send a heartbeat soon: something has changed."""
        self._news.set()

    def set_draining(self, draining: bool) -> None:
        """Tell the manager that this node takes no new work, or does again."""
        self.draining = draining
        self.wake()

    async def beat(self) -> None:
        """Send heartbeats until this node has left, or until cancelled."""
        while not self._has_left:
            self._news.clear()
            if self._is_expelled:
                await self._become_anew()
            self._ask_who_leads()
            quiet_seconds = self._search.quiet_until - self._now()
            if quiet_seconds <= 0:
                self._send()
                quiet_seconds = self._heartbeat_seconds
            try:
                async with asyncio.timeout(quiet_seconds):
                    await self._news.wait()
            except TimeoutError:
                continue

    def farewell(self) -> None:
        """Say that this node has stopped in order; no heartbeat follows."""
        self._has_left = True
        self._outbox.post(self._search.leader, Farewell(self.info.node_id, self.info.incarnation))

    def _send(self) -> None:
        actors = self._host.reports() if self._host is not None else ()
        drained = self.draining and self.holds_nothing()
        heartbeat = Heartbeat(
            self.info,
            actors,
            self.draining,
            self._routes.table.epoch,
            drained,
            {name: dict(of) for name, of in self.offered().items()},
            self._host.lent() if self._host is not None else None,
            self._host.prefetches.reports() if self._host is not None else (),
        )
        self._outbox.post(self._search.leader, heartbeat, replaces="heartbeat")

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _ask_who_leads(self) -> None:
        own = f"{self.info.address}/{CONTROL_REGION}"
        if self.is_stopping or self._search.leader == own:
            return
        managers = [
            f"{node.address}/{CONTROL_REGION}" for node in self._routes.table.nodes if "manager" in node.roles
        ]
        for address in self._search.to_ask(managers, self._now(), self._rng.random()):
            self._outbox.post(address, WhoLeads(own), replaces="who leads")

    def _on_leader(self, told: LeaderIs) -> None:
        nodes = len(self._routes.table.nodes)
        if self._search.told(told.address, nodes, self._now(), self._rng.random()):
            get_logger().info("leader_found", leader=told.address)
            self.wake()

    def _on_routes(self, published: PublishedRoutes) -> None:
        if published.table.is_newer_than(self._newest):
            self._newest = published.table
            self._table_came.set()

    def _on_expel(self, expel: Expel) -> None:
        mine = (self.info.node_id, self.info.incarnation)
        if self._has_left or self._is_expelled or (expel.node_id, expel.incarnation) != mine:
            return
        get_logger().warning("node_expelled", reason=expel.reason, may_rejoin=expel.may_rejoin)
        if not expel.may_rejoin:
            self._on_must_stop(expel.reason)
            return
        self._newest_heard = max(self._newest_heard, expel.newest)
        self._begin_new_life()

    def _on_refused(self) -> None:
        """A node that knows this one to be dead lets nothing of it in, also no heartbeat, nor an answer."""
        if not self._has_left and not self._is_expelled:
            get_logger().warning("node_expelled", reason="its messages are refused", may_rejoin=True)
            self._begin_new_life()

    def _on_http_answered(self, address: str, why: str) -> None:
        """A node that was never in a set, and finds none at any address it is to join, ends, and says why."""
        self._no_nodes.add(address)
        if self._newest is None and self._no_nodes.issuperset(self._search.joins):
            places = ", ".join(each.removesuffix(f"/{CONTROL_REGION}") for each in self._search.joins)
            self._on_must_stop(f"--join {places}: {why}")

    def _begin_new_life(self) -> None:
        if self._host is not None:
            self._host.drop_all()
        self._is_expelled = True
        self.wake()

    async def _become_anew(self) -> None:
        """Take a higher incarnation, once nothing is left of what this one ran."""
        if self._host is not None:
            await self._host.all_gone()
        newest = max(self.info.incarnation, self._newest_heard)
        incarnation = self._next_incarnation(newest + 1)
        self.info = evolve(self.info, incarnation=incarnation)
        self._identity.incarnation = incarnation
        self._on_new_life()
        self._is_expelled = False

    async def follow_routes(self) -> None:
        """Import the workflows of each newer table, then let the node use it; until cancelled."""
        while True:
            await self._table_came.wait()
            self._table_came.clear()
            table = self._newest
            assert table is not None
            graphs, unusable = await self._graphs(table)
            changes = diff(self._routes.table, table)
            self._routes.update(table, graphs, unusable)
            gone = frozenset(node.life for node in changes.nodes_gone)
            for node in changes.nodes_gone:
                self._outbox.drop(f"{node.address}/{CONTROL_REGION}")
            for actor in changes.actors_gone:
                if actor.life in gone and actor.address:
                    self._outbox.drop(actor.address)
            self._fence(gone)
            if gone:
                self._on_nodes_died(gone)
            if self._host is not None:
                self._host.routes_changed()
            self.wake()

    def _fence(self, lives: frozenset[str]) -> None:
        """What a dead node sends under its old life is not taken any more, should it come back."""
        self._inboxes.refuse(lives)

    async def _graphs(self, table: RouteTable) -> tuple[dict[str, WorkflowGraph], dict[str, str]]:
        graphs: dict[str, WorkflowGraph] = {}
        unusable: dict[str, str] = {}
        for workflow in table.workflows:
            try:
                imported = await self._imports.get(workflow.module, workflow.digest)
            except OnePieceError as error:
                if self._routes.unusable.get(workflow.name) != error.message:
                    get_logger().error("workflow_unusable", workflow=workflow.name, error=error.message)
                unusable[workflow.name] = error.message
                continue
            graphs[workflow.name] = imported.graph
        return graphs, unusable
