"""A move under way, and one that is over, as they are stored and shown; a giving back is one of them.

They are plain values: ``move_book`` says what becomes of them, the coordinator keeps those under way, and the
manager's view names both. An actor is known by its id, which is never used twice, so that a stored move finds
its actors again after a restart, or finds that they are gone.
"""

import enum

from attrs import frozen


class MovePhase(enum.StrEnum):
    """How far a move has come."""

    PREFETCHING = "prefetching"
    DRAINING = "draining"
    WARMING = "warming"
    GIVING_BACK = "giving back"


@frozen
class PendingMove:
    """A move under way; ``donor`` is the stage of the actors it ``replaces``, None on idle devices.

    In the phase ``GIVING_BACK`` nothing comes: ``stage`` is that of the actors that end, and so is ``donor``.
    """

    stage: str
    node_id: str
    devices: tuple[str, ...]
    replaces: tuple[int, ...]
    donor: str | None
    phase: MovePhase
    is_beside: bool
    reason: str
    new_id: int | None = None


@frozen
class EndedMove:
    """A move that is over: ``problem`` is None if the new instance serves, else why it was abandoned."""

    move: PendingMove
    ended_at: float
    problem: str | None
