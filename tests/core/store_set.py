"""A set of store nodes on virtual time: real machines, model disks, a network that loses and reorders.

What the driver of a machine does is done here in a few lines each: a copy is one call that is answered or
runs out of time, a page likewise. Crashes, wiped disks, partitions and late route tables are calls.
"""

import heapq
import itertools
import random
from collections.abc import Callable
from functools import partial

from attrs import define, field

from onepiece.core.replication import ReplicationMachine
from onepiece.core.replication_events import (
    TOMBSTONE,
    CopyFailed,
    CopyRefused,
    CopyReplaced,
    CopyTaken,
    Pull,
    Purged,
    ReplicationConfig,
    ReplicationEffect,
    ReplicationEvent,
    SendCopy,
    SendSummary,
    Stored,
    StoreNode,
    StoresChanged,
    SummaryAnswered,
    SummaryFailed,
    SummaryReceived,
    Tick,
    Version,
)

CALL_SECONDS = 3.0
"""How long a call waits for its answer."""

SCAN_RECORDS = 3
"""Records in a page before those are left out that the peer should not hold."""


@define(eq=False)
class ModelNode:
    """A store node: its disk outlives its machine."""

    name: str
    life: int = 0
    machine: ReplicationMachine | None = None
    disk: dict[str, Version] = field(factory=dict)
    wake_at: float = float("inf")


