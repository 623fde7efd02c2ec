"""The result store."""

from onepiece.store.records import PutOutcome, RecordKind, StoredRecord, StoreOptions, StoreStats
from onepiece.store.result_store import ResultStore

__all__ = ["PutOutcome", "RecordKind", "ResultStore", "StoreOptions", "StoreStats", "StoredRecord"]
