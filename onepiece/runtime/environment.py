"""What the parts of an actor share: who they are, and the ways to talk to the rest of the set."""

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Final, Protocol

from attrs import field, frozen

from onepiece.core.fair_door import Weights
from onepiece.core.routing import RouteEpoch, RouteTable, life_of, rendezvous
from onepiece.errors import NodeUnreachable
from onepiece.graph import WorkflowGraph
from onepiece.limits import (
    DELIVERY_PATIENCE_SECONDS,
    LOADS_AT_ONCE,
    PULLED_BYTES_MAX,
    REPORT_HEARD_SECONDS,
    STORES_FORGOTTEN_SECONDS,
    STORES_RETURN_SECONDS,
)
from onepiece.messages import CONTROL_REGION, RequestErrored
from onepiece.runtime.checkpoints import Checkpoints
from onepiece.runtime.counts import Counts
from onepiece.runtime.outbox import Outbox
from onepiece.runtime.reports import Report
from onepiece.runtime.retainer import Retainer
from onepiece.runtime.under_way import UnderWay
from transports import Address, Geometry, Leniency, Listener, Receiver, open_receiver

_REFUSED_MAX: Final = 1024
_ADOPTED_MAX: Final = 16_384


class Clock(Protocol):
    """Seconds, since the epoch or on a monotonic clock."""

    def __call__(self) -> float:
        """The time now."""
        ...


class Routes:
    """The newest route table this node has seen, the graphs it names, and a way to wait for news."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._stores_left_at: dict[str, float | None] = {}
        """Every store node that was seen lately, and since when it is not there."""
        self._first_at: float | None = None
        self.table = RouteTable(RouteEpoch(0, 0))
        self.graphs: Mapping[str, WorkflowGraph] = {}
        self.proxies: Mapping[str, str] = {}
        """Control address of each living proxy, by name."""
        self.unusable: Mapping[str, str] = {}
        """Registered workflows that this node cannot use, and why: it has another version, for example."""
        self._changed = asyncio.Event()

    def update(
        self, table: RouteTable, graphs: Mapping[str, WorkflowGraph], unusable: Mapping[str, str]
    ) -> None:
        """Take a newer table and wake who waits."""
        self.table = table
        self.proxies = {
            node.node_id: f"{node.address}/{CONTROL_REGION}" for node in table.nodes if "proxy" in node.roles
        }
        self.graphs = graphs
        self.unusable = unusable
        self._note_stores()
        self._changed.set()
        self._changed = asyncio.Event()

    def _note_stores(self) -> None:
        now = self._clock()
        self._first_at = now if self._first_at is None else self._first_at
        present = {node.node_id for node in self.table.nodes if "store" in node.roles}
        left = {name: at for name, at in self._stores_left_at.items() if name not in present}
        self._stores_left_at = {
            **{name: now if at is None else at for name, at in left.items()},
            **dict.fromkeys(present),
        }

    @property
    def are_new(self) -> bool:
        """Nodes of the set may still be joining a manager that has started with this node, or since."""
        return self._first_at is None or self._clock() < self._first_at + STORES_RETURN_SECONDS

    def why_unsure(self) -> str | None:
        """Why something may be stored though no store node that is there knows it; None if it is not.

        A store node that is away keeps what it has on its disk, and a node that has just started does not
        know yet which are away.
        """
        now = self._clock()
        if self.are_new:
            return "this node has just started, and store nodes may still be joining"
        away = {name: now - at for name, at in self._stores_left_at.items() if at is not None}
        for name, seconds in sorted(away.items()):
            if seconds < STORES_FORGOTTEN_SECONDS:
                return f"{name}, which may know, is away since {seconds:.0f} s"
        return None

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next update; take it before looking at the table, so that none is missed."""
        return self._changed


