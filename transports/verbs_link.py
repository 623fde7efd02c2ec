"""The producer's way into the owner's memory over verbs: what is posted, in which order, and when it is done.

All work goes through one queue, in the order of the calls::

    write, put, read, swap, add --> queue --> post lists --> the adapter's send queue --> completions
                                    (views)   (bytes copied into registered memory)

Bytes on a device are copied within it, into registered memory there (``verbs_staging.Desk``): the host's
processor never has them.

The send queue is bounded, and so is the registered memory that bytes are copied into: what finds no room
waits in the queue, whose length the session bounds by making its callers wait. Only the last request of a
list, one after every so many bytes and questions ask for a completion; one completion tells of all that went
before it.
"""

import asyncio
import secrets
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from attrs import define, frozen

from transports._pyverbs import Domain, Registered, VerbsError, adapter
from transports._pyverbs_pair import Pair, Verb, Work
from transports.device_memory import Device, DeviceError, DeviceSpan
from transports.operations import EXPIRED, WORD_BYTES, Bytes, Chain, CompareAndSwap, Expired, Put
from transports.region_memory import RegionMemory
from transports.verbs_cards import Card
from transports.verbs_devices import Place
from transports.verbs_pulls import Readables
from transports.verbs_staging import Desk, Staging, pieces, spans

PIECE_BYTES: Final = 256 << 10
"""Largest write or read; longer ones are cut."""
STAGED_BYTES: Final = 2 << 20
"""Registered memory of a link: what is under way is in there."""

_SENDS: Final = 256
_LIST_MAX: Final = 16
_INLINE_ROOM: Final = 256
_SIGNALLED_BYTES: Final = 512 << 10
"""After so many bytes a request asks for a completion, so that their memory comes back soon."""
_WORD: Final = struct.Struct("=Q")


@define(eq=False)
class _Item:
    """Something to be done, that is not posted yet."""

    verb: Verb
    remote: int
    length: int
    buffers: Sequence[Bytes] = ()
    sink: memoryview | None = None
    """Where a read's bytes go."""
    answer: asyncio.Future[int | Expired] | None = None
    """For who waits: the word found, or anything."""
    swap: CompareAndSwap | None = None
    addend: int = 0
    span: DeviceSpan | None = None
    """The bytes, if they are on a device."""
    into_device: bool = False


@frozen(eq=False)
class _Flight:
    """A work request that the adapter has."""

    id: int
    item: _Item
    place: int
    staging: Staging | None
    """Where its bytes have their place until it is carried out."""
    staged_end: int
    since: float


