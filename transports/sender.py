"""The producer's end of a channel: keeps what it sent until the receiver has it.

One task, the *courier*, runs everything that touches the ring, one program after another, so messages
enter in the order of the ``send`` calls and a cancelled caller never leaves a reservation half done.
Where it rests and nothing waits, ``send`` itself begins the work up to the first answer that it has to
wait for, which for a small message is all there is to send; the courier is left what does not end with
that answer. So the common message leaves without a turn of the event loop.

A message goes through these states::

    waiting ----reserved----> kept ----counted as delivered----> gone
       |                       ^ |
       | no room in time,      | | the receiver is gone
       | caller cancelled      | v
       +--> never sent         | undelivered()
       |                       |
       +--outcome unknown------+

The last arrow is why a message whose reservation met a broken connection is *kept*, never dropped:
it may be in the ring already, and its number cannot be given to another one. After a reconnection
under the same identity the receiver says how many it has, and the rest is sent again; what it had
already is recognised by its number.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, cast

from transports.address import Address
from transports.background import Background
from transports.device_memory import DeviceSpan
from transports.driver import Waiter, pause_seconds, run
from transports.errors import (
    ChannelClosed,
    MessageTooLarge,
    OperationTimeout,
    PeerLost,
    RingFull,
    SessionFenced,
    TransportError,
)
from transports.hashing import hash_patiently
from transports.operations import Bytes, Content, Pause, PauseReason
from transports.sender_link import Link, Session
from transports.sender_pace import Pace
from transports.sender_request import Abandoned, Begun, Request, Undelivered, new_request
from transports.sessions import Ending

_BROKEN: Final = (PeerLost, SessionFenced, OperationTimeout)
"""What ends a session but not the channel: a new session may go on."""


class Sender:
    """Sends messages to one receiver; opened by ``open_sender``."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._clock = link.clock
        self._loop = asyncio.get_running_loop()
        self._background = Background(self._fail)
        self._session: Session | None = None
        self._requests: deque[Request] = deque()
        self._kept: deque[Undelivered] = deque()
        self._next_number = 0
        self._alarm: asyncio.Future[None] | None = None
        self._pace = Pace(link.clock)
        self._waiting_for_room = False
        self._in_hand: Request | None = None
        self._rests_unbounded = False
        self._progress: asyncio.Future[None] = self._loop.create_future()
        self._ending = Ending()
        self._ended = asyncio.Event()

    @property
    def address(self) -> Address:
        """Where the receiver is."""
        return self._link.address

    @property
    def wire(self) -> str:
        """What carries the bytes now, as the transport names it; another session may have another wire."""
        return self._current().memory.capabilities.wire

    @property
    def message_bytes_max(self) -> int:
        """The longest message that can be sent now."""
        return self._current().lender.message_bytes_max

    @property
    def head_bytes_max(self) -> int:
        """The longest head that can be sent; 0: the inbox is in the host's memory, and takes none."""
        return self._current().welcome.geometry.head_bytes

    @property
    def lent_bytes(self) -> int:
        """Bytes of messages that were sent and that the receiver was not yet seen to pull."""
        return self._current().lender.lent_bytes

    @property
    def delivered(self) -> int:
        """Messages of this identity that the receiver has been seen to take."""
        return self._kept[0].number if self._kept else self._next_number

    def undelivered(self) -> list[Undelivered]:
        """Messages sent and not seen to be taken, oldest first; also after the channel has ended.

        A message whose ``send`` raised is not among them: that caller still has it.
        """
        return list(self._kept)

    async def send(
        self,
        buffers: Bytes | DeviceSpan | Sequence[Content],
        *,
        kind: int = 0,
        flags: int = 0,
        timeout_seconds: float | None = None,
        head: Bytes = b"",
    ) -> int:
        """Send one message, the concatenation of ``buffers``.

        The buffers are not copied: they must stay unchanged until ``delivered`` passes the number.

        Args:
            buffers: The message's bytes; a buffer of other elements counts as the bytes that it lies in.
                What is on a device is ready by now (``span_of``), and goes only into an inbox on one.
            kind: A small number that the receiver sees beside the payload.
            flags: Likewise.
            timeout_seconds: How long to wait for room; 0 does not wait, None waits as long as it takes.
            head: What the receiver's host reads beside the payload; only into an inbox in a device's memory.

        Returns:
            The message's number, from 0 upwards for this identity.

        Raises:
            TypeError: What is no buffer.
            ValueError: A buffer that is not in one piece, or a kind or flags out of bounds; nothing was sent.
            RingFull: There was no room in time; nothing was sent.
            MessageTooLarge: It fits neither the ring nor what may be pulled; nothing was sent.
            DeviceUnreachable: Bytes on a device cannot be sent from here, or not into this inbox.
            PeerLost: The receiver is gone; the message may or may not have reached it.
            ChannelClosed: The sender was closed; likewise.

        Cancellation: the message is sent whole or not at all.
        """
        self._ending.check()
        request = new_request(kind, flags, buffers, head, timeout_seconds)
        if not request.may_wait and self._waiting_for_room:
            raise RingFull(f"{self.address} has no room and other sends wait for it already")
        for device in request.devices:
            self._current().memory.reach(device)
        self._requests.append(request)
        if self._alarm is None or self._alarm.done() or len(self._requests) > 1:
            self._ring_alarm()
        else:
            self._begin(request)
        if timeout_seconds is None or not request.may_wait:
            return await request.answer
        timer = self._loop.call_later(timeout_seconds, request.expire, timeout_seconds)
        try:
            return await request.answer
        finally:
            timer.cancel()

    async def drained(self) -> None:
        """Return when the receiver has taken every message sent before.

        Raises:
            PeerLost: The receiver is gone; ``undelivered`` says which messages it was not seen to take.
            ChannelClosed: The sender was closed.
        """
        goal = self._next_number
        self._pace.drainers += 1
        try:
            self._look_soon()
            while self.delivered < goal:
                self._ending.check()
                await asyncio.shield(self._progress)
        finally:
            self._pace.drainers -= 1

    async def progressed(self) -> None:
        """Wait until ``delivered`` has grown, or the channel has ended; raises as ``lost``."""
        self._ending.check()
        await asyncio.shield(self._progress)
        self._ending.check()

    async def lost(self) -> None:
        """Wait until the channel has ended, and raise why.

        A receiver that is gone is noticed while messages are under way to it, or at the next send.

        Raises:
            PeerLost: The receiver is gone.
            ChannelClosed: The sender was closed.
        """
        await self._ended.wait()
        self._ending.check()

    async def close(self) -> None:
        """End the session; waiting ``send`` and ``drained`` calls raise ``ChannelClosed``. Idempotent.

        What was posted may still arrive; what was not seen to arrive is listed by ``undelivered``.
        """
        self._fail(ChannelClosed(f"the sender {self._link.identity!r} to {self.address} was closed"))
        await self._background.stop()
        if self._session is not None:
            await self._session.memory.close()

    async def finish(self) -> None:
        """Let what was posted reach the wire, and be pulled; used on a regular exit, before ``close``."""
        if not self._ending.over() and self._session is not None:
            with suppress(TransportError, TimeoutError):  # undelivered() tells
                await self._session.memory.flush()
                if self.lent_bytes:
                    async with asyncio.timeout(self._link.patience.pull_seconds):
                        await self.drained()

    async def open(self) -> None:
        """Open the first session and start the courier; called once, by ``open_sender``."""
        self._session = await self._link.open()
        self._next_number = self._session.welcome.first_number
        self._background.start(self._courier())

    # What follows runs in the courier's task, or is called by it.

    async def _courier(self) -> None:
        while True:
            if self._requests:
                self._in_hand = self._requests.popleft()
                if self._in_hand.begun is not None or not self._in_hand.answer.done():
                    await self._carry(self._in_hand)
                self._in_hand = None
            elif not self._kept:
                await self._rest(None)
            elif (wait := self._pace.wait) > 0:
                await self._rest(wait)
            else:
                await self._refresh()

    async def _rest(self, seconds: float | None) -> None:
        """Wait until there is something to do, at most so long."""
        alarm = self._alarm = self._loop.create_future()
        self._rests_unbounded = seconds is None
        timer = None if seconds is None else self._loop.call_later(seconds, self._ring_alarm)
        try:
            await alarm
        finally:
            self._alarm = None
            if timer is not None:
                timer.cancel()

    async def _carry(self, request: Request) -> None:
        """Send a waiting message, or tell its caller why not."""
        begun, request.begun = request.begun, None
        if begun is None:
            begun = self._work_for(request)
            work: Awaitable[None] = begun.work
        else:
            work = begun.finish()
        message = begun.message
        try:
            await work
        except Abandoned:
            return
        except (RingFull, MessageTooLarge) as error:
            request.fail(error)
            return
        except _BROKEN as error:
            # It may be in the ring: from here on it has its number and is sent until its fate is known.
            self._keep(message)
            try:
                await self._reconnect(error)
            except TransportError as final:
                if not request.answer.done() and message in self._kept:
                    self._kept.remove(message)
                request.fail(final)
                raise
        except TransportError as error:
            request.fail(error)
            raise
        else:
            self._keep(message)
        if not request.answer.done():
            request.answer.set_result(message.number)

    def _work_for(self, request: Request) -> Begun:
        message = Undelivered(self._next_number, request.kind, request.flags, request.buffers, request.head)
        request.idle = False
        work = self._send(message, may_wait=request.may_wait, wait=partial(self._wait_for, request))
        return Begun(message, work)

    def _begin(self, request: Request) -> None:
        """Put a message on its way while the courier rests; runs in the task of ``send``."""
        request.begun = self._work_for(request)
        self._go_on(request)

    def _go_on(self, request: Request, _answer: object = None) -> None:
        """Go on with what was begun, now that it need not wait, unless the courier has taken it over."""
        begun = request.begun
        if begun is None:
            return
        try:
            waits_for = begun.waits_for = begun.work.send(None)
        except StopIteration:
            request.begun = None
            taken = self._requests.popleft()
            assert taken is request, "it stands first until it is sent"
            self._keep(begun.message)
            if not request.answer.done():
                request.answer.set_result(begun.message.number)
            if self._rests_unbounded:
                self._ring_alarm()  # from now on there is something to look after
        except BaseException as error:  # noqa: BLE001 - the courier raises it where it can act on it
            begun.error = error
            self._ring_alarm()
        else:
            if isinstance(waits_for, asyncio.Future):
                waits_for.add_done_callback(partial(self._go_on, request))
            else:
                self._ring_alarm()

    async def _send(self, message: Undelivered, *, may_wait: bool, wait: Waiter) -> None:
        length = sum(map(len, message.buffers))
        if self._current().lender.pulls(length):
            await self._lend(message, length, may_wait=may_wait, wait=wait)
        else:
            await self._post(message, message.buffers, may_wait=may_wait, wait=wait)
        self._let_go()

    async def _post(
        self,
        message: Undelivered,
        payload: Sequence[Content],
        *,
        may_wait: bool,
        wait: Waiter,
        pull: bool = False,
    ) -> None:
        session = self._current()
        program = session.producer.send(
            payload,
            kind=message.kind,
            flags=message.flags,
            now=self._clock(),
            wait=may_wait,
            pull=pull,
            head=message.head,
        )
        number = await run(program, session.memory, wait=wait)
        assert number == message.number, f"message {message.number} went out as {number}"

    async def _lend(self, message: Undelivered, length: int, *, may_wait: bool, wait: Waiter) -> None:
        """Send an offer of the message, once there is room for one more."""
        session = self._current()
        lender = session.lender
        attempt = 0
        while not lender.has_room(length):
            await run(session.producer.refresh(self._clock()), session.memory, wait=wait)
            self._let_go()
            if lender.has_room(length):
                break
            if not may_wait:
                raise RingFull(
                    f"{self.address} has not yet pulled what was sent before; wait, or refuse work"
                )
            attempt += 1
            await wait(Pause(PauseReason.FULL, attempt))
        buffers = cast("tuple[Bytes, ...]", message.buffers)  # who is lent to has no device
        message_hash = await hash_patiently(buffers)
        offer = await lender.lend(message.number, buffers, length, message_hash)
        try:
            await self._post(message, (offer,), may_wait=may_wait, wait=wait, pull=True)
        except BaseException:
            # Nothing was sent, or the session is over: then it is lent again in the next one.
            lender.take_back(message.number)
            raise

    def _keep(self, message: Undelivered) -> None:
        assert message.number == self._next_number
        self._next_number += 1
        self._kept.append(message)
        self._pace.sent(len(self._kept))
        if self._pace.drainers:
            self._ring_alarm()

    def _let_go(self) -> None:
        """Drop the messages that the receiver is known to have."""
        session = self._current()
        delivered = session.producer.delivered
        session.lender.delivered(delivered)
        moved = False
        while self._kept and self._kept[0].number < delivered:
            self._kept.popleft()
            moved = True
        if moved:
            self._signal_progress()

    async def _refresh(self) -> None:
        """Look how much was delivered; less often the longer nothing moves."""
        before = len(self._kept)
        session = self._current()
        try:
            await run(session.producer.refresh(self._clock()), session.memory, wait=self._wait)
        except _BROKEN as error:
            await self._reconnect(error)
            return
        self._let_go()
        if len(self._kept) < before:
            self._look_soon()
        else:
            self._pace.later()

    def _look_soon(self) -> None:
        self._pace.soon()
        if self._pace.drainers:
            self._ring_alarm()

    async def _wait_for(self, request: Request, pause: Pause) -> float:
        """Wait inside a send that has reserved nothing yet; its caller may give up meanwhile."""
        if pause.reason is PauseReason.CONTENDED and pause.attempt == 1:
            # What was lost is a swap of a tail that others had moved on; the next try has the right one.
            if request.answer.done():
                raise Abandoned
            return self._clock()
        if request.begun is not None:
            await asyncio.sleep(0)  # rest, so that the courier takes over: a wait belongs to its task
        self._let_go()
        request.idle = True
        if request.expired:
            request.expire(0.0)
        if request.answer.done():
            raise Abandoned
        now = await self._wait(pause)
        if request.answer.done():
            raise Abandoned
        request.idle = False
        return now

    async def _wait(self, pause: Pause) -> float:
        seconds = pause_seconds(pause, self._link.rng)
        if pause.reason is PauseReason.CONTENDED:
            await asyncio.sleep(seconds)
            return self._clock()
        self._waiting_for_room = True
        try:
            await self._current().memory.wait_notified(seconds)
        finally:
            self._waiting_for_room = False
        return self._clock()

    async def _reconnect(self, cause: TransportError) -> None:
        """Open a new session and send again what the receiver has not.

        Raises:
            PeerLost: The receiver is gone, or did not answer in time.
        """
        while True:
            await self._current().memory.close()
            session = self._session = await self._link.open_again(cause, self._next_number, self.delivered)
            self._let_go()
            try:
                for message in tuple(self._kept):
                    if message.number >= session.producer.next_number:
                        await self._send(message, may_wait=True, wait=self._wait)
            except _BROKEN as error:
                cause = error
            else:
                self._look_soon()
                return

    # Shared by the courier and the callers.

    def _current(self) -> Session:
        assert self._session is not None, "open() comes first"
        return self._session

    def _ring_alarm(self) -> None:
        if self._alarm is not None and not self._alarm.done():
            self._alarm.set_result(None)

    def _signal_progress(self) -> None:
        self._progress.set_result(None)
        self._progress = self._loop.create_future()

    def _fail(self, failure: BaseException) -> None:
        """End the channel: the first reason stays, and everyone who waits is told."""
        if not self._ending.reach(self._link.reason_of(failure)):
            return
        self._ended.set()
        if self._in_hand is not None:
            self._in_hand.fail(self._ending.error())
        while self._requests:
            request = self._requests.popleft()
            request.begun = None
            request.fail(self._ending.error())
        self._signal_progress()
