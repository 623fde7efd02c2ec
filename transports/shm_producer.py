"""The producer's side of memory that is shared within a host: a tcp session that writes payloads by itself.

What ``post`` writes goes straight into the owner's memory, if it is longer than a slot. Everything else
takes the connection: questions, chains behind a swap, slots with their commit words, notifications. So the
owner checks each offset that the ring lives by, and the frame behind a payload, which goes out when the
payload has been copied, is what makes it visible on every kind of processor.

The memory is asked for when the first such write is posted: most sessions, those of small messages, never
need it.

Where the owner can read this process's memory (``process_memory``) it fetches longer messages itself, from
where they lie: one copy, as with a write, but into memory that is the message's own, so that whoever receives
it need not copy it again. What is lent stays until the message was delivered, or the session has ended and
what was read counts for nothing.

Two ways to one memory need an order: a copy waits until the owner has carried out the frames before it.
The other way round there is nothing to wait for, as a copy is done when ``post`` returns.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from attrs import evolve

from transports import tcp_frames as frames
from transports.address import Address
from transports.errors import ConnectFailed, PeerLost, ProtocolError, SessionFenced
from transports.memory import Options
from transports.operations import (
    EXPIRED,
    Bytes,
    Chain,
    Claim,
    Claimed,
    CompareAndSwap,
    Expired,
    Guarded,
    Write,
)
from transports.process_memory import SPANS_MAX, Spans, located, parse_located
from transports.region_memory import check_span
from transports.shared_memory import Bypass
from transports.shm_link import OFFER_BYTES_MAX, MemoryLink, Offer, open_link
from transports.tcp_frames import Header, Kind
from transports.tcp_producer import TcpMemory

_EXPECTS: Final[frames.Bounds] = {**frames.PRODUCER_EXPECTS_ANSWERS, Kind.ATTACHED: OFFER_BYTES_MAX}
_FRAMED_BYTES_MAX: Final = 64
"""Writes up to this length, a slot's, go in frames."""
_GUARDED_BYTES_MAX: Final = 64 << 10
"""A longer message is cheaper as a swap and a copy than in one go with its swap."""


