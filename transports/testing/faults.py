"""Wires that misbehave: a transport around a transport.

What a channel must survive, exactly once, whole and in order: ``shuffle_pieces``, ``delay_seconds``,
``cut_chance``, ``flip_chance``, ``drop_chance``, ``rival_chance``, in any mixture. Flips and drops stand for
broken hardware: the ring finds them by its hashes, fences the session, and the message comes again.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

from attrs import define, field

from transports.address import Address
from transports.device_memory import DeviceSpan
from transports.errors import PeerLost
from transports.memory import Listener, Options, RemoteMemory, Transport
from transports.operations import Bytes, Chain, Claim, Claimed, CompareAndSwap, Content, Expired, Put, Write
from transports.sessions import Ending
from transports.testing.forwarding import ForwardingMemory

_PIECE_BYTES: Final = 64


@define
class Faults:
    """Which faults happen, how often, and how many in all; the rest of the run is sound."""

    rng: random.Random
    shuffle_pieces: bool = False
    """Each write lands in pieces of 64 bytes in any order (never across two writes of a chain)."""
    delay_seconds: float = 0.0
    """Each operation waits up to so long before it is passed on."""
    cut_chance: float = 0.0
    """Before an operation, or behind one whose outcome is then lost, the connection breaks."""
    flip_chance: float = 0.0
    """One bit of a write arrives changed."""
    drop_chance: float = 0.0
    """A chain of writes never arrives, though later ones do."""
    rival_chance: float = 0.0
    """A swap does not take place, as if another producer had been faster."""
    remaining: int = 1 << 30
    """Cuts, flips, drops and rivals still to come."""
    flips_wanted: Callable[[Write], bool] = field(default=lambda write: write.length > 0)
    """Which writes a flip may hit."""
    happened: list[str] = field(factory=list)

    def strikes(self, chance: float, what: str) -> bool:
        """Draw whether a fault happens now."""
        if self.remaining <= 0 or self.rng.random() >= chance:
            return False
        self.remaining -= 1
        self.happened.append(what)
        return True


class FaultyTransport(Transport):
    """Listens as the transport inside does; sessions opened through it suffer ``faults``."""

    def __init__(self, inner: Transport, faults: Faults) -> None:
        self.scheme = inner.scheme
        self.faults = faults
        self.sessions: list[FaultyMemory] = []
        self._inner = inner

    def check(self, address: Address) -> None:
        """As the transport inside."""
        self._inner.check(address)

    def listen(self, address: Address, options: Options) -> AbstractAsyncContextManager[Listener]:
        """As the transport inside."""
        return self._inner.listen(address, options)

    async def connect(self, address: Address, hello: bytes, options: Options) -> RemoteMemory:
        """Open a session that suffers the faults."""
        session = FaultyMemory(await self._inner.connect(address, hello, options), self.faults)
        self.sessions.append(session)
        return session

    async def cut(self) -> None:
        """Break every connection that is open."""
        sessions, self.sessions = self.sessions, []
        for session in sessions:
            await session.cut()


class FaultyMemory(ForwardingMemory):
    """A session whose wire misbehaves."""

    def __init__(self, inner: RemoteMemory, faults: Faults) -> None:
        super().__init__(inner)
        self._faults = faults
        self._loses_puts = False
        self._ending = Ending()

    async def read(self, offset: int, length: int) -> Bytes:
        """Fetch bytes of the region."""
        await self._before()
        return await self._inner.read(offset, length)

    async def compare_and_swap(self, swap: CompareAndSwap) -> int | Expired:
        """Swap a word; the outcome may be lost with the connection."""
        await self._before()
        if self._faults.strikes(self._faults.rival_chance, "rival"):
            return swap.expected ^ 1
        outcome = await self._inner.compare_and_swap(swap)
        if self._faults.strikes(self._faults.cut_chance, "cut behind a swap"):
            await self._cut_now()
        return outcome

    async def claim(self, claim: Claim) -> Claimed:
        """Have the owner reserve; the outcome may be lost with the connection."""
        await self._before()
        claimed = await self._inner.claim(claim)
        if self._faults.strikes(self._faults.cut_chance, "cut behind a claim"):
            await self._cut_now()
        return claimed

    async def fetch_and_add(self, offset: int, addend: int) -> int:
        """Add to a word."""
        await self._before()
        return await self._inner.fetch_and_add(offset, addend)

    async def post(self, chain: Chain) -> None:
        """Post writes, some of which suffer."""
        await self._before()
        faults = self._faults
        if faults.strikes(faults.drop_chance, "drop"):
            return
        writes: list[Write] = []
        for write in chain.writes:
            if faults.flips_wanted(write) and faults.strikes(faults.flip_chance, "flip"):
                write = Write(write.offset, (_flipped(write, faults.rng),))
            writes.extend(_shuffled(write, faults.rng) if faults.shuffle_pieces else (write,))
        for write in writes[:-1]:
            await self._inner.post(Chain((write,), notify=False))
        await self._inner.post(Chain(tuple(writes[-1:]), notify=chain.notify))

    async def put(self, put: Put) -> None:
        """Put bytes into device memory.

        What nobody would find there does not happen: no bit flips, and with one put all behind it are lost.
        """
        await self._before()
        faults = self._faults
        self._loses_puts = self._loses_puts or faults.strikes(faults.drop_chance, "drop of puts")
        if self._loses_puts:
            return
        for part in _shuffled_put(put, faults.rng) if faults.shuffle_pieces else (put,):
            await self._inner.put(part)

    def export(self, buffers: Sequence[Bytes]) -> bytes:
        """Let the owner pull bytes."""
        self._ending.check()
        return self._inner.export(buffers)

    async def wait_notified(self, timeout_seconds: float) -> bool:
        """Wait for a nudge."""
        self._ending.check()
        return await self._inner.wait_notified(timeout_seconds)

    async def flush(self) -> None:
        """Return when all that was posted before has landed."""
        self._ending.check()
        await self._inner.flush()

    async def cut(self) -> None:
        """Break the connection."""
        self._ending.reach(PeerLost("the connection was cut on purpose"))
        await self._inner.close()

    async def _before(self) -> None:
        self._ending.check()
        if self._faults.delay_seconds:
            await asyncio.sleep(self._faults.rng.random() * self._faults.delay_seconds)
            self._ending.check()
        if self._faults.strikes(self._faults.cut_chance, "cut"):
            await self._cut_now()

    async def _cut_now(self) -> None:
        await self.cut()
        self._ending.check()


def _flipped(write: Write, rng: random.Random) -> bytearray:
    data = bytearray().join(write.buffers)
    bit = rng.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    return data


def _shuffled(write: Write, rng: random.Random) -> Iterable[Write]:
    data = memoryview(bytearray().join(write.buffers))
    starts = list(range(0, len(data), _PIECE_BYTES)) or [0]
    rng.shuffle(starts)
    return [Write(write.offset + start, (data[start : start + _PIECE_BYTES],)) for start in starts]


def _shuffled_put(put: Put, rng: random.Random) -> Iterable[Put]:
    parts: list[Put] = []
    offset = put.offset
    for buffer in put.buffers:
        for start in range(0, len(buffer), _PIECE_BYTES):
            piece = _cut(buffer, start, start + _PIECE_BYTES)
            parts.append(Put(offset + start, (piece,)))
        offset += len(buffer)
    rng.shuffle(parts)
    return parts


def _cut(buffer: Content, start: int, stop: int) -> Content:
    if isinstance(buffer, DeviceSpan):
        return buffer[start:stop]
    assert isinstance(buffer, bytes | bytearray | memoryview)
    return memoryview(buffer)[start:stop]
