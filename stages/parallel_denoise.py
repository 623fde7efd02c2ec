r"""A denoise stage whose devices share one request: each holds a part of the sequence.

::

    seed --> draw_noise --> denoise (2 ranks) --> tokens
                            denoise_alone     --> the same tokens, within rounding

The network is a small diffusion transformer with weights drawn from a fixed seed: it makes nothing worth
looking at, and costs what such networks cost in kind. Every layer of it but attention treats tokens one by
one, so each rank does its own share of them. For attention a rank has the queries of its share, and needs the
keys and values of all tokens: the ranks gather those from each other, in the order of the sequence.

That is what context parallelism does for a video model, where the sequence has tens of thousands of tokens
and attention is most of the work; there it is the model's library that splits (``enable_parallelism`` of
diffusers), over the same ``ctx.group``.
"""

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Final, Self

import numpy as np
from attrs import frozen

from onepiece import Cpu, InvalidInput, StageContext, Tensor, stage, workflow

if TYPE_CHECKING:
    import torch.distributed

RANKS: Final = 2
WIDTH: Final = 64
HEADS: Final = 4
LAYERS: Final = 3
TOKENS_MAX: Final = 65_536
STEPS_MAX: Final = 10_000
_SEED: Final = 20_260_101


@frozen
class Share:
    """Which part of the sequence is this rank's, and how it gets at the others'."""

    rank: int = 0
    world_size: int = 1
    group: "torch.distributed.ProcessGroup | None" = None

    def of(self, tokens: "torch.Tensor") -> "torch.Tensor":
        """This rank's tokens of all: [batch, tokens, ...] -> [batch, share, ...]."""
        return tokens.tensor_split(self.world_size, dim=1)[self.rank]

    def gathered(self, part: "torch.Tensor", length: int) -> "torch.Tensor":
        """The parts of all ranks behind each other, ``length`` tokens in all; every rank must call it."""
        if self.world_size == 1:
            return part
        import torch

        sizes = [
            length // self.world_size + (rank < length % self.world_size) for rank in range(self.world_size)
        ]
        padded = part.new_zeros((part.shape[0], max(sizes), *part.shape[2:]))
        padded[:, : part.shape[1]] = part
        everyone = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(everyone, padded, group=self.group)
        return torch.cat([each[:, :size] for each, size in zip(everyone, sizes, strict=True)], dim=1)


@frozen
class _Layer:
    """Attention and a perceptron; each weight is [out, in]."""

    qkv: "torch.Tensor"
    joined: "torch.Tensor"
    wide: "torch.Tensor"
    narrow: "torch.Tensor"


@frozen
class Denoiser:
    """The network, on one device, for its share of the sequence."""

    layers: tuple[_Layer, ...]
    share: Share

    @classmethod
    def load(cls, device: str) -> Self:
        """Draw the weights: the same on every device. Blocks."""
        import torch

        dice = torch.Generator().manual_seed(_SEED)

        def draw(rows: int, columns: int) -> "torch.Tensor":
            return torch.randn(rows, columns, generator=dice).div(columns**0.5).to(device)

        layers = tuple(
            _Layer(draw(3 * WIDTH, WIDTH), draw(WIDTH, WIDTH), draw(4 * WIDTH, WIDTH), draw(WIDTH, 4 * WIDTH))
            for _ in range(LAYERS)
        )
        return cls(layers, Share())

    def denoise(self, noise: "torch.Tensor", steps: int, on_step: Callable[[int], None]) -> "torch.Tensor":
        """This rank's tokens without noise: [batch, tokens, width] -> [batch, share, width]."""
        import torch

        length = noise.shape[1]
        tokens = self.share.of(noise)
        with torch.inference_mode():
            for step in range(steps):
                tokens = tokens - self._velocity(tokens, 1 - step / steps, length) / steps
                on_step(step + 1)
        return tokens

    def _velocity(self, tokens: "torch.Tensor", moment: float, length: int) -> "torch.Tensor":
        from torch.nn import functional

        hidden = tokens + moment
        for layer in self.layers:
            normed = functional.layer_norm(hidden, (WIDTH,))
            hidden = hidden + self._attention(layer, normed, length)
            normed = functional.layer_norm(hidden, (WIDTH,))
            hidden = hidden + functional.gelu(normed @ layer.wide.T) @ layer.narrow.T
        return functional.layer_norm(hidden, (WIDTH,))

    def _attention(self, layer: _Layer, tokens: "torch.Tensor", length: int) -> "torch.Tensor":
        from torch.nn import functional

        mine = tokens @ layer.qkv.T
        keys, values = self.share.gathered(mine[..., WIDTH:], length).chunk(2, dim=-1)
        query, keys, values = (_by_head(each) for each in (mine[..., :WIDTH], keys, values))
        seen = functional.scaled_dot_product_attention(query, keys, values)
        return seen.transpose(1, 2).flatten(2) @ layer.joined.T


def _by_head(tokens: "torch.Tensor") -> "torch.Tensor":
    """[batch, tokens, width] -> [batch, heads, tokens, width of a head]."""
    return tokens.reshape(*tokens.shape[:2], HEADS, WIDTH // HEADS).transpose(1, 2)


def join_tokens(parts: list[Tensor]) -> Tensor:
    """The ranks' shares, in the order of the sequence."""
    import torch

    return torch.cat(parts, dim=1)


async def load_denoiser(ctx: StageContext[None]) -> AsyncIterator[Denoiser]:
    """Weights first, then the group: ranks load one after another, and meet when all have."""
    alone = await ctx.run(Denoiser.load, ctx.device)
    yield Denoiser(alone.layers, Share(ctx.rank, ctx.world_size, ctx.group))


@stage
async def draw_noise(ctx: StageContext[None], tokens: int, seed: int) -> Tensor:
    """Noise to begin with: float32 [1, tokens, width]."""
    if not RANKS <= tokens <= TOKENS_MAX:
        raise InvalidInput(f"tokens is {tokens}; from {RANKS} to {TOKENS_MAX}", field="tokens")
    if seed < 0:
        raise InvalidInput(f"seed is {seed}; it must not be negative", field="seed")
    return np.random.default_rng(seed).standard_normal((1, tokens, WIDTH), dtype=np.float32)


async def _denoise(ctx: StageContext[Denoiser], noise: Tensor, steps: int) -> Tensor:
    if not 1 <= steps <= STEPS_MAX:
        raise InvalidInput(f"steps is {steps}; from 1 to {STEPS_MAX}", field="steps")
    denoiser = ctx.state
    return await ctx.run(denoiser.denoise, noise, steps, lambda step: ctx.report(step=step, total=steps))


@stage(resources=Cpu(count=RANKS), setup=load_denoiser, merge=join_tokens)
async def denoise(ctx: StageContext[Denoiser], noise: Tensor, steps: int) -> Tensor:
    """Take the noise away, on several devices: each returns its share of the tokens."""
    return await _denoise(ctx, noise, steps)


@stage(setup=load_denoiser)
async def denoise_alone(ctx: StageContext[Denoiser], noise: Tensor, steps: int) -> Tensor:
    """The same on one device."""
    return await _denoise(ctx, noise, steps)


@workflow
def together(tokens: int = 256, steps: int = 4, seed: int = 0) -> Tensor:
    """Denoised tokens, float32 [1, tokens, width], made by several devices."""
    return denoise(draw_noise(tokens, seed), steps)


@workflow
def alone(tokens: int = 256, steps: int = 4, seed: int = 0) -> Tensor:
    """The same tokens, within rounding, made by one."""
    return denoise_alone(draw_noise(tokens, seed), steps)
