"""Actors that move: what placement does to carry out moves, and to have instances end that are not needed.

``move_book`` says what comes next, and this gives the orders. What it promises:

* The book is in a ``KeepMoves`` effect before the orders that rely on it: a restarted manager goes on by it.
* Nothing begins before workers have gathered, nor what does not fit the actors as they are any more.
* An old actor is told to end once, and told so again only as any order is that was lost.
"""

from collections import Counter

from attrs import define, field

from onepiece.core.actor_table import ActorTable
from onepiece.core.actors import ActorLife
from onepiece.core.give_back import GiveBack
from onepiece.core.inventory import users_of
from onepiece.core.move_board import StageLimits
from onepiece.core.move_book import Abandon, Fetch, MoveBook, Release, StartNew, StopOld, Switch, next_step
from onepiece.core.moves import Move
from onepiece.core.packing import Chosen
from onepiece.core.pending_move import MovePhase, PendingMove
from onepiece.core.placement_events import (
    KeepMoves,
    MoveTold,
    PlacementEffect,
    ReserveActorIds,
    SendPrefetch,
)
from onepiece.core.prefetches import Prefetch, Prefetches, StopPrefetch


@define(kw_only=True, eq=False)
class MovingActors(ActorTable):
    """The actors, and the book of their moves; see the module's text."""

    book: MoveBook = field(factory=MoveBook)
    _kept: MoveBook = field(init=False)
    """As it was last stored."""
    _is_open: bool = field(default=False, init=False)
    """Workers have gathered: something may be placed."""
    _prefetches: Prefetches = field(init=False)

    def _with_moves_kept(self, effects: list[PlacementEffect]) -> list[PlacementEffect]:
        """What is to be stored stands before the orders that rely on it."""
        kept, self._kept = self._kept, self.book
        if (kept.demand, kept.pending) == (self.book.demand, self.book.pending):
            return effects
        first = [effect for effect in effects if isinstance(effect, ReserveActorIds)]
        others = [effect for effect in effects if not isinstance(effect, ReserveActorIds)]
        return [*first, KeepMoves(self.book.demand, self.book.pending), *others]

    def _order_move(self, move: Move, now: float) -> list[PlacementEffect]:
        if move.stage not in self._needs:
            return []
        serving = Counter(actor.stage for actor in self._actors.values() if actor.serves)
        taking = self._rooms(only_taking=True)
        before, need = self.book, self._sized_needs()[move.stage]
        self.book = before.order(move, self._actors, taking, need, serving)
        if self.book is before:
            return []
        self._is_dirty = True
        begun = self.book.pending[-1]
        return [MoveTold(begun, "begun", begun.reason), *self._advance_moves(now)]

    def _order_give_back(self, give: GiveBack, now: float) -> list[PlacementEffect]:
        if give.stage not in self._needs:
            return []
        serving = Counter(actor.stage for actor in self._actors.values() if actor.serves)
        limits = self.config.limits.get(give.stage) or StageLimits()
        before = self.book
        self.book = before.give_back(give, self._actors, serving, limits.instances_min)
        if self.book is before:
            return []
        self._is_dirty = True
        begun = self.book.pending[-1]
        return [MoveTold(begun, "begun", begun.reason), *self._advance_moves(now)]

    def _advance_moves(self, now: float) -> list[PlacementEffect]:
        effects: list[PlacementEffect] = []
        for move in self.book.pending if self._is_open else ():
            is_fetched = self._prefetches.is_over(move.node_id, move.stage, now)
            match next_step(
                move,
                self._actors,
                self._workers,
                self._sized_needs(),
                self._rooms(),
                is_fetched=is_fetched,
            ):
                case Fetch():
                    effects += self._fetch(move, now)
                case StopOld():
                    self.book, draining = self.book.draining(move)
                    effects += self._stop_old(draining, now)
                case StartNew():
                    effects += self._start_moved(move, now)
                case Switch():
                    self.book = self.book.switched(move, now)
                    effects += [MoveTold(move, "done", move.reason), *self._stop_old(move, now)]
                case Release():
                    self.book = self.book.released(move, now)
                    effects.append(MoveTold(move, "given_back", move.reason))
                case Abandon(reason):
                    self.book = self.book.abandon(move, reason, now)
                    effects.append(MoveTold(move, "abandoned", reason))
        return effects + self._take_back_prefetches()

    def _fetch(self, move: PendingMove, now: float) -> list[PlacementEffect]:
        number = self._prefetches.number_to_send(move.node_id, move.stage, self.manager_epoch, now)
        if number is None:
            return []
        workflow = users_of(move.stage, self.workflows)[0]
        order = Prefetch(move.stage, workflow.module, workflow.digest, number, self.manager_epoch)
        incarnation = self._workers[move.node_id].node.incarnation
        return [SendPrefetch(move.node_id, incarnation, order)]

    def _take_back_prefetches(self) -> list[PlacementEffect]:
        """Those whose move is over, or whose new instance loads."""
        wanted = [(move.node_id, move.stage) for move in self.book.pending if move.new_id is None]
        return [
            SendPrefetch(node_id, worker.node.incarnation, StopPrefetch(stage, self.manager_epoch))
            for node_id, stage in self._prefetches.unwanted(wanted)
            if (worker := self._workers.get(node_id)) is not None
        ]

    def _start_moved(self, move: PendingMove, now: float) -> list[PlacementEffect]:
        effects = self._reserve(self._next_actor_id + 1)
        actor = self._new_actor(Chosen(move.stage, move.node_id, move.devices), now)
        self.book = self.book.started(move, actor.actor_id)
        return [*effects, self._order_start(actor, now)]

    def _stop_old(self, move: PendingMove, now: float) -> list[PlacementEffect]:
        old = [self._actors[actor_id] for actor_id in move.replaces if actor_id in self._actors]
        is_given_back = move.phase is MovePhase.GIVING_BACK
        reason = "the load does not need it" if is_given_back else f"its device goes to {move.stage}"
        return [
            effect
            for actor in old
            if actor.life is not ActorLife.STOPPING
            for effect in self._stop(actor, reason, now)
        ]
