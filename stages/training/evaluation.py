"""Measures a pipeline on digits it has never seen, and draws sheets to look at."""

import json
import math
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, field
from PIL import Image

from stages.training.digits import (
    BOX,
    FRAMES,
    MOVES,
    SIZE,
    SPEED,
    TRAINING_DIGITS,
    Frames,
    Scene,
    centre,
    load_digits,
    nearest_move,
    random_scene,
)
from stages.training.networks import PROMPT_TOKENS, load_pipeline

_SCENE_SEEDS: Final = 20_000
_ROWS_SHOWN: Final = 10
_WAY: Final = SPEED * (FRAMES - 1)
_IDENTICAL_DECIBELS: Final = 80.0
"""A clip that stands still equals its first frame repeated: no figure to average."""


@define
class Sampler:
    """Clips from one pipeline, at a fixed number of steps and guidance."""

    pipeline: Any
    steps: int
    guidance: float
    seconds: list[float] = field(factory=list)

    def __call__(self, image: npt.NDArray[np.uint8], prompt: str, seed: int) -> Frames:
        """The clip for an image and a prompt."""
        started = time.monotonic()
        frames = self.pipeline(
            image=Image.fromarray(image),
            prompt=prompt,
            height=SIZE,
            width=SIZE,
            num_frames=FRAMES,
            num_inference_steps=self.steps,
            guidance_scale=self.guidance,
            generator=torch.Generator().manual_seed(seed),
            max_sequence_length=PROMPT_TOKENS,
            output_type="np",
        ).frames[0]
        self.seconds.append(time.monotonic() - started)
        clip: Frames = (frames * 255).round().astype(np.uint8)
        return clip


def evaluate(model: Path, sheets: Path, *, clips: int, steps: int, guidance: float) -> dict[str, object]:
    """Measure, write ``samples.png`` and ``prompts.png`` into ``sheets``, print and return the figures."""
    sampler = Sampler(load_pipeline(model), steps, guidance)
    reads = _digit_reader()
    decibels, frozen_decibels, drift, rows = [], [], [], list[Frames]()
    right_way = right_digit = 0
    for number in range(clips):
        scene = random_scene(np.random.default_rng(_SCENE_SEEDS + number), held_out=True)
        truth = scene.frames()
        made = sampler(truth[0], scene.prompt, number)
        decibels.append(_decibels(made, truth))
        frozen_decibels.append(_decibels(truth[:1], truth))
        right_way += nearest_move(centre(made[-1]) - centre(made[0])) == scene.move
        drift.append(float(np.abs(centre(made[-1]) - centre(truth[-1])).max()))
        right_digit += reads(_last_box(made, scene)) == load_digits().labels[scene.digit]
        if number < _ROWS_SHOWN:
            rows += [_strip(truth), _strip(made), np.full((3, SIZE * FRAMES, 3), 90, np.uint8)]
    Image.fromarray(np.concatenate(rows, 0)).save(sheets / "samples.png")
    figures: dict[str, object] = {
        "clips": clips,
        "steps": steps,
        "guidance": guidance,
        "decibels": round(float(np.mean(decibels)), 2),
        "first_frame_repeated_decibels": round(
            float(np.mean([value for value in frozen_decibels if value < _IDENTICAL_DECIBELS])), 2
        ),
        "right_direction": right_way / clips,
        "digit_read_in_last_frame": right_digit / clips,
        "end_position_error_pixels": round(float(np.median(drift)), 2),
        "one_image_five_prompts_right": _five_prompts(sampler, sheets),
        "seconds_per_clip": round(float(np.median(sampler.seconds)), 2),
    }
    print(json.dumps(figures, indent=2))  # noqa: T201 - a command's output
    return figures


def _decibels(left: Frames, right: Frames) -> float:
    return -10 * math.log10(float(np.mean((left / 255.0 - right / 255.0) ** 2)) + 1e-9)


def _strip(clip: Frames) -> Frames:
    return np.concatenate(list(clip), 1)


def _last_box(clip: Frames, scene: Scene) -> npt.NDArray[np.float64]:
    """What stands at the end where the digit should be."""
    dx, dy = MOVES[scene.move]
    left, top = scene.x + _WAY * dx + BOX, scene.y + _WAY * dy + BOX
    padded = np.pad(clip[-1].max(-1), BOX)
    box: npt.NDArray[np.float64] = padded[top : top + BOX, left : left + BOX] / 255.0
    return box


def _digit_reader() -> Any:
    """Reads a digit by its three nearest neighbours among the training digits."""
    from sklearn.neighbors import KNeighborsClassifier

    digits = load_digits()
    flat = digits.glyphs[:TRAINING_DIGITS].reshape(TRAINING_DIGITS, -1)
    reader = KNeighborsClassifier(3).fit(flat, digits.labels[:TRAINING_DIGITS])
    return lambda box: reader.predict(box.reshape(1, -1))[0]


def _five_prompts(sampler: Sampler, sheets: Path) -> int:
    """One first frame, each of the five moves: how many are followed."""
    drawn = random_scene(np.random.default_rng(31), held_out=True)
    rows, right = [], 0
    for move in MOVES:
        scene = Scene(drawn.digit, drawn.colour, move, x=20, y=20)
        clip = sampler(scene.frames(1)[0], scene.prompt, 5)
        right += nearest_move(centre(clip[-1]) - centre(clip[0])) == move
        rows.append(_strip(clip))
    Image.fromarray(np.concatenate(rows, 0)).save(sheets / "prompts.png")
    return right
