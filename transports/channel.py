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

from transports.receiver import DEFAULT_GEOMETRY, Delivery, Leniency, Receiver, open_receiver
from transports.sender import Sender, open_sender
from transports.sender_link import Patience
from transports.sender_request import Undelivered

__all__ = [
    "DEFAULT_GEOMETRY",
    "Delivery",
    "Leniency",
    "Patience",
    "Receiver",
    "Sender",
    "Undelivered",
    "open_receiver",
    "open_sender",
]
