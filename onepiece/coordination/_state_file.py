"""The manager's state in LMDB; the only file of this package that touches it.

One table of the state's records (``_state_records``). A state is written in one transaction with sync on,
so that it is either there as a whole or not at all, whatever dies. All of this blocks, and belongs on a
thread.
"""

import os
from pathlib import Path
from typing import Final

import lmdb
from attrs import define, field

from onepiece.coordination._state_records import from_records, to_records
from onepiece.core.manager import ManagerState
from onepiece.errors import ConfigError, StoreFull
from onepiece.owner_lock import lock_directory

_MAP_BYTES: Final = 256 << 20


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
            records = {bytes(key): bytes(value) for key, value in transaction.cursor()}
        return from_records(records, repr(str(self.path)), "give an empty directory")

    def write(self, state: ManagerState) -> None:
        """Replace the state; durable on return.

        Raises:
            StoreFull: The disk took no more; the state before is intact.
        """
        wanted = to_records(state)
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
