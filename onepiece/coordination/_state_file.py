"""The manager's state in LMDB; the only file of this package that touches it.

One table: ``counters`` holds the epoch and the next actor id, ``moves`` what is wanted by load and the moves
under way, ``workflow/NAME`` each registered workflow. A state is written in one transaction with sync on, so
that it is either there as a whole or not at all, whatever dies. All of this blocks, and belongs on a thread.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar

import lmdb
from attrs import define, field, frozen

from onepiece.codec import decode_control, encode_control, register
from onepiece.core.inventory import RegisteredWorkflow
from onepiece.core.manager import ManagerState
from onepiece.core.pending_move import PendingMove
from onepiece.errors import CodecError, ConfigError, StoreFull
from onepiece.owner_lock import lock_directory

_COUNTERS: Final = b"counters"
_MOVES: Final = b"moves"
_WORKFLOW: Final = b"workflow/"
_MAP_BYTES: Final = 256 << 20

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


register(RegisteredWorkflow)


@define(eq=False)
class StateFile:
    """An open state file, owned by this process alone until it is closed or the process dies."""

    path: Path
    _owner: int = field(repr=False)
    _environment: lmdb.Environment = field(repr=False)

    @classmethod
    def open(cls, path: Path) -> "StateFile":
        """Open or create the file in this directory; raises ``ConfigError`` if that cannot be."""
        owner = lock_directory(path, "manager's state")
        try:
            environment = lmdb.open(str(path), map_size=_MAP_BYTES, max_readers=4)
        except lmdb.Error as error:
            os.close(owner)
            raise ConfigError(
                f"the manager's state in {str(path)!r} cannot be opened ({error}); "
                "restore it, or give an empty directory to begin anew"
            ) from error
        return cls(path, owner, environment)

    def close(self) -> None:
        """Close the file and let others open it."""
        self._environment.close()
        os.close(self._owner)

    def load(self) -> ManagerState:
        """The state last written; the initial one in a new file."""
        with self._environment.begin() as transaction:
            pairs = [(bytes(key), bytes(value)) for key, value in transaction.cursor()]
        counters = ManagerCounters(0, 1)
        moves = ManagerMoves({}, ())
        workflows: list[RegisteredWorkflow] = []
        for key, value in pairs:
            if key == _COUNTERS:
                counters = self._decoded(value, ManagerCounters)
            elif key == _MOVES:
                moves = self._decoded(value, ManagerMoves)
            else:
                workflows.append(self._decoded(value, RegisteredWorkflow))
        workflows.sort(key=lambda workflow: workflow.name)
        return ManagerState(
            counters.epoch, counters.next_actor_id, tuple(workflows), moves.demand, moves.moves
        )

    def write(self, state: ManagerState) -> None:
        """Replace the state; durable on return.

        Raises:
            StoreFull: The disk took no more; the state before is intact.
        """
        wanted = {_COUNTERS: encode_control(ManagerCounters(state.epoch, state.next_actor_id))}
        wanted[_MOVES] = encode_control(ManagerMoves(state.demand, state.moves))
        wanted |= {_WORKFLOW + each.name.encode(): encode_control(each) for each in state.workflows}
        try:
            with self._environment.begin(write=True) as transaction:
                known = {bytes(key): bytes(value) for key, value in transaction.cursor()}
                for key in known.keys() - wanted.keys():
                    transaction.delete(key)
                for key, value in wanted.items():
                    if known.get(key) != value:
                        transaction.put(key, value)
        except lmdb.Error as error:
            raise StoreFull(
                f"the manager's state in {str(self.path)!r} could not be written ({error}); make room there",
                path=str(self.path),
            ) from error

    def _decoded(self, value: bytes, wanted: type[_T]) -> _T:
        try:
            message = decode_control(value)
        except CodecError as error:
            raise self._foreign(str(error)) from error
        if not isinstance(message, wanted):
            raise self._foreign(f"a {type(message).__name__} where a {wanted.__name__} should be")
        return message

    def _foreign(self, what: str) -> ConfigError:
        return ConfigError(
            f"the manager's state in {str(self.path)!r} is of another version of OnePiece ({what}); "
            "start that version, or give an empty directory and register the workflows again"
        )
