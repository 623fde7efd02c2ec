"""What sessions have in common whose writes go beside their connection (``ucx``, ``verbs``).

Nobody on the way looks at what is written there, so it is checked here, before it leaves. And a wire that
breaks is often the sign of an end whose reason is still on its way over the connection.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from transports import tcp_frames as frames
from transports.errors import PeerLost, ProtocolError
from transports.operations import Chain
from transports.region_memory import check_span
from transports.tcp_frames import Header
from transports.tcp_producer import TcpMemory

_REASON_SECONDS: Final = 1.0
"""How long a session whose wire broke waits for the owner to say why."""


class BesideMemory(TcpMemory):
    """A session over a connection that has another way to the memory."""

    _size_bytes = 0
    """Of the region; known once the owner has welcomed us."""
    _timer: asyncio.TimerHandle | None = None
    _bounds: frames.Bounds = frames.PRODUCER_EXPECTS_ANSWERS
    """What the owner may say."""

    @contextmanager
    def _in_bounds(self) -> Iterator[None]:
        """End the session at what lies outside the region: beside the connection nobody else would look.

        The owner looks at what the connection carries; but it would have to end others too.
        """
        self._ending.check()
        try:
            yield
        except ProtocolError as error:
            self._end(error)
            raise

    def _check_chain(self, chain: Chain) -> None:
        for write in chain.writes:
            check_span(write.offset, write.length, self._size_bytes)

    def _wire_broke(self, error: Exception) -> None:
        """Nothing more can be written; the owner may have ended the session, and then it says why."""
        if self._timer is None:
            reason = PeerLost(f"the wire to {self._address} broke: {error}")
            self._timer = self._loop.call_later(_REASON_SECONDS, self._end, reason)

    def _welcomed(self, header: Header, body: memoryview) -> None:
        super()._welcomed(header, body)
        self._size_bytes = header.b
        self._expect(self._bounds, self._answered)
