"""What the parts of an actor share: who they are, and the ways to talk to the rest of the set."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from attrs import frozen

from onepiece.core.routing import RouteEpoch, RouteTable
from onepiece.graph import WorkflowGraph
from onepiece.messages import RequestErrored
from onepiece.requests import EventKind
from onepiece.runtime.outbox import Outbox
from onepiece.runtime.owners import LostOwners
from onepiece.runtime.reports import StageRun
from transports import Address, Listener


class Routes:
    """The newest route table this node has seen, the graphs it names, and a way to wait for news."""

    def __init__(self) -> None:
        self.table = RouteTable(RouteEpoch(0, 0))
        self.graphs: Mapping[str, WorkflowGraph] = {}
        self.unusable: Mapping[str, str] = {}
        """Registered workflows that this node cannot use, and why: it has another version, for example."""
        self._changed = asyncio.Event()

    def update(
        self, table: RouteTable, graphs: Mapping[str, WorkflowGraph], unusable: Mapping[str, str]
    ) -> None:
        """Take a newer table and wake who waits."""
        self.table = table
        self.graphs = graphs
        self.unusable = unusable
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next update; take it before looking at the table, so that none is missed."""
        return self._changed


class Clock(Protocol):
    """Seconds since the epoch; what deadlines and headers are written in."""

    def __call__(self) -> float:
        """The time now."""
        ...


@frozen
class Environment:
    """The node as its actors see it."""

    node_id: str
    address: Address
    """Where other nodes reach it; the listener may be bound to all addresses of the machine."""
    listener: Listener
    outbox: Outbox
    routes: Routes
    owners: LostOwners
    inbox_bytes: int
    join_bytes: int
    on_change: Callable[[], None]
    """Called when an actor's state changes, so that the manager hears of it at once."""
    now: Clock = time.time

    def report(self, owner: str, run: StageRun) -> None:
        """Tell a request's owner how far a stage's run has come; never waits."""
        self.outbox.report(owner, run)

    def report_progress(self, owner: str, run: StageRun, kind: EventKind, detail: Mapping[str, Any]) -> None:
        """Tell a request's owner something about a run that goes on; never waits."""
        self.outbox.report_progress(owner, run, run.progress(kind.value, self.now(), detail))

    def break_request(self, owner: str, error: RequestErrored) -> None:
        """Tell a request's owner that it cannot go on."""
        self.outbox.post(owner, error)
