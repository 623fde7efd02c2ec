"""The manager's state as records: of the numbers, the moves, the sizes, and of each registered workflow.

Whatever keeps them (a file, etcd) keeps the same bytes under the same keys, and writes only those that
have changed.
"""

from collections.abc import Mapping
from typing import Final, TypeVar

from attrs import frozen

from onepiece.codec import decode_control, encode_control, register
from onepiece.core.inventory import RegisteredWorkflow
from onepiece.core.manager import ManagerState
from onepiece.core.pending_move import PendingMove
from onepiece.errors import CodecError, ConfigError

COUNTERS: Final = b"counters"
_MOVES: Final = b"moves"
_SIZES: Final = b"sizes"
_WORKFLOW: Final = b"workflow/"

_T = TypeVar("_T")


@register
@frozen
class ManagerCounters:
    """The numbers of a ``ManagerState``."""

    epoch: int
    next_actor_id: int


@register
@frozen
class ManagerMoves:
    """What is wanted by measured load, and the moves under way, of a ``ManagerState``."""

    demand: Mapping[str, int]
    moves: tuple[PendingMove, ...]


@register
@frozen
class ManagerSizes:
    """What instances of stages were measured to take, of a ``ManagerState``."""

    seen_bytes: Mapping[str, int]


register(RegisteredWorkflow)


def to_records(state: ManagerState) -> dict[bytes, bytes]:
    """The records of a state by key."""
    records = {COUNTERS: encode_control(ManagerCounters(state.epoch, state.next_actor_id))}
    records[_MOVES] = encode_control(ManagerMoves(state.demand, state.moves))
    records[_SIZES] = encode_control(ManagerSizes(state.seen_bytes))
    return records | {_WORKFLOW + each.name.encode(): encode_control(each) for each in state.workflows}


def from_records(records: Mapping[bytes, bytes], place: str, way_out: str) -> ManagerState:
    """The state of these records; the initial one of none.

    Args:
        records: Their bytes by key.
        place: Where they lie, for the error.
        way_out: How to begin anew, for the error.

    Raises:
        ConfigError: They are of another version of OnePiece.
    """
    counters, moves, sizes = ManagerCounters(0, 1), ManagerMoves({}, ()), ManagerSizes({})
    workflows: list[RegisteredWorkflow] = []
    for key, value in records.items():
        try:
            if key == COUNTERS:
                counters = _decoded(value, ManagerCounters)
            elif key == _MOVES:
                moves = _decoded(value, ManagerMoves)
            elif key == _SIZES:
                sizes = _decoded(value, ManagerSizes)
            else:
                workflows.append(_decoded(value, RegisteredWorkflow))
        except CodecError as error:
            raise ConfigError(
                f"the manager's state in {place} is of another version of OnePiece ({error}); "
                f"start that version, or {way_out} and register the workflows again"
            ) from error
    workflows.sort(key=lambda workflow: workflow.name)
    return ManagerState(
        counters.epoch,
        counters.next_actor_id,
        tuple(workflows),
        moves.demand,
        moves.moves,
        sizes.seen_bytes,
    )


def _decoded(value: bytes, wanted: type[_T]) -> _T:
    message = decode_control(value)
    if not isinstance(message, wanted):
        raise CodecError(f"a {type(message).__name__} where a {wanted.__name__} should be")
    return message
