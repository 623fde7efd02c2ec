"""What the manager shows of placement: what is wanted of each stage, what there is, the moves and why.

A picture of one moment, made when somebody asks, and of a bounded size: one row for each stage, and at most
``_MOVES_SHOWN_MAX`` moves: those under way (or, where there are none, those that would be worth it by the
last look), then the latest ones that ended; idle devices as ``idle_devices`` has them. It decides nothing.
"""

from collections.abc import Iterable, Mapping

from attrs import frozen

from onepiece.core.actors import Actor, ActorLife
from onepiece.core.balance import BalanceMachine
from onepiece.core.idle_devices import IdleDevices, IdleView
from onepiece.core.inventory import RegisteredWorkflow, StageNeed, users_of
from onepiece.core.move_board import StageLimits
from onepiece.core.move_book import MoveBook
from onepiece.core.pending_move import MovePhase, PendingMove
from onepiece.core.stage_sizes import StageSizes

_MOVES_SHOWN_MAX = 32


@frozen
class StageView:
    """One stage: instances wanted and there, and how busy they were by the load that was last looked at."""

    stage: str
    workflows: tuple[str, ...]
    wanted: int
    declared: int
    ready: int
    loading: int
    leaving: int
    """They retire, drain or stop."""
    instances_min: int
    instances_max: int | None
    utilisation: float | None = None
    """The share of time that its instances are busy; above 1 they do not keep up; None: not known."""
    seconds: float | None = None
    """The mean of a run; None: none has finished yet."""
    load_seconds: float | None = None
    memory_bytes: int = 0
    """Of each device, as declared, and with its inbox where that lies there."""
    seen_bytes: int | None = None
    """What an instance was measured to take of a device at most; None: that could not be told so far."""
    wanted_bytes: int = 0
    """What new instances are given."""
    problem: str | None = None


@frozen
class MoveView:
    """A move: ``outcome`` is "advised", its phase, "done", "given back" or "abandoned"; ``reason`` says why.

    Where an instance is given back, nothing comes: ``stage`` and ``donor`` are that of the actor that ends.
    """

    outcome: str
    stage: str
    donor: str | None
    node: str
    devices: tuple[str, ...]
    replaces: tuple[int, ...]
    actor: int | None
    reason: str
    seconds_ago: float | None = None
    """Since it ended."""


@frozen
class PlacementView:
    """All of it; ``reason`` says why there are no (more) moves, None before the first look."""

    mode: str
    stages: tuple[StageView, ...]
    moves: tuple[MoveView, ...]
    rates: Mapping[str, float]
    """Requests a second of each workflow that were offered between the last two looks."""
    done: int
    """Moves since the manager began."""
    abandoned: int
    given_back: int = 0
    """Instances that were not needed, since the manager began."""
    idle: tuple[IdleView, ...] = ()
    """Devices that no actor uses; ``idle_count`` of them there are."""
    idle_count: int = 0
    reason: str | None = None


def view_of(
    balance: BalanceMachine,
    book: MoveBook,
    workflows: Iterable[RegisteredWorkflow],
    needs: Mapping[str, StageNeed],
    wanted: Mapping[str, int],
    actors: Mapping[int, Actor],
    limits: Mapping[str, StageLimits],
    problems: Mapping[str, str],
    idle: IdleDevices,
    sizes: StageSizes,
    now: float,
) -> PlacementView:
    """The view, of what each part knows."""
    workflows, decision = tuple(workflows), balance.latest
    stages = []
    for stage, need in sorted(needs.items()):
        lives = [actor.life for actor in actors.values() if actor.stage == stage]
        limit, timing = limits.get(stage, StageLimits()), balance.timing(stage)
        stages.append(
            StageView(
                stage=stage,
                workflows=tuple(workflow.name for workflow in users_of(stage, workflows)),
                wanted=wanted.get(stage, 0),
                declared=need.instances,
                ready=lives.count(ActorLife.READY),
                loading=lives.count(ActorLife.ASSIGNED) + lives.count(ActorLife.LOADING),
                leaving=lives.count(ActorLife.RETIRING) + lives.count(ActorLife.STOPPING),
                instances_min=limit.instances_min,
                instances_max=limit.instances_max,
                utilisation=_finite(decision.utilisation.get(stage)) if decision is not None else None,
                seconds=timing.mean_seconds if timing is not None else None,
                load_seconds=balance.load_seconds(stage),
                memory_bytes=need.memory_bytes,
                seen_bytes=sizes.seen.get(stage),
                wanted_bytes=sizes.wanted_bytes(need),
                problem=problems.get(stage),
            )
        )
    return PlacementView(
        mode=balance.config.mode.value,
        stages=tuple(stages),
        moves=_moves(balance, book, actors, now)[:_MOVES_SHOWN_MAX],
        rates=dict(balance.rates),
        done=book.done,
        abandoned=book.abandoned,
        given_back=book.given_back,
        idle=idle.view(now),
        idle_count=idle.count,
        reason=decision.reason if decision is not None else None,
    )


def _finite(value: float | None) -> float | None:
    """JSON has no infinity: a stage with work and no instance is shown as not known."""
    return None if value is None or value == float("inf") else value


def _moves(
    balance: BalanceMachine, book: MoveBook, actors: Mapping[int, Actor], now: float
) -> tuple[MoveView, ...]:
    shown = [_shown(move, move.phase.value, move.reason, None) for move in book.pending]
    if not shown and balance.latest is not None:
        for move in balance.latest.moves:
            donor = next((actors[each].stage for each in move.replaces if each in actors), None)
            gain = f"{move.reason}; would serve {move.gain_requests:.0f} more requests"
            shown.append(
                MoveView(
                    "advised",
                    move.stage,
                    donor,
                    move.node_id,
                    move.devices,
                    move.replaces,
                    None,
                    f"{gain}, and lose {move.cost_requests:.0f} meanwhile",
                )
            )
        for give in balance.latest.gives_back:
            where = (give.stage, give.stage, give.node_id, give.devices, (give.actor_id,), None)
            shown.append(MoveView("advised to give back", *where, give.reason))
    for ended in reversed(book.ended):
        is_given_back = ended.move.phase is MovePhase.GIVING_BACK
        outcome = "abandoned" if ended.problem else "given back" if is_given_back else "done"
        reason = ended.problem or ended.move.reason
        shown.append(_shown(ended.move, outcome, reason, max(0.0, now - ended.ended_at)))
    return tuple(shown)


def _shown(move: PendingMove, outcome: str, reason: str, seconds_ago: float | None) -> MoveView:
    return MoveView(
        outcome,
        move.stage,
        move.donor,
        move.node_id,
        move.devices,
        move.replaces,
        move.new_id,
        reason,
        seconds_ago,
    )
