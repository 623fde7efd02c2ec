"""The result store."""

from onepiece.store.records import Durability, PutOutcome, RecordKind, StoredRecord, StoreOptions, StoreStats
from onepiece.store.result_store import ResultStore

__all__ = [
    "Durability",
    "PutOutcome",
    "RecordKind",
    "ResultStore",
    "StoreOptions",
    "StoreStats",
    "StoredRecord",
]
