"""How an outbox opens the way to an address: under which name, and by which transport."""

import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager

from onepiece.limits import EXPORTED_BYTES_MAX
from transports import Address, Options, Sender, Terms, Transport, open_sender

OpenLink = Callable[[str], AbstractAsyncContextManager[Sender]]
"""Opens the way to an address; entering raises ``TransportError``."""


def link_opener(
    identity: Callable[[], str],
    options: Options,
    *,
    find_transport: Callable[[Address], Transport],
    other_spellings: Sequence[str],
    clock: Callable[[], float],
    rng: random.Random | None,
) -> OpenLink:
    """What opens the links of a node.

    Args:
        identity: The node's name on channels, asked for each time.
        options: Secret, bounds and certificates.
        find_transport: The transport for an address.
        other_spellings: Addresses of rings that may be known by another address too, as where a node was
            told to join a host by its name. Links to both have names of their own, else each would end the
            other.
        clock: Monotonic seconds.
        rng: Draws the jitter of waits.
    """
    endings = {address: f"/{number}" for number, address in enumerate(other_spellings)}

    @contextlib.asynccontextmanager
    async def open_link(text: str) -> AsyncIterator[Sender]:
        # All of it in here: others chose the address, and what it asks for may not be there.
        address = Address.parse(text)
        opening = open_sender(
            address,
            identity=identity() + endings.get(text, ""),
            options=options,
            terms=Terms(exported_bytes_max=EXPORTED_BYTES_MAX),
            transport=find_transport(address),
            clock=clock,
            rng=rng,
        )
        async with opening as sender:
            yield sender

    return open_link
