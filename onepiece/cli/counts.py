"""Counts on a command line."""

import argparse


def positive(text: str) -> int:
    """A whole number from 1 up; raises ``ArgumentTypeError``, which the parser tells."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value
