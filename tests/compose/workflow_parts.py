"""Stages, and a workflow of them, that tests draw graphs with."""

from typing import NamedTuple

import numpy as np
from attrs import frozen

from onepiece import StageContext, Tensor, stage, workflow


class Pair(NamedTuple):
    """Two tensors with names."""

    mean: Tensor
    number: int


@frozen
class Encoded:
    """A record with a record inside."""

    pair: Pair
    mask: Tensor


@stage
async def encode(ctx: StageContext[None], text: str, scale: float = 1.0) -> Tensor:
    """Make a tensor of a text."""
    return np.ones(1) * scale


@stage
async def look(ctx: StageContext[None], image: bytes) -> tuple[Tensor, int]:
    """Make a tensor and a number of an image."""
    return np.ones(1), len(image)


@stage
async def pack(ctx: StageContext[None], tensor: Tensor) -> Encoded:
    """Make a record."""
    return Encoded(Pair(tensor, 1), tensor)


@stage
async def join(
    ctx: StageContext[None], a: Tensor, b: Tensor, n: int = 1, words: tuple[str, ...] = ()
) -> bytes:
    """Make bytes of tensors."""
    return b""


@stage
async def clock(ctx: StageContext[None], every: int) -> int:
    """Need nothing from anybody."""
    return every


@workflow
def everything(prompt: str, image: bytes, n: int = 3) -> bytes:
    """Use all kinds of sources."""
    tensor, _ = look(image)
    packed = pack(encode(prompt))
    return join(packed.pair.mean, tensor, n, words=("a", "b"))
