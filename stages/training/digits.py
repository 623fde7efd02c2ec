"""The data: handwritten digits that move over black, with a prompt that says how.

The first frame never depends on the direction, so that only the prompt tells where the digit goes.
"""

import functools
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from attrs import frozen
from PIL import Image

from onepiece import ConfigError

Frames = npt.NDArray[np.uint8]
"""[frames, height, width, 3]"""

SIZE: Final = 64
FRAMES: Final = 9
BOX: Final = 24
"""Side of the square a digit is drawn in."""
SPEED: Final = 2
"""Pixels a frame: in four frames, which share a latent, one cell of the latents."""
TRAINING_DIGITS: Final = 1500
"""Digits from this index on are held out."""

DIGIT_WORDS: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOURS: Final[Mapping[str, tuple[int, int, int]]] = {
    "white": (255, 255, 255),
    "red": (255, 70, 60),
    "green": (80, 230, 90),
    "blue": (80, 140, 255),
    "yellow": (250, 220, 60),
}
MOVES: Final[Mapping[str, tuple[int, int]]] = {
    "moving left": (-1, 0),
    "moving right": (1, 0),
    "moving up": (0, -1),
    "moving down": (0, 1),
    "standing still": (0, 0),
}


class Digits(NamedTuple):
    """scikit-learn's digits, enlarged."""

    glyphs: npt.NDArray[np.float32]
    """[digits, BOX, BOX], 0 to 1."""
    labels: npt.NDArray[np.int64]


@frozen
class Scene:
    """One clip in words: which digit, its colour, where it starts and how it moves."""

    digit: int
    colour: str
    move: str
    x: int
    y: int

    @property
    def prompt(self) -> str:
        """What the model is told."""
        word = DIGIT_WORDS[load_digits().labels[self.digit]]
        return f"a {self.colour} {word} {self.move}"

    def frames(self, count: int = FRAMES, *, start: int = 0) -> Frames:
        """The true clip, from frame ``start`` on."""
        dx, dy = MOVES[self.move]
        tile = load_digits().glyphs[self.digit][:, :, None] * np.asarray(COLOURS[self.colour], np.float32)
        padded = SIZE + 2 * BOX
        frames = np.zeros((count, padded, padded, 3), np.float32)
        for index in range(count):
            left = self.x + dx * SPEED * (start + index) + BOX
            top = self.y + dy * SPEED * (start + index) + BOX
            frames[index, top : top + BOX, left : left + BOX] = tile
        return frames[:, BOX:-BOX, BOX:-BOX].round().astype(np.uint8)


@functools.cache
def load_digits() -> Digits:
    """The digits, read once."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise ConfigError("training needs scikit-learn for its digits; pip install scikit-learn") from error
    bundled: Any = load()
    enlarged = [_enlarge(image) for image in bundled.images]
    glyphs = np.clip((np.stack(enlarged) - 0.15) * 1.6, 0, 1)
    return Digits(glyphs, bundled.target)


def _enlarge(image: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    small = Image.fromarray((image * 15.9).astype(np.uint8))
    large = small.resize((BOX, BOX), Image.Resampling.BICUBIC)
    return np.asarray(large, np.float32) / np.float32(255)


def random_scene(rng: np.random.Generator, *, held_out: bool = False) -> Scene:
    """A scene whose digit stays on the canvas for all frames of a clip."""
    low, high = (TRAINING_DIGITS, len(load_digits().labels)) if held_out else (0, TRAINING_DIGITS)
    digit = int(rng.integers(low, high))
    colour = list(COLOURS)[rng.integers(len(COLOURS))]
    move = list(MOVES)[rng.integers(len(MOVES))]
    return Scene(digit, colour, move, x=int(rng.integers(8, 33)), y=int(rng.integers(8, 33)))


def centre(frame: Frames) -> npt.NDArray[np.float64]:
    """Where the ink is: (x, y) of its centre of mass."""
    ink = frame.astype(np.float64).max(-1)
    ink[ink < 40] = 0
    total = ink.sum() + 1e-6
    across, down = ink.sum(0), ink.sum(1)
    positions = np.arange(len(across))
    return np.array([(across * positions).sum() / total, (down * positions).sum() / total])


def nearest_move(shift: npt.NDArray[np.float64], frames: int = FRAMES) -> str:
    """The move that shifts a digit's centre most like this over a clip."""
    length = SPEED * (frames - 1)
    return min(MOVES, key=lambda move: float(np.abs(shift - length * np.array(MOVES[move])).sum()))
