"""Where an inbox's payload ring lies: in the host's memory, or in a device's."""

from typing import Final

from transports.cuda import device_named
from transports.device_calls import in_thread
from transports.device_memory import Device, DeviceError, DeviceMemory
from transports.errors import DeviceUnreachable
from transports.ring import Geometry

HOST: Final = "host"


async def memory_for(memory: str | Device, geometry: Geometry) -> DeviceMemory | None:
    """Memory for the payload ring, if that is to lie on a device; there is no second choice.

    Args:
        memory: ``host``, a device's name, or a device.
        geometry: Of the ring.

    Raises:
        ValueError: The geometry is for the other kind of memory, or no device has such a name.
        DeviceUnreachable: There is no such device here, or it has no memory left.

    Cancellation: what was taken is given back.
    """
    if memory == HOST:
        if geometry.is_apart:
            raise ValueError(
                f"head_bytes is {geometry.head_bytes}, and heads are for inboxes in a device's memory: leave"
                " it 0, or give memory='cuda:0'"
            )
        return None
    if not geometry.is_apart:
        raise ValueError(
            f"an inbox in the memory of {memory} needs room for each message's head in the host's: give its"
            " geometry head_bytes, for example 4096"
        )
    # A device that is used for the first time takes seconds to begin.
    return await in_thread(_taken, memory, geometry.payload_bytes)


def _taken(memory: str | Device, size_bytes: int) -> DeviceMemory:
    try:
        device = device_named(memory) if isinstance(memory, str) else memory
        return device.allocate(size_bytes)
    except DeviceError as error:
        raise DeviceUnreachable(f"no inbox in the memory of {memory}: {error}") from error
