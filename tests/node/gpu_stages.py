"""Workflows whose stages work on a pretended GPU, in the process of the tests."""

import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from onepiece import Gpu, StageContext, Tensor, at_most_once, stage, workflow
from tests.runtime.pretended_gpu import GpuArray

runs: Counter[str] = Counter()
arrived: list[int] = []
"""The addresses of what came to ``look``."""
hooks: dict[str, Callable[[str], Awaitable[None]]] = {}
"""What a stage waits for, given its node's name; by stage."""


def reset() -> None:
    """Forget what happened."""
    runs.clear()
    arrived.clear()
    hooks.clear()


def pixels(seed: int, length: int) -> bytes:
    """What ``paint`` makes."""
    return np.random.default_rng(seed).bytes(length)


def seen(data: bytes) -> str:
    """What ``look`` makes of it."""
    return hashlib.sha256(data).hexdigest()


@stage(resources=Gpu(), isolation="loop")
async def paint(ctx: StageContext[None], seed: int, length: int) -> Tensor:
    """Compute something on a GPU."""
    runs["paint"] += 1
    return GpuArray.of(pixels(seed, length))


@stage(resources=Gpu(), inbox="device", isolation="loop", instances=2)
async def look(ctx: StageContext[None], image: Tensor) -> str:
    """Say what arrived."""
    runs["look"] += 1
    assert isinstance(image, GpuArray)
    assert image.span is not None
    arrived.append(image.span.address)
    if "look" in hooks:
        await hooks["look"](ctx.node)
    return seen(image.content())


@workflow
def shown(seed: int, length: int) -> str:
    """Two stages on GPUs."""
    return look(paint(seed, length))


@workflow
def shown_once(seed: int, length: int) -> str:
    """The same, and nothing is retained in between."""
    return look(at_most_once(paint(seed, length)))


@frozen
class Scene:
    """Values of many kinds."""

    mask: Tensor
    empty: Tensor
    weights: NDArray[np.float32]
    caption: str
    extra: list[Any]


@stage(resources=Gpu())
async def compose(ctx: StageContext[None], seed: int, length: int) -> Scene:
    """Values of many kinds, some of them on a GPU."""
    return Scene(
        mask=GpuArray.of(pixels(seed, 24), "bfloat16", (3, 1, 4)),
        empty=GpuArray.of(b"", "float32", (0, 7)),
        weights=np.arange(100, dtype=np.float32),
        caption="long " * length,
        extra=[None, b"short", bytes(length), GpuArray.of(pixels(seed + 1, 8), "complex64", ())],
    )


@stage(resources=Gpu(), inbox="device")
async def describe(ctx: StageContext[None], scene: Scene, backdrop: Tensor, title: str) -> str:
    """Say what arrived: a join of a stage on a GPU, another one, and the workflow's inputs."""
    extra = scene.extra[3]
    assert isinstance(scene.mask, GpuArray)
    assert isinstance(backdrop, GpuArray)
    assert isinstance(scene.weights, np.ndarray)
    shown = (scene.mask, scene.empty, extra, backdrop)
    arrays = [(each.dtype, each.shape, each.content().hex()) for each in shown]
    rest = scene.weights.tolist(), scene.caption, scene.extra[:3], title
    return repr((arrays, rest))


def description(seed: int, length: int, title: str) -> str:
    """What ``describe`` should say."""
    arrays = [
        ("bfloat16", (3, 1, 4), pixels(seed, 24).hex()),
        ("float32", (0, 7), ""),
        ("complex64", (), pixels(seed + 1, 8).hex()),
        ("uint8", (length,), pixels(seed, length).hex()),
    ]
    rest = [float(number) for number in range(100)], "long " * length, [None, b"short", bytes(length)], title
    return repr((arrays, rest))


@workflow
def scenery(seed: int, length: int, title: str) -> str:
    """A join of everything in an inbox on a GPU."""
    return describe(compose(seed, length), paint(seed, length), title)
