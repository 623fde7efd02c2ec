"""Line charts as PNG, with nothing but Pillow: axes, lines, a legend.

For the plots of reports, not for a screen. Pillow comes with the extra ``diffusion``, which draws pictures
anyway; a plotting library would be one more thing to install for a handful of lines.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from onepiece.errors import ConfigError

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

_COLOURS: Final = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
_WIDTH: Final = 1160
_HEIGHT: Final = 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 390, 40, 50
_TICKS: Final = 6
_FONT_SIZE: Final = 14


@frozen
class Line:
    """One line: its points in order."""

    name: str
    points: Sequence[tuple[float, float]]


@frozen
class Chart:
    """Lines over one pair of axes; ``is_log`` is about the vertical one."""

    title: str
    across: str
    up: str
    lines: Sequence[Line]
    is_log: bool = False


def draw_charts(path: Path, charts: Sequence[Chart]) -> None:
    """Write the charts into one picture, one above the other.

    Raises:
        ConfigError: Pillow is not installed.
        OSError: The file cannot be written.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise ConfigError(
            "plots need Pillow; install the extra 'diffusion' (pip install -e '.[diffusion]'), or leave "
            "--plot out"
        ) from error
    image = Image.new("RGB", (_WIDTH, _HEIGHT * len(charts)), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(_FONT_SIZE)
    for number, chart in enumerate(charts):
        _draw(draw, chart, number * _HEIGHT, font)
    image.save(path, format="PNG")


def _draw(draw: "ImageDraw", chart: Chart, top: int, font: Any) -> None:
    across = [x for line in chart.lines for x, _ in line.points]
    up = [y for line in chart.lines for _, y in line.points if y > 0 or not chart.is_log]
    x_low, x_high = (min(across), max(across)) if across else (0.0, 1.0)
    y_low, y_high = _range(up, is_log=chart.is_log)
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    bottom = top + _TOP + height

    def place_x(x: float) -> float:
        return _LEFT + width * (x - x_low) / ((x_high - x_low) or 1.0)

    def place_y(y: float) -> float:
        low, high, value = map(math.log10, (y_low, y_high, y)) if chart.is_log else (y_low, y_high, y)
        return bottom - height * (value - low) / ((high - low) or 1.0)

    draw.text((_LEFT + width / 2, top + 12), chart.title, fill="black", font=font, anchor="ma")
    draw.text((_LEFT + width / 2, bottom + 26), chart.across, fill="black", font=font, anchor="ma")
    draw.text((8, top + _TOP - 20), chart.up, fill="black", font=font)
    for x in _ticks(x_low, x_high):
        draw.line([(place_x(x), bottom), (place_x(x), bottom + 5)], fill="black")
        draw.text((place_x(x), bottom + 8), _number(x), fill="black", font=font, anchor="ma")
    for y in _decades(y_low, y_high) if chart.is_log else _ticks(y_low, y_high):
        draw.line([(_LEFT, place_y(y)), (_LEFT + width, place_y(y))], fill="#dddddd")
        draw.text((_LEFT - 8, place_y(y)), _number(y), fill="black", font=font, anchor="rm")
    draw.rectangle([_LEFT, top + _TOP, _LEFT + width, bottom], outline="black")
    for number, line in enumerate(chart.lines):
        colour = _COLOURS[number % len(_COLOURS)]
        _draw_line(draw, line, place_x, place_y, colour, is_log=chart.is_log)
        y = top + _TOP + 10 + 22 * number
        draw.line([(_LEFT + width + 12, y), (_LEFT + width + 36, y)], fill=colour, width=3)
        draw.text((_LEFT + width + 42, y), line.name, fill="black", font=font, anchor="lm")


def _draw_line(
    draw: "ImageDraw",
    line: Line,
    place_x: Callable[[float], float],
    place_y: Callable[[float], float],
    colour: str,
    *,
    is_log: bool,
) -> None:
    placed = [(place_x(x), place_y(y)) for x, y in line.points if y > 0 or not is_log]
    if len(placed) == 1:
        ((x, y),) = placed
        draw.ellipse([x - 3, y - 3, x + 3, y + 3], fill=colour)
    elif placed:
        draw.line(placed, fill=colour, width=2, joint="curve")


def _range(values: Sequence[float], *, is_log: bool) -> tuple[float, float]:
    if not values:
        return (1.0, 10.0) if is_log else (0.0, 1.0)
    if is_log:
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        return 10.0**low, 10.0 ** max(high, low + 1)
    return min(0.0, *values), (max(values) * 1.05) or 1.0


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers in between, about six."""
    rough = (high - low) / _TICKS or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [step * count for count in range(first, math.floor(high / step + 1e-9) + 1)]


def _decades(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(round(math.log10(low)), round(math.log10(high)) + 1)]


def _number(value: float) -> str:
    return f"{value:.4g}"
