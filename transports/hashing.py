"""The hash of a payload, without holding up the event loop for long."""

import asyncio
from collections.abc import Sequence
from typing import Final

from transports.operations import Bytes
from transports.ring.layout import hash_payload

HASH_ELSEWHERE_BYTES: Final = 4 << 20
"""From this length on a payload is hashed in a thread: the event loop would stand for longer than the
thread costs."""


async def hash_patiently(payload: Sequence[Bytes]) -> int:
    """The hash of the concatenation of ``payload``; in a thread if it is long."""
    if sum(map(len, payload)) < HASH_ELSEWHERE_BYTES:
        return hash_payload(payload)
    try:
        return await asyncio.to_thread(hash_payload, payload)
    except RuntimeError:  # no thread can be had (ulimit -u, a container's bound): no reason to end a channel
        return hash_payload(payload)
