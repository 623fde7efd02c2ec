"""Which Wan image-to-video model is served, what it expects, and which requests it can answer.

Pure and light: no torch here, since proxies and the command line import the workflow only for its
graph. A model is a folder or a hub id in diffusers' layout (``model_index.json`` and one sub-folder
for each component). What diffusers' files do not say (defaults, bounds, memory) comes from the first
of these that exists:

1. ``serving.json`` in the model's folder,
2. the table of known hub ids below,
3. the figures of Wan2.1 14B at 480P.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from attrs import fields_dict, frozen

from onepiece import ConfigError, InvalidInput

MODEL_VARIABLE: Final = "ONEPIECE_WAN_MODEL"
"""Environment variable: a folder or a hub id. All nodes of a set need the same value."""

SHIPPED_MODEL: Final = Path(__file__).parent / "weights" / "tinywan"

SIZE_MULTIPLE: Final = 16
"""The VAE shrinks height and width by 8, the transformer cuts the latents into patches of 2x2."""

FRAMES_PER_LATENT: Final = 4
"""The VAE keeps the first frame alone and joins each four that follow."""

MAX_SEED: Final = 2**63 - 1
MAX_PROMPT_CHARACTERS: Final = 8192
MAX_GUIDANCE: Final = 30.0

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DTYPES: Final = ("float32", "bfloat16", "float16")
_STAGES: Final = ("encode_text", "encode_image", "encode_latents", "denoise", "decode")


@frozen
class WanModel:
    """One model: where its files are, its defaults, its bounds, what it needs."""

    source: str
    """A folder, or a hub id such as ``Wan-AI/Wan2.1-I2V-14B-480P-Diffusers``."""
    max_sequence_length: int
    """Prompts are padded to this many tokens. The padding is attended to: it is part of the result."""
    height: int
    width: int
    keeps_aspect: bool
    """The default size has the area of height x width and the image's own proportions."""
    num_frames: int
    steps: int
    guidance: float
    frames_per_second: int
    max_steps: int
    max_frames: int
    max_pixels: int
    """Of one frame."""
    dtype: str
    """Of text encoder and transformer. Image encoder and VAE always run in float32, as upstream advises."""
    device: str
    """``gpu`` or ``cpu``: the kind of device its stages ask for."""
    memory_gib: Mapping[str, float]
    """By stage: weights and activations at the model's default size."""

    @property
    def is_local(self) -> bool:
        """The files lie in a folder; nothing is asked of a hub."""
        return Path(self.source).is_dir()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """The model that ``ONEPIECE_WAN_MODEL`` names; the shipped one if it is unset.

        Raises:
            ConfigError: It names neither a model folder nor a hub id, or ``serving.json`` is unusable.
        """
        source = environ.get(MODEL_VARIABLE) or str(SHIPPED_MODEL)
        return cls.from_source(source)

    @classmethod
    def from_source(cls, source: str) -> Self:
        """The model in a folder or on the hub.

        Raises:
            ConfigError: As for ``from_environment``.
        """
        folder = Path(source).expanduser()
        if folder.is_dir():
            if not (folder / "model_index.json").is_file():
                raise ConfigError(
                    f"{MODEL_VARIABLE}={source!r} is a folder without model_index.json; "
                    "give the folder that WanImageToVideoPipeline.save_pretrained wrote"
                )
            settings = {**_LARGE, **_read_settings(folder / "serving.json")}
            return cls._build(str(folder.resolve()), settings, folder / "serving.json")
        if _HUB_ID.fullmatch(source) is None:
            raise ConfigError(
                f"{MODEL_VARIABLE}={source!r} is neither a folder nor a hub id; "
                f"known hub ids: {', '.join(_KNOWN)}; unset it for the shipped model"
            )
        return cls._build(source, _KNOWN.get(source, _LARGE), MODEL_VARIABLE)

    @classmethod
    def _build(cls, source: str, settings: Mapping[str, Any], origin: object) -> Self:
        unknown = settings.keys() - (fields_dict(cls).keys() - {"source"})
        if unknown:
            raise ConfigError(f"{origin}: unknown settings {sorted(unknown)}")
        model = cls(source=source, **settings)
        whole = ("max_sequence_length", "height", "width", "num_frames", "steps", "frames_per_second")
        for name in (*whole, "max_steps", "max_frames", "max_pixels"):
            value = getattr(model, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{origin}: {name} must be a whole number of at least 1, not {value!r}")
        if model.dtype not in _DTYPES:
            raise ConfigError(f"{origin}: dtype {model.dtype!r} is none of {', '.join(_DTYPES)}")
        if model.device not in {"cpu", "gpu"}:
            raise ConfigError(f"{origin}: device {model.device!r} is neither 'cpu' nor 'gpu'")
        if not isinstance(model.memory_gib, Mapping) or set(model.memory_gib) != set(_STAGES):
            raise ConfigError(f"{origin}: memory_gib must name each of {', '.join(_STAGES)}")
        return model

    def check_prompt(self, field: str, text: str) -> str:
        """The text, if it is short enough to be worth counting its tokens.

        Raises:
            InvalidInput: It is longer than any prompt.
        """
        if len(text) > MAX_PROMPT_CHARACTERS:
            raise _invalid(field, f"has {len(text)} characters; at most {MAX_PROMPT_CHARACTERS} are read")
        return text

    def check_steps(self, steps: int | None) -> int:
        """How many denoising steps to take.

        Raises:
            InvalidInput: Out of range.
        """
        chosen = self.steps if steps is None else steps
        return _in_range("steps", chosen, 1, self.max_steps)

    def check_seed(self, seed: int) -> int:
        """The seed.

        Raises:
            InvalidInput: Out of range.
        """
        return _in_range("seed", seed, 0, MAX_SEED)

    def check_guidance(self, guidance: float | None) -> float:
        """The guidance scale; above 1 the negative prompt counts and each step costs twice as much.

        Raises:
            InvalidInput: Not a number from 0 to the bound.
        """
        chosen = self.guidance if guidance is None else guidance
        if not 0.0 <= chosen <= MAX_GUIDANCE:  # refuses NaN as well
            raise _invalid("guidance", f"must be from 0 to {MAX_GUIDANCE}, not {chosen!r}")
        return chosen

    def check_frame_rate(self, frames_per_second: int | None) -> int:
        """Frames a second of the written video.

        Raises:
            InvalidInput: Out of range.
        """
        chosen = self.frames_per_second if frames_per_second is None else frames_per_second
        return _in_range("frames_per_second", chosen, 1, 120)

    def check_frames(self, num_frames: int | None) -> int:
        """How many frames to make.

        Raises:
            InvalidInput: Out of range, or not one more than a multiple of four.
        """
        chosen = self.num_frames if num_frames is None else num_frames
        _in_range("num_frames", chosen, 1, self.max_frames)
        below = (chosen - 1) // FRAMES_PER_LATENT * FRAMES_PER_LATENT + 1
        if chosen != below:
            above = below + FRAMES_PER_LATENT
            raise _invalid(
                "num_frames",
                f"must be one more than a multiple of {FRAMES_PER_LATENT}, not {chosen}; "
                f"the nearest are {below} and {above}",
            )
        return chosen

    def video_size(
        self, image_size: tuple[int, int], height: int | None, width: int | None
    ) -> tuple[int, int]:
        """Height and width of the video for an image of (width, height).

        Raises:
            InvalidInput: Not multiples of 16, or more pixels than the model's bound.
        """
        image_width, image_height = image_size
        default_height, default_width = self.height, self.width
        if self.keeps_aspect:
            aspect = image_height / image_width
            default_height = _multiple_below(math.sqrt(self.height * self.width * aspect))
            default_width = _multiple_below(math.sqrt(self.height * self.width / aspect))
        chosen_height = default_height if height is None else height
        chosen_width = default_width if width is None else width
        for field, value in (("height", chosen_height), ("width", chosen_width)):
            if value < SIZE_MULTIPLE or value % SIZE_MULTIPLE:
                nearest = _multiple_below(value)
                raise _invalid(
                    field,
                    f"must be a multiple of {SIZE_MULTIPLE}, not {value}; "
                    f"the nearest are {nearest} and {nearest + SIZE_MULTIPLE}",
                )
        if chosen_height * chosen_width > self.max_pixels:
            raise _invalid(
                "height",
                f"times width must be at most {self.max_pixels} pixels, not {chosen_height}x{chosen_width}",
            )
        return chosen_height, chosen_width


def _invalid(field: str, complaint: str) -> InvalidInput:
    return InvalidInput(f"{field} {complaint}", field=field)


def _in_range(field: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise _invalid(field, f"must be from {low} to {high}, not {value}")
    return value


def _multiple_below(length: float) -> int:
    return max(SIZE_MULTIPLE, round(length) // SIZE_MULTIPLE * SIZE_MULTIPLE)


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must hold a JSON object of settings")
    return settings


# Memory: parameter counts of the published configurations in the dtype above, and room for the
# activations at the default size.
_LARGE: Final[dict[str, Any]] = {
    "max_sequence_length": 512,
    "height": 480,
    "width": 832,
    "keeps_aspect": True,
    "num_frames": 81,
    "steps": 40,
    "guidance": 5.0,
    "frames_per_second": 16,
    "max_steps": 200,
    "max_frames": 161,
    "max_pixels": 1280 * 720,
    "dtype": "bfloat16",
    "device": "gpu",
    "memory_gib": {
        "encode_text": 14,
        "encode_image": 4,
        "encode_latents": 10,
        "denoise": 44,
        "decode": 12,
    },
}
_KNOWN: Final[dict[str, dict[str, Any]]] = {
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": _LARGE,
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": {
        **_LARGE,
        "height": 720,
        "width": 1280,
        "memory_gib": {
            "encode_text": 14,
            "encode_image": 4,
            "encode_latents": 20,
            "denoise": 60,
            "decode": 24,
        },
    },
}
