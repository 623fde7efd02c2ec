"""What a receiver hands over, and how patient it is with who sends."""

from attrs import field, frozen

from transports.device_memory import DeviceMemory, DeviceSpan
from transports.ring import Delivery as RingDelivery


@frozen
class Leniency:
    """How long a receiver waits for a sender that has reserved room and not filled it."""

    lease_seconds: float = 5.0
    slowest_bytes_per_second: float = 10e6
    """Reserved bytes lengthen the lease at this rate, so that a slow link is not taken for a stall."""


@frozen(eq=False)
class Delivery:
    """A message handed over; its bytes stay in the ring until it is released."""

    payload: memoryview
    kind: int
    flags: int
    producer: str
    """The identity that the sender gave."""
    number: int
    """The sender's own running number of this message."""
    held: RingDelivery = field(repr=False)
    on_device: DeviceSpan | None = None
    """The payload, where the inbox is in a device's memory; ``payload`` is empty then. Its room is given back
    by ``release`` alone: first let the device finish what reads it."""

    @property
    def is_own(self) -> bool:
        """The payload lies in memory of its own: views of it stay good behind its release."""
        return self.held.content is not None

    @property
    def head(self) -> bytes:
        """What was sent beside the payload; only in an inbox in a device's memory."""
        return self.held.head


def delivery_of(held: RingDelivery, view: memoryview, device: DeviceMemory | None) -> Delivery:
    """What the ring hands over, with the bytes themselves.

    Args:
        held: Handed over by the ring.
        view: The region.
        device: The memory beside it, if the payload ring lies apart.
    """
    on_device = None
    if device is not None:
        payload = memoryview(b"")  # its own: a release closes it
        on_device = device.span(held.offset, held.length)
    elif held.content is not None:
        payload = memoryview(held.content)
    else:
        payload = view[held.offset : held.offset + held.length]
    return Delivery(payload, held.kind, held.flags, held.identity, held.number, held, on_device)
