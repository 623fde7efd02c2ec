"""The producer's way into the owner's memory over verbs: what is posted, in which order, and when it is done.

All work goes through one queue, in the order of the calls::

    write, read, swap, add --> queue --> post lists --> the adapter's send queue --> completions
                               (views)   (bytes copied into registered memory)

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
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from attrs import define, frozen

from transports._pyverbs import Domain, Registered, VerbsError, adapter
from transports._pyverbs_pair import Pair, Verb, Work
from transports.operations import EXPIRED, WORD_BYTES, Bytes, Chain, CompareAndSwap, Expired
from transports.region_memory import RegionMemory
from transports.verbs_cards import Card
from transports.verbs_devices import Place
from transports.verbs_pulls import Readables

PIECE_BYTES: Final = 256 << 10
"""Largest write or read; longer ones are cut."""
STAGED_BYTES: Final = 2 << 20
"""Registered memory of a link: what is under way is in there."""

_SENDS: Final = 256
_LIST_MAX: Final = 16
_INLINE_ROOM: Final = 256
_SIGNALLED_BYTES: Final = 512 << 10
"""After so many bytes a request asks for a completion, so that their memory comes back soon."""
_LINE: Final = 64
_WORD: Final = struct.Struct("=Q")


class Staging:
    """Places in a ring of bytes, given back in the order in which they were taken (pure).

    Args:
        size_bytes: Of the ring; no place is longer.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size = size_bytes
        self._begin = 0
        self._end = 0

    def take(self, length: int) -> tuple[int, int] | None:
        """A place of ``length`` bytes: its offset, and its end for ``give_back``; None without room."""
        if self._begin == self._end:
            self._begin = self._end = 0  # empty: the longest place begins at the start
        start = self._end
        if start % self._size + length > self._size:
            start += self._size - start % self._size
        end = start + max(_LINE, length + -length % _LINE)  # never nothing: ends tell places apart
        if end - self._begin > self._size:
            return None
        self._end = end
        return start % self._size, end

    def give_back(self, end: int) -> None:
        """All places up to this end are free."""
        self._begin = end


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


@frozen(eq=False)
class _Flight:
    """A work request that the adapter has."""

    id: int
    item: _Item
    place: int
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
            works = self._next_list()
            if not works:
                return
            try:
                self._pair.post(works, self._registered.local_key)
            except VerbsError as error:
                self._fail(error)

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
            inline = not _brings(item.verb) and item.length <= self._pair.inline_bytes_max
            place, staged_end = len(works) * _INLINE_ROOM, 0
            if not inline:
                found = self._staging.take(item.length)
                if found is None:
                    break
                place, staged_end = self._inline_bytes + found[0], found[1]
            self._take()
            self._copy(item, place)
            flight = _Flight(self._next_id, item, place, staged_end, now)
            self._next_id += 1
            self._flights.append(flight)
            works.append(self._work(flight, inline=inline))
        self._room -= len(works)
        if works:
            works[-1].signalled = True
            self._unsignalled_bytes = 0
        return works

    def _take(self) -> None:
        self._queued_bytes -= self._queue.popleft().length

    def _copy(self, item: _Item, place: int) -> None:
        view = self._memory.view
        for buffer in item.buffers:
            view[place : place + len(buffer)] = buffer
            place += len(buffer)
        item.buffers = ()

    def _work(self, flight: _Flight, *, inline: bool) -> Work:
        item = flight.item
        self._unsignalled_bytes += item.length
        signalled = item.answer is not None or self._unsignalled_bytes >= _SIGNALLED_BYTES
        if signalled:
            self._unsignalled_bytes = 0
        return Work(
            id=flight.id,
            verb=item.verb,
            local=self._registered.address + flight.place,
            length=item.length,
            remote=self._owner.memory + item.remote,
            inline=inline,
            signalled=signalled,
            compare_or_add=item.addend if item.swap is None else item.swap.expected,
            swap=0 if item.swap is None else item.swap.desired,
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
            if flight.staged_end:
                self._staging.give_back(flight.staged_end)

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
        self._domain.close()


def _brings(verb: Verb) -> bool:
    """Its bytes come from the owner's memory."""
    return verb in {Verb.READ, Verb.SWAP, Verb.ADD}


def _tell(item: _Item, word: int | Expired) -> None:
    if item.answer is not None and not item.answer.done():
        item.answer.set_result(word)


def pieces(buffers: Sequence[Bytes], piece_bytes: int) -> Iterator[tuple[int, list[Bytes]]]:
    """Cut buffers into pieces of at most ``piece_bytes``, without copying: length and parts of each."""
    length, parts = 0, list[Bytes]()
    for buffer in buffers:
        rest = memoryview(buffer)
        while rest:
            part = rest[: piece_bytes - length]
            parts.append(part)
            length += len(part)
            rest = rest[len(part) :]
            if length == piece_bytes:
                yield length, parts
                length, parts = 0, []
    if length:
        yield length, parts
