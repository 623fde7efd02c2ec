"""Trains transformer, text encoder and image encoder together, by flow matching on encoded clips."""

import copy
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from attrs import frozen
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.training.digits import Scene, random_scene
from stages.training.journal import Journal
from stages.training.networks import (
    FLOW_SHIFT,
    PROMPT_TOKENS,
    Conditioners,
    as_clips,
    encode_clips,
    load_autoencoder,
    make_conditioners,
    make_image_processor,
    make_tokenizer,
    make_transformer,
    normalise,
    save_pipeline,
)

BATCH: Final = 16
PEAK_RATE: Final = 1e-3
PROMPTS_DROPPED: Final = 0.1
"""So that the model learns what no prompt means, which guidance needs."""

_SCENE_SEEDS: Final = 1_000_000
_CHUNK: Final = 8
_CLIPS_PER_FILE_NAME: Final = "latents-{part}.safetensors"


def scene_of(index: int) -> Scene:
    """The training scene with this number."""
    return random_scene(np.random.default_rng(_SCENE_SEEDS + index))


def encode_training_clips(work: Path, *, part: int, parts: int, clips: int) -> None:
    """Encode every ``parts``-th clip from ``part`` on, once for the whole training.

    Several processes can share the work. Next to a clip's latents stands its condition, made as the
    pipeline's ``prepare_latents`` makes it: the first frame followed by zeros, encoded.
    """
    journal = Journal(work, "latents")
    processor, autoencoder = make_image_processor(), load_autoencoder(work)
    numbers = list(range(part, clips, parts))
    latents, conditions, images = [], [], []
    with torch.no_grad():
        for start in range(0, len(numbers), _CHUNK):
            frames = [scene_of(number).frames() for number in numbers[start : start + _CHUNK]]
            videos = as_clips(frames)
            stills = torch.zeros_like(videos)
            stills[:, :, :1] = videos[:, :, :1]
            latents.append(normalise(autoencoder, encode_clips(autoencoder, videos)))
            conditions.append(normalise(autoencoder, encode_clips(autoencoder, stills)))
            first = [Image.fromarray(clip[0]) for clip in frames]
            images.append(processor(images=first, return_tensors="pt")["pixel_values"])
    tensors = {
        "numbers": torch.tensor(numbers),
        "latents": torch.cat(latents).half(),
        "conditions": torch.cat(conditions).half(),
        "images": torch.cat(images).half(),
    }
    save_file(tensors, work / _CLIPS_PER_FILE_NAME.format(part=part))
    journal.write(part=part, clips=len(numbers))


@frozen
class _Examples:
    """All encoded clips, in memory."""

    latents: Tensor
    conditions: Tensor
    images: Tensor
    prompts: list[str]
    mask: Tensor
    """Marks the first frame as given, as the pipeline does."""

    @classmethod
    def read(cls, work: Path) -> "_Examples":
        files = [load_file(path) for path in sorted(work.glob(_CLIPS_PER_FILE_NAME.format(part="*")))]
        latents, conditions, images = (
            torch.cat([file[name] for file in files]).float() for name in ("latents", "conditions", "images")
        )
        numbers = torch.cat([file["numbers"] for file in files]).tolist()
        mask = torch.zeros(1, 4, *latents.shape[2:])
        mask[:, :, 0] = 1
        return cls(latents, conditions, images, [scene_of(number).prompt for number in numbers], mask)


def train(work: Path, *, minutes: float) -> None:
    """Train for so long and write ``<work>/pipeline``, a smoothed copy of the weights."""
    torch.manual_seed(1)
    rng = np.random.default_rng(1)
    examples = _Examples.read(work)
    tokenizer = make_tokenizer()
    transformer = make_transformer()
    conditioners = make_conditioners(len(tokenizer))
    networks = torch.nn.ModuleDict(
        {"dit": transformer, "text": conditioners.text, "image": conditioners.image}
    )
    networks.train()
    optimizer = torch.optim.AdamW(networks.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    smoothed = copy.deepcopy(networks).requires_grad_(requires_grad=False)
    step, losses, journal = 0, list[float](), Journal(work, "dit")
    while (share := journal.minutes / minutes) < 1:
        for group in optimizer.param_groups:
            group["lr"] = _rate(step, share)
        loss = _loss(networks, tokenizer, examples, rng)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(networks.parameters(), 1.0)
        optimizer.step()
        step += 1
        losses.append(loss.item())
        _smooth(smoothed.parameters(), networks.parameters(), keep=min(0.998, (1 + step) / (10 + step)))
        if step % 50 == 0 or step == 1:
            journal.write(step=step, loss=round(float(np.mean(losses)), 4))
            losses.clear()
        if step % 500 == 0:
            _save(smoothed, tokenizer, work)
    _save(smoothed, tokenizer, work)
    journal.write(final=True, step=step)


def _rate(step: int, share: float) -> float:
    """Warm up, stay, and from two fifths of the time on fall along a cosine."""
    falling = 1.0 if share < 0.4 else 0.5 + 0.5 * math.cos(math.pi * (share - 0.4) / 0.6)
    return PEAK_RATE * min(1, (step + 1) / 100) * falling + 1e-6


def _loss(
    networks: torch.nn.ModuleDict, tokenizer: Any, examples: _Examples, rng: np.random.Generator
) -> Tensor:
    chosen = rng.integers(0, len(examples.prompts), BATCH)
    spread = (torch.rand(BATCH) + torch.arange(BATCH)) / BATCH  # one moment from each sixteenth of the way
    moments = FLOW_SHIFT * spread / (1 + (FLOW_SHIFT - 1) * spread)
    clean = examples.latents[chosen]
    noise = torch.randn_like(clean)
    share = moments.view(-1, 1, 1, 1, 1)
    mixed = (1 - share) * clean + share * noise
    masks = examples.mask.expand(BATCH, -1, -1, -1, -1)
    prompts = ["" if rng.random() < PROMPTS_DROPPED else examples.prompts[index] for index in chosen]
    text = _embed(networks["text"], tokenizer, prompts)
    image = networks["image"](pixel_values=examples.images[chosen], output_hidden_states=True).hidden_states[
        -2
    ]
    joined = torch.cat([mixed, masks, examples.conditions[chosen]], 1)
    velocity = networks["dit"](joined, (moments * 1000).long(), text, image, return_dict=False)[0]
    loss: Tensor = (velocity - (noise - clean)).pow(2).mean()
    return loss


def _embed(encoder: Any, tokenizer: Any, prompts: list[str]) -> Tensor:
    batch = tokenizer(
        prompts, padding="max_length", max_length=PROMPT_TOKENS, truncation=True, return_tensors="pt"
    )
    hidden = encoder(batch.input_ids, batch.attention_mask).last_hidden_state
    embeddings: Tensor = hidden * batch.attention_mask[:, :, None]  # the pipeline zeroes the padding too
    return embeddings


def _smooth(averages: Iterable[Tensor], weights: Iterable[Tensor], *, keep: float) -> None:
    with torch.no_grad():
        for average, weight in zip(averages, weights, strict=True):
            average.lerp_(weight, 1 - keep)


def _save(smoothed: torch.nn.ModuleDict, tokenizer: Any, work: Path) -> None:
    networks = copy.deepcopy(smoothed).eval()
    save_pipeline(networks["dit"], Conditioners(networks["text"], networks["image"]), tokenizer, work)
