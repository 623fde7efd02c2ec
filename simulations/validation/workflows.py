r"""Three workflows that wait as for a GPU, so that two processors carry many instances.

::

    video     encode -> denoise -> decode
    picture   encode -> draw    -> decode            shares two stages with video

    collage           /-> left --\
              split -<            >- merge            a fork and a join
                      \-> right -/

A request's ``scale`` is how much longer than usual each of its stages takes: its size class.
"""

import asyncio
from typing import Final

from onepiece import Cpu, StageContext, stage, workflow

MEMORY_GIB: Final = 0.6
"""Of a device's one: each instance has a device for itself."""
SECONDS: Final = {
    "encode": 0.08,
    "denoise": 0.6,
    "draw": 0.3,
    "decode": 0.2,
    "split": 0.1,
    "left": 0.4,
    "right": 0.3,
    "merge": 0.2,
}
INSTANCES: Final = {
    "encode": 2,
    "denoise": 4,
    "draw": 3,
    "decode": 3,
    "split": 1,
    "left": 2,
    "right": 2,
    "merge": 2,
}
SCALES: Final = {"short": 1.0, "long": 2.0}
"""By size class."""
WORKFLOWS: Final = ("video", "picture", "collage")


@stage(resources=Cpu(memory_gib=MEMORY_GIB), instances=INSTANCES["encode"])
async def encode(ctx: StageContext[None], scale: float) -> float:
    """Begin a video or a picture."""
    await asyncio.sleep(SECONDS["encode"] * scale)
    return scale


@stage(resources=Cpu(memory_gib=MEMORY_GIB), instances=INSTANCES["denoise"])
async def denoise(ctx: StageContext[None], scale: float) -> float:
    """The long part of a video."""
    await asyncio.sleep(SECONDS["denoise"] * scale)
    return scale


@stage(resources=Cpu(memory_gib=MEMORY_GIB), instances=INSTANCES["draw"])
async def draw(ctx: StageContext[None], scale: float) -> float:
    """The long part of a picture."""
    await asyncio.sleep(SECONDS["draw"] * scale)
    return scale


@stage(resources=Cpu(memory_gib=MEMORY_GIB), instances=INSTANCES["decode"])
async def decode(ctx: StageContext[None], scale: float) -> float:
    """End a video or a picture."""
    await asyncio.sleep(SECONDS["decode"] * scale)
    return scale


@stage(resources=Cpu(memory_gib=MEMORY_GIB), instances=INSTANCES["split"])
async def split(ctx: StageContext[None], scale: float) -> float:
    """Begin a collage."""
    await asyncio.sleep(SECONDS["split"] * scale)
    return scale


@stage(resources=Cpu(memory_gib=MEMORY_GIB), instances=INSTANCES["left"])
async def left(ctx: StageContext[None], scale: float) -> float:
    """One side of a collage."""
    await asyncio.sleep(SECONDS["left"] * scale)
    return scale


@stage(resources=Cpu(memory_gib=MEMORY_GIB), instances=INSTANCES["right"])
async def right(ctx: StageContext[None], scale: float) -> float:
    """The other side."""
    await asyncio.sleep(SECONDS["right"] * scale)
    return scale


@stage(resources=Cpu(memory_gib=MEMORY_GIB), instances=INSTANCES["merge"])
async def merge(ctx: StageContext[None], one: float, other: float) -> float:
    """End a collage."""
    await asyncio.sleep(SECONDS["merge"] * one)
    return other


@workflow
def video(scale: float) -> float:
    """Three stages in a row."""
    return decode(denoise(encode(scale)))


@workflow
def picture(scale: float) -> float:
    """Three stages in a row, two of which video has, too."""
    return decode(draw(encode(scale)))


@workflow
def collage(scale: float) -> float:
    """A fork and a join."""
    begun = split(scale)
    return merge(left(begun), right(begun))