@define(eq=False)
class StoreSet:
    """The nodes, the network between them, and the time."""

    names: list[str]
    config: ReplicationConfig
    rng: random.Random
    now: float = 0.0
    nodes: dict[str, ModelNode] = field(factory=dict)
    cut: set[tuple[str, str]] = field(factory=set)
    """From whom to whom nothing gets through."""
    loss: float = 0.1
    _agenda: list[tuple[float, int, Callable[[], None]]] = field(factory=list)
    _serial: "itertools.count[int]" = field(factory=itertools.count)

    def __attrs_post_init__(self) -> None:
        self.nodes = {name: ModelNode(name) for name in self.names}
        for name in self.names:
            self.start(name)

    # --- faults ---------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start a node with what its disk has; everybody hears of it sooner or later."""
        node = self.nodes[name]
        node.life += 1
        node.machine = ReplicationMachine(node_id=name, config=self.config)
        self.publish()

    def crash(self, name: str, *, wipe: bool) -> None:
        """A node dies, perhaps with its disk; the others hear of it sooner or later."""
        node = self.nodes[name]
        node.machine = None
        node.wake_at = float("inf")
        if wipe:
            node.disk.clear()
        self.publish()

    def publish(self) -> None:
        """Have every node hear who is there: some now, others later; each hears of what is so then."""
        for node in self.nodes.values():
            self.at(self.rng.choice([0.0, 0.01, 0.5]), partial(self.hear_routes, node.name))

    def hear_routes(self, name: str) -> None:
        """A node gets the newest route table."""
        living = [node for node in self.nodes.values() if node.machine is not None]
        stores = tuple(StoreNode(node.name, f"{node.name}.{node.life}") for node in living)
        self.handle(name, StoresChanged(stores))

    def heal(self, stays_dead: str) -> None:
        """Faults stop: the network is whole, and every node but that one is there."""
        self.cut.clear()
        self.loss = 0.0
        for node in self.nodes.values():
            if node.machine is None and node.name != stays_dead:
                self.start(node.name)

    # --- what clients do ------------------------------------------------------------------------

    def put(self, name: str, uid: str) -> None:
        """Store a value at a node, if it lives and has nothing under the UID."""
        node = self.nodes[name]
        if node.machine is not None and uid not in node.disk:
            node.disk[uid] = Version(uid, "result", self.now + next(self._serial) * 1e-9)
            self.handle(name, Stored(uid))

    def purge(self, name: str, uid: str) -> None:
        """Purge a value at a node, if it lives."""
        node = self.nodes[name]
        if node.machine is not None:
            node.disk[uid] = Version(uid, TOMBSTONE, self.now)
            self.handle(name, Purged(uid))

    # --- time and network -----------------------------------------------------------------------

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something after a while."""
        heapq.heappush(self._agenda, (self.now + seconds, next(self._serial), action))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while True:
            awake = min(self.nodes.values(), key=lambda node: node.wake_at)
            next_at = self._agenda[0][0] if self._agenda else float("inf")
            if min(next_at, awake.wake_at) > end:
                break
            if next_at <= awake.wake_at:
                self.now, _, action = heapq.heappop(self._agenda)
                action()
            else:
                self.now = max(self.now, awake.wake_at)
                self.handle(awake.name, Tick())
        self.now = end

    def send(self, source: str, target: str, action: Callable[[], None]) -> None:
        """Deliver something, if it gets through: late, perhaps twice, perhaps not at all."""
        for _ in range(self.rng.choice([1, 1, 1, 2])):
            if (source, target) not in self.cut and self.rng.random() >= self.loss:
                self.at(self.rng.choice([0.001, 0.01, 0.1, 1.0]), action)

    def handle(self, name: str, event: ReplicationEvent) -> list[ReplicationEffect]:
        """Tell a node's machine, and carry out what it says."""
        node = self.nodes[name]
        if node.machine is None:
            return []
        effects = node.machine.handle(event, self.now)
        for effect in effects:
            match effect:
                case SendCopy():
                    self._send_copy(node, effect)
                case SendSummary():
                    self._send_page(node, effect)
        wake_at = node.machine.next_deadline(self.now)
        node.wake_at = float("inf") if wake_at is None else wake_at
        return effects

    def _call(self, node: ModelNode, failed: ReplicationEvent) -> Callable[[ReplicationEvent], None]:
        """A call that ends once: by an answer in time, or by ``failed``; only its own life hears of it."""
        life, is_open = node.life, [True]

        def end(event: ReplicationEvent) -> None:
            if is_open[0] and node.life == life and node.machine is not None:
                is_open[0] = False
                self.handle(node.name, event)

        self.at(CALL_SECONDS, lambda: end(failed))
        return end

    def _send_copy(self, node: ModelNode, effect: SendCopy) -> None:
        end = self._call(node, CopyFailed(effect.number))
        version = node.disk.get(effect.uid)
        if version is None:
            self.at(0.0, lambda: end(CopyTaken(effect.number)))
            return
        peer = self.nodes[effect.peer]

        def arrive() -> None:
            if peer.machine is None:
                return
            own = peer.disk.get(version.uid)
            if version.beats(own):
                peer.disk[version.uid] = version
                if own is not None:
                    replaced = CopyReplaced(version.uid, node.name, version.kind == TOMBSTONE)
                    self.handle(peer.name, replaced)
            elif own is not None and own.beats(version):
                self.handle(peer.name, CopyRefused(version.uid, node.name))
            self.send(peer.name, node.name, lambda: end(CopyTaken(effect.number)))

        self.send(node.name, peer.name, arrive)

    def _send_page(self, node: ModelNode, effect: SendSummary) -> None:
        assert node.machine is not None
        end = self._call(node, SummaryFailed(effect.number))
        behind = sorted(uid for uid in node.disk if uid > effect.after_uid)
        scanned = behind[:SCAN_RECORDS]
        up_to = scanned[-1] if len(behind) > SCAN_RECORDS else None
        page = tuple(node.disk[uid] for uid in scanned if node.machine.should_hold(effect.peer, uid))
        peer = self.nodes[effect.peer]

        def arrive() -> None:
            mine = tuple(peer.disk[version.uid] for version in page if version.uid in peer.disk)
            effects = self.handle(peer.name, SummaryReceived(node.name, page, mine))
            for answer in effects:
                if isinstance(answer, Pull):
                    answered = SummaryAnswered(effect.number, answer.uids, up_to)
                    self.send(peer.name, node.name, partial(end, answered))

        self.send(node.name, peer.name, arrive)
