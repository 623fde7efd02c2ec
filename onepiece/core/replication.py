"""Replication: copies of results on several store nodes, and how they are kept alike.

*Which* nodes hold a result's copies follows from its UID alone, by rendezvous hashing, so that whoever
knows the store nodes knows where to write and where to ask. A node that comes or goes moves only the
copies that it takes or leaves. Each store node runs one machine; there is no leader among them.

What stands under a UID on one node is a *version*; of two versions every node agrees which is better
(``Version.beats``), and copying keeps that one. So copying may be late, repeated and out of order, and
still all nodes come to hold the same: the best version that any of them has.

Copies travel in two ways:

- *At once*: what was just stored is sent to the other holders, what was purged to every store node. A
  copy is one call that ends in ``CopyTaken`` or ``CopyFailed``; it is tried ``attempts_max`` times. What
  then is still missing, or found no place in the bounded list, is left to the second way. Who takes in a
  copy in the place of something worse hands it on in the same way, since others may have the worse too.
- *By rounds* (anti-entropy): this node goes through all it has, in pages in the order of UIDs, and offers
  to one peer what that peer should hold. The peer asks for what it lacks, and sends back what it has
  better. A round is due when the peer joins (perhaps with an empty disk), when a node left and others
  hold in its place, when copies to the peer failed, and every ``round_seconds``.

The state of the rounds to one peer::

               needed            page sent             page answered
    (new) ---> DUE ----------------> OFFERED -------------------> COPYING
                ^ ^                     |                            |  |
                | +---- page failed ----+        more pages left     |  | that was the last
                +----------------------------------------------------+  v
                +--------------------- needed ----------------------- RESTING

A need that comes up in the middle of a round begins another one behind it.

What it promises: when faults stop, all holders of a UID come to hold the same version, the best that
was on any disk that is still there; a tombstone that was on such a disk is on all of them. A node need not
be a holder to offer what it has, so what a former holder has is not lost, and what drains is handed
over. Everything is bounded: copies under way, the list of those that wait, pages in time.

What it does not: a tombstone outlives a partition only as long as its own time to live; a node that
returns after that brings back what it kept, unless that has expired too, which with the default times
it has. A copy that is no longer where it should be stays until it expires.
"""

import enum
from collections import Counter
from collections.abc import Mapping
from typing import Final, TypeAlias

from attrs import define, evolve, field, frozen

from onepiece.core.machine import Machine, follow
from onepiece.core.replication_events import (
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
    copy_holders,
)

__all__ = ["TRANSITIONS", "ReplicationMachine", "RoundState", "copy_holders"]


class RoundState(enum.Enum):
    """How far the round with one peer is."""

    DUE = "due"
    OFFERED = "offered"
    COPYING = "copying"
    RESTING = "resting"


class _Trigger(enum.Enum):
    NEEDED = "needed"
    PAGE_SENT = "page sent"
    PAGE_FAILED = "page failed"
    PAGE_ANSWERED = "page answered"
    PAGE_COPIED = "page copied"
    ROUND_ENDED = "round ended"


TRANSITIONS: Final[Mapping[tuple[RoundState, _Trigger], RoundState]] = {
    (RoundState.RESTING, _Trigger.NEEDED): RoundState.DUE,
    (RoundState.DUE, _Trigger.NEEDED): RoundState.DUE,
    (RoundState.OFFERED, _Trigger.NEEDED): RoundState.OFFERED,
    (RoundState.COPYING, _Trigger.NEEDED): RoundState.COPYING,
    (RoundState.DUE, _Trigger.PAGE_SENT): RoundState.OFFERED,
    (RoundState.OFFERED, _Trigger.PAGE_FAILED): RoundState.DUE,
    (RoundState.OFFERED, _Trigger.PAGE_ANSWERED): RoundState.COPYING,
    (RoundState.COPYING, _Trigger.PAGE_COPIED): RoundState.DUE,
    (RoundState.COPYING, _Trigger.ROUND_ENDED): RoundState.RESTING,
}


