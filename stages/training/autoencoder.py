"""Trains the VAE, in three phases by share of the time.

1. Crops of 32x32 pixels and 5 frames: fast, learns the looks.
2. Crops of 9 and 13 frames: from the third latent on, the temporal up-sampling takes another path
   through its cache. A VAE trained on 5 frames alone garbles frames 5 to 8.
3. Whole frames of 64x64.
"""

import math
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from stages.training.digits import BOX, MOVES, SIZE, SPEED, Frames, random_scene
from stages.training.journal import Journal
from stages.training.networks import (
    as_clips,
    decode_latents,
    encode_clips,
    load_autoencoder,
    make_autoencoder,
    signal_to_noise,
)

LONGER_CLIPS_FROM: Final = 0.55
WHOLE_FRAMES_FROM: Final = 0.85
CROP: Final = 32
_PEAK_RATE: Final = 3e-3
_FLOOR_RATE: Final = 2e-5


def train(work: Path, *, minutes: float, resume_at: float = 0.0) -> None:
    """Train for so long and write ``<work>/vae``.

    Args:
        work: The folder of the run.
        minutes: How long.
        resume_at: Go on from ``<work>/vae``, at this share of the schedule.
    """
    torch.manual_seed(0)
    rng = np.random.default_rng(int(resume_at * 1000))
    autoencoder = (
        load_autoencoder(work).requires_grad_(requires_grad=True) if resume_at else make_autoencoder()
    )
    autoencoder.train()
    optimizer = torch.optim.AdamW(autoencoder.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0)
    held_out = _held_out_clips()
    step, journal = 0, Journal(work, "vae")
    while (share := resume_at + (1 - resume_at) * journal.minutes / minutes) < 1:
        rate = _PEAK_RATE * min(1, (step + 1) / 50) * (0.5 + 0.5 * math.cos(math.pi * share)) + _FLOOR_RATE
        figures = _train_step(autoencoder, optimizer, rate, _batch(rng, share))
        step += 1
        if step % 100 == 0 or step == 1:
            with torch.no_grad():
                decoded = decode_latents(autoencoder, encode_clips(autoencoder, held_out)).clamp(-1, 1)
            decibels = round(signal_to_noise(decoded, held_out), 2)
            journal.write(step=step, held_out_decibels=decibels, rate=round(rate, 5), **figures)
    _finish(autoencoder, rng, held_out, work, journal)


def _held_out_clips() -> Tensor:
    seeds = range(10_000, 10_006)
    return as_clips([random_scene(np.random.default_rng(seed), held_out=True).frames() for seed in seeds])


def _batch(rng: np.random.Generator, share: float) -> Tensor:
    crop = CROP if share < WHOLE_FRAMES_FROM else SIZE
    if share < LONGER_CLIPS_FROM:
        count, size = 5, 6
    else:
        count, size = (9, 4) if rng.random() < 0.7 else (13, 3)
    if crop == SIZE:
        size = max(2, size // 2)
    return as_clips([_cropped_clip(rng, crop, count) for _ in range(size)])


def _cropped_clip(rng: np.random.Generator, crop: int, count: int) -> Frames:
    """A window near the middle of the digit's way, so that there is ink in it."""
    scene = random_scene(rng)
    start = SPEED * int(rng.integers(0, max(1, 10 - count)))
    frames = scene.frames(count, start=start)
    dx, dy = MOVES[scene.move]
    corner = [
        int(np.clip(at + way * SPEED * (start + count // 2) + BOX // 2 - crop // 2 + jitter, 0, SIZE - crop))
        for at, way, jitter in (
            (scene.x, dx, rng.integers(-8, 9)),
            (scene.y, dy, rng.integers(-8, 9)),
        )
    ]
    left, top = corner
    return frames[:, top : top + crop, left : left + crop]


def _train_step(
    autoencoder: Any, optimizer: torch.optim.Optimizer, rate: float, clips: Tensor
) -> dict[str, float]:
    for group in optimizer.param_groups:
        group["lr"] = rate
    mean = encode_clips(autoencoder, clips)
    # Only the mean is ever used, so that the deviation is not learned: a small fixed noise smooths the space.
    decoded = decode_latents(autoencoder, mean + 0.1 * torch.randn_like(mean))
    ink = (clips > -0.98).any(1, keepdim=True).float()
    weight = 1 + 3 * ink  # ink is rare, and what one looks at
    reconstruction = (weight * ((decoded - clips).abs() + (decoded - clips).pow(2))).mean()
    spread = mean.pow(2).mean()
    loss = reconstruction + 1e-3 * spread
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    torch.nn.utils.clip_grad_norm_(autoencoder.parameters(), 1.0)
    optimizer.step()
    return {"reconstruction": round(reconstruction.item(), 4), "spread": round(spread.item(), 3)}


def _finish(
    autoencoder: Any, rng: np.random.Generator, held_out: Tensor, work: Path, journal: Journal
) -> None:
    """Measure the latents' mean and deviation, which belong to the model; save; show what it can do."""
    autoencoder.eval()
    with torch.no_grad():
        latents = torch.cat(
            [
                encode_clips(autoencoder, as_clips([random_scene(rng).frames() for _ in range(16)]))
                for _ in range(6)
            ]
        )
        autoencoder.register_to_config(
            latents_mean=latents.mean((0, 2, 3, 4)).tolist(),
            latents_std=latents.std((0, 2, 3, 4)).tolist(),
        )
        autoencoder.save_pretrained(work / "vae")
        decoded = autoencoder.decode(autoencoder.encode(held_out).latent_dist.mode()).sample
    journal.write(final=True, held_out_decibels=round(signal_to_noise(decoded, held_out), 2))
    pairs = torch.cat([held_out, decoded.clamp(-1, 1)], 3)[:, :, ::2].permute(0, 2, 3, 4, 1)
    pixels = ((pairs + 1) * 127.5).round().byte().numpy()
    sheet = np.concatenate([np.concatenate(list(row), 1) for row in pixels], 0)
    Image.fromarray(sheet).save(work / "vae.png")
