"""Numbers of the command line: each option says what it takes, and refuses the rest by name."""

import argparse
import math
from collections.abc import Callable


def number_from(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """A finite number from ``low`` to ``high``; ``above``: not ``low`` itself. For ``type=`` of argparse."""
    bounds = _bounds(low, high, "above" if above else "from")

    def number(text: str) -> float:
        found = float(text)
        is_low = found > low if above else found >= low
        if not (is_low and found <= high and math.isfinite(found)):
            raise argparse.ArgumentTypeError(f"{text!r} is no number {bounds}")
        return found

    return number


def whole_from(low: int, high: float = math.inf) -> Callable[[str], int]:
    """A whole number from ``low`` to ``high``."""
    bounds = _bounds(low, high, "from")

    def whole_number(text: str) -> int:
        found = int(text)
        if not low <= found <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number {bounds}")
        return found

    return whole_number


def _bounds(low: float, high: float, word: str) -> str:
    return f"{word} {low:g}" + (" on" if math.isinf(high) else f" to {high:.10g}")
