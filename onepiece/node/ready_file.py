"""The file that says that a node serves, and where: it is there, whole, exactly while that is so."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from onepiece.errors import ConfigError


@contextlib.contextmanager
def ready_file(path: Path, content: Mapping[str, object]) -> Iterator[None]:
    """Have the file there with this content, as JSON, within the context.

    Raises:
        ConfigError: It cannot be written; the message names it.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(json.dumps(content), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"--ready-file {str(path)!r} cannot be written: {error}") from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # whoever took the directory away does not look for the file in it
            path.unlink()