class SharingMemory(TcpMemory):
    """A session over a connection and, for large payloads to an owner on this host, a link beside it."""

    def __init__(self, address: Address, hello: bytes, options: Options, *, encrypted: bool) -> None:
        super().__init__(address, hello, options, encrypted=encrypted)
        self._bypass = Bypass.of(address)
        self._lends = False
        self._size_bytes = 0
        self._offer: asyncio.Future[Offer] = self._loop.create_future()
        self._link: MemoryLink | None = None
        self._beside = self._capabilities.wire
        self._may_attach = False
        self._spans: dict[bytes, Spans] = {}
        """Where the exports lie, by key."""
        self._posted = 0
        """Frames that write, sent so far."""
        self._carried_out = 0
        """How many of them the owner is known to have carried out."""

    async def open(self) -> None:
        """Shake hands as over tcp; get the memory now only if nothing else will do."""
        await super().open()
        why_not = self._obstacle()
        if why_not is None:
            self._may_attach = True
            self._capabilities = evolve(
                self._capabilities,
                wire=f"{self._beside} (shm from the first large payload on)",
                fences_sessions=False,
                guarded_bytes_max=min(_GUARDED_BYTES_MAX, self._capabilities.guarded_bytes_max),
            )
        if self._bypass is not Bypass.REQUIRED:
            return
        try:
            why_not = why_not or await self._attach()
        except (PeerLost, SessionFenced) as error:
            raise ConnectFailed(f"the session could not be opened: {error}") from error
        if why_not is not None:
            raise ConnectFailed(f"{self._address} asks for shared memory, and there is none: {why_not}")

    def _obstacle(self) -> str | None:
        if self._bypass is Bypass.OFF:
            return "it is turned off"
        if not self.wire.is_within_host:
            return "the owner is on another host"
        return None if self._lends else "the owner lends no memory"

    async def _attach(self) -> str | None:
        """Get the memory, once in a session; why there is none. Bounded, and may end in another task."""
        self._may_attach = False
        link = await self._ask_for_link()
        if self._ending.over() and isinstance(link, MemoryLink):
            link.close()
        self._ending.check()
        if isinstance(link, str):
            self._capabilities = evolve(self._capabilities, wire=f"{self._beside} (no shm: {link})")
            return link
        self._link = link
        how = f"beside {self._beside}" + (", read in place" if link.is_read else "")
        pull_bytes = _GUARDED_BYTES_MAX if link.is_read else 0
        self._capabilities = evolve(self._capabilities, wire=f"shm ({how})", pull_bytes=pull_bytes)
        return None

    async def _ask_for_link(self) -> MemoryLink | str:
        seconds = self._options.connect_timeout_seconds
        self._send([frames.frame(Kind.ATTACH)])
        await asyncio.wait([self._offer], timeout=seconds)
        if not self._offer.done():
            return f"the owner made no offer within {seconds} s"
        may_be_read = self._bypass is not Bypass.COPY
        return await open_link(self._offer.result(), self._size_bytes, seconds, may_be_read=may_be_read)

    # Operations.

    async def _read(self, offset: int, length: int) -> Bytes:
        posted = self._posted
        data = await super()._read(offset, length)
        self._carried_out = max(self._carried_out, posted)
        return data

    async def compare_and_swap(self, swap: CompareAndSwap) -> int | Expired:
        """Swap a word: by the owner."""
        posted = self._posted
        found = await super().compare_and_swap(swap)
        if found is not EXPIRED:
            self._carried_out = max(self._carried_out, posted)
        return found

    async def claim(self, claim: Claim) -> Claimed:
        """Have the owner reserve."""
        posted = self._posted
        claimed = await super().claim(claim)
        self._carried_out = max(self._carried_out, posted)
        return claimed

    async def fetch_and_add(self, offset: int, addend: int) -> int:
        """Add to a word: by the owner."""
        posted = self._posted
        found = await super().fetch_and_add(offset, addend)
        self._carried_out = max(self._carried_out, posted)
        return found

    async def guarded(self, guarded: Guarded) -> int | Expired:
        """Swap and, if it took place, the chain: both by the owner."""
        self._posted += 1  # the answer is that of the swap: the chain may still be behind it
        return await super().guarded(guarded)

    async def flush(self) -> None:
        """Return when all that was posted before has landed."""
        posted = self._posted
        await super().flush()
        self._carried_out = max(self._carried_out, posted)

    async def post(self, chain: Chain) -> None:
        """Write in order; waits first where frames of before are under way."""
        if self._may_attach and any(write.length > _FRAMED_BYTES_MAX for write in chain.writes):
            await self._attach()
        framed: list[Write] = []
        for write in chain.writes:
            if self._link is None or write.length <= _FRAMED_BYTES_MAX:
                framed.append(write)
                continue
            if framed:
                await self._post_frames(Chain(tuple(framed), notify=False))
                framed.clear()
            await self._copy(self._link, write)
        if framed or chain.notify:
            await self._post_frames(Chain(tuple(framed), notify=chain.notify))

    async def prepare_export(self, length: int) -> None:
        """Get the memory, with which the owner learns where to read, if that is worth it."""
        if self._may_attach and length > _GUARDED_BYTES_MAX:
            await self._attach()

    def export(self, buffers: Sequence[Bytes]) -> bytes:
        """Let the owner fetch these bytes, from where they lie if it can read there."""
        key = super().export(buffers)
        if self._link is None or not self._link.is_read or len(buffers) > SPANS_MAX:
            return key
        spans = self._spans[key] = Spans(buffers)
        return located(key, spans)

    def withdraw(self, key: bytes) -> None:
        """End an export."""
        key, _ = parse_located(key, frames.EXPORT_KEY_BYTES)
        spans = self._spans.pop(key, None)
        if spans is not None:
            spans.end()
        super().withdraw(key)

    async def _post_frames(self, chain: Chain) -> None:
        await self._wait_for_room()
        self._posted += 1
        self._send(frames.chain_frames(chain))

    async def _copy(self, link: MemoryLink, write: Write) -> None:
        self._ending.check()
        try:
            check_span(write.offset, write.length, self._size_bytes)
        except ProtocolError as error:
            # Nobody else would look. Told by the connection's end, as by an owner that refuses a frame.
            self._end(error)
            raise
        while self._posted != self._carried_out:
            await self.flush()
        await link.write(write.offset, write.buffers)
        self._ending.check()

    # How it ends.

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.close()
        for spans in self._spans.values():
            spans.end()
        self._spans.clear()
        if not self._offer.done():
            self._offer.set_exception(self._ending.error())
            self._offer.exception()  # perhaps nobody waits for it yet, or any more
        super()._hang_up()

    # What the owner says.

    def _welcomed(self, header: Header, body: memoryview) -> None:
        super()._welcomed(header, body)
        self._lends = bool(header.flags & frames.LENDS)
        self._size_bytes = header.b
        if self._lends:
            self._expect(_EXPECTS, self._answered)

    def _answered(self, header: Header, body: memoryview) -> None:
        if header.kind != Kind.ATTACHED:
            super()._answered(header, body)
        elif self._offer.done():
            raise ProtocolError("an offer that nobody has asked for")
        else:
            self._offer.set_result(Offer.parse(body))
