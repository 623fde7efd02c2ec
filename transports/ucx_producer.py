"""The producer's side of the ucx transport: a session as over tcp, whose writes go by a link.

Questions and guarded chains take the connection; ``post`` puts straight into the owner's memory.
Two ways to one memory need an order: whatever could overtake an earlier write waits for it.

When the session ends and nothing is under way, the owner is told so (LANDED). Otherwise it has to take
the region's memory out of reach, since nobody can call back what an adapter has been given.
"""

import asyncio
from itertools import count
from typing import Final

from attrs import evolve

from transports import tcp_frames as frames
from transports._libucp import UcpError
from transports.address import Address
from transports.beside_memory import BesideMemory
from transports.device_memory import Device, DeviceError, DeviceSpan
from transports.errors import ConnectFailed, DeviceUnreachable, PeerLost, ProtocolError
from transports.memory import Options
from transports.operations import Bytes, Chain, CompareAndSwap, Expired, Guarded, Put
from transports.region_memory import check_span, check_word
from transports.tcp_frames import Header, Kind
from transports.tcp_wire import PENDING_BYTES_HIGH
from transports.ucx_devices import type_of
from transports.ucx_link import (
    OFFER_BYTES_MAX,
    Link,
    Offer,
    OfferBeside,
    Requirement,
    Wire,
    WireKind,
    open_link,
)
from transports.ucx_worker import Role

_EXPECTS: Final[frames.Bounds] = {**frames.PRODUCER_EXPECTS_ANSWERS, Kind.ATTACHED: OFFER_BYTES_MAX}
_PART_SECONDS: Final = 1.0
"""How long a closing session waits for what is under way, and then for the owner to hang up."""
_SLOWEST_BYTES_PER_SECOND: Final = 10e6


