"""What the training writes down: one line on the screen and in a file for each measurement."""

import json
import time
from pathlib import Path

from attrs import Factory, define


@define
class Journal:
    """Measurements of one step of the training, and the time it has used since this was made."""

    folder: Path
    name: str
    _started: float = Factory(time.monotonic)

    @property
    def minutes(self) -> float:
        """Since the step began in earnest."""
        return (time.monotonic() - self._started) / 60

    def write(self, **figures: object) -> None:
        """Show the figures, and append them to ``<folder>/<name>.jsonl``."""
        line = json.dumps({**figures, "minutes": round(self.minutes, 2)})
        print(self.name, line, flush=True)  # noqa: T201 - a command's output
        with (self.folder / f"{self.name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")
