"""What a node keeps on its disk, and the copies that it exchanges with other store nodes."""

from onepiece import metrics_catalogue as catalogue
from onepiece.metrics import Sample
from onepiece.node.node_stores import Stores
from onepiece.node.replica_service import ReplicaService
from onepiece.store import StoreStats


async def stores(kept: Stores) -> list[Sample]:
    """Each store in numbers; waits for the thread that each has to itself."""
    found: list[Sample] = []
    if kept.results is not None:
        found += _entries("results", await kept.results.stats())
    if kept.checkpoints is not None:
        found += _entries("checkpoints", await kept.checkpoints.stats())
    if kept.spill is not None:
        found += _entries("retained", await kept.spill.stats())
    if kept.records is not None:
        stats = await kept.records.stats()
        found += _sizes("records", stats.bytes_in_use, stats.byte_budget, stats.file_bytes)
        found.append(catalogue.STORE_ENTRIES.of(stats.open_entries, "records", "open"))
        found.append(catalogue.STORE_ENTRIES.of(stats.ended_entries, "records", "ended"))
    return found


def _entries(store: str, stats: StoreStats) -> list[Sample]:
    return [
        *_sizes(store, stats.bytes_in_use, stats.byte_budget, stats.file_bytes),
        catalogue.STORE_ENTRIES.of(stats.results, store, "value"),
        catalogue.STORE_ENTRIES.of(stats.errors, store, "error"),
        catalogue.STORE_ENTRIES.of(stats.tombstones, store, "tombstone"),
        catalogue.STORE_ENTRIES.of(stats.unfinished, store, "unfinished"),
    ]


def _sizes(store: str, in_use: int, budget: int, file_bytes: int) -> list[Sample]:
    return [
        catalogue.STORE_BYTES.of(in_use, store),
        catalogue.STORE_LIMIT_BYTES.of(budget, store),
        catalogue.STORE_FILE_BYTES.of(file_bytes, store),
    ]


def copies(service: ReplicaService) -> list[Sample]:
    """The copies of results."""
    counts = service.metrics()
    return [
        catalogue.COPIES_PENDING.of(counts["copies_pending"]),
        catalogue.COPIES_SENT.of(counts["copies_sent"]),
        catalogue.COPIES_FAILED.of(counts["copies_failed"]),
        catalogue.COPIES_TAKEN.of(counts["copies_taken"]),
    ]
