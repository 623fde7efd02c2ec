"""A device that is none: memory which this process reaches by the device's own copies only."""

from transports.device_memory import Device, DeviceError
from transports.operations import Bytes

_FIRST_ADDRESS = 0x7F00_0000_0000_0000
"""No process of Linux has anything there: whoever takes it for the host's is ended by the kernel."""
_GRAIN_BYTES = 2 << 20


class FakeDevice(Device):
    """Memory behind addresses that mean nothing to the host.

    Args:
        name: Of the device.
        late: What is written shows only once ``flush`` was called, as adapters' writes may.
    """

    def __init__(self, name: str = "fake:0", *, late: bool = False) -> None:
        self.name = name
        self.flushes = 0
        self._late = late
        self._waiting: list[tuple[int, bytes]] = []
        self._memory: dict[int, bytearray] = {}
        self._next = _FIRST_ADDRESS

    @property
    def allocations(self) -> int:
        """How much memory was taken and not given back, in pieces."""
        return len(self._memory)

    def _take(self, size_bytes: int) -> int:
        address = self._next
        self._next += -(-size_bytes // _GRAIN_BYTES) * _GRAIN_BYTES
        self._memory[address] = bytearray(size_bytes)
        return address

    def give_back(self, address: int) -> None:
        """Free memory; what is under way to it is lost."""
        if self._memory.pop(address, None) is None:
            raise DeviceError(f"{self.name} has nothing at {address:#x} to be given back")

    def write(self, address: int, data: Bytes) -> None:
        """Copy from the host."""
        self._land(address, bytes(data))

    def read(self, address: int, length: int) -> bytes:
        """Copy to the host what shows."""
        memory, at = self._find(address, length)
        return bytes(memory[at : at + length])

    def copy(self, to: int, address: int, length: int) -> None:
        """Copy within the device."""
        self._land(to, self.read(address, length))

    def flush(self) -> None:
        """Let everything show that was written."""
        self.flushes += 1
        waiting, self._waiting = self._waiting, []
        for address, data in waiting:
            self._show(address, data)

    def wait(self, stream: int | None) -> None:
        """Nothing is computed here."""

    def check_remote_writes(self) -> None:
        """Flushing works."""

    def dmabuf(self, address: int, size_bytes: int) -> int:
        """There is none."""
        raise DeviceError(f"{self.name} is no device that the kernel knows")

    def check_peer_access(self) -> None:
        """Adapters cannot reach it."""
        raise DeviceError(f"{self.name} is no device that the kernel knows")

    def _land(self, address: int, data: bytes) -> None:
        self._find(address, len(data))
        if self._late:
            self._waiting.append((address, data))
        else:
            self._show(address, data)

    def _show(self, address: int, data: bytes) -> None:
        memory, at = self._find(address, len(data))
        memory[at : at + len(data)] = data

    def _find(self, address: int, length: int) -> tuple[bytearray, int]:
        for (
            start,
            memory,
        ) in self._memory.copy().items():  # the garbage collector gives memory back at any time
            if start <= address <= address + length <= start + len(memory):
                return memory, address - start
        raise DeviceError(f"{self.name} has no {length} bytes at {address:#x}")
