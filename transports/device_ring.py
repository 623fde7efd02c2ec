"""The device memory in which an inbox's payload ring lies, and what follows it when a region is retired."""

from collections.abc import Callable

from transports.device_memory import DeviceError, DeviceMemory
from transports.driver import RegionRun
from transports.ring import Consumer


class DeviceRing:
    """Holds the memory for a receiver; a ``Keeper``.

    Args:
        memory: Of the device, zeroed.
        consumer: Of the ring; knows which payloads are whole.
        on_failed: Told when there is no other memory to be had, though it is needed.
    """

    def __init__(
        self, memory: DeviceMemory, consumer: Consumer, on_failed: Callable[[DeviceError], None]
    ) -> None:
        self.memory = memory
        """Where the payload ring lies now."""
        self._consumer = consumer
        self._on_failed = on_failed

    def renew(self, view: memoryview) -> DeviceMemory:
        """Other memory of the device, with what was sealed in the old one before it was copied.

        What was handed over stays where it is, and that memory with it.
        """
        fresh = self.memory.device.allocate(self.memory.size_bytes)
        run = RegionRun(self._consumer.carry_over(), self.memory, fresh)
        run.advance(view)
        assert run.finished, "taking over neither fences nor pulls"
        self.memory = fresh
        return fresh

    def failed(self, error: DeviceError) -> None:
        """The region is closed."""
        self._on_failed(error)
