"""The consumer's end of a channel: one region, one ring, its sessions.

Everything about the ring's state happens in plain calls on the event loop; the only step that may
suspend is a fence. While one is under way the ring's memory is left alone: polls find nothing, and
releases wait their turn in ``_deferred``.
"""

import asyncio
import random
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

from attrs import field, frozen

from transports.address import Address
from transports.background import Background
from transports.driver import RegionRun, run_on_region
from transports.errors import ChannelClosed, IdentityRefused
from transports.introductions import Hello, Welcome
from transports.memory import Accepted, Listener, Region
from transports.ring import Consumer, Geometry
from transports.ring import Delivery as RingDelivery
from transports.ring.layout import GENERATION_MAX

DEFAULT_GEOMETRY: Final = Geometry(slot_count=1024, payload_bytes=64 << 20, session_count=64)

_REFUSED_MAX: Final = 4096
_POLLS_BEFORE_YIELD: Final = 64
"""Deliveries in a row after which ``receive`` lets other tasks run, though more are waiting."""


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


class Receiver:
    """Receives the messages of many senders; opened by ``open_receiver``."""

    def __init__(
        self, geometry: Geometry, leniency: Leniency, clock: Callable[[], float], rng: random.Random
    ) -> None:
        self._geometry = geometry
        self._leniency = leniency
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        # Generations tell one life of an inbox from the next; chance keeps them apart without a store.
        self._generation = rng.randint(1, GENERATION_MAX)
        self._consumer = Consumer(
            geometry,
            generation=self._generation,
            lease_seconds=leniency.lease_seconds,
            slowest_bytes_per_second=leniency.slowest_bytes_per_second,
        )
        self._region: Region | None = None
        self._background = Background(self._fail)
        self._waiters: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._opening = asyncio.Lock()
        self._settled = asyncio.Event()
        self._settled.set()
        self._recovered: deque[Delivery] = deque()
        self._deferred: list[Callable[[], None]] = []
        self._refused: OrderedDict[str, None] = OrderedDict()
        self._failure: BaseException | None = None
        self._in_a_row = 0

    @property
    def address(self) -> Address:
        """Where senders connect to."""
        return self._open_region().address

    @property
    def depth(self) -> int:
        """Messages handed over and not yet released."""
        return self._consumer.held

    @property
    def free_bytes(self) -> int:
        """Bytes of the payload ring that senders may reserve now."""
        return self._consumer.free_bytes

    async def receive(self) -> Delivery:
        """Wait for the next message.

        Returns:
            The oldest message that was not handed over yet; ``release`` it when its bytes are done with.

        Raises:
            ChannelClosed: The receiver was closed, also while this call waited.

        Cancellation: no message is lost.
        """
        if self._in_a_row >= _POLLS_BEFORE_YIELD:
            self._in_a_row = 0
            await asyncio.sleep(0)
        while True:
            delivery = self.poll_nowait()
            if delivery is not None:
                self._in_a_row += 1
                return delivery
            self._in_a_row = 0
            await self._wait()

    def poll_nowait(self) -> Delivery | None:
        """The next message if one is there.

        Raises:
            ChannelClosed: The receiver was closed.
        """
        self._check()
        if self._recovered:
            return self._recovered.popleft()
        if not self._settled.is_set():
            return None
        poll = RegionRun(self._consumer.poll(self._clock()), self._open_region().view)
        poll.advance()
        if poll.finished:
            return self._hand_over(poll.result)
        self._settled.clear()
        self._background.start(self._recover(poll))
        return None

    def release(self, delivery: Delivery) -> None:
        """Give the message's bytes back to the senders; any order of messages is allowed.

        The payload must not be used any more. Does nothing once the receiver is closed.
        """
        if self._failure is not None:
            return
        if not self._settled.is_set():
            self._deferred.append(lambda: self.release(delivery))
            return
        with suppress(BufferError):  # views derived from it keep it open; the ring cannot see those
            delivery.payload.release()
        region = self._open_region()
        run_on_region(self._consumer.release(delivery.held), region.view)
        region.nudge()

    def refuse(self, identity: str) -> None:
        """Take nothing more from this identity: neither from its session, if it has one, nor a new one.

        What was handed over stays. A refusal is forgotten only when many others have come since.
        """
        self._refused[identity] = None
        if len(self._refused) > _REFUSED_MAX:
            self._refused.popitem(last=False)
        self._background.start(self._fence_out(identity))

    async def _fence_out(self, identity: str) -> None:
        async with self._opening:
            await self._settled.wait()
            session = self._consumer.session_of(identity)
            if session is not None:
                await self._open_region().fence([session])
                await self._settled.wait()
                self._consumer.close_session(session)

    async def close(self) -> None:
        """Stop serving the region; whoever waits in ``receive`` gets ``ChannelClosed``. Idempotent."""
        if self._failure is None:
            self._fail(ChannelClosed(f"the receiver at {self.address} was closed"))
        await self._background.stop()
        await self._open_region().close()

    async def open(self, listener: Listener, name: str) -> None:
        """Register the region and lay out the ring in it; called once, by ``open_receiver``."""
        async with self._opening:
            self._region = await listener.register(
                name,
                self._geometry.region_bytes,
                accept=self._accept,
                on_notify=self._wake,
                on_session_lost=self._lost,
            )
            run_on_region(self._consumer.initialise(), self._region.view)

    async def _accept(self, hello: bytes) -> Accepted:
        identity = Hello.from_bytes(hello).identity
        if identity in self._refused:
            raise IdentityRefused(f"{identity!r} was declared dead; join under a new incarnation")
        async with self._opening:
            earlier = self._consumer.session_of(identity)
            if earlier is not None:
                await self._open_region().fence([earlier])
                self._consumer.close_session(earlier)
            session, first_number = self._consumer.open_session(identity)
        welcome = Welcome(
            generation=self._generation,
            first_number=first_number,
            lease_seconds=self._leniency.lease_seconds,
            geometry=self._geometry,
        )
        return Accepted(session, welcome.to_bytes())

    def _lost(self, session: int) -> None:
        # Allowed during a recovery too: it only changes the consumer's books.
        self._consumer.close_session(session)
        self._wake()

    async def _recover(self, poll: RegionRun[RingDelivery | None]) -> None:
        region = self._open_region()
        while not poll.finished:
            await region.fence(poll.wants_fenced)
            poll.advance()
        self._settled.set()
        deferred, self._deferred = self._deferred, []
        for action in deferred:
            action()
        delivery = self._hand_over(poll.result)
        if delivery is not None:
            self._recovered.append(delivery)
        region.nudge()
        self._wake()

    def _hand_over(self, held: RingDelivery | None) -> Delivery | None:
        if held is None:
            return None
        region = self._open_region()
        region.nudge()
        return Delivery(
            payload=region.view[held.offset : held.offset + held.length],
            kind=held.kind,
            flags=held.flags,
            producer=held.identity,
            number=held.number,
            held=held,
        )

    async def _wait(self) -> None:
        """Wait for a notification, or for the moment at which a sender's lease ends."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.add(waiter)
        deadline = self._consumer.next_deadline() if self._settled.is_set() else None
        if deadline is not None and self._timer is None:
            self._timer = self._loop.call_later(max(0.0, deadline - self._clock()), self._lease_over)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def _lease_over(self) -> None:
        self._timer = None
        self._wake()

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _fail(self, failure: BaseException) -> None:
        if self._failure is None:
            self._failure = failure
        self._wake()

    def _check(self) -> None:
        if self._failure is not None:
            raise ChannelClosed(*self._failure.args) from self._failure

    def _open_region(self) -> Region:
        assert self._region is not None, "open() comes first"
        return self._region


@asynccontextmanager
async def open_receiver(
    listener: Listener,
    name: str,
    geometry: Geometry = DEFAULT_GEOMETRY,
    *,
    leniency: Leniency | None = None,
    clock: Callable[[], float] = time.monotonic,
    rng: random.Random | None = None,
) -> AsyncIterator[Receiver]:
    """Serve an inbox under ``name``; leaving the block closes it.

    Args:
        listener: Where senders connect.
        name: The region's name, for example ``actor/7``.
        geometry: Slots, bytes and sessions of the ring.
        leniency: How long a sender may keep reserved room unfilled.
        clock: Monotonic seconds.
        rng: Draws the ring's generation.

    Raises:
        ValueError: The name is taken.
    """
    receiver = Receiver(geometry, leniency or Leniency(), clock, rng or random.SystemRandom())
    await receiver.open(listener, name)
    try:
        yield receiver
    finally:
        await receiver.close()
