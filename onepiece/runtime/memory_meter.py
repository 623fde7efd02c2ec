"""What a loaded stage takes of its device's memory, at most so far.

Of a GPU: what torch has allocated in the process, at most. Of a processor: what the process has had in
memory, at most. From both is taken what was there before the stage was loaded. So a figure is a stage's own
if nobody else uses the device in that process meanwhile, which is so in a helper process; in the node's own
it is so for a stage that has its GPU for itself. Else there is none (0).
"""

import os
from pathlib import Path
from typing import Final

from attrs import define, field

from onepiece import _torch

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(process_id: int) -> int:
    """What a process has in memory; 0 where the system does not say."""
    try:
        pages = Path(f"/proc/{process_id}/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * _PAGE_BYTES


def most_resident_bytes() -> int:
    """What this process has had in memory at most; 0 where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("VmHWM:")), "VmHWM: 0 kB")
    return int(line.split()[1]) * 1024


def gpu_index(device: str) -> int | None:
    """Of ``cuda:1`` 1; None of a processor."""
    kind, _, index = device.partition(":")
    return int(index or 0) if kind == "cuda" else None


@define(eq=False)
class ProcessMeter:
    """In a process of the stage's own: begin before it is loaded, look as often as is wanted."""

    device: str
    _before_bytes: int = 0

    @classmethod
    def begun(cls, device: str) -> "ProcessMeter":
        """A meter that takes nothing of what there is now for the stage's."""
        return cls(device, 0 if gpu_index(device) is not None else resident_bytes(os.getpid()))

    def peak_bytes(self) -> int:
        """What the stage has taken at most."""
        index = gpu_index(self.device)
        if index is not None:
            return _torch.cuda_use(index)[1]
        return max(0, most_resident_bytes() - self._before_bytes)


@define(eq=False)
class DeviceMeter:
    """Of a device in the node's own process: tells what a stage takes while it is there alone.

    A stage is named by whatever object stands for one life of it.
    """

    device: str
    _lives: set[object] = field(factory=set)
    _mixed: set[object] = field(factory=set)
    """Those that were not alone all the time."""
    _before_bytes: int = 0

    def enter(self, life: object) -> None:
        """A stage is about to be loaded."""
        index = gpu_index(self.device)
        if index is not None and not self._lives:
            _torch.cuda_forget(index)
            self._before_bytes = _torch.cuda_use(index)[0]
        self._lives.add(life)
        if len(self._lives) > 1:
            self._mixed |= self._lives

    def leave(self, life: object) -> None:
        """It has been unloaded."""
        self._lives.discard(life)
        self._mixed.discard(life)

    def peak_bytes(self, life: object) -> int:
        """What the stage has taken at most; 0 if that cannot be told."""
        index = gpu_index(self.device)
        if index is None or life in self._mixed or life not in self._lives:
            return 0
        return max(0, _torch.cuda_use(index)[1] - self._before_bytes)