@frozen
class _Round:
    """The rounds with one peer; ``after_uid`` is where the next page begins."""

    state: RoundState
    due_at: float
    """DUE: not before this; RESTING: the next round."""
    after_uid: str = ""
    number: int | None = None
    """OFFERED: which page is under way."""
    was_last: bool = False
    """COPYING: no page is left behind this one."""
    again_at: float | None = None
    """Another round is needed behind this one, not before this."""
    failures: int = 0
    """Pages in a row."""


@frozen
class _Copy:
    """A copy to be made; ``number`` while it is under way."""

    due_at: float
    of_round: bool
    number: int | None = None
    failures: int = 0
    again: bool = False
    """What stands under the UID has changed since it was sent."""


_Key: TypeAlias = tuple[str, str]
"""Peer and UID."""


@define(kw_only=True, eq=False)
class ReplicationMachine(Machine[ReplicationEvent, ReplicationEffect]):
    """One store node's part in replication; see the module's text."""

    node_id: str
    config: ReplicationConfig = field(factory=ReplicationConfig)
    story_entries_max: int = 64
    _peers: dict[str, StoreNode] = field(factory=dict, init=False)
    _candidates: frozenset[str] = field(default=frozenset(), init=False)
    """The nodes that copies are placed on, this one perhaps among them."""
    _rounds: dict[str, _Round] = field(factory=dict, init=False)
    _copies: dict[_Key, _Copy] = field(factory=dict, init=False)
    _under_way: dict[int, _Key] = field(factory=dict, init=False)
    _next_number: int = field(default=1, init=False)
    _next_page_at: float = field(default=float("-inf"), init=False)

    @property
    def pending(self) -> int:
        """Copies under way or waiting."""
        return len(self._copies)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is known to be missing on any peer."""
        return not self._copies and all(each.state is RoundState.RESTING for each in self._rounds.values())

    def should_hold(self, node_id: str, uid: str) -> bool:
        """Whether a node is one of the UID's holders."""
        return node_id in copy_holders(uid, self._candidates, self.config.copies)

    def next_deadline(self, now: float) -> float | None:
        """When the next attempt, page or round is due."""
        deadlines = [
            copy.due_at for copy in self._copies.values() if copy.number is None and copy.due_at > now
        ]
        for each in self._rounds.values():
            if each.state is RoundState.RESTING:
                deadlines.append(each.due_at)
            elif each.state is RoundState.DUE and self._has_page_room():
                deadlines.append(max(each.due_at, self._next_page_at))
        return min(deadlines, default=None)

    def check_invariants(self) -> None:
        """Within the bounds; what is under way is known under its number; states and fields agree."""
        assert self.node_id not in self._peers
        assert self._rounds.keys() == self._peers.keys()
        assert len(self._copies) <= self.config.pending_max
        numbers = {copy.number: key for key, copy in self._copies.items() if copy.number is not None}
        assert numbers == self._under_way
        in_flight = self._in_flight()
        assert max(in_flight.values(), default=0) <= self.config.in_flight_per_peer
        copying = {peer for (peer, _), copy in self._copies.items() if copy.of_round}
        for peer, each in self._rounds.items():
            assert (each.number is not None) == (each.state is RoundState.OFFERED)
            assert each.state is not RoundState.COPYING or peer in copying, f"the page for {peer} is copied"
        assert {peer for peer, _ in self._copies} <= self._peers.keys()

    def _react(self, event: ReplicationEvent, now: float) -> list[ReplicationEffect]:
        effects: list[ReplicationEffect] = []
        match event:
            case StoresChanged():
                self._on_stores(event, now)
            case Stored(uid):
                for peer in copy_holders(uid, self._candidates, self.config.copies):
                    self._enqueue(peer, uid, now)
            case Purged(uid):
                for peer in self._peers:
                    self._enqueue(peer, uid, now)
            case CopyRefused(uid, peer):
                self._enqueue(peer, uid, now)
            case CopyReplaced():
                self._on_replaced(event, now)
            case CopyTaken(number):
                self._on_taken(number, now)
            case CopyFailed(number):
                self._on_failed(number, now)
            case SummaryReceived():
                effects.append(self._on_summary(event, now))
            case SummaryAnswered():
                self._on_answered(event, now)
            case SummaryFailed(number):
                self._on_page_failed(number, now)
            case Tick():
                pass
        return effects + self._proceed(now)

    # --- who is there --------------------------------------------------------------------------

    def _on_stores(self, event: StoresChanged, now: float) -> None:
        taking = frozenset(node.node_id for node in event.stores if node.takes_copies)
        candidates = taking or frozenset(node.node_id for node in event.stores)
        left, entered = self._candidates - candidates, candidates - self._candidates
        peers = {node.node_id: node for node in event.stores if node.node_id != self.node_id}
        for peer, node in list(self._peers.items()):
            if peer not in peers or peers[peer].life != node.life:
                self._forget(peer)
        for peer in peers:
            if peer not in self._rounds:
                self._rounds[peer] = _Round(RoundState.DUE, now)
            elif peer in entered:
                self._need(peer, now)
            elif left:
                self._need(peer, now + self.config.settle_seconds)
        self._peers, self._candidates = peers, candidates

    def _forget(self, peer: str) -> None:
        """Drop what was meant for a life that is over; what is under way ends unheard."""
        del self._rounds[peer]
        for key in [key for key in self._copies if key[0] == peer]:
            number = self._copies.pop(key).number
            if number is not None:
                del self._under_way[number]

    def _need(self, peer: str, at: float) -> None:
        """A round with the peer is needed, not before ``at``."""
        each = self._rounds[peer]
        state = follow(TRANSITIONS, each.state, _Trigger.NEEDED)
        if each.state is RoundState.RESTING:
            self._rounds[peer] = _Round(state, at)
        elif each.state is RoundState.DUE and not each.after_uid:
            self._rounds[peer] = evolve(each, due_at=min(each.due_at, at))
        else:
            again_at = at if each.again_at is None else min(each.again_at, at)
            self._rounds[peer] = evolve(each, state=state, again_at=again_at)

    # --- copies --------------------------------------------------------------------------------

    def _enqueue(self, peer: str, uid: str, now: float, *, of_round: bool = False) -> None:
        if peer not in self._peers:
            return
        known = self._copies.get((peer, uid))
        if known is not None:
            self._copies[peer, uid] = evolve(known, again=known.number is not None)
        elif len(self._copies) < self.config.pending_max:
            self._copies[peer, uid] = _Copy(now, of_round)
        else:
            self._need(peer, now + self.config.retry_seconds)

    def _on_replaced(self, event: CopyReplaced, now: float) -> None:
        """Hand it on: others may have the worse too, and who sent it may have died before it told them."""
        holders = copy_holders(event.uid, self._candidates, self.config.copies)
        for peer in self._peers if event.is_tombstone else holders:
            if peer != event.peer:
                self._enqueue(peer, event.uid, now)

    def _on_taken(self, number: int, now: float) -> None:
        key = self._under_way.pop(number, None)
        if key is None:
            return
        copy = self._copies.pop(key)
        if copy.again:
            self._copies[key] = _Copy(now, copy.of_round)

    def _on_failed(self, number: int, now: float) -> None:
        key = self._under_way.pop(number, None)
        if key is None:
            return
        copy = self._copies.pop(key)
        failures = copy.failures + 1
        if failures < self.config.attempts_max:
            pause = self.config.pause_seconds(failures)
            self._copies[key] = _Copy(now + pause, copy.of_round, failures=failures)
        else:
            self._need(key[0], now + self.config.retry_seconds_max)

    # --- rounds --------------------------------------------------------------------------------

    def _on_summary(self, event: SummaryReceived, now: float) -> Pull:
        mine = {version.uid: version for version in event.mine}
        wanted: list[str] = []
        for version in event.page:
            own = mine.get(version.uid)
            if version.beats(own):
                wanted.append(version.uid)
            elif own is not None and own.beats(version):
                self._enqueue(event.peer, version.uid, now)
        return Pull(event.peer, tuple(wanted))

    def _peer_of_page(self, number: int) -> str | None:
        return next((peer for peer, each in self._rounds.items() if each.number == number), None)

    def _on_answered(self, event: SummaryAnswered, now: float) -> None:
        peer = self._peer_of_page(event.number)
        if peer is None:
            return
        each = self._rounds[peer]
        self._rounds[peer] = evolve(
            each,
            state=follow(TRANSITIONS, each.state, _Trigger.PAGE_ANSWERED),
            number=None,
            after_uid=event.up_to or "",
            was_last=event.up_to is None,
            failures=0,
        )
        for uid in event.wanted[: self.config.page_records_max]:
            self._enqueue(peer, uid, now, of_round=True)

    def _on_page_failed(self, number: int, now: float) -> None:
        peer = self._peer_of_page(number)
        if peer is None:
            return
        each = self._rounds[peer]
        failures = each.failures + 1
        self._rounds[peer] = evolve(
            each,
            state=follow(TRANSITIONS, each.state, _Trigger.PAGE_FAILED),
            number=None,
            due_at=now + self.config.pause_seconds(failures),
            failures=failures,
        )

    # --- what can be done now ------------------------------------------------------------------

    def _proceed(self, now: float) -> list[ReplicationEffect]:
        self._end_pages(now)
        return [*self._send_copies(now), *self._send_pages(now)]

    def _end_pages(self, now: float) -> None:
        copying = {peer for (peer, _), copy in self._copies.items() if copy.of_round}
        for peer, each in self._rounds.items():
            if each.state is RoundState.RESTING and each.due_at <= now:
                self._need(peer, now)
            if each.state is not RoundState.COPYING or peer in copying:
                continue
            if not each.was_last:
                state = follow(TRANSITIONS, each.state, _Trigger.PAGE_COPIED)
                self._rounds[peer] = evolve(each, state=state, due_at=now)
                continue
            state = follow(TRANSITIONS, each.state, _Trigger.ROUND_ENDED)
            self._rounds[peer] = _Round(state, now + self.config.round_seconds)
            if each.again_at is not None:
                self._need(peer, each.again_at)

    def _in_flight(self) -> Counter[str]:
        return Counter(peer for peer, _ in self._under_way.values())

    def _send_copies(self, now: float) -> list[ReplicationEffect]:
        """What was just stored goes before what a round brings."""
        effects: list[ReplicationEffect] = []
        in_flight = self._in_flight()
        for of_round in (False, True):
            for key, copy in self._copies.items():
                peer, uid = key
                is_next = copy.number is None and copy.of_round == of_round and copy.due_at <= now
                if is_next and in_flight[peer] < self.config.in_flight_per_peer:
                    number = self._take_number()
                    self._copies[key] = evolve(copy, number=number)
                    self._under_way[number] = key
                    in_flight[peer] += 1
                    effects.append(SendCopy(number, uid, peer))
        return effects

    def _has_page_room(self) -> bool:
        """Whether all that a page may make a peer ask for finds a place."""
        return len(self._copies) + self.config.page_records_max <= self.config.pending_max

    def _send_pages(self, now: float) -> list[ReplicationEffect]:
        due = [
            (each.due_at, peer)
            for peer, each in self._rounds.items()
            if each.state is RoundState.DUE and each.due_at <= now
        ]
        if not due or now < self._next_page_at or not self._has_page_room():
            return []
        _, peer = min(due)
        each, number = self._rounds[peer], self._take_number()
        state = follow(TRANSITIONS, each.state, _Trigger.PAGE_SENT)
        self._rounds[peer] = evolve(each, state=state, number=number)
        self._next_page_at = now + self.config.page_seconds
        return [SendSummary(number, peer, each.after_uid)]

    def _take_number(self) -> int:
        number = self._next_number
        self._next_number += 1
        return number
