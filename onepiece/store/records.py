"""What the result store keeps and says: options, records, outcomes, numbers."""

import enum
import math
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from onepiece.codec import register
from onepiece.core.replication_events import ERROR, INTENT, TOMBSTONE, Version
from onepiece.errors import ConfigError, InvalidInput
from onepiece.limits import ERROR_BYTES_MAX, HEADER_BYTES_MAX

MEBIBYTE: Final = 1 << 20
PAGE_BYTES: Final = 4096
UID_BYTES_MAX: Final = 128
RECORD_BYTES_MAX: Final = 192 << 10
TTL_SECONDS_MAX: Final = 10 * 365 * 86400.0
FLUSH_SECONDS_MAX: Final = 3600.0

assert RECORD_BYTES_MAX < HEADER_BYTES_MAX, "a record travels in the header of its copy"
assert 2 * ERROR_BYTES_MAX < RECORD_BYTES_MAX, "every error can be stored, whatever a stage put into it"


class Durability(enum.Enum):
    """What an acknowledged change survives, beyond the store's own bugs."""

    PROCESS = "process"
    """Death of the process at any moment, ``kill -9`` included. A power cut may cost the whole file."""
    POWER = "power"
    """Loss of power too, on a disk that keeps what it was told to flush; each commit waits for it."""


@frozen
class StoreOptions:
    """Bounds of one result store.

    Raises:
        ConfigError: A value is out of range; the message names it.
    """

    byte_budget: int = 1 << 30
    """What results may occupy, in whole pages. A put beyond it is refused with ``StoreFull``."""
    map_bytes: int | None = None
    """The most the file may grow to; twice the budget and 64 MiB unless given. Address space, not memory."""
    ttl_seconds: float = 3600.0
    """How long a result is kept where ``put`` names no other time."""
    tombstone_ttl_seconds: float = 3600.0
    """How long a purged or expired UID refuses later puts; longer than any request's deadline."""
    purge_after_fetch: bool = True
    """Whether ``fetched`` drops the result."""
    chunk_bytes: int = MEBIBYTE
    """Values are cut in pieces of this size: a range read touches only the pieces it needs."""
    transaction_bytes: int = 16 * MEBIBYTE
    """A larger value is written in several transactions, so that reads get their turn between them."""
    durability: Durability = Durability.PROCESS
    """What ``STORED`` promises."""
    flush_seconds: float = 1.0
    """How often what was committed is flushed to the disk under ``PROCESS``; no commit waits for it."""

    def __attrs_post_init__(self) -> None:
        for name in ("ttl_seconds", "tombstone_ttl_seconds"):
            check_ttl(getattr(self, name), f"the store's {name}", ConfigError)
        if not 0 < self.flush_seconds <= FLUSH_SECONDS_MAX:
            raise ConfigError(
                f"the store's flush_seconds is {self.flush_seconds!r}: give seconds above 0 and at most "
                f"{FLUSH_SECONDS_MAX:.0f}"
            )
        if self.byte_budget < PAGE_BYTES:
            raise ConfigError(f"the store's byte_budget is {self.byte_budget!r}: give at least {PAGE_BYTES}")
        if not PAGE_BYTES <= self.chunk_bytes <= self.transaction_bytes:
            raise ConfigError(
                f"the store's chunk_bytes is {self.chunk_bytes!r}: it must lie between {PAGE_BYTES} and "
                f"transaction_bytes, {self.transaction_bytes}"
            )
        if self.map_bytes is not None and self.map_bytes < MEBIBYTE:
            raise ConfigError(f"the store's map_bytes is {self.map_bytes!r}: give at least {MEBIBYTE}")

    @property
    def map_size(self) -> int:
        """The map's size in whole pages."""
        wanted = self.map_bytes if self.map_bytes is not None else 2 * self.byte_budget + 64 * MEBIBYTE
        return -(-wanted // PAGE_BYTES) * PAGE_BYTES


def check_ttl(ttl_seconds: float, name: str, kind: type[ConfigError] | type[InvalidInput]) -> None:
    """Raise ``kind`` unless the time to live is a positive, bounded length."""
    if not (math.isfinite(ttl_seconds) and 0 < ttl_seconds <= TTL_SECONDS_MAX):
        raise kind(f"{name} is {ttl_seconds!r}: give seconds above 0 and at most {TTL_SECONDS_MAX:.0f}")


class RecordKind(enum.Enum):
    """What stands under a UID."""

    RESULT = "result"
    ERROR = ERROR
    INTENT = INTENT
    """An error that a request is to end in, unless something else stands; readers do not see it."""
    TOMBSTONE = TOMBSTONE


@register
@frozen
class StoredRecord:
    """One UID's entry; the bytes of a result lie beside it, in chunks."""

    uid: str
    kind: RecordKind
    content_type: str
    meta: dict[str, Any]
    """What the writer said about the result; for an error, the error as of ``to_wire``."""
    total_bytes: int
    chunk_bytes: int
    value_id: int
    stored_at: float
    expires_at: float

    @property
    def version(self) -> Version:
        """How it compares with what other nodes have under the UID."""
        return Version(self.uid, self.kind.value, self.stored_at)

    @property
    def chunks(self) -> int:
        """How many pieces the value has."""
        return -(-self.total_bytes // self.chunk_bytes)


class PutOutcome(enum.Enum):
    """What became of a put. None of them is an error: a stage may run twice."""

    STORED = "stored"
    """It is durable, as ``StoreOptions.durability`` says."""
    ALREADY = "already"
    """Another writer was first; what it wrote stands."""
    TOMBSTONED = "tombstoned"
    """The UID was purged or has expired; nothing was written."""
    REPLACED = "replaced"
    """A copy, and better than what stood here; durable like ``STORED``."""


@frozen
class CopyOutcome:
    """What became of a copy."""

    standing: "StoredRecord | None"
    """What stands here now, durably: the copy or what beats it. None if its time is over."""
    has_replaced: bool
    """Something worse stood here, and the copy has taken its place."""


@frozen
class StoreStats:
    """The store in numbers."""

    path: Path
    results: int
    errors: int
    tombstones: int
    unfinished: int
    """Values whose writing has begun and not ended."""
    bytes_in_use: int
    byte_budget: int
    file_bytes: int
    """What the file occupies on the disk."""
    map_bytes: int


def chunk_pages_bytes(total_bytes: int, chunk_bytes: int) -> int:
    """What the chunks of a value occupy: LMDB gives each whole pages behind a 16-byte header."""
    whole, rest = divmod(total_bytes, chunk_bytes)
    pages = whole * _pages(chunk_bytes)
    if rest:
        pages += _pages(rest)
    return pages * PAGE_BYTES


def record_occupied_bytes(encoded_bytes: int, uid: str) -> int:
    """What a record occupies in its table and, by its UID, in the table of expiry."""
    return encoded_bytes + 2 * len(uid) + 96


def _pages(length: int) -> int:
    return -(-(length + 16) // PAGE_BYTES)


def uid_key(uid: str) -> bytes:
    """The UID as a key.

    Raises:
        InvalidInput: It is empty, too long, or not ASCII.
    """
    if not (uid and uid.isascii() and len(uid) <= UID_BYTES_MAX):
        raise InvalidInput(f"uid {uid[:40]!r}: give 1 to {UID_BYTES_MAX} ASCII characters", field="uid")
    return uid.encode()
