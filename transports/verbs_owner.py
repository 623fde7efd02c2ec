"""The owner's side of the verbs transport: memory that producers' adapters read, write and swap.

Each session has a queue pair of its own, so one session can be revoked alone: its pair is reset, and from
then on the adapter refuses its packets. That comes first whenever a session ends, for whatever reason.

::

    open --ATTACH--> the owner's card --WIRE, the producer's card--> connected

Reads, writes and swaps do not pass through here; what the producer lends is read through the same pair
(``verbs_pulls``). A write with a notification takes a receive request
of the pair and wakes the event loop; there are some in store, and what comes when none is left is tried
again by the producer's adapter.
"""

import logging
import secrets
from typing import Final, Protocol

from transports import tcp_frames as frames
from transports._pyverbs import Adapter, Domain, Registered, RegisteredDevice, VerbsError
from transports._pyverbs_pair import Pair
from transports.device_memory import DeviceMemory
from transports.errors import PeerLost, TransportError
from transports.memory import Accepted
from transports.region_memory import RegionMemory
from transports.tcp_frames import Header, Kind
from transports.tcp_owner import House, OwnerSession, TcpRegion
from transports.verbs_cards import CARD_BYTES, Card
from transports.verbs_devices import Place
from transports.verbs_pulls import READS_MAX, NotPinnedError, Reads, parts_of, plain_key

_LOG: Final = logging.getLogger(__name__)

_NOTIFICATIONS: Final = 256
"""Of one session, that may wait to be heard."""
_EXPECTS_ATTACH: Final[frames.Bounds] = {Kind.ATTACH: 0, Kind.BEAT: 0}
_EXPECTS_WIRE: Final[frames.Bounds] = {Kind.WIRE: CARD_BYTES, Kind.BEAT: 0}
_EXPECTS_LITTLE: Final[frames.Bounds] = {
    Kind.LISTEN: 0,
    Kind.BEAT: 0,
    Kind.PULLED: frames.PULL_BYTES_MAX,
    Kind.GONE: 0,
}


class PinnedMemory(RegionMemory):
    """A region's memory, registered with an adapter, in a domain of its own; raises ``VerbsError``.

    Args:
        size_bytes: Of the region.
        adapter: By which peers reach it.
        device: Memory of a device beside it, that peers may write to.
    """

    __slots__ = ("beside", "domain", "registered")

    def __init__(self, size_bytes: int, adapter: Adapter, device: DeviceMemory | None = None) -> None:
        super().__init__(size_bytes)
        self.domain = Domain(adapter)
        self.beside: RegisteredDevice | None = None
        try:
            if device is not None:
                self.beside = RegisteredDevice(self.domain, device, for_peers=True)
            self.registered = Registered(self.domain, self.view, for_peers=True)
        except BaseException:
            self._close_beside()
            self.domain.close()
            raise

    def unpin(self) -> None:
        """Take it away from the adapter; no pair may use it any more. Views and spans stay valid."""
        self.registered.close()
        self._close_beside()
        self.domain.close()

    def _close_beside(self) -> None:
        if self.beside is not None:
            self.beside.close()


class VerbsHouse(House, Protocol):
    """What a session needs of its listener."""

    place: Place


class VerbsRegion(TcpRegion):
    """Memory that producers write to by themselves, and the connections of those producers."""

    def shut(self) -> None:
        """Revoke all sessions, then take the memory away from the adapter."""
        was_open = not self._closed
        super().shut()
        if was_open:
            assert isinstance(self.memory, PinnedMemory)
            self.memory.unpin()


class VerbsOwnerSession(OwnerSession):
    """A connection whose producer's adapter writes beside it."""

    executes = False

    def __init__(self, house: VerbsHouse, peer: str) -> None:
        super().__init__(house, peer)
        self._place_of_packets = house.place
        self._pair: Pair | None = None
        self._card: Card | None = None
        self._reads: Reads | None = None

    # The handshake goes on.

    def _open(self, region: TcpRegion, accepted: Accepted, proofs: frames.Proofs) -> None:
        super()._open(region, accepted, proofs)
        self._expect(_EXPECTS_ATTACH, self._attach)

    def _attach(self, header: Header, body: memoryview) -> None:
        if header.kind == Kind.BEAT:
            return
        memory = self._memory
        assert isinstance(memory, PinnedMemory)
        try:
            self._pair = pair = Pair(
                memory.domain,
                self._place_of_packets,
                sends=min(READS_MAX, memory.domain.adapter.limits.queue),
                receives=_NOTIFICATIONS,
                for_peers=True,
                on_completions=self._notified,
            )
            psn = secrets.randbits(24)
            self._card = card = pair.card(psn, memory=memory.registered, device=memory.beside)
            self._reads = Reads(pair, memory.domain, self._ending.check)
        except VerbsError as error:
            self._end(PeerLost(f"the owner has no queues for this session: {error}"))
            return
        said = card.to_bytes()
        self._send([frames.frame(Kind.ATTACHED, body=len(said)) + said])
        self._expect(_EXPECTS_WIRE, self._connect)

    def _connect(self, header: Header, body: memoryview) -> None:
        if header.kind == Kind.BEAT:
            return
        pair, card = self._pair, self._card
        assert pair is not None
        assert card is not None
        try:
            pair.connect(card, Card.parse(body))
            pair.expect(_NOTIFICATIONS)
        except VerbsError as error:
            self._end(PeerLost(f"the owner cannot connect the session's queues: {error}"))
            return
        _LOG.info("session %d of %s writes over %s", self._number, self._peer, pair.place)
        self._expect(_EXPECTS_LITTLE, self._operation)
        self._answer(header, 0)

    # What comes from the adapter.

    def _notified(self) -> None:
        pair = self._pair
        if pair is None or pair.closed:
            return
        heard, failure = 0, None
        try:
            while completions := pair.poll():
                for id_, failed in completions:
                    failure = failure or failed
                    heard += failed is None and not id_
                    if failed is None and id_ and self._reads is not None:
                        self._reads.completed(id_)
            if failure is None:
                pair.expect(heard)
        except VerbsError as error:
            failure = str(error)
        if heard:
            assert self._region is not None
            self._region.notify()
        if failure is not None:
            self._end(PeerLost(f"the owner's queue pair on {pair.place} failed: {failure}"))

    # What the producer lends.

    async def pull(self, key: bytes, into: memoryview) -> None:
        """Fetch an export: by the adapter, if it can reach it."""
        parts, reads = parts_of(key, len(into)), self._reads
        if not parts or reads is None:
            await self.pulls.pull(plain_key(key), into)
            return
        await self.pulls.look(plain_key(key), into)
        try:
            await reads.read(parts, into)
        except NotPinnedError as error:
            _LOG.warning("what %s lends is pulled over its connection: %s", self._peer, error)
            await self.pulls.pull(plain_key(key), into)
        except VerbsError as error:
            self._end(PeerLost(f"what the producer lends cannot be read: {error}"))
            self._ending.check()

    # How it ends: no packet lands any more when anybody is told.

    def revoke(self, error: TransportError) -> None:
        """End by the region's will, which knows of it."""
        self._refuse_packets()
        super().revoke(error)

    def close(self) -> None:
        """Close the connection at once. Idempotent."""
        self._refuse_packets()
        super().close()

    def _leave(self) -> None:
        self._refuse_packets()
        super()._leave()

    def _refuse_packets(self) -> None:
        if self._pair is not None:
            self._pair.close()
        if self._reads is not None:
            self._reads.end(PeerLost(f"the session of {self._peer} ended while its export was read"))
