"""The consumer's end of a channel: one region, one ring, its sessions.

Everything about the ring's state happens in plain calls on the event loop. Three steps take longer, and
while one of them is under way polls find nothing:

* a fence. The ring's memory is left alone meanwhile; releases wait their turn in ``_deferred``.
* a pull. The message comes into memory of its own, which it keeps until it is released.
* the hash of a large payload. It is computed in a thread, so that the loop goes on receiving and
  answering; then the ring is polled again, with the hash at hand. Had a session ended in between,
  bytes may have landed behind the hash or the region's memory may be another, and all begins anew.
"""

import asyncio
import logging
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, NoReturn

from transports.address import Address
from transports.background import Background
from transports.deliveries import Delivery, Leniency, delivery_of
from transports.device_memory import Device, DeviceError, DeviceMemory
from transports.device_ring import DeviceRing
from transports.driver import RegionRun, run_on_region
from transports.errors import ChannelClosed, IdentityRefused
from transports.fences import REFUSED, REPLACED, STALLED
from transports.hashing import hash_patiently
from transports.inbox_memory import HOST, memory_for
from transports.introductions import Hello, Welcome
from transports.memory import Accepted, Listener, Region
from transports.operations import Bytes, Pull
from transports.patient_consumer import HashElsewhere, PatientConsumer
from transports.pulled_messages import Pulls
from transports.refusals import Refusals
from transports.ring import Claims, Geometry
from transports.ring import Delivery as RingDelivery
from transports.ring.layout import GENERATION_MAX
from transports.spare_memory import SpareMemory

_LOG: Final = logging.getLogger(__name__)

PULLED_BYTES_MAX: Final = 1 << 30
"""Memory that a receiver takes for messages that it pulls; so also the longest of them."""
DEFAULT_GEOMETRY: Final = Geometry(slot_count=1024, payload_bytes=64 << 20, session_count=64)

_SEAL_SECONDS: Final = 0.001
"""How soon to look again for a payload that has not landed on the device, though its slot has."""
_NOTHING_CAME: Final = "what they owe did not come"
_CHANGED: Final = "what they lent is not what they had sent; do not write to it before it has arrived"
_POLLS_BEFORE_YIELD: Final = 64
"""Deliveries in a row after which ``receive`` lets other tasks run, though more are waiting."""


