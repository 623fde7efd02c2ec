"""Draws the demo's first frame."""

from pathlib import Path
from typing import Final

from PIL import Image

from stages.training.digits import Scene

RED_THREE: Final = Scene(digit=1504, colour="red", move="moving right", x=12, y=20)
"""A three that no training has seen, and that people read at a glance."""


def write(path: Path) -> None:
    """Write the frame as PNG."""
    Image.fromarray(RED_THREE.frames(1)[0]).save(path)