class Link:
    """Access to one region's memory, until ``close``.

    Args:
        place: Where the packets leave.
        owner: The owner's end, and its memory.
        spin_seconds: How long a question looks for its own completion before the event loop waits for it.
        on_failure: Called once at most, when nothing more can be done.
        on_room: Called when there is room in the queue again.
    """

    def __init__(
        self,
        place: Place,
        owner: Card,
        *,
        spin_seconds: float,
        on_failure: Callable[[VerbsError], None],
        on_room: Callable[[], None],
    ) -> None:
        self._owner = owner
        self._spin_seconds = spin_seconds
        self._on_failure = on_failure
        self._on_room = on_room
        self._loop = asyncio.get_running_loop()
        self._queue: deque[_Item] = deque()
        self._flights: deque[_Flight] = deque()
        self._next_id = 0
        self._queued_bytes = 0
        self._unsignalled_bytes = 0
        self._broken = False
        device = adapter(place.device)
        self._room = self._sends = min(_SENDS, device.limits.queue)
        # Places of their own for bytes that are taken when they are posted, then the ring.
        self._inline_bytes = _LIST_MAX * _INLINE_ROOM
        self._staging = Staging(STAGED_BYTES - self._inline_bytes)
        self._desks: dict[Device, Desk] = {}
        self._domain = Domain(device)
        self.readables: Final = Readables(self._domain)
        self._memory = RegionMemory(STAGED_BYTES)
        self._registered = Registered(self._domain, self._memory.view, for_peers=False)
        self._pair = Pair(
            self._domain,
            place,
            sends=self._sends,
            receives=1,
            for_peers=False,
            on_completions=self._completed,
        )
        self.card: Final = self._pair.card(secrets.randbits(24))
        self._pair.connect(self.card, owner)

    # What is asked for.

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be copied; their buffers are still in use."""
        return self._queued_bytes

    def write(self, chain: Chain) -> None:
        """Put a chain's writes in order, then notify the owner."""
        writes = [write for write in chain.writes if write.length]
        for write in writes:
            offset = write.offset
            for length, buffers in pieces(write.buffers, PIECE_BYTES):
                self._add(_Item(Verb.WRITE, offset, length, buffers))
                offset += length
        if chain.notify:
            if writes:
                self._queue[-1].verb = Verb.WRITE_AND_NOTIFY
            else:
                self._add(_Item(Verb.WRITE_AND_NOTIFY, 0, 0))
        self._pump()

    def put(self, put: Put) -> None:
        """Put bytes into the device's memory beside the region, in order; their own devices are reached."""
        offset = put.offset
        for buffer in put.buffers:
            if isinstance(buffer, DeviceSpan):
                for span in spans(buffer):
                    self._add(_Item(Verb.WRITE, offset, len(span), span=span, into_device=True))
                    offset += len(span)
                continue
            assert isinstance(buffer, bytes | bytearray | memoryview)
            for length, parts in pieces((buffer,), PIECE_BYTES):
                self._add(_Item(Verb.WRITE, offset, length, parts, into_device=True))
                offset += length
        self._pump()

    def reach(self, device: Device) -> None:
        """Have registered memory on this device; raises ``DeviceError`` or ``VerbsError``."""
        if device not in self._desks:
            self._desks[device] = Desk(self._domain, device)

    async def read(self, offset: int, sink: memoryview) -> None:
        """Fetch bytes, behind all that was written before."""
        answer = self._new_answer()
        for start in range(0, len(sink), PIECE_BYTES):
            part = sink[start : start + PIECE_BYTES]
            self._add(_Item(Verb.READ, offset + start, len(part), sink=part))
        self._queue[-1].answer = answer
        self._ask()
        await answer

    async def swap(self, swap: CompareAndSwap) -> int | Expired:
        """Swap a word; the word found."""
        answer = self._new_answer()
        self._add(_Item(Verb.SWAP, swap.offset, WORD_BYTES, answer=answer, swap=swap))
        self._ask()
        return await answer

    async def add(self, offset: int, addend: int) -> int:
        """Add to a word; the word found."""
        answer = self._new_answer()
        self._add(_Item(Verb.ADD, offset, WORD_BYTES, answer=answer, addend=addend))
        self._ask()
        found = await answer
        assert isinstance(found, int)
        return found

    def _new_answer(self) -> asyncio.Future[int | Expired]:
        return self._loop.create_future()

    def _add(self, item: _Item) -> None:
        self._queued_bytes += item.length
        self._queue.append(item)

    def _ask(self) -> None:
        answer = self._queue[-1].answer
        assert answer is not None
        self._pump()
        if self._spin_seconds:
            give_up_at = time.monotonic() + self._spin_seconds
            while not answer.done() and not self._broken and time.monotonic() < give_up_at:
                self._completed()

    # What is posted.

    def _pump(self) -> None:
        """Post what there is room for."""
        while self._queue and not self._broken and not self._pair.closed:
            try:
                works = self._next_list()
                if not works:
                    return
                self._pair.post(works, self._registered.local_key)
            except VerbsError as error:
                self._fail(error)
            except DeviceError as error:
                self._fail(VerbsError(str(error)))

    def _next_list(self) -> list[Work]:
        """Take items from the queue, for as many as there is room; their bytes are copied."""
        now = self._loop.time()
        works: list[Work] = []
        while self._queue and len(works) < min(_LIST_MAX, self._room):
            item = self._queue[0]
            if item.swap is not None and time.monotonic() > item.swap.not_after:
                self._take()
                _tell(item, EXPIRED)
                continue
            flight = self._board(item, len(works) * _INLINE_ROOM, now)
            if flight is None:
                break
            self._take()
            self._next_id += 1
            self._flights.append(flight)
            works.append(self._work(flight))
        self._room -= len(works)
        if works:
            works[-1].signalled = True
            self._unsignalled_bytes = 0
        return works

    def _board(self, item: _Item, inline_place: int, now: float) -> _Flight | None:
        """Copy an item's bytes to where the adapter takes them from; None without room."""
        if item.span is not None:
            desk = self._desks[item.span.device]
            found = desk.bring(item.span)
            return found and _Flight(self._next_id, item, found[0], desk.staging, found[1], now)
        if not _brings(item.verb) and item.length <= self._pair.inline_bytes_max:
            self._copy(item, inline_place)
            return _Flight(self._next_id, item, inline_place, None, 0, now)
        found = self._staging.take(item.length)
        if found is None:
            return None
        place = self._inline_bytes + found[0]
        self._copy(item, place)
        return _Flight(self._next_id, item, place, self._staging, found[1], now)

    def _take(self) -> None:
        self._queued_bytes -= self._queue.popleft().length

    def _copy(self, item: _Item, place: int) -> None:
        view = self._memory.view
        for buffer in item.buffers:
            view[place : place + len(buffer)] = buffer
            place += len(buffer)
        item.buffers = ()

    def _work(self, flight: _Flight) -> Work:
        item, owner = flight.item, self._owner
        desk = None if item.span is None else self._desks[item.span.device]
        item.span = None  # copied
        self._unsignalled_bytes += item.length
        signalled = item.answer is not None or self._unsignalled_bytes >= _SIGNALLED_BYTES
        if signalled:
            self._unsignalled_bytes = 0
        return Work(
            id=flight.id,
            verb=item.verb,
            local=flight.place + (self._registered.address if desk is None else desk.address),
            length=item.length,
            remote=item.remote + (owner.device_memory if item.into_device else owner.memory),
            inline=flight.staging is None,
            signalled=signalled,
            compare_or_add=item.addend if item.swap is None else item.swap.expected,
            swap=0 if item.swap is None else item.swap.desired,
            local_key=None if desk is None else desk.local_key,
            into_device=item.into_device,
        )

    # What is done.

    def _completed(self) -> None:
        if self._pair.closed:
            return
        had = self._queued_bytes
        try:
            while completions := self._pair.poll():
                for id_, failure in completions:
                    if failure is not None:
                        raise VerbsError(f"{self._pair.place}: {failure}")
                    self._retire(id_)
        except VerbsError as error:
            self._fail(error)
        self._pump()
        if self._queued_bytes < had:
            self._on_room()

    def _retire(self, last: int) -> None:
        """All requests up to this one have been carried out."""
        while self._flights and self._flights[0].id <= last:
            flight = self._flights.popleft()
            item = flight.item
            self._room += 1
            if item.sink is not None:
                item.sink[:] = self._memory.view[flight.place : flight.place + item.length]
                _tell(item, 0)
            elif _brings(item.verb):
                _tell(item, _WORD.unpack_from(self._memory.view, flight.place)[0])
            if flight.staging is not None:
                flight.staging.give_back(flight.staged_end)

    def waits_since(self) -> float:
        """Since when, by the loop's clock, the oldest request is under way; infinite if there is none."""
        return self._flights[0].since if self._flights else float("inf")

    # How it ends.

    def _fail(self, error: VerbsError) -> None:
        if not self._broken:
            self._broken = True
            self._on_failure(error)

    def close(self, reason: Callable[[], Exception]) -> None:
        """Do nothing more; who waits is told the reason. Idempotent."""
        if self._pair.closed:
            return
        self._pair.close()
        for item in (*(flight.item for flight in self._flights), *self._queue):
            if item.answer is not None and not item.answer.done():
                item.answer.set_exception(reason())
        self._flights.clear()
        self._queue.clear()
        self._queued_bytes = 0
        self.readables.close()
        self._registered.close()
        for desk in self._desks.values():
            desk.close()
        self._desks.clear()
        self._domain.close()


def _brings(verb: Verb) -> bool:
    """Its bytes come from the owner's memory."""
    return verb in {Verb.READ, Verb.SWAP, Verb.ADD}


def _tell(item: _Item, word: int | Expired) -> None:
    if item.answer is not None and not item.answer.done():
        item.answer.set_result(word)