class UcxMemory(BesideMemory):
    """A session over a connection and, where there is a wire for it, a link beside it."""

    _bounds = _EXPECTS

    def __init__(self, address: Address, hello: bytes, options: Options) -> None:
        super().__init__(address, hello, options, encrypted=False)
        self._requirement = Requirement.of(address)
        self._offer: asyncio.Future[Offer] = self._loop.create_future()
        self._link: Link | None = None
        self._numbers = count()
        self._flying: dict[int, tuple[float, int]] = {}
        """Deadline and bytes of each chain that has not landed."""
        self._guards: set[object] = set()
        """Guarded chains that may be on their way to the owner."""
        self._attached = False
        self._hung_up: asyncio.Future[None] = self._loop.create_future()

    async def open(self) -> None:
        """Shake hands as over tcp, then look for a better wire."""
        await super().open()
        try:
            self._attached = True
            self._send([frames.frame(Kind.ATTACH)])
            offer = await self._offer
            wire, link = await open_link(offer, self._wire_broke)
            self._use(wire, link, offer.beside)
            if (unmet := self._requirement.unmet(wire)) is not None:
                raise ConnectFailed(f"{self._address}: {unmet}")
            if offer.beside is not None and wire.kind is WireKind.TCP:
                raise ConnectFailed(
                    f"{self._address}: this inbox lies in a device's memory, and nothing gets there over"
                    f" {wire}"
                )
            said = str(wire).encode()
            await self._ask_word(lambda tag: [frames.frame(Kind.WIRE, tag=tag, body=len(said)) + said])
        except PeerLost as error:
            raise ConnectFailed(f"the session could not be opened: {error}") from error

    def _use(self, wire: Wire, link: Link | None, beside: OfferBeside | None) -> None:
        if self._ending.over() and link is not None:
            link.close()
            link = None
        self._link = link
        self._capabilities = evolve(self._capabilities, wire=str(wire))
        if wire.kind is WireKind.TCP:
            return
        guarded = self._capabilities.guarded_bytes_max
        if wire.kind is WireKind.RDMA:
            # An adapter takes no processor's time; between processes of a host a message of up to 1 MiB costs
            # less in one go with its swap than a question, a put and a doorbell.
            guarded = min(guarded, frames.GUARDED_FRAME_BYTES_MAX)
        self._capabilities = evolve(
            self._capabilities, one_sided=True, fences_sessions=False, guarded_bytes_max=guarded
        )
        if beside is not None:
            self._capabilities = evolve(
                self._capabilities,
                device_bytes=beside.size_bytes,
                wire=f"{wire}, payload into a device",
            )

    # Operations.

    async def read(self, offset: int, length: int) -> Bytes:
        """Fetch bytes of the region, behind all that was posted."""
        await self._landed()
        with self._in_bounds():
            check_span(offset, length, self._size_bytes)
        return await super().read(offset, length)

    async def compare_and_swap(self, swap: CompareAndSwap) -> int | Expired:
        """Swap a word: by the owner."""
        with self._in_bounds():
            check_word(swap.offset, self._size_bytes)
        return await super().compare_and_swap(swap)

    async def fetch_and_add(self, offset: int, addend: int) -> int:
        """Add to a word: by the owner."""
        with self._in_bounds():
            check_word(offset, self._size_bytes)
        return await super().fetch_and_add(offset, addend)

    async def post(self, chain: Chain) -> None:
        """Write in order; waits first while too much is under way."""
        with self._in_bounds():
            self._check_chain(chain)
        if self._link is None:
            await super().post(chain)
            return
        await self._wait_for_room()
        if self._guards:
            guards = set(self._guards)
            await super().flush()
            self._guards -= guards
        self._ending.check()  # it may have ended since the last wait was over
        number = self._takes_off(sum([write.length for write in chain.writes]))
        self._link.write(chain, lambda: self._has_landed(number))

    async def put(self, put: Put) -> None:
        """Write into the device's memory; waits first while too much is under way."""
        length = sum(map(len, put.buffers))
        with self._in_bounds():
            check_span(put.offset, length, self._capabilities.device_bytes)
        await self._wait_for_room()
        for buffer in put.buffers:
            if isinstance(buffer, DeviceSpan):
                self.reach(buffer.device)
        self._ending.check()
        assert self._link is not None
        number = self._takes_off(length)
        self._link.put(put, lambda: self._has_landed(number))

    def reach(self, device: Device) -> None:
        """Ask whether libucp handles memory of this device; nothing is registered beforehand."""
        if self._ending.over():
            return
        if not self._capabilities.device_bytes:
            super().reach(device)
        try:
            type_of(device, Role.PRODUCER)
            with device.current():  # where that fails now, no put would ever leave, in any session
                pass
        except (DeviceError, UcpError) as error:
            raise DeviceUnreachable(f"bytes on {device.name} cannot be sent over UCX: {error}") from error

    def _takes_off(self, length: int) -> int:
        number = next(self._numbers)
        deadline = self._loop.time() + self._options.operation_timeout_seconds
        self._flying[number] = (deadline + length / _SLOWEST_BYTES_PER_SECOND, length)
        return number

    async def guarded(self, guarded: Guarded) -> int | Expired:
        """Swap and, if it took place, the chain: both by the owner."""
        await self._landed()
        with self._in_bounds():
            check_word(guarded.swap.offset, self._size_bytes)
            self._check_chain(guarded.chain)
        guard = object()
        self._guards.add(guard)
        found = await super().guarded(guarded)
        self._guards.discard(guard)  # not if this call is cancelled: then it may still be on its way
        return found

    async def flush(self) -> None:
        """Return when all that was posted before has landed."""
        await self._landed()
        await super().flush()

    async def close(self) -> None:
        """End the session."""
        give_up_at = self._loop.time() + _PART_SECONDS
        while self._flying and not self._ending.over() and self._loop.time() < give_up_at:
            await self._moved(give_up_at - self._loop.time())
        await super().close()
        await asyncio.wait([self._hung_up], timeout=_PART_SECONDS)

    async def _wait_for_room(self) -> None:
        await super()._wait_for_room()
        while sum([length for _, length in self._flying.values()]) >= PENDING_BYTES_HIGH:
            await self._moved()
            self._ending.check()

    async def _landed(self) -> None:
        self._ending.check()
        while self._flying:
            await self._moved()
            self._ending.check()

    async def _moved(self, timeout_seconds: float | None = None) -> None:
        """Wait until something has landed or the session has ended."""
        if self._room is None:
            self._room = self._loop.create_future()
        await asyncio.wait([self._room], timeout=timeout_seconds)

    def _has_landed(self, number: int) -> None:
        del self._flying[number]
        self.has_room()

    # How it ends.

    def lost(self, error: OSError | None) -> None:
        """The connection is gone."""
        self._is_hung_up()
        super().lost(error)

    def _hang_up(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._link is not None:
            self._link.close()
        if not self._offer.done():
            self._offer.set_exception(self._ending.error())
            self._offer.exception()  # perhaps nobody waits for it yet, or any more
        if not self._attached or self._flying or self._hung_up.done():
            self._cut()
            return
        self.wire.send([frames.frame(Kind.LANDED)])
        self.wire.finish_sending()
        self._timer = self._loop.call_later(_PART_SECONDS, self._cut)

    def _cut(self) -> None:
        self.wire.close()
        self._is_hung_up()

    def _is_hung_up(self) -> None:
        if not self._hung_up.done():
            self._hung_up.set_result(None)

    def _check(self) -> None:
        super()._check()
        now = self._loop.time()
        if any(deadline < now for deadline, _ in self._flying.values()):
            self._end(PeerLost(f"the wire to {self._address} did not carry a write in time"))

    # What the owner says.

    def _answered(self, header: Header, body: memoryview) -> None:
        if header.kind != Kind.ATTACHED:
            super()._answered(header, body)
        elif self._offer.done():
            raise ProtocolError("an offer that nobody has asked for")
        else:
            self._offer.set_result(Offer.parse(header.a, header.b, body, header.c))
