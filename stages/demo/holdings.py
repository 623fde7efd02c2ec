"""What processes hold that could outlive them, and what is left of it afterwards (Linux).

Sockets are told apart by inode, so that a port which somebody else took meanwhile is no false alarm;
shared memory by the files that were mapped.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from attrs import frozen

_SOCKET: Final = re.compile(r"socket:\[(\d+)\]")
_TABLES: Final = ("tcp", "tcp6", "unix")
_INODE_COLUMN: Final = {"tcp": 9, "tcp6": 9, "unix": 6}
_SHARED_MEMORY: Final = "/dev/shm/"  # noqa: S108 - looked at, not written to


@frozen
class Holdings:
    """Sockets by inode, shared memory by path."""

    sockets: frozenset[int] = frozenset()
    shared_memory: frozenset[str] = frozenset()

    @classmethod
    def of(cls, process_ids: Iterable[int]) -> "Holdings":
        """What these processes hold now; nothing of those that are gone."""
        sockets, shared_memory = set[int](), set[str]()
        for process_id in process_ids:
            sockets |= _open_sockets(process_id)
            shared_memory |= _mapped_shared_memory(process_id)
        return cls(frozenset(sockets), frozenset(shared_memory))

    def left(self) -> list[str]:
        """What of it still exists, in words."""
        known = {inode: table for table in _TABLES for inode in _socket_inodes(table)}
        sockets = [f"a {known[inode]} socket" for inode in sorted(self.sockets & known.keys())]
        return sockets + [path for path in sorted(self.shared_memory) if Path(path).exists()]


def group_members(group: int) -> list[int]:
    """The running processes of a process group; one that has ended holds nothing."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            status = (entry / "stat").read_text()
        except OSError:
            continue
        # The name, in parentheses, may hold anything; the fields behind it are state, parent, group.
        state, _, its_group, *_ = status.rpartition(")")[2].split()
        if int(its_group) == group and state != "Z":
            members.append(int(entry.name))
    return members


def _open_sockets(process_id: int) -> set[int]:
    inodes = set[int]()
    try:
        descriptors = list(Path(f"/proc/{process_id}/fd").iterdir())
    except OSError:
        return inodes
    for descriptor in descriptors:
        try:
            match = _SOCKET.fullmatch(str(descriptor.readlink()))
        except OSError:
            continue
        if match:
            inodes.add(int(match[1]))
    return inodes


def _mapped_shared_memory(process_id: int) -> set[str]:
    try:
        maps = Path(f"/proc/{process_id}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    paths = (line.partition(_SHARED_MEMORY) for line in maps.splitlines())
    return {_SHARED_MEMORY + name for _, found, name in paths if found and not name.endswith(" (deleted)")}


def _socket_inodes(table: str) -> set[int]:
    """Inodes in the kernel's table. A closed TCP connection that only waits has none (0)."""
    column = _INODE_COLUMN[table]
    try:
        rows = Path(f"/proc/net/{table}").read_text(encoding="utf-8").splitlines()[1:]
    except OSError:
        return set()
    return {int(fields[column]) for row in rows if len(fields := row.split()) > column} - {0}
