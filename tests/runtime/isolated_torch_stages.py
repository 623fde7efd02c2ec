"""A stage whose module imports torch, which the node need not."""

import torch

from onepiece import StageContext, stage


@stage(isolation="process")
async def halve(ctx: StageContext[None], latents: torch.Tensor) -> torch.Tensor:
    """Halve, and turn: what goes back is a view."""
    return (latents / 2).transpose(0, 1)
