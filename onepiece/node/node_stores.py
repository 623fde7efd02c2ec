"""What a node keeps on its disk, opened as its roles ask for it."""

import contextlib
import shutil
from pathlib import Path

from attrs import evolve, frozen

from onepiece.node.checkpoint_store import CheckpointStore
from onepiece.node.options import NodeOptions
from onepiece.node.parts import NodeParts
from onepiece.store import Durability, RequestLog, ResultStore, StoreOptions

_SPILL_SECONDS = 30 * 24 * 3600.0
"""What is spilled is released when it is done with; this bounds what a lost release may cost."""
_TOMBSTONE_SECONDS = 3600.0
"""A tombstone outlives any copy of its result, or that could come back with a node that was away."""
_KEPT_TOMBSTONE_SECONDS = 1.0
"""Checkpoints of ended requests are refused by their UIDs, so that their tombstones serve nobody."""


@frozen
class Stores:
    """What this node keeps on disk; None where its roles do not ask for it."""

    results: ResultStore | None = None
    records: RequestLog | None = None
    checkpoints: CheckpointStore | None = None
    spill: ResultStore | None = None


async def open_stores(
    options: NodeOptions, state_dir: Path, parts: NodeParts, stack: contextlib.AsyncExitStack
) -> Stores:
    """Opened before the tasks that use them, so that they are closed behind them."""
    results = records = checkpoints = spill = None
    if "store" in options.roles:
        store_options = StoreOptions(
            byte_budget=options.store_bytes,
            ttl_seconds=options.result_ttl_seconds,
            tombstone_ttl_seconds=max(_TOMBSTONE_SECONDS, options.result_ttl_seconds),
            durability=Durability(options.store_durability),
        )
        results = await stack.enter_async_context(parts.open_results(state_dir / "results", store_options))
        records = await stack.enter_async_context(parts.open_requests(state_dir / "requests", store_options))
        kept_options = evolve(
            store_options, byte_budget=options.checkpoint_bytes, tombstone_ttl_seconds=_KEPT_TOMBSTONE_SECONDS
        )
        kept = await stack.enter_async_context(parts.open_results(state_dir / "checkpoints", kept_options))
        checkpoints = await CheckpointStore.load(kept)
    if "worker" in options.roles:
        retained = state_dir / "retained"
        shutil.rmtree(retained, ignore_errors=True)  # of an earlier life: nobody asks for it any more
        spill_options = StoreOptions(
            byte_budget=options.retain_disk_bytes,
            ttl_seconds=_SPILL_SECONDS,
            tombstone_ttl_seconds=1.0,
            durability=Durability.PROCESS,
        )
        spill = await stack.enter_async_context(parts.open_results(retained, spill_options))
    return Stores(results, records, checkpoints, spill)
