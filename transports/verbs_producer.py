"""The producer's side of the verbs transport: a session as over tcp, whose operations go by the adapter.

The connection is there for the handshake, for nudges, for the reason of an end, and to notice at once that
the owner's process is gone or stopped: its adapter would go on answering for a stopped one.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Final

from attrs import evolve

from transports import tcp_frames as frames
from transports._pyverbs import VerbsError
from transports.address import Address
from transports.beside_memory import BesideMemory
from transports.device_memory import Device, DeviceError, DeviceSpan
from transports.errors import ConnectFailed, DeviceUnreachable, PeerLost, ProtocolError
from transports.memory import Atomics, Options
from transports.operations import EXPIRED, WORD_BYTES, Bytes, Chain, CompareAndSwap, Expired, Guarded, Put
from transports.region_memory import check_span, check_word
from transports.tcp_frames import Header, Kind
from transports.tcp_wire import PENDING_BYTES_HIGH, SocketWire
from transports.verbs_cards import CARD_BYTES, Card
from transports.verbs_devices import SETTINGS_VARIABLE, NoPlaceError, Wanted, choose, devices_of
from transports.verbs_link import Link
from transports.verbs_pulls import plain_key

_EXPECTS: Final[frames.Bounds] = {**frames.PRODUCER_EXPECTS_ANSWERS, Kind.ATTACHED: CARD_BYTES}


class VerbsMemory(BesideMemory):
    """A session over a connection and a pair of queues."""

    _bounds = _EXPECTS

    def __init__(self, address: Address, hello: bytes, options: Options) -> None:
        super().__init__(address, hello, options, encrypted=False)
        self._wanted = Wanted.of(address, os.environ.get(SETTINGS_VARIABLE, ""))
        self._card: asyncio.Future[Card] = self._loop.create_future()
        self._open_link: Link | None = None

    async def open(self) -> None:
        """Shake hands as over tcp, then connect the queues."""
        await super().open()
        try:
            self._send([frames.frame(Kind.ATTACH)])
            self._open_link = link = self._new_link(await self._card)
            said = link.card.to_bytes()
            await self._ask_word(lambda tag: [frames.frame(Kind.WIRE, tag=tag, body=len(said)) + said])
        except (PeerLost, NoPlaceError, VerbsError) as error:
            raise ConnectFailed(f"no session on {self._address}: {error}") from error

    def _new_link(self, owner: Card) -> Link:
        assert isinstance(self.wire, SocketWire)
        place = choose(devices_of(), self._wanted, near=self.wire.local_host, like=owner.kind)
        self._capabilities = evolve(
            self._capabilities,
            atomics=Atomics.ADAPTER,
            one_sided=True,
            guarded_bytes_max=0,
            zero_copy_send=False,
            device_bytes=owner.device_bytes,
            wire=f"rdma ({place}), payload into a device" if owner.device_bytes else f"rdma ({place})",
        )
        return Link(
            place,
            owner,
            spin_seconds=self._wanted.spin_microseconds / 1e6,
            on_failure=self._wire_broke,
            on_room=self.has_room,
        )

    @property
    def _link(self) -> Link:
        assert self._open_link is not None
        return self._open_link

    # Operations.

    async def read(self, offset: int, length: int) -> Bytes:
        """Fetch bytes of the region, behind all that was posted."""
        with self._in_bounds():
            check_span(offset, length, self._size_bytes)
        await self._wait_for_room()
        data = bytearray(length)
        if length:
            self._look()
            await self._link.read(offset, memoryview(data))
        return data

    async def compare_and_swap(self, swap: CompareAndSwap) -> int | Expired:
        """Swap a word: by the owner's adapter."""
        with self._in_bounds():
            check_word(swap.offset, self._size_bytes)
        await self._wait_for_room()
        if time.monotonic() > swap.not_after:
            return EXPIRED
        self._look()
        return await self._link.swap(swap)

    async def fetch_and_add(self, offset: int, addend: int) -> int:
        """Add to a word: by the owner's adapter."""
        with self._in_bounds():
            check_word(offset, self._size_bytes)
        await self._wait_for_room()
        return await self._link.add(offset, addend)

    async def post(self, chain: Chain) -> None:
        """Write in order; waits first while too much is queued."""
        with self._in_bounds():
            self._check_chain(chain)
        await self._wait_for_room()
        self._link.write(chain)

    async def put(self, put: Put) -> None:
        """Write into the device's memory; waits first while too much is queued."""
        with self._in_bounds():
            check_span(put.offset, sum(map(len, put.buffers)), self._capabilities.device_bytes)
        await self._wait_for_room()
        for buffer in put.buffers:
            if isinstance(buffer, DeviceSpan):
                self.reach(buffer.device)
        self._link.put(put)

    def reach(self, device: Device) -> None:
        """Register memory of this device, which its bytes pass through on their way to the adapter."""
        if self._ending.over():
            return
        if not self._capabilities.device_bytes:
            super().reach(device)
        try:
            self._link.reach(device)
        except (DeviceError, VerbsError) as error:
            raise DeviceUnreachable(
                f"bytes on {device.name} cannot be sent to {self._address}: {error}"
            ) from error

    async def guarded(self, guarded: Guarded) -> int | Expired:
        """Swap and, if it took place, the chain; adapters know no such thing, so it takes two steps."""
        with self._in_bounds():
            self._check_chain(guarded.chain)
        found = await self.compare_and_swap(guarded.swap)
        if found == guarded.swap.expected:
            await self.post(guarded.chain)
        return found

    async def flush(self) -> None:
        """Return when all that was posted before has landed: a read that comes back has passed it."""
        await self._wait_for_room()
        await self._link.read(0, memoryview(bytearray(WORD_BYTES)))

    def export(self, buffers: Sequence[Bytes]) -> bytes:
        """Let the owner's adapter read these bytes, or the owner pull them over the connection."""
        return self._link.readables.export(super().export(buffers), buffers)

    def withdraw(self, key: bytes) -> None:
        """End an export."""
        super().withdraw(plain_key(key))
        self._link.readables.withdraw(plain_key(key))

    def _look(self) -> None:
        # The adapter does not say how many nudges there were when it looked; those that we have heard of
        # were before. If there were others we are woken once in vain.
        self._nudges_seen = self._nudges_known

    async def _wait_for_room(self) -> None:
        await super()._wait_for_room()
        while self._link.queued_bytes >= PENDING_BYTES_HIGH:
            if self._room is None:
                self._room = self._loop.create_future()
            await asyncio.shield(self._room)  # shared by all who wait
            self._ending.check()

    # How it ends.

    def _hang_up(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._open_link is not None:
            self._open_link.close(self._ending.error)
        if not self._card.done():
            self._card.set_exception(self._ending.error())
            self._card.exception()  # perhaps nobody waits for it yet, or any more
        super()._hang_up()

    def _check(self) -> None:
        super()._check()
        if self._open_link is None:
            return
        seconds = self._options.operation_timeout_seconds
        if self._open_link.waits_since() + seconds < self._loop.time():
            self._end(
                PeerLost(f"the wire to {self._address} did not carry out an operation within {seconds} s")
            )

    # What the owner says.

    def _answered(self, header: Header, body: memoryview) -> None:
        if header.kind != Kind.ATTACHED:
            super()._answered(header, body)
        elif self._card.done():
            raise ProtocolError("a card that nobody has asked for")
        else:
            self._card.set_result(Card.parse(body))
