"""CONTRACT (to be implemented by the transports helper): what the runtime uses.

    async with open_receiver(listener, "actor/7", geometry) as receiver:
        receiver.address                       # Address with the region's name
        delivery = await receiver.receive()    # waits
        delivery = receiver.poll_nowait()      # or None
        delivery.payload                       # memoryview into the ring, valid until release()
        delivery.kind, delivery.producer (identity str), delivery.number
        receiver.release(delivery)             # out of order allowed; synchronous; nudges producers
        receiver.depth, receiver.free_bytes

    async with open_sender(address, identity="node-1.42/actor-7", options=...) as sender:
        number = await sender.send(buffers, kind=1, timeout_seconds=None)   # waits while full
        sender.delivered                       # count of own messages handed over
        await sender.drained()                 # everything sent was handed over
        sender.undelivered()                   # [(number, kind, buffers)] kept for sending elsewhere
"""
