"""Disks that take no more: a small one, and one that has become read-only."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import lmdb
import pytest
from attrs import frozen


@contextmanager
def small_disk(path: Path, size_bytes: int) -> Iterator[Path]:
    """A file system of this size, in memory; skips the test where mounting is not allowed.

    The system must survive that it is full.
    """
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"mounting needs a privilege that is missing here: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@contextmanager
def read_only_disk(file: Any, error: lmdb.Error) -> Iterator[None]:
    """Have every commit of an ``LmdbFile`` fail like this, as on a disk that became read-only.

    The system must survive it, and its end.
    """
    environment = file._environment
    file._environment = _ReadOnly(environment, error)
    try:
        yield
    finally:
        file._environment = environment


@frozen
class _ReadOnly:
    _environment: lmdb.Environment
    _error: lmdb.Error

    def begin(self, *, write: bool = False) -> Any:
        """A transaction whose commit fails if it writes."""
        transaction = self._environment.begin(write=write)
        return _Failing(transaction, self._error) if write else transaction

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)


@frozen
class _Failing:
    _transaction: Any
    _error: lmdb.Error

    def __enter__(self) -> Any:
        return self._transaction

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transaction.abort()
        if error is None:
            raise self._error
