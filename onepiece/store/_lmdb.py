"""The only file that touches LMDB: opening, transactions, and what its errors mean.

The map is never written through (``writemap`` stays off): a full disk is then an error of ``write``
and not a SIGBUS. A commit hands its pages to the system, which has them whatever becomes of the
process. With ``Durability.POWER`` it also waits until the disk has them. With ``Durability.PROCESS`` a
thread flushes now and then (``_flusher``); should the power fail before, the disk may have taken the
pages in any order and the file may be broken. So a marker says under which boot of the machine the
file was opened and not yet closed whole: a file that a cut may have broken is set aside, never read.
Read transactions last for one lookup: an old reader would keep all pages freed since from
being used again, and the file would grow. Readers that died are cleared by ``check_readers``.

Everything here blocks, and belongs on one thread.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Generic, TypeAlias, TypeVar

import attrs
import lmdb
from attrs import define, field, frozen

from onepiece.errors import ConfigError, StoreFull
from onepiece.log import get_logger
from onepiece.owner_lock import lock_directory
from onepiece.store._flusher import Flusher
from onepiece.store.records import Durability

Transaction: TypeAlias = "lmdb.Transaction[bytes]"
Table: TypeAlias = "lmdb._Database"  # noqa: SLF001 - its stubs give the handle this name only

TablesT = TypeVar("TablesT")

LAYOUT_KEY: Final = b"layout"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_log = get_logger(part="store")


@frozen
class FileOptions:
    """How one file is opened, and what its errors call it."""

    what: str
    """For example "result store"."""
    relief: str
    """What makes room in it, as an imperative."""
    map_size: int
    durability: Durability
    flush_seconds: float


@define(eq=False)
class LmdbFile(Generic[TablesT]):
    """An open environment, owned by this process alone.

    Its named tables are the fields of an attrs class of table handles.
    """

    path: Path
    options: FileOptions
    _owner: int = field(repr=False)
    _environment: lmdb.Environment = field(repr=False)
    tables: TablesT = field(repr=False)
    _environment_lock: threading.Lock = field(factory=threading.Lock, repr=False)
    """Held while the environment is flushed or replaced; all else is done by the store's thread alone."""
    _flusher: Flusher | None = field(default=None, repr=False)

    @classmethod
    def open(cls, path: Path, options: FileOptions, tables_class: type[TablesT]) -> "LmdbFile[TablesT]":
        """Open or create the file in this directory.

        Raises:
            ConfigError: The directory is in use by another process, or unusable.
        """
        owner = lock_directory(path, options.what)
        try:
            _set_aside_if_suspect(path)
            if options.durability is Durability.PROCESS:
                _mark_open(path, options.what)
            environment, tables = _open_environment(path, options, tables_class)
        except BaseException:
            os.close(owner)
            raise
        file = cls(path, options, owner, environment, tables)
        if options.durability is Durability.PROCESS:
            file._flusher = Flusher(file._flush, options.flush_seconds)
        return file

    def close(self) -> None:
        """Close the file and let others open it."""
        if self._flusher is not None:
            self._flusher.stop()
            if self._flush():
                _marker(self.path).unlink(missing_ok=True)
        self._environment.close()
        os.close(self._owner)

    def _flush(self) -> bool:
        """Have the disk take what was committed; false if it did not."""
        with self._environment_lock:
            try:
                self._environment.sync(force=True)
            except lmdb.Error as error:
                _log.warning("store_flush_failed", path=str(self.path), error=str(error))
                return False
        return True

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        """A read transaction; what is got from it is copied."""
        with self._environment.begin() as transaction:
            yield transaction

    @contextmanager
    def writing(self) -> Iterator[Transaction]:
        """A write transaction; committed and as durable as promised when the block ends, undone if it raises.

        Raises:
            StoreFull: The map or the disk has no room. The file is as it was, and usable.
        """
        try:
            with self._environment.begin(write=True) as transaction:
                yield transaction
            if self._flusher is not None:
                self._flusher.note_change()
        except lmdb.MapFullError as error:
            raise StoreFull(
                f"the {self.options.what}'s file in {str(self.path)!r} has reached its map of "
                f"{self.options.map_size} bytes: {self.options.relief}, or open it with a larger map_bytes",
                path=str(self.path),
                map_bytes=self.options.map_size,
            ) from error
        except lmdb.Error as error:
            if isinstance(error, lmdb.PanicError):
                self._reopen()
            elif not _is_of_the_system(error):
                raise
            raise StoreFull(
                f"the disk below the {self.options.what} {str(self.path)!r} took no more ({error}); "
                f"{_free_bytes(self.path)} bytes are free there: make room and send the request again",
                path=str(self.path),
                free_bytes=_free_bytes(self.path),
            ) from error

    def check_layout(self, version: int, table: Table, advice: str) -> None:
        """Note the layout's version in a new file; raises ``ConfigError`` with advice if it has another."""
        with self.reading() as transaction:
            raw = transaction.get(LAYOUT_KEY, db=table)
        if raw is None:
            with self.writing() as transaction:
                transaction.put(LAYOUT_KEY, version.to_bytes(8, "big"), db=table)
            return
        found = int.from_bytes(raw, "big")
        if found != version:
            raise ConfigError(
                f"the {self.options.what} in {str(self.path)!r} has layout {found}, this version reads "
                f"layout {version}: give another directory, or remove this one {advice}"
            )

    def check_readers(self) -> int:
        """Clear the reader slots of processes that died; returns how many there were."""
        return int(self._environment.reader_check())

    def occupied_bytes(self) -> int:
        """What the file occupies on the disk."""
        return (self.path / "data.mdb").stat().st_blocks * 512

    def _reopen(self) -> None:
        """After a failed write of its root page LMDB refuses all work until it is opened again."""
        with self._environment_lock:
            self._environment.close()
            self._environment, self.tables = _open_environment(self.path, self.options, type(self.tables))