class Receiver:
    """Receives the messages of many senders; opened by ``open_receiver``."""

    def __init__(
        self,
        geometry: Geometry,
        leniency: Leniency,
        pulled_bytes_max: int,
        clock: Callable[[], float],
        rng: random.Random,
        fenced: "Counter[str] | None" = None,
        device: DeviceMemory | None = None,
    ) -> None:
        self.fenced: Counter[str] = Counter() if fenced is None else fenced
        """Sessions that were fenced, by the reason."""
        self._geometry = geometry
        self._leniency = leniency
        self._pulled_bytes_max = pulled_bytes_max
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        # It tells one life of an inbox from the next; chance keeps them apart without a store.
        self._generation = rng.randint(1, GENERATION_MAX)
        self._consumer = PatientConsumer(
            geometry,
            generation=self._generation,
            lease_seconds=leniency.lease_seconds,
            slowest_bytes_per_second=leniency.slowest_bytes_per_second,
            pulled_bytes_max=pulled_bytes_max,
        )
        self._device_ring = None if device is None else DeviceRing(device, self._consumer, self._fail)
        self._region: Region | None = None
        self._background = Background(self._fail)
        self._waiters: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._opening = asyncio.Lock()
        self._pulls = Pulls(leniency, SpareMemory(2 * geometry.payload_bytes))
        self._fencing = False
        self._hashing = False
        self._pulling = False
        self._sessions_ended = 0
        self._notifications = 0
        self._ready: deque[Delivery] = deque()
        self._deferred: list[Callable[[], None]] = []
        self._refused: Final = Refusals()
        self._failure: BaseException | None = None
        self._in_a_row = 0
        self._take: Callable[[Delivery], None] | None = None
        self._delivering = False
        self._delivery_ended: asyncio.Future[None] = self._loop.create_future()

    @property
    def address(self) -> Address:
        """Where senders connect to."""
        return self._open_region().address

    @property
    def depth(self) -> int:
        """Messages handed over and not yet released."""
        return self._consumer.held

    @property
    def device(self) -> Device | None:
        """In whose memory the payload ring lies; None: in the host's."""
        return None if self._device_ring is None else self._device_ring.memory.device

    @property
    def _beside(self) -> DeviceMemory | None:
        return None if self._device_ring is None else self._device_ring.memory

    @property
    def geometry(self) -> Geometry:
        """That of the ring."""
        return self._geometry

    @property
    def pulled_bytes(self) -> int:
        """Bytes of messages that were pulled and not yet released."""
        return self._consumer.pulled_bytes

    @property
    def pulled_bytes_max(self) -> int:
        """How many of them it holds at a time."""
        return self._pulled_bytes_max

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

    async def deliver_to(self, take: Callable[[Delivery], None]) -> NoReturn:
        """Call ``take`` with each message as soon as it is there, one after the other, until cancelled.

        For whoever never waits between two messages: ``receive`` costs a turn of the event loop for each.
        ``take`` is called by the event loop, and releases the message when its bytes are done with.

        Raises:
            ChannelClosed: The receiver was closed.
            Exception: What ``take`` raised; its message was not released.

        Cancellation: no message is lost.
        """
        assert self._take is None, "messages are delivered to somebody already"
        self._take = take
        ended = self._delivery_ended = self._loop.create_future()
        try:
            self._deliver()
            await ended
        finally:
            self._take = None
        raise AssertionError("deliveries end with an error")

    def poll_nowait(self) -> Delivery | None:
        """The next message if one is there.

        Raises:
            ChannelClosed: The receiver was closed.
        """
        self._check()
        if self._ready:
            return self._ready.popleft()
        return None if self._is_busy else self._poll()

    @property
    def _is_busy(self) -> bool:
        return self._fencing or self._hashing or self._pulling

    def release(self, delivery: Delivery) -> None:
        """Give the message's bytes back to the senders; any order of messages is allowed.

        The payload must not be used any more. Does nothing once the receiver is closed.
        """
        if self._failure is not None:
            return
        if self._fencing:
            self._deferred.append(lambda: self.release(delivery))
            return
        with suppress(BufferError):  # views derived from it keep it open
            delivery.payload.release()
            if isinstance(delivery.held.content, memoryview):
                delivery.held.content.release()
        region = self._open_region()
        run_on_region(self._consumer.release(delivery.held), region.view)
        region.nudge()
        if self._consumer.waits_for_release:
            self._wake()

    def refuse(self, identity: str) -> None:
        """Take nothing more from this identity: neither from its session, if it has one, nor a new one.

        Nor from those whose names go on behind it with a slash (of ``node-1`` also ``node-1/actor-7``). What
        was handed over stays. Only when many others have come since is a refusal forgotten.
        """
        self._refused.add(identity)
        self._background.start(self._fence_out(identity))

    async def _fence_out(self, identity: str) -> None:
        async with self._opening:
            sessions = self._consumer.sessions_below(identity)
            if sessions:
                await self._open_region().fence(sessions)
                self.fenced[REFUSED] += len(sessions)
                for session in sessions:
                    self._lost(session)

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
                on_notify=self._notified,
                on_session_lost=self._lost,
                device=self._beside,
                keeper=self._device_ring,
                claimant=Claims(self._geometry),
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
                self.fenced[REPLACED] += 1
                self._consumer.close_session(earlier)
                self._sessions_ended += 1
            session, first_number = self._consumer.open_session(identity)
        welcome = Welcome(
            generation=self._generation,
            first_number=first_number,
            lease_seconds=self._leniency.lease_seconds,
            geometry=self._geometry,
            pulled_bytes_max=self._pulled_bytes_max,
        )
        return Accepted(session, welcome.to_bytes())

    def _notified(self) -> None:
        self._notifications += 1
        self._wake()

    def _lost(self, session: int) -> None:
        # Allowed during a fence too: it only changes the consumer's books.
        self._consumer.close_session(session)
        self._sessions_ended += 1
        self._wake()

    def _poll(self) -> Delivery | None:
        """Look at the ring once; what takes longer goes on in the background and ends in ``_ready``."""
        poll = RegionRun(self._consumer.poll(self._clock()), self._beside)
        try:
            poll.advance(self._open_region().view)
        except HashElsewhere as large:
            self._hashing = True
            self._background.start(self._hash(large.payload))
            return None
        except DeviceError as error:
            self._fail(error)
            self._check()
        if poll.finished:
            return self._hand_over(poll.result)
        self._hold_for(poll)
        self._background.start(self._finish(poll))
        return None

    def _hold_for(self, poll: RegionRun[RingDelivery | None]) -> None:
        """Leave the ring to a poll that waits for a pull or a fence, until it is finished."""
        self._pulling = not poll.finished and poll.wants_pulled is not None
        self._fencing = not poll.finished and poll.wants_pulled is None

    async def _hash(self, payload: Sequence[Bytes]) -> None:
        before = self._notifications
        ended = self._sessions_ended
        computed = await hash_patiently(payload)
        self._hashing = False
        if ended != self._sessions_ended:
            self._wake()  # whoever waits polls again, and finds the payload where it is now
            return
        self._consumer.computed, self._consumer.hashes_here = computed, True
        try:
            delivery = self._poll()
        finally:
            self._consumer.computed, self._consumer.hashes_here = None, False
        if delivery is not None:
            self._ready.append(delivery)
        if delivery is not None or self._notifications != before:
            self._wake()
        else:
            # Not what was hashed in the first place: hashing it again at once would find the same.
            self._set_timer()

    async def _finish(self, poll: RegionRun[RingDelivery | None]) -> None:
        """Pull and fence what a poll wants, until it has found a message or that there is none."""
        region = self._open_region()
        why = _NOTHING_CAME
        while not poll.finished:
            pulled = None
            if poll.wants_pulled is not None:
                pulled = await self._pull(poll.wants_pulled)
                why = _NOTHING_CAME if pulled is None else _CHANGED
            else:
                _LOG.warning("%s fences %s: %s", self.address, poll.wants_fenced, why)
                await region.fence(poll.wants_fenced)
                self.fenced[STALLED] += len(poll.wants_fenced)
            self._consumer.hashes_here = True
            poll.device = self._beside  # a fence may have put other memory in its place
            poll.advance(region.view, pulled)
            self._consumer.hashes_here = False
            self._hold_for(poll)
            if not self._fencing:
                deferred, self._deferred = self._deferred, []
                for action in deferred:
                    action()
        delivery = self._hand_over(poll.result)
        if delivery is not None:
            self._ready.append(delivery)
        region.nudge()
        self._wake()

    async def _pull(self, pull: Pull) -> memoryview | None:
        """What a session exports, and its hash at hand."""
        pulled = await self._pulls.of(self._open_region(), pull)
        if pulled is None:
            return None
        self._consumer.computed = pulled.computed
        return pulled.content

    def _hand_over(self, held: RingDelivery | None) -> Delivery | None:
        if held is None:
            return None
        region = self._open_region()
        region.nudge()
        return delivery_of(held, region.view, self._beside)

    async def _wait(self) -> None:
        """Wait for a notification, or for the moment at which a sender's lease ends."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.add(waiter)
        if not self._is_busy:
            self._set_timer()
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def _set_timer(self) -> None:
        """Wake at the end of the lease that is running, for those who wait by then."""
        deadline = self._consumer.next_deadline()
        if deadline is not None and self._timer is None:
            seconds = max(0.0, deadline - self._clock())
            if self._consumer.waits_for_seal:
                seconds = min(seconds, _SEAL_SECONDS)
            self._timer = self._loop.call_later(seconds, self._lease_over)

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
        self._deliver()

    def _deliver(self) -> None:
        """Hand over what is there, but let others run in between."""
        if self._take is None or self._delivering or self._delivery_ended.done():
            return
        self._delivering = True
        try:
            for _ in range(_POLLS_BEFORE_YIELD):
                delivery = self.poll_nowait()
                if delivery is None:
                    if not self._is_busy:
                        self._set_timer()
                    return
                self._take(delivery)
        except Exception as error:  # noqa: BLE001 - raised where deliveries are awaited
            self._delivery_ended.set_exception(error)
            return
        finally:
            self._delivering = False
        self._loop.call_soon(self._deliver)

    def _fail(self, failure: BaseException) -> None:
        self._failure = self._failure or failure
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
    pulled_bytes_max: int = PULLED_BYTES_MAX,
    clock: Callable[[], float] = time.monotonic,
    rng: random.Random | None = None,
    fenced: "Counter[str] | None" = None,
    memory: str | Device = HOST,
) -> AsyncIterator[Receiver]:
    """Serve an inbox under ``name``; leaving the block closes it.

    Args:
        listener: Where senders connect.
        name: The region's name, for example ``actor/7``.
        geometry: Slots, bytes and sessions of the ring.
        leniency: How long a sender may keep reserved room unfilled.
        pulled_bytes_max: Memory for messages that are pulled: how much is held at a time, and the longest
            of them. 0: none is pulled.
        clock: Monotonic seconds.
        rng: Draws the ring's generation.
        fenced: Where sessions that are fenced are counted, by the reason.
        memory: Where the payload ring lies: ``host``, or a device's name (``cuda:0``). On a device each
            message has a head for the host (``Geometry.head_bytes``), and nothing is pulled.

    Raises:
        ValueError: The name is taken; or ``geometry`` has heads and the memory is the host's, or has none
            and it is a device's.
        DeviceUnreachable: There is no such device, it has no memory left, or the listener reaches none.
    """
    device = await memory_for(memory, geometry)
    receiver = Receiver(
        geometry,
        leniency or Leniency(),
        pulled_bytes_max if device is None else 0,
        clock,
        rng or random.SystemRandom(),
        fenced,
        device,
    )
    del device  # the receiver's, to give back when it goes
    await receiver.open(listener, name)
    try:
        yield receiver
    finally:
        await receiver.close()
