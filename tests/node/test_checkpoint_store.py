"""The checkpoints of one store node: kept once, bounded, found again, let go, never a result."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from attrs import evolve

from onepiece.checkpoint_messages import CheckpointInput, split_header, with_header
from onepiece.codec import CodecError, encode_control
from onepiece.errors import StoreFull, UnknownRequest
from onepiece.limits import CHECKPOINT_LINGER_SECONDS
from onepiece.messages import StopRequest
from onepiece.node.checkpoint_store import CheckpointStore
from onepiece.runtime.device_messages import copied_to_host
from onepiece.store import ResultStore, StoreOptions

UID = "01JDWX4T9Z7Q2M3K8V5N6P0R1S"
HEADER = CheckpointInput(1, "tcp://a/control", UID, "denoise", "decode", "tcp://p/control", "w#1", 1, 100.0)
NOW = 10.0
OPTIONS = StoreOptions(byte_budget=1 << 20, chunk_bytes=4096, transaction_bytes=16384)


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[CheckpointStore]:
    """The checkpoints in a directory."""
    async with ResultStore.open(path, OPTIONS) as store:
        yield await CheckpointStore.load(store)
        await store.check_invariants()


async def test_a_checkpoint_is_read_as_it_was_sent(tmp_path: Path) -> None:
    """Each edge of each request has its own; what is not there is not held."""
    async with opened(tmp_path) as kept:
        await kept.keep(HEADER, b"latents", NOW)
        await kept.keep(evolve(HEADER, target="preview"), b"small" * 20_000, NOW)
        assert await kept.read(UID, "denoise", "decode") == b"latents"
        assert await kept.read(UID, "denoise", "preview") == b"small" * 20_000
        assert kept.sources_of(UID) == ("denoise",)
        assert kept.holds(UID, "denoise", "decode")
        assert not kept.holds(UID, "decode", "denoise")
        assert kept.sources_of("other") == ()
        assert kept.owners() == {UID: "tcp://p/control"}


async def test_the_first_run_of_a_stage_stands(tmp_path: Path) -> None:
    """A stage that ran twice is kept once; the second is told that it is kept."""
    async with opened(tmp_path) as kept:
        await kept.keep(HEADER, b"first", NOW)
        await kept.keep(evolve(HEADER, attempt=2, life="w#2"), b"second", NOW)
        assert await kept.read(UID, "denoise", "decode") == b"first"


async def test_what_was_kept_is_found_after_a_restart(tmp_path: Path) -> None:
    """A store node that was killed and comes back has all it had acknowledged, and can let go of it."""
    async with opened(tmp_path) as kept:
        await kept.keep(HEADER, b"latents", NOW)
        await kept.keep(evolve(HEADER, uid="gone"), b"latents", NOW)
        await kept.release("gone", NOW)
    async with opened(tmp_path) as kept:
        assert kept.owners() == {UID: "tcp://p/control"}
        assert await kept.read(UID, "denoise", "decode") == b"latents"
        await kept.release(UID, NOW)
    async with opened(tmp_path) as kept:
        assert kept.owners() == {}


async def test_an_ended_request_is_let_go_and_takes_no_straggler(tmp_path: Path) -> None:
    """Behind the end nothing is left, and what comes late is refused."""
    async with ResultStore.open(tmp_path, OPTIONS) as store:
        kept = await CheckpointStore.load(store)
        await kept.keep(HEADER, b"latents" * 1000, NOW)
        await kept.release(UID, NOW)
        with pytest.raises(UnknownRequest, match="has ended"):
            await kept.keep(evolve(HEADER, attempt=2), b"late", NOW)
        assert kept.owners() == {}
        assert not kept.holds(UID, "denoise", "decode")
        await store.expire(NOW + OPTIONS.tombstone_ttl_seconds + 1)
        assert (await store.stats()).bytes_in_use == 0


async def test_checkpoints_never_exceed_their_budget(tmp_path: Path) -> None:
    """One that finds no room is refused by name; what is there stays."""
    async with opened(tmp_path) as kept:
        await kept.keep(HEADER, b"x" * 400_000, NOW)
        with pytest.raises(StoreFull, match="--checkpoint-bytes"):
            await kept.keep(evolve(HEADER, uid="other"), b"x" * 400_000, NOW)
        assert not kept.holds("other", "denoise", "decode")
        assert await kept.read(UID, "denoise", "decode") == b"x" * 400_000


async def test_a_checkpoint_expires_behind_its_deadline(tmp_path: Path) -> None:
    """One that nobody releases goes by itself; a request whose deadline has passed still has its moment."""
    async with opened(tmp_path) as kept:
        await kept.keep(HEADER, b"latents", NOW)
        await kept.keep(evolve(HEADER, uid="late", deadline_at=1.0), b"latents", NOW)
        assert kept.holds("late", "denoise", "decode")
        await kept.expire(100.0 + CHECKPOINT_LINGER_SECONDS - 1)
        assert kept.owners() == {UID: "tcp://p/control"}
        await kept.expire(100.0 + CHECKPOINT_LINGER_SECONDS + 1)
        assert kept.owners() == {}


async def test_an_unreadable_checkpoint_is_held_no_longer(tmp_path: Path) -> None:
    """What the disk lost is not promised to the owner a second time."""
    async with ResultStore.open(tmp_path, OPTIONS) as store:
        kept = await CheckpointStore.load(store)
        await kept.keep(HEADER, b"latents", NOW)
        for record in await store.scan("", 10):
            await store.purge(record.uid, NOW)
        assert kept.holds(UID, "denoise", "decode")
        assert await kept.read(UID, "denoise", "decode") is None
        assert not kept.holds(UID, "denoise", "decode")


def test_a_checkpoint_carries_its_message_untouched() -> None:
    """What stands behind the message says what it is; anything else is refused."""
    whole = b"".join(copied_to_host(with_header([b"mess", b"age"], HEADER)))
    message, header = split_header(memoryview(whole))
    assert bytes(message) == b"message"
    assert header == HEADER
    other = encode_control(StopRequest(UID, {}))
    wrong = b"message" + other + len(other).to_bytes(4, "little")
    for broken in (b"", b"abc", whole[:-1], b"\0\0\0\0", b"\xff\xff\xff\xff", wrong):
        with pytest.raises(CodecError):
            split_header(memoryview(broken))