class Inboxes:
    """The rings of this node that others send to, and whom none of them takes anything from."""

    def __init__(
        self,
        listener: Listener,
        *,
        clock: Clock = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._listener = listener
        self._clock = clock
        self._rng = rng
        self._open: dict[Receiver, str] = {}
        """With the name of each."""
        self.fenced: dict[str, Counter[str]] = {}
        """Sessions that were fenced, by the kind of the inbox and the reason, since the node began."""
        self._refused: OrderedDict[str, None] = OrderedDict()

    @asynccontextmanager
    async def open(
        self,
        name: str,
        geometry: Geometry,
        leniency: Leniency | None = None,
        *,
        pulled_bytes_max: int = PULLED_BYTES_MAX,
        memory: str = "host",
    ) -> AsyncIterator[Receiver]:
        """Serve a ring under ``name``, as ``open_receiver`` does; leaving the block closes it."""
        opening = open_receiver(
            self._listener,
            name,
            geometry,
            leniency=leniency,
            pulled_bytes_max=pulled_bytes_max,
            clock=self._clock,
            rng=self._rng,
            fenced=self.fenced.setdefault(kind_of_inbox(name), Counter()),
            memory=memory,
        )
        async with opening as receiver:
            for life in self._refused:
                receiver.refuse(life)
            self._open[receiver] = name
            try:
                yield receiver
            finally:
                self._open.pop(receiver)

    def receivers(self) -> Iterator[tuple[str, Receiver]]:
        """Those that are open, with their names."""
        for receiver, name in self._open.items():
            yield name, receiver

    def refuse(self, lives: Iterable[str]) -> None:
        """These lives of nodes are over: what they send is not taken, should they come back."""
        for life in lives:
            self._refused[life] = None
            if len(self._refused) > _REFUSED_MAX:
                self._refused.popitem(last=False)
            for receiver in self._open:
                receiver.refuse(life)


def kind_of_inbox(name: str) -> str:
    """Of which there are few: ``actor`` for ``actor/7``, else the name itself."""
    return name.partition("/")[0]


class Identity:
    """Who this node is; a node that was declared dead takes a higher incarnation."""

    def __init__(self, node_id: str, incarnation: int) -> None:
        self.node_id = node_id
        self.incarnation = incarnation

    @property
    def life(self) -> str:
        """This life of the node; also its name on channels."""
        return life_of(self.node_id, self.incarnation)


class AdoptedRequests(OrderedDict[str, str]):
    """Owners of adopted requests by UID, bounded: of too many the oldest are forgotten.

    Word about those then goes to the owner that their inputs name, or to a proxy that passes it on.
    """

    def __setitem__(self, uid: str, owner: str) -> None:
        super().__setitem__(uid, owner)
        if len(self) > _ADOPTED_MAX:
            self.popitem(last=False)


@frozen
class Environment:
    """The node as its actors see it."""

    identity: Identity
    address: Address
    """Where other nodes reach it; the listener may be bound to all addresses of the machine."""
    control_address: str
    inboxes: Inboxes
    outbox: Outbox
    routes: Routes
    inbox_bytes: int
    join_bytes: int
    on_change: Callable[[], None]
    """Called when an actor's state changes, so that the manager hears of it at once."""
    retainer: Retainer
    under_way: UnderWay = field(init=False)
    delivery_seconds: float = DELIVERY_PATIENCE_SECONDS
    """How long a message waits where no node takes it, before its request fails."""
    checkpoints: Checkpoints = field(factory=Checkpoints)
    owners: AdoptedRequests = field(factory=AdoptedRequests)
    """Control address of the owner of requests that have been adopted, by UID."""
    now: Clock = time.time
    """What deadlines and headers are written in."""
    monotonic: Clock = time.monotonic
    rng: random.Random = field(factory=random.SystemRandom)
    load_gate: asyncio.Semaphore = field(factory=lambda: asyncio.Semaphore(LOADS_AT_ONCE))
    """Held by each rank of a stage on several devices while it loads."""
    weights: Weights = field(factory=Weights)
    counts: Counts = field(factory=Counts)
    call_numbers: Iterator[int] = field(init=False)
    """One sequence for the whole node, since several of its parts may be answered by the same kind of
    message. It begins anywhere, since answers to an earlier life may come to this one's address."""

    @under_way.default
    def _of_the_retainer(self) -> UnderWay:
        return self.retainer.under_way

    @call_numbers.default
    def _from_anywhere(self) -> Iterator[int]:
        return itertools.count(self.rng.getrandbits(48))

    @property
    def node_id(self) -> str:
        """This node's name."""
        return self.identity.node_id

    def owner_of(self, uid: str, named: str) -> str:
        """Whom to tell about a request; ``named`` is who owned it when its work came here.

        If that one is gone it is the proxy that adopts the request, or will know who has.
        """
        owner = self.owners.get(uid, named)
        proxies = self.routes.proxies
        if not proxies or owner in proxies.values():
            return owner
        return proxies[rendezvous(uid, proxies)]

    def report(self, owner: str, report: Report) -> None:
        """Tell a request's owner how a stage gets on; never waits."""
        self.outbox.report(self.owner_of(report.uid, owner), report)

    async def report_heard(self, owner: str, report: Report) -> None:
        """As ``report``, but wait until the owner has heard, for ``REPORT_HEARD_SECONDS`` at most."""
        with contextlib.suppress(NodeUnreachable, TimeoutError):
            async with asyncio.timeout(REPORT_HEARD_SECONDS):
                await self.outbox.tell(self.owner_of(report.uid, owner), report)

    def break_request(self, owner: str, error: RequestErrored) -> None:
        """Tell a request's owner that it cannot go on."""
        self.tell_owner(error.uid, owner, error)

    def tell_owner(self, uid: str, owner: str, message: object) -> None:
        """Tell whoever owns a request now; ``owner`` is who did when its work came here."""
        self.outbox.post(self.owner_of(uid, owner), message)
