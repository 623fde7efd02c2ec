"""Text for people: columns, seconds, bytes, ages."""

from collections.abc import Sequence


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows below a head, each column as wide as its widest cell; nothing is cut."""
    table = [list(head), *map(list, rows)]
    widths = [max(len(row[place]) for row in table) for place in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    )


def seconds_text(seconds: float) -> str:
    """A length of time at the precision that matters: ``3 ms``, ``1.25 s``, ``4 min 5 s``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def payload_text(size_bytes: int) -> str:
    """A payload's size as benchmarks title it: ``64 B``, ``16 MiB``."""
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes} B"


def bytes_text(count: int) -> str:
    """A size in binary units: ``17 B``, ``4.0 KiB``."""
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"
