"""The ways out of a node: one link to each ring it sends to, opened on first use.

This is one of the two borders between transports and the runtime (the other is ``inbox.py``): below
it errors are ``TransportError``s, above it ``OnePieceError``s with the cause kept.

A *data* message is sent by whoever has it: ``send`` waits while the ring is full, which is the
back-pressure a stage feels. A *control* message is queued and sent by the link's own task, several in
one ring message, so that whoever reports something never waits; the queue is bounded, and a peer that is
gone loses its queue. Reports of stages linger before that (``reports``).

A message counts as handed over when its ring's consumer has taken it. If the peer is lost before,
``on_lost`` is run for each message it had not taken, to send it elsewhere; the outbox runs it, since
whoever sent the message may be gone by then.
"""

import asyncio
import contextlib
import functools
import random
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from onepiece._repetitions import Repetitions
from onepiece.codec import encode_control
from onepiece.errors import NodeUnreachable, PayloadTooLarge
from onepiece.limits import (
    CONSUMED_PER_MESSAGE_MAX,
    REPORT_LINGER_SECONDS,
    REPORTS_QUEUED_MAX,
)
from onepiece.log import get_logger
from onepiece.messages import KIND_CONTROL, Consumed
from onepiece.runtime.control_queue import ControlQueue, control_frame
from onepiece.runtime.device_messages import DeviceWay
from onepiece.runtime.link_opening import OpenLink, link_opener
from onepiece.runtime.link_view import LinkView
from onepiece.runtime.reports import Report, ReportQueue
from transports import (
    Address,
    ChannelClosed,
    HttpAnswered,
    IdentityRefused,
    MessageTooLarge,
    Options,
    Sender,
    Transport,
    TransportError,
    transport_for,
)
from transports.operations import Content

OVERFLOW: Final = "overflow"
"""Too many waited for a peer that takes nothing."""
PEER_LOST: Final = "peer_lost"

TakenOutput = tuple[str, str, str]
"""UID, source and target."""
Lost = Callable[[], Coroutine[Any, Any, None]]
Taken = Callable[[], None]


