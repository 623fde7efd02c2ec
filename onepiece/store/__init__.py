"""What a store node keeps: results, and the records of requests that have not ended."""

from onepiece.store._thread import Closable, Jobs, OpenJobs
from onepiece.store.records import (
    CopyOutcome,
    Durability,
    PutOutcome,
    RecordKind,
    StoredRecord,
    StoreOptions,
    StoreStats,
)
from onepiece.store.request_log import LogEntry, LogStats, RequestLog
from onepiece.store.result_store import ResultStore

__all__ = [
    "Closable",
    "CopyOutcome",
    "Durability",
    "Jobs",
    "LogEntry",
    "LogStats",
    "OpenJobs",
    "PutOutcome",
    "RecordKind",
    "RequestLog",
    "ResultStore",
    "StoreOptions",
    "StoreStats",
    "StoredRecord",
]
