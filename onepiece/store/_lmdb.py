"""The only file that touches LMDB: opening, transactions, and what its errors mean.

The map is never written through (``writemap`` stays off): a full disk is then an error of ``write``
and not a SIGBUS. ``sync`` and ``metasync`` stay on: what is committed survives ``kill -9`` and loss of
power. Read transactions last for one lookup: an old reader would keep all pages freed since from
being used again, and the file would grow. Readers that died are cleared by ``check_readers``.

Everything here blocks, and belongs on one thread.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import lmdb
from attrs import define, field, frozen

from onepiece.errors import ConfigError, StoreFull
from onepiece.store.records import StoreOptions

Transaction: TypeAlias = "lmdb.Transaction[bytes]"
Table: TypeAlias = "lmdb._Database"  # noqa: SLF001 - its stubs give the handle this name only

_TABLE_NAMES = ("records", "chunks", "expiry", "unfinished", "totals")


@frozen
class Tables:
    """The handles of the named tables; ``_database`` says what is in them."""

    records: Table
    chunks: Table
    expiry: Table
    unfinished: Table
    totals: Table


@define(eq=False)
class LmdbFile:
    """An open environment, owned by this process alone."""

    path: Path
    options: StoreOptions
    _owner: int = field(repr=False)
    _environment: lmdb.Environment = field(repr=False)
    tables: Tables = field(repr=False)

    @classmethod
    def open(cls, path: Path, options: StoreOptions) -> "LmdbFile":
        """Open or create the file in this directory.

        Raises:
            ConfigError: The directory is in use by another process, or unusable.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            owner = _lock(path)
        except OSError as error:
            raise ConfigError(f"the result store's directory {str(path)!r} is unusable: {error}") from error
        try:
            environment, tables = _open_environment(path, options)
        except BaseException:
            os.close(owner)
            raise
        return cls(path, options, owner, environment, tables)

    def close(self) -> None:
        """Close the file and let others open it."""
        self._environment.close()
        os.close(self._owner)

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        """A read transaction; what is got from it is copied."""
        with self._environment.begin() as transaction:
            yield transaction

    @contextmanager
    def writing(self) -> Iterator[Transaction]:
        """A write transaction; committed and durable when the block ends, undone if it raises.

        Raises:
            StoreFull: The map or the disk has no room. The file is as it was, and usable.
        """
        try:
            with self._environment.begin(write=True) as transaction:
                yield transaction
        except lmdb.MapFullError as error:
            raise StoreFull(
                f"the result store's file in {str(self.path)!r} has reached its map of "
                f"{self.options.map_size} bytes: purge results, or open the store with a larger map_bytes",
                path=str(self.path),
                map_bytes=self.options.map_size,
            ) from error
        except lmdb.Error as error:
            if isinstance(error, lmdb.PanicError):
                self._reopen()
            elif not _is_of_the_system(error):
                raise
            raise StoreFull(
                f"the disk below the result store {str(self.path)!r} took no more ({error}); "
                f"{_free_bytes(self.path)} bytes are free there: make room and send the request again",
                path=str(self.path),
                free_bytes=_free_bytes(self.path),
            ) from error

    def check_readers(self) -> int:
        """Clear the reader slots of processes that died; returns how many there were."""
        return int(self._environment.reader_check())

    def occupied_bytes(self) -> int:
        """What the file occupies on the disk."""
        return (self.path / "data.mdb").stat().st_blocks * 512

    def _reopen(self) -> None:
        """After a failed write of its root page LMDB refuses all work until it is opened again."""
        self._environment.close()
        self._environment, self.tables = _open_environment(self.path, self.options)


def _lock(path: Path) -> int:
    """Hold the directory until this process closes it or dies."""
    descriptor = os.open(path / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise ConfigError(
            f"the result store in {str(path)!r} is in use by process {owner}: give each node its own "
            "directory, or stop the other node"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _open_environment(path: Path, options: StoreOptions) -> tuple[lmdb.Environment, Tables]:
    try:
        environment = lmdb.open(str(path), map_size=options.map_size, max_dbs=5, max_readers=16)
        try:
            tables = Tables(**{name: environment.open_db(name.encode()) for name in _TABLE_NAMES})
        except BaseException:
            environment.close()
            raise
    except lmdb.Error as error:
        raise ConfigError(
            f"the result store in {str(path)!r} cannot be opened: {error}; "
            "give another directory, or a larger map_bytes"
        ) from error
    return environment, tables


def _is_of_the_system(error: lmdb.Error) -> bool:
    """Whether the operating system refused: LMDB names its own errors, and passes others on bare."""
    return isinstance(error, lmdb.DiskError) or type(error) is lmdb.Error


def _free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
