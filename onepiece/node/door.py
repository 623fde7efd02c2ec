"""The door of a proxy: its ``Admission``, told of routes, of time, and of what the other proxies say.

It decides nothing. What the set can do is taken from the route table each time there is a newer one: every
ready actor works on as many requests at once as its stage allows. Twice a second it tells each other proxy
what it is asked for and what it has seen; nobody answers, and what is lost is replaced by the next.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from onepiece.core.admission import Admission, AdmissionRules, BudgetLimits, ProxyLoad, RequestBudget
from onepiece.core.capacity import WorkflowShape
from onepiece.core.membership import NodeState
from onepiece.core.routing import RouteTable
from onepiece.core.service_times import ANY_SIZE
from onepiece.ids import new_uid
from onepiece.limits import REPORTED_CLASSES_MAX
from onepiece.node.control import ControlService
from onepiece.requests import Terms
from onepiece.runtime.environment import Environment

EXCHANGE_SECONDS: Final = 0.5
_SERVING: Final = frozenset({NodeState.ALIVE.value, NodeState.SUSPECT.value})


class Door:
    """See the module's text."""

    def __init__(self, env: Environment, requests_max: int, rules: AdmissionRules) -> None:
        self._env = env
        limits = BudgetLimits(total=requests_max, each=requests_max)
        self.admission = Admission(RequestBudget(limits), rules)
        self._table: RouteTable | None = None
        self.offered: dict[str, dict[str, int]] = {}
        """Requests that were let in, or refused, since the process began, by workflow and size class.

        Of each workflow the first ``REPORTED_CLASSES_MAX`` classes are told apart; the others have none.
        """

    def attach(self, control: ControlService) -> None:
        """Receive what other proxies say."""
        control.on(ProxyLoad, self._on_load)

    def offer(self, workflow: str, terms: Terms, timeout_seconds: float) -> str:
        """Take a place for a request that comes now; gives its UID, or raises ``Overloaded``."""
        self._follow_routes()
        now = self._env.now()
        self._count(workflow, terms.size_class)
        uid = new_uid(now, self._env.rng)
        self.admission.offer(uid, workflow, terms, timeout_seconds, now)
        return uid

    def _count(self, workflow: str, size_class: str) -> None:
        counts = self.offered.setdefault(workflow, {ANY_SIZE: 0})
        is_known = size_class in counts or len(counts) <= REPORTED_CLASSES_MAX
        kind = size_class if is_known else ANY_SIZE
        counts[kind] = counts.get(kind, 0) + 1

    def view(self) -> Mapping[str, Any]:
        """What an operator wants to see."""
        self._follow_routes()
        return self.admission.view(self._env.now())

    async def exchange(self) -> None:
        """Tell the other proxies what this one is asked for; until cancelled."""
        while True:
            await asyncio.sleep(EXCHANGE_SECONDS)
            others = [
                address
                for address in self._env.routes.proxies.values()
                if address != self._env.control_address
            ]
            if others:
                self._follow_routes()
                load = self.admission.load(self._env.now())
                for address in others:
                    self._env.outbox.post(address, load, replaces="proxy load")

    def _on_load(self, load: ProxyLoad) -> None:
        self._follow_routes()
        self.admission.hear(load, self._env.now())

    def _follow_routes(self) -> None:
        """Take in what a newer table says; nothing is done where there is none."""
        routes = self._env.routes
        if routes.table is self._table and self.admission.life == self._env.identity.life:
            return
        self._table, self.admission.life = routes.table, self._env.identity.life
        stages = {key: spec for graph in routes.graphs.values() for key, spec in graph.stages.items()}
        workers = {key: spec.concurrency * len(routes.table.actors_for(key)) for key, spec in stages.items()}
        shapes = [WorkflowShape.of(graph) for graph in routes.graphs.values()]
        self.admission.set_up(shapes, workers)
        lives = [node.life for node in routes.table.nodes if "proxy" in node.roles and node.state in _SERVING]
        self.admission.set_proxies(lives, self._env.now())