class _Link:
    """The way to one ring: a sender, what it has not handed over, and queued control messages."""

    def __init__(
        self,
        address: str,
        lost: "Counter[str]",
        on_lost_words: Callable[[int, str], None] = lambda *_: None,
    ) -> None:
        self.address = address
        self._lost = lost
        self._on_lost_words = on_lost_words
        """Called with the number of control messages that were lost, and why."""
        self.ready: asyncio.Future[Sender] = asyncio.get_running_loop().create_future()
        self.stop = asyncio.Event()
        self._under_way: OrderedDict[int, tuple[Lost | None, Taken | None]] = OrderedDict()
        """What to call when a message is lost, and when it is taken, by its number."""
        self._way = DeviceWay(address)
        self._queue = ControlQueue()
        self._reports = ReportQueue()
        self._consumed: list[TakenOutput] = []
        self._wake = asyncio.Event()
        self._taken = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None
        self.is_disowned = False
        self.was_refused = False
        """The peer takes nothing from this life of the node any more."""
        self.http_answered: str | None = None
        """What was wrong, if the address is that of an HTTP server."""

    def close(self) -> None:
        """End the link; one that is still being opened is given up at once."""
        self.stop.set()
        self._taken.set()  # who waits for what is queued waits in vain
        if not self.ready.done():
            self._fail(self._closed())
            if self.task is not None:
                self.task.cancel()

    async def send(
        self, parts: Sequence[Content], kind: int, on_lost: Lost | None, on_taken: Taken | None
    ) -> None:
        sender = self.ready.result() if self.ready.done() else await asyncio.shield(self.ready)
        number = await self._way.send(sender, parts, kind)
        if on_lost is not None or on_taken is not None:
            self._under_way[number] = (on_lost, on_taken)
            self._notice_taken(sender)

    def _notice_taken(self, sender: Sender) -> None:
        """Tell whoever wants to know of the messages that the ring's consumer has."""
        self._queue.taken(sender.delivered)
        while self._under_way:
            number, (_, on_taken) = next(iter(self._under_way.items()))
            if number >= sender.delivered:
                return
            del self._under_way[number]
            if on_taken is not None:
                on_taken()

    def post(self, body: bytes, replaces: object = None, *, lingers: bool = False) -> None:
        if not self._queue.add(body, replaces):
            self._lost[OVERFLOW] += 1
            get_logger().warning("control_queue_overflow", address=self.address)
        if lingers:
            self._set_alarm()
        else:
            self._wake.set()

    def report(self, report: Report) -> None:
        self._reports.add(report)
        if len(self._reports) >= REPORTS_QUEUED_MAX:
            self._post_reports()
        else:
            self._set_alarm()

    def consumed(self, output: TakenOutput) -> None:
        self._consumed.append(output)
        if len(self._consumed) >= CONSUMED_PER_MESSAGE_MAX:
            self._post_reports()
        else:
            self._set_alarm()

    def _set_alarm(self) -> None:
        if self._alarm is None:
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_later(REPORT_LINGER_SECONDS, self._post_reports)

    def _post_reports(self) -> None:
        """Send what has lingered."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        for body in self._reports.take():
            self.post(body)
        if self._consumed:
            outputs, self._consumed = self._consumed, []
            self.post(encode_control(Consumed(tuple(outputs))))
        self._wake.set()

    async def flushed(self) -> None:
        """Return when the queue is empty and all was taken, or the peer is lost."""
        self._post_reports()
        if not (self.ready.done() or self._owes):
            return  # nothing was sent either: the peer cannot be reached, and may never be
        await asyncio.wait([self.ready])
        if self.ready.cancelled() or self.ready.exception() is not None:
            return
        with contextlib.suppress(TransportError):
            while self._owes and not self.stop.is_set():
                self._wake.set()
                self._taken.clear()
                await self._taken.wait()
            await self.ready.result().drained()
        self._notice_taken(self.ready.result())

    @property
    def _owes(self) -> bool:
        """A message waits to be sent; if nobody is there yet, one that no newer one is going to replace."""
        if self.ready.done():
            return bool(self._queue)
        return self._queue.has_lasting

    @property
    def is_quiet(self) -> bool:
        """Nothing waits to be sent, or to be taken; nor will it ever be, where the link has ended."""
        waits = self._owes or self._under_way or self._consumed or len(self._reports)
        return self.stop.is_set() or not waits

    def view(self) -> LinkView:
        """As it is now."""
        queued = len(self._queue) + len(self._reports) + len(self._consumed)
        is_open = self.ready.done() and not self.ready.cancelled() and self.ready.exception() is None
        if not is_open:
            return LinkView(self.address, None, 0, queued, 0)
        sender = self.ready.result()
        return LinkView(self.address, sender.wire, len(sender.undelivered()), queued, sender.lent_bytes)

    async def serve(self, opening: AbstractAsyncContextManager[Sender]) -> None:
        """Hold the sender open and send what is queued, until told to stop or the peer is lost."""
        try:
            async with opening as sender:
                self.ready.set_result(sender)
                async with asyncio.TaskGroup() as tasks:
                    running = [tasks.create_task(self._pump(sender)), tasks.create_task(self._watch(sender))]
                    await self.stop.wait()
                    for task in running:
                        task.cancel()
        except* TransportError as errors:
            self.was_refused = errors.subgroup(IdentityRefused) is not None
            error = errors.exceptions[0]
            self.http_answered = str(error) if isinstance(error, HttpAnswered) else None
            self._fail(error)
        finally:
            if not self.ready.done():
                self.ready.cancel()
            self._tell_lost_words(self._closed())
            if self._alarm is not None:
                self._alarm.cancel()

    async def _watch(self, sender: Sender) -> None:
        while True:
            await sender.progressed()
            self._notice_taken(sender)

    async def _pump(self, sender: Sender) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                self._queue.sent(await sender.send(control_frame(self._queue.leave()), kind=KIND_CONTROL))
            self._notice_taken(sender)
            self._taken.set()

    def _fail(self, error: BaseException) -> None:
        self.stop.set()
        self._taken.set()
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # seen: nobody may be waiting
        self._tell_lost_words(error)

    def _tell_lost_words(self, error: BaseException) -> None:
        """Count and log what no consumer was seen to take, or lingered; the second time there is none."""
        if self.ready.done() and not self.ready.cancelled() and self.ready.exception() is None:
            self._queue.taken(self.ready.result().delivered)
        lost = self._queue.lose() + len(self._reports) + len(self._consumed)
        self._reports, self._consumed = ReportQueue(), []
        if lost and not self.is_disowned:
            self._lost[PEER_LOST] += lost
            self._on_lost_words(lost, str(error))

    def _closed(self) -> ChannelClosed:
        return ChannelClosed(f"the link to {self.address} was closed")

    def disown(self) -> None:
        """Nothing of this link is to arrive any more, and nothing of it is told as lost."""
        self.is_disowned = True
        self._under_way.clear()

    def take_lost(self) -> list[Lost]:
        """What to run for the messages that were not taken, once the link has ended."""
        if self.ready.done() and not self.ready.cancelled() and self.ready.exception() is None:
            self._notice_taken(self.ready.result())
        under_way, self._under_way = self._under_way, OrderedDict()
        return [on_lost for on_lost, _ in under_way.values() if on_lost is not None]


class Outbox:
    """All links of one node; use ``open_outbox``."""

    def __init__(self, open_link: OpenLink, tasks: asyncio.TaskGroup) -> None:
        self._open_link = open_link
        self._tasks = tasks
        self._links: dict[str, _Link] = {}
        self._local: dict[str, Callable[[object], None]] = {}
        self._is_closing = False
        self._lives = 0
        self._complaints = Repetitions()
        self.lost: Counter[str] = Counter()
        """Control messages that were given up, by the reason."""
        self.on_refused: Callable[[], None] = lambda: None
        """Called when a peer takes nothing from this life of the node any more: it was declared dead."""
        self.on_http_answered: Callable[[str, str], None] = lambda *_: None
        """Called with an address at which an HTTP server answers, and what is wrong."""

    async def send(
        self,
        address: str,
        parts: Sequence[Content],
        *,
        kind: int,
        on_lost: Lost | None = None,
        on_taken: Taken | None = None,
    ) -> None:
        """Put a message into the ring at ``address``; waits while it is full.

        The buffers must stay unchanged until the ring's consumer has taken the message. Then
        ``on_taken`` is called, or ``on_lost`` is run if the peer is lost before. Raises
        ``NodeUnreachable`` if nobody is there, ``PayloadTooLarge`` if it can never fit. If the caller is
        cancelled the message may or may not have been sent.
        """
        link = self._link(address)
        try:
            await link.send(parts, kind, on_lost, on_taken)
        except MessageTooLarge as error:
            raise PayloadTooLarge(f"{error}; give the receiving node a larger --inbox-bytes") from error
        except TransportError as error:
            self.drop(address)
            raise NodeUnreachable(f"{address} cannot be reached: {error}", address=address) from error

    async def tell(self, address: str, message: object) -> None:
        """Send a control message at once, and wait until it was taken; raises as ``send``.

        Where that is this node itself nobody is waited for. Cancelled: it may have been sent.
        """
        handler = self._local.get(address)
        if handler is not None:
            asyncio.get_running_loop().call_soon(handler, message)
            return
        taken = asyncio.Event()
        frame = control_frame([encode_control(message)])
        await self.send(address, frame, kind=KIND_CONTROL, on_taken=taken.set)
        await taken.wait()

    def post(self, address: str, message: object, *, replaces: object = None, lingers: bool = False) -> None:
        """Queue a control message; never waits. It replaces a queued one with the same ``replaces``.

        One that ``lingers`` waits a moment to share a ring message with others.

        When the queue is full its oldest message is dropped, which is logged: only a peer that takes
        nothing for long gets there, and membership declares it dead.
        """
        handler = self._local.get(address)
        if handler is not None:
            asyncio.get_running_loop().call_soon(handler, message)
            return
        if self._is_closing:
            return  # what was taken in the last moment is told to nobody: its links are gone, too
        self._link(address).post(encode_control(message), replaces, lingers=lingers)

    def post_to_all(self, addresses: Sequence[str], message: object, *, replaces: object = None) -> None:
        """Queue a control message for each of them, as ``post``; it is encoded once."""
        body = None
        for address in addresses:
            if address in self._local:
                self.post(address, message, replaces=replaces)
            elif not self._is_closing:
                body = encode_control(message) if body is None else body
                self._link(address).post(body, replaces)

    def report(self, address: str, report: Report) -> None:
        """Tell a request's owner how a stage gets on; never waits, and lingers to share a message."""
        handler = self._local.get(address)
        if handler is not None:
            asyncio.get_running_loop().call_soon(handler, report)
            return
        if self._is_closing:
            return
        self._link(address).report(report)

    def consumed(self, address: str, output: TakenOutput) -> None:
        """Tell a node that it need not retain this any more; never waits, and lingers as ``report`` does."""
        handler = self._local.get(address)
        if handler is not None:
            asyncio.get_running_loop().call_soon(handler, Consumed((output,)))
            return
        if self._is_closing:
            return
        self._link(address).consumed(output)

    def deliver_locally(self, address: str, handler: Callable[[object], None]) -> None:
        """Hand control messages for this node's own ``address`` to ``handler``, without a ring."""
        self._local[address] = handler

    async def flushed(self) -> None:
        """Return when no control message waits and every ring's consumer has taken what was sent.

        What is taken may let another control message begin its way, to whoever retained what it was made
        from: so links are looked at until all are quiet. Where nobody is there yet, heartbeats and the like,
        of which a newer one replaces the older, are not waited for: that might be without end.
        """
        while True:
            for link in list(self._links.values()):
                await link.flushed()
            if all(link.is_quiet for link in self._links.values()):
                return
            await asyncio.sleep(0)  # a link whose sender has ended is about to

    def links(self) -> list[LinkView]:
        """All of them."""
        return [link.view() for link in self._links.values()]

    def unquiet(self) -> list[str]:
        """Where messages wait to be sent, or to be taken."""
        return [address for address, link in self._links.items() if not link.is_quiet]

    def drop(self, address: str) -> None:
        """Close the link, for example since its node was declared dead; the next use opens a new one."""
        link = self._links.pop(address, None)
        if link is not None:
            link.close()

    def forget_all(self) -> None:
        """This node begins a new life: nothing of the old one is sent any more, links open anew."""
        self._lives += 1
        for address in list(self._links):
            link = self._links.pop(address)
            link.disown()
            link.close()

    def drop_all(self) -> None:
        """Close every link; messages that were not taken are lost."""
        self._is_closing = True
        for address in list(self._links):
            self.drop(address)

    def _link(self, address: str) -> _Link:
        link = self._links.get(address)
        if link is None:
            complain = functools.partial(self._complain, address)
            link = self._links[address] = _Link(address, self.lost, complain)
            link.task = self._tasks.create_task(self._serve(link), name=f"link {address}")
        return link

    def _note_reached(self, address: str, ready: asyncio.Future[Sender]) -> None:
        if not ready.cancelled() and ready.exception() is None:
            self._complaints.is_well(address)

    def _complain(self, address: str, count: int, error: str) -> None:
        """Heartbeats to whoever is not there yet are lost twice a second: that is not said each time."""
        left_out = self._complaints.worth_saying(address, error, asyncio.get_running_loop().time())
        if left_out is not None:
            get_logger().warning(
                "control_messages_lost", address=address, count=count, error=error, left_out=left_out
            )

    async def _serve(self, link: _Link) -> None:
        life = self._lives
        link.ready.add_done_callback(lambda ready: self._note_reached(link.address, ready))
        try:
            await link.serve(self._open_link(link.address))
        finally:
            if self._links.get(link.address) is link:
                del self._links[link.address]
            for on_lost in link.take_lost():
                if not self._is_closing:
                    self._tasks.create_task(on_lost())
        if link.was_refused and life == self._lives:
            self.on_refused()
        if link.http_answered is not None:
            self.on_http_answered(link.address, link.http_answered)


@contextlib.asynccontextmanager
async def open_outbox(
    identity: Callable[[], str],
    options: Options,
    *,
    find_transport: Callable[[Address], Transport] = transport_for,
    other_spellings: Sequence[str] = (),
    clock: Callable[[], float] = time.monotonic,
    rng: random.Random | None = None,
) -> AsyncIterator[Outbox]:
    """An outbox whose links are closed with the context.

    Args:
        identity: This node's name on channels, asked for each time that a link is opened.
        options: Secret, bounds and certificates.
        find_transport: The transport for an address.
        other_spellings: As ``link_opener`` takes it.
        clock: Monotonic seconds.
        rng: Draws the jitter of waits.
    """
    open_link = link_opener(
        identity,
        options,
        find_transport=find_transport,
        other_spellings=other_spellings,
        clock=clock,
        rng=rng,
    )
    async with asyncio.TaskGroup() as tasks:
        outbox = Outbox(open_link, tasks)
        try:
            yield outbox
        finally:
            outbox.drop_all()
