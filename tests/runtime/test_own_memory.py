"""Inputs that come in memory of their own: arrays over it, which stay what they were whatever comes later."""

import asyncio
import weakref
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from attrs import define, field

from onepiece import StageContext, _materialise, stage, workflow
from onepiece.codec import materialise, pack, unpack
from onepiece.tensor import numpy_from_buffer
from onepiece.types import Kind, TypeSpec
from tests.runtime.actor_rig import actor_rig
from transports.testing import until

LENGTH = 200_000
Array = np.ndarray[Any, Any]


@define
class Kept:
    """What a stage has been given."""

    images: list[Any] = field(factory=list)


async def remember(ctx: StageContext[None]) -> AsyncIterator[Kept]:
    """A state that tests look into."""
    yield kept


kept = Kept()


@stage(setup=remember)
async def collect(ctx: StageContext[Kept], image: Array, other: Array) -> int:
    """Keep what came, after writing to a part of it."""
    image[0] += 1
    ctx.state.images.append((image, other))
    return int(other[-1])


@workflow
def collecting(image: Array, other: Array) -> int:
    """One stage that keeps its inputs."""
    return collect(image, other)


@pytest.fixture(autouse=True)
def _forgets() -> None:
    kept.images.clear()


@pytest.mark.parametrize("scheme", ["tcp", "local"])
async def test_a_stage_may_keep_and_change_its_inputs(scheme: str) -> None:
    """Of twenty messages through an inbox that holds three of them: none waits, none changes another one."""
    async with actor_rig(collecting, scheme=scheme, inbox_bytes=6 * LENGTH) as rigged:
        for number in range(20):
            image, other = np.full(LENGTH, number, np.uint8), np.full(LENGTH // 8, number, np.int64)
            await rigged.submit(str(number), image=image, other=other)
            async with asyncio.timeout(20):
                assert await rigged.outcome(str(number)) == number
            assert image[0] == number, "the sender's array is not the stage's"
    for number, (image, other) in enumerate(kept.images):
        assert (image[0], set(image[1:].tolist()), set(other.tolist())) == (number + 1, {number}, {number})


async def test_nothing_is_copied_on_the_way_to_the_stage() -> None:
    """What the stage has is the memory that was read into, once a sender has found out that it can be."""
    async with actor_rig(collecting, scheme="tcp", inbox_bytes=6 * LENGTH) as rigged:
        for number in range(3):
            image, other = np.full(LENGTH, number, np.uint8), np.full(9, number, np.int64)
            await rigged.submit(str(number), image=image, other=other)
            await rigged.outcome(str(number))
    first, *later = [image for image, _ in kept.images]
    assert first.base is None, "the first large message of a session is written into the ring"
    assert all(image.base is not None and image.flags.writeable for image in later)


async def test_an_idle_stage_keeps_nothing_of_its_last_inputs() -> None:
    """Their memory goes back though no other inputs take their place."""
    async with actor_rig(collecting, scheme="tcp", inbox_bytes=6 * LENGTH) as rigged:
        for number in range(2):
            image, other = np.full(LENGTH, number, np.uint8), np.full(9, number, np.int64)
            await rigged.submit(str(number), image=image, other=other)
            await rigged.outcome(str(number))
        lent = kept.images[-1][0]
        while isinstance(lent, np.ndarray):
            lent = lent.base
        message = weakref.ref(lent.obj)
        del lent
        assert message() is not None
        kept.images.clear()
        await until(lambda: message() is None, "the last message is let go of")


ARRAY, TENSOR = TypeSpec(Kind.ARRAY), TypeSpec(Kind.TENSOR)


def _received(array: Any, *, is_readonly: bool = False) -> Any:
    data = bytearray(b"".join(bytes(part) for part in pack(None, {"x": array}).parts))
    view = memoryview(data).toreadonly() if is_readonly else memoryview(data)
    return unpack(view, type(None)).values["x"]


def test_memory_of_its_own_is_not_copied_if_it_can_be_used_as_it_is() -> None:
    """What is not to be written to, and what a device or another type needs, is."""
    array = np.arange(1000, dtype=np.float64)
    for spec in (ARRAY, TENSOR):
        over = materialise(_received(array), spec, is_own=True)
        assert np.array_equal(np.asarray(over), array)
        assert not getattr(over, "flags", None) or not over.flags.owndata
    copied = materialise(_received(array, is_readonly=True), ARRAY, is_own=True)
    assert copied.flags.owndata
    assert copied.flags.writeable
    assert materialise(_received(array), ARRAY).flags.owndata


def test_a_tensor_without_elements_arrives_in_memory_of_its_own_too() -> None:
    """It has no place in the message: there is nothing to lie over."""
    for dtype in (np.uint8, np.float32, np.complex128):
        empty = np.empty((0, 3), dtype)
        for spec in (ARRAY, TENSOR, TypeSpec(Kind.TORCH)):
            arrived = materialise(_received(empty), spec, is_own=True)
            assert (tuple(arrived.shape), np.asarray(arrived).dtype) == ((0, 3), empty.dtype)


def test_an_order_of_bytes_that_torch_does_not_have_costs_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that turns them round: from memory of the message's own nothing else is copied first."""
    torch = pytest.importorskip("torch")
    array = np.arange(1000, dtype=">f4")
    made: list[Any] = []

    def noted(*arguments: Any, **named: Any) -> Any:
        made.append(numpy_from_buffer(*arguments, **named))
        return made[-1]

    monkeypatch.setattr(_materialise, "numpy_from_buffer", noted)
    tensor = materialise(_received(array), TypeSpec(Kind.TORCH), is_own=True)
    assert torch.equal(tensor, torch.arange(1000, dtype=torch.float32))
    assert [each.flags.owndata for each in made] == [False]