def _marker(path: Path) -> Path:
    return path / "unflushed.boot"


def _mark_open(path: Path, what: str) -> None:
    """Note under which boot the file may hold what the disk does not; on the disk itself before that."""
    marker = _marker(path)
    try:
        with marker.open("w", encoding="ascii") as file:
            file.write(_BOOT_ID.read_text(encoding="ascii"))
            file.flush()
            os.fsync(file.fileno())
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise ConfigError(f"the {what}'s directory {str(path)!r} is unusable: {error}") from error


def _set_aside_if_suspect(path: Path) -> None:
    """Start anew if the machine went down while the file held what the disk may never have got."""
    marker = _marker(path)
    if not marker.exists() or marker.read_text(encoding="ascii") == _BOOT_ID.read_text(encoding="ascii"):
        return
    data = path / "data.mdb"
    if data.exists():
        aside = data.replace(path / "data.mdb.after-power-loss")
        _log.warning("store_set_aside", path=str(aside), why="the machine went down before it was flushed")
    marker.unlink()


def _open_environment(
    path: Path, options: FileOptions, tables_class: type[TablesT]
) -> tuple[lmdb.Environment, TablesT]:
    waits = options.durability is Durability.POWER
    kind: Any = tables_class  # attrs.fields wants to know that it is an attrs class
    names = [each.name for each in attrs.fields(kind)]
    try:
        environment = lmdb.open(
            str(path),
            map_size=options.map_size,
            max_dbs=len(names),
            max_readers=16,
            sync=waits,
            metasync=waits,
        )
        try:
            tables = tables_class(**{name: environment.open_db(name.encode()) for name in names})
        except BaseException:
            environment.close()
            raise
    except lmdb.Error as error:
        raise ConfigError(
            f"the {options.what} in {str(path)!r} cannot be opened: {error}; "
            "give another directory, or a larger map_bytes"
        ) from error
    return environment, tables


def _is_of_the_system(error: lmdb.Error) -> bool:
    """Whether the operating system refused: LMDB names its own errors, and passes others on bare."""
    return isinstance(error, lmdb.DiskError | lmdb.ReadonlyError) or type(error) is lmdb.Error


def _free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
