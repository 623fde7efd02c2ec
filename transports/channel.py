"""Channels: whole messages from many senders to one receiver. What the runtime uses.

::

    async with transport.listen(address, options) as listener:
        async with open_receiver(listener, "actor/7", geometry) as receiver:
            delivery = await receiver.receive()        # or poll_nowait(), or deliver_to(take)
            delivery.payload                           # memoryview into the ring, until release()
            receiver.release(delivery)                 # any order

    async with open_sender(receiver_address, "node-1.42/actor-7") as sender:
        number = await sender.send([header, tensor_bytes], kind=1)     # waits while full
        await sender.drained()                         # everything sent was handed over
        sender.undelivered()                           # what may be sent elsewhere when it is gone

A channel keeps the ring's promises (exactly once, in order, whole, bounded) across lost connections
and fences, for as long as the receiver lives. When the receiver is gone, ``PeerLost`` says so, and
the sender still holds what was not seen to be taken.
"""

import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from transports.address import Address
from transports.deliveries import Delivery, Leniency
from transports.memory import Options, Transport
from transports.receiver import DEFAULT_GEOMETRY, Receiver, open_receiver
from transports.registry import transport_for
from transports.sender import Sender
from transports.sender_lender import Terms
from transports.sender_link import Link, Patience
from transports.sender_request import Undelivered

__all__ = [
    "DEFAULT_GEOMETRY",
    "Delivery",
    "Leniency",
    "Patience",
    "Receiver",
    "Sender",
    "Terms",
    "Undelivered",
    "open_receiver",
    "open_sender",
]


@asynccontextmanager
async def open_sender(
    address: Address | str,
    identity: str,
    *,
    options: Options | None = None,
    patience: Patience | None = None,
    terms: Terms | None = None,
    transport: Transport | None = None,
    clock: Callable[[], float] = time.monotonic,
    rng: random.Random | None = None,
) -> AsyncIterator[Sender]:
    """Connect to a receiver; leaving the block ends the session.

    A regular exit lets what was posted reach the wire; ``drained`` is what waits for the receiver.

    Args:
        address: The receiver's address, with the region's name.
        identity: Names this sender across sessions; no two live senders of a receiver share one.
        options: Secret, bounds and certificates.
        patience: How long to try before the receiver is called gone.
        terms: What is lent to the receiver instead of being written into its ring.
        transport: Used instead of the one registered for the address's scheme.
        clock: Monotonic seconds.
        rng: Draws the jitter of waits.

    Raises:
        TransportError: Whatever ``Transport.connect`` raises; ``UnknownScheme``; ``LayoutMismatch``.
    """
    address = Address.parse(address) if isinstance(address, str) else address
    link = Link(
        transport=transport or transport_for(address),
        address=address,
        identity=identity,
        options=options or Options(),
        patience=patience or Patience(),
        terms=terms or Terms(),
        clock=clock,
        rng=rng or random.Random(),  # noqa: S311  # jitter, no secret
    )
    sender = Sender(link)
    await sender.open()
    try:
        yield sender
        await sender.finish()
    finally:
        await sender.close()
