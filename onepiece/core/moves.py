"""Moves: which instances should change their stage under a measured load, and what that gains.

A pure function of the load, the measured service times, and where actors are. What it promises:

* Nothing is moved while no stage is busier than ``utilisation_high``: a set that keeps up is left alone,
  however uneven it is. A stage below its pinned minimum is raised in any case.
* The busiest stage is served first: from devices that nobody uses, then from the donor with the smallest
  loss, the one that is least busy once it has given. A donor keeps its pinned minimum (one at least), and
  the move must leave the busier of the two less busy than the receiver was, by all windows' load: what
  was is not mistaken for what is. All that can be given together must make the receiver less busy by
  ``gain_min``, or by ``confidence`` standard deviations of what chance alone does to the ratio of the two
  stages' work, whichever is more. So a move and its reverse never both look good under one load, and few
  requests prove little. A stage does not give and take in one decision.
* A move must pay: what it is predicted to gain within ``horizon_seconds``, less the time that loading takes,
  is more than what the donor loses meanwhile. Both stand in the move.
* Memory is never exceeded. Where the new one fits beside the old one, ``is_beside`` says so: it can be
  warmed up while the old one serves. Else the old one drains first.
* An instance of several devices takes idle ones of one node, or those of one donor that has as many.
* A stage has at most ``per_node_max`` instances on one node; those nodes come first that have the fewest.
* Equal inputs give equal moves.

An actor that shares its device with others is neither moved nor joined: what it is worth there is not known.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from onepiece.core.capacity import CapacityModel
from onepiece.core.give_back import GiveBack
from onepiece.core.move_board import (
    Board,
    DeviceInfo,
    KeptBoard,
    Load,
    Place,
    PlacedActor,
    StageLimits,
    Work,
)


@frozen
class MovePolicy:
    """When moving is worth it; see the module's text."""

    utilisation_high: float = 0.85
    utilisation_goal: float = 0.75
    gain_min: float = 0.05
    confidence: float = 4.0
    horizon_seconds: float = 300.0
    moves_max: int = 64

    def __attrs_post_init__(self) -> None:
        assert 0 < self.utilisation_goal <= self.utilisation_high
        assert self.gain_min >= 0
        assert self.confidence >= 0
        assert self.horizon_seconds > 0
        assert self.moves_max >= 1


@frozen
class Move:
    """A new instance of ``stage`` on these devices, in place of the actors ``replaces`` (none: idle devices).

    ``gain_requests`` is what it is predicted to serve more within the horizon, ``cost_requests`` what it
    loses while it takes place.
    """

    stage: str
    node_id: str
    devices: tuple[str, ...]
    replaces: tuple[int, ...]
    is_beside: bool
    gain_requests: float
    cost_requests: float
    reason: str


@frozen
class Decision:
    """What should be moved, how busy each stage was before, and the instances of each stage afterwards."""

    moves: tuple[Move, ...]
    instances: Mapping[str, int]
    utilisation: Mapping[str, float]
    reason: str
    """Why there are no (more) moves."""
    gives_back: tuple[GiveBack, ...] = ()
    """Instances that are not needed; none where anything moves."""


def decide(
    model: CapacityModel,
    loads: Sequence[Load],
    devices: Iterable[DeviceInfo],
    actors: Iterable[PlacedActor],
    limits: Mapping[str, StageLimits] | None = None,
    policy: MovePolicy | None = None,
    gave: Iterable[str] = (),
    took: Iterable[str] = (),
    kept: KeptBoard | None = None,
) -> Decision:
    """Choose moves.

    Args:
        model: Measured service times.
        loads: Those of windows that end now, from the shortest one on; the first that says enough decides.
        devices: Those of nodes that take new actors.
        actors: All of the set; of stages that the model does not know, they only take room.
        limits: By stage; the defaults where one is not named.
        policy: When moving is worth it.
        gave: Stages that have given lately, and take from no donor now.
        took: Stages that have taken lately, and do not give now.
        kept: The board of an earlier call, if devices, actors and limits have not changed since.

    Raises:
        ConfigError: The load has a workflow or size class that was not measured.
    """
    policy, limits, actors = policy or MovePolicy(), limits or {}, tuple(actors)
    quiet = _quiet(model, loads, actors, limits, policy)
    if quiet is not None:
        return quiet
    kept = kept or KeptBoard()
    board = kept.of(model, devices, actors, limits)
    board.begin(gave, took)
    decision = Decision((), dict(board.counts), {}, "nothing is known of the load")
    for load in loads:
        board.works.insert(0, Work.of(model, load))
        board.gains.clear()
        decision = _decide_by(board, policy)
        if decision.moves:
            kept.clear()
            break
    return decision


