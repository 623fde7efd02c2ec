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
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any

from onepiece.codec import encode_control
from onepiece.errors import NodeUnreachable, PayloadTooLarge
from onepiece.limits import (
    CONTROL_BATCH_BYTES_MAX,
    CONTROL_QUEUE_MAX,
    REPORT_LINGER_SECONDS,
    REPORTS_QUEUED_MAX,
)
from onepiece.log import get_logger
from onepiece.messages import KIND_CONTROL, StageProgress
from onepiece.runtime.reports import ReportQueue, StageRun
from transports import (
    Address,
    Bytes,
    ChannelClosed,
    MessageTooLarge,
    Options,
    Sender,
    TransportError,
    open_sender,
)

Lost = Callable[[], Coroutine[Any, Any, None]]


def control_frame(bodies: Iterable[bytes]) -> list[bytes]:
    """Several control messages as one ring message: each behind its length."""
    parts: list[bytes] = []
    for body in bodies:
        parts += [len(body).to_bytes(4, "little"), body]
    return parts


class _Link:
    """The way to one ring: a sender, what it has not handed over, and queued control messages."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.ready: asyncio.Future[Sender] = asyncio.get_running_loop().create_future()
        self.stop = asyncio.Event()
        self._on_lost: deque[tuple[int, Lost]] = deque()
        """What to run for each message that may not have been taken, oldest first."""
        self._queue: OrderedDict[object, bytes] = OrderedDict()
        self._reports = ReportQueue()
        self._wake = asyncio.Event()
        self._taken = asyncio.Event()
        self._serial = 0
        self._alarm: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None

    def close(self) -> None:
        """End the link; one that is still being opened is given up at once."""
        self.stop.set()
        if not self.ready.done():
            self._fail(ChannelClosed(f"the link to {self.address} was closed"))
            if self.task is not None:
                self.task.cancel()

    async def send(self, parts: Sequence[Bytes], kind: int, on_lost: Lost | None) -> None:
        sender = self.ready.result() if self.ready.done() else await asyncio.shield(self.ready)
        number = await sender.send(parts, kind=kind)
        if on_lost is not None:
            self._on_lost.append((number, on_lost))
            self._forget_delivered(sender)

    def _forget_delivered(self, sender: Sender) -> None:
        delivered = sender.delivered
        while self._on_lost and self._on_lost[0][0] < delivered:
            self._on_lost.popleft()

    def post(self, body: bytes, replaces: object = None) -> None:
        if replaces is None:
            self._serial += 1
            replaces = self._serial
        self._queue[replaces] = body
        if len(self._queue) > CONTROL_QUEUE_MAX:
            self._queue.popitem(last=False)
            get_logger().warning("control_queue_overflow", address=self.address)
        self._wake.set()

    def report(self, run: StageRun) -> None:
        self._reports.add(run)
        self._linger()

    def report_progress(self, run: StageRun, progress: StageProgress) -> None:
        self._reports.add_progress(run, progress)
        self._linger()

    def _linger(self) -> None:
        if len(self._reports) >= REPORTS_QUEUED_MAX:
            self._post_reports()
        elif self._alarm is None:
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_later(REPORT_LINGER_SECONDS, self._post_reports)

    def _post_reports(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        for body in self._reports.take():
            self.post(body)

    async def flushed(self) -> None:
        """Return when the queue is empty and all was taken, or the peer is lost."""
        self._post_reports()
        await asyncio.wait([self.ready])
        if self.ready.cancelled() or self.ready.exception() is not None:
            return
        with contextlib.suppress(TransportError):
            while self._queue and not self.stop.is_set():
                self._wake.set()
                self._taken.clear()
                await self._taken.wait()
            await self.ready.result().drained()

    async def serve(self, identity: str, options: Options) -> None:
        """Hold the sender open and send what is queued, until told to stop or the peer is lost."""
        try:
            async with open_sender(Address.parse(self.address), identity=identity, options=options) as sender:
                self.ready.set_result(sender)
                async with asyncio.TaskGroup() as tasks:
                    pump = tasks.create_task(self._pump(sender))
                    lost = tasks.create_task(sender.lost())
                    await self.stop.wait()
                    pump.cancel()
                    lost.cancel()
        except* TransportError as errors:
            self._fail(errors.exceptions[0])
        finally:
            if not self.ready.done():
                self.ready.cancel()
            if self._alarm is not None:
                self._alarm.cancel()

    async def _pump(self, sender: Sender) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                batch, size = [], 0
                while self._queue and size < CONTROL_BATCH_BYTES_MAX:
                    _, body = self._queue.popitem(last=False)
                    batch.append(body)
                    size += len(body)
                await sender.send(control_frame(batch), kind=KIND_CONTROL)
            self._taken.set()

    def _fail(self, error: BaseException) -> None:
        self.stop.set()
        self._taken.set()
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # seen: nobody may be waiting
        if self._queue:
            get_logger().warning(
                "control_messages_lost", address=self.address, count=len(self._queue), error=str(error)
            )

    def take_lost(self) -> list[Lost]:
        """What to run for the messages that were not taken, once the link has ended."""
        if self.ready.done() and not self.ready.cancelled() and self.ready.exception() is None:
            self._forget_delivered(self.ready.result())
        lost = [on_lost for _, on_lost in self._on_lost]
        self._on_lost.clear()
        return lost


class Outbox:
    """All links of one node; use ``open_outbox``."""

    def __init__(self, identity: str, options: Options, tasks: asyncio.TaskGroup) -> None:
        self._identity = identity
        self._options = options
        self._tasks = tasks
        self._links: dict[str, _Link] = {}
        self._local: dict[str, Callable[[object], None]] = {}
        self._is_closing = False

    async def send(
        self, address: str, parts: Sequence[Bytes], *, kind: int, on_lost: Lost | None = None
    ) -> None:
        """Put a message into the ring at ``address``; waits while it is full.

        The buffers must stay unchanged until the ring's consumer has taken the message. ``on_lost``
        is run at most once, if the peer is lost before that. Raises ``NodeUnreachable`` if nobody
        is there, ``PayloadTooLarge`` if it can never fit. If the caller is cancelled the message may
        or may not have been sent.
        """
        link = self._link(address)
        try:
            await link.send(parts, kind, on_lost)
        except MessageTooLarge as error:
            raise PayloadTooLarge(f"{error}; give the receiving node a larger --inbox-bytes") from error
        except TransportError as error:
            self.drop(address)
            raise NodeUnreachable(f"{address} cannot be reached: {error}", address=address) from error

    def post(self, address: str, message: object, *, replaces: object = None) -> None:
        """Queue a control message; never waits. It replaces a queued one with the same ``replaces``.

        When the queue is full its oldest message is dropped, which is logged: only a peer that takes
        nothing for long gets there, and membership declares it dead.
        """
        handler = self._local.get(address)
        if handler is not None:
            asyncio.get_running_loop().call_soon(handler, message)
            return
        self._link(address).post(encode_control(message), replaces)

    def report(self, address: str, run: StageRun) -> None:
        """Tell a request's owner how far a run has come; never waits, and lingers to share a message."""
        handler = self._local.get(address)
        if handler is not None:
            asyncio.get_running_loop().call_soon(handler, run.report())
            return
        self._link(address).report(run)

    def report_progress(self, address: str, run: StageRun, progress: StageProgress) -> None:
        """Tell a request's owner something about a run that goes on; likewise."""
        handler = self._local.get(address)
        if handler is not None:
            asyncio.get_running_loop().call_soon(handler, progress)
            return
        self._link(address).report_progress(run, progress)

    def deliver_locally(self, address: str, handler: Callable[[object], None]) -> None:
        """Hand control messages for this node's own ``address`` to ``handler``, without a ring."""
        self._local[address] = handler

    async def flushed(self) -> None:
        """Return when no control message waits and every ring's consumer has taken what was sent."""
        for link in list(self._links.values()):
            await link.flushed()

    def drop(self, address: str) -> None:
        """Close the link, for example since its node was declared dead; the next use opens a new one."""
        link = self._links.pop(address, None)
        if link is not None:
            link.close()

    def drop_all(self) -> None:
        """Close every link; messages that were not taken are lost."""
        self._is_closing = True
        for address in list(self._links):
            self.drop(address)

    def _link(self, address: str) -> _Link:
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = _Link(address)
            link.task = self._tasks.create_task(self._serve(link), name=f"link {address}")
        return link

    async def _serve(self, link: _Link) -> None:
        try:
            await link.serve(self._identity, self._options)
        finally:
            if self._links.get(link.address) is link:
                del self._links[link.address]
            for on_lost in link.take_lost():
                if not self._is_closing:
                    self._tasks.create_task(on_lost())


@contextlib.asynccontextmanager
async def open_outbox(identity: str, options: Options) -> AsyncIterator[Outbox]:
    """An outbox whose links are closed with the context."""
    async with asyncio.TaskGroup() as tasks:
        outbox = Outbox(identity, options, tasks)
        try:
            yield outbox
        finally:
            outbox.drop_all()