def _quiet(
    model: CapacityModel,
    loads: Sequence[Load],
    actors: Iterable[PlacedActor],
    limits: Mapping[str, StageLimits],
    policy: MovePolicy,
) -> Decision | None:
    """The decision where no stage is too busy by any window, which counting is enough for; else None."""
    found = Counter(actor.stage for actor in actors)
    board = Board(model, limits, {}, counts={stage: found[stage] for stage in model.stages})
    for load in loads:
        board.works.insert(0, Work.of(model, load))
        if board.neediest(set(), policy.utilisation_high) is not None:
            return None
    used = {stage: board.used(stage) for stage in board.work.total} if loads else {}
    return Decision((), board.counts, used, _why_done(board, set(), policy))


def _decide_by(board: "Board", policy: MovePolicy) -> Decision:
    before = {stage: board.used(stage) for stage in board.work.total}
    moves: list[Move] = []
    reason = f"{policy.moves_max} moves at once are enough"
    blocked: set[str] = set()
    while len(moves) < policy.moves_max:
        stage = board.neediest(blocked, policy.utilisation_goal if moves else policy.utilisation_high)
        if stage is None:
            reason = _why_done(board, blocked, policy)
            break
        found = _best_move(board, stage, policy)
        if found is None:
            blocked.add(stage)
            continue
        board.carry_out(stage, (found.node_id, found.devices, found.replaces))
        moves.append(found)
    return Decision(tuple(moves), dict(board.counts), before, reason)


def _why_done(board: "Board", blocked: set[str], policy: MovePolicy) -> str:
    if not blocked:
        return f"no stage is busier than {policy.utilisation_high:.0%}"
    named = ", ".join(f"{stage} ({board.used(stage):.0%} busy)" for stage in sorted(blocked))
    return f"nothing that would gain enough can be given to {named}"


def _best_move(board: "Board", stage: str, policy: MovePolicy) -> Move | None:
    """From idle devices if any are fit, else from the donor with the smallest loss that pays."""
    if stage in board.gives:
        return None
    place = board.idle_place(stage)
    if place is not None:
        return _move(board, stage, place, (), policy)
    must = board.counts[stage] < board.limit(stage).instances_min
    if not must and stage in board.gave:
        return None
    donors = board.donors(stage)
    gain = board.reachable_gain(stage, donors)
    for donor in donors:
        gain_min = max(policy.gain_min, policy.confidence * board.work.chance(stage, donor))
        if not must and (gain < gain_min or board.does_harm(stage, donor)):
            continue
        place = board.donor_place(stage, donor)
        if place is None:
            continue
        move = _move(board, stage, place, (donor,), policy)
        if must or move.gain_requests > move.cost_requests:
            return move
    return None


def _move(board: "Board", stage: str, place: Place, donors: tuple[str, ...], policy: MovePolicy) -> Move:
    node_id, devices, replaces = place
    load_seconds = board.model.stages[stage].load_seconds
    high = policy.utilisation_high

    def served(used: float) -> float:
        return min(1.0, high / used) if used > 0 else 1.0

    before, after = board.used(stage), board.used(stage, 1)
    lost = sum(served(board.used(donor)) - served(board.used(donor, -1)) for donor in donors)
    lost_rate = sum(lost * board.work.rates.get(donor, 0.0) for donor in donors)
    gained_rate = (served(after) - served(before)) * board.work.rates.get(stage, 0.0) - lost_rate
    busy = f"{stage} is {before:.0%} busy"
    whence = f"{donors[0]} is {board.used(donors[0]):.0%} busy" if donors else "the devices are idle"
    return Move(
        stage=stage,
        node_id=node_id,
        devices=devices,
        replaces=replaces,
        is_beside=bool(replaces) and board.fits_beside(stage, node_id, devices),
        gain_requests=gained_rate * max(0.0, policy.horizon_seconds - load_seconds),
        cost_requests=lost_rate * load_seconds,
        reason=f"{busy}, {whence}",
    )
