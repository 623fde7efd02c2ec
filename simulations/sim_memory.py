"""The producer's side of the simulated transport: operations that arrive late and in pieces."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from attrs import define

from simulations.sim_network import Network, Wire
from simulations.sim_region import SimSession
from transports.errors import ChannelClosed, TransportError
from transports.memory import Accepted, Atomics, Capabilities, RemoteMemory
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
from transports.sessions import Ending

_PULL_SHARE: Final = 2**-15
"""So small that whatever goes into an inbox of 256 KiB is pulled, where operations need no processor of the
owner; of control messages those of more than 256 bytes."""


@define(eq=False)
class _Piece:
    """A part of a posted write, which lies in the sender's memory until it lands."""

    offset: int
    data: list[Bytes]
    length: int = 0

    def add(self, view: memoryview) -> None:
        """Lengthen it."""
        self.data.append(view)
        self.length += len(view)

    def freeze(self) -> None:
        """Take a copy: the sender is free to use its memory otherwise."""
        self.data = [b"".join(self.data)]


class SimMemory(RemoteMemory):
    """The producer's side of a session."""

    def __init__(self, session: SimSession, accepted: Accepted, wire: Wire, network: Network) -> None:
        self._far = session
        self._accepted = accepted
        self._wire = wire
        self._network = network
        self._ending = Ending()
        self._open: dict[asyncio.Future[Any], None] = {}
        """What is waited for."""
        self._posted_bytes = 0
        self._exports: dict[bytes, tuple[Bytes, ...]] = {}
        self._exported = 0
        session.lends = self._lent
        wire.tell_near = self._end

    @property
    def capabilities(self) -> Capabilities:
        """As the weather has it."""
        weather = self._network.weather
        return Capabilities(
            atomics=Atomics.ADAPTER if weather.one_sided else Atomics.OWNER,
            one_sided=weather.one_sided,
            fences_sessions=True,
            guarded_bytes_max=weather.guarded_bytes_max,
            claims=not weather.one_sided and self._far.region.hooks.claimant is not None,
            zero_copy_send=True,
            pull_share=_PULL_SHARE if weather.one_sided else 1.0,
        )

    @property
    def session(self) -> int:
        """The number the owner gave this session."""
        return self._accepted.session

    @property
    def welcome(self) -> bytes:
        """What the owner answered to our hello."""
        return self._accepted.welcome

    async def read(self, offset: int, length: int) -> Bytes:
        """Fetch bytes of the region."""

        def look() -> bytes:
            self._far.look()
            return self._far.region.memory.read(offset, length)

        found: bytes = await self._ask(look)
        return found

    async def compare_and_swap(self, swap: CompareAndSwap) -> int | Expired:
        """Swap a word; the word found is the outcome."""
        self._ending.check()
        if asyncio.get_running_loop().time() > swap.not_after:
            return EXPIRED
        found: int = await self._ask(lambda: self._swap(swap))
        return found

    def _swap(self, swap: CompareAndSwap) -> int:
        self._far.look()
        return self._far.region.memory.compare_and_swap(swap.offset, swap.expected, swap.desired)

    async def claim(self, claim: Claim) -> Claimed:
        """Have the owner reserve."""

        def reserve() -> Claimed:
            self._far.look()
            region = self._far.region
            assert region.hooks.claimant is not None, "capabilities say that there are claims"
            return region.hooks.claimant(region.memory.view, self._far.number, claim.length)

        claimed: Claimed = await self._ask(reserve)
        return claimed

    async def fetch_and_add(self, offset: int, addend: int) -> int:
        """Add to a word, modulo 2**64; the word found."""
        found: int = await self._ask(lambda: self._far.region.memory.fetch_and_add(offset, addend))
        return found

    async def post(self, chain: Chain) -> None:
        """Post writes; waits while too much of this session is under way."""
        if self._posted_bytes > self._network.weather.window_bytes:
            await self.flush()
        self._ending.check()
        self._post(chain, lambda: True, lambda: None)

    async def guarded(self, guarded: Guarded) -> int | Expired:
        """A swap, and behind it a chain that lands piece by piece if the swap took place."""
        self._ending.check()
        if asyncio.get_running_loop().time() > guarded.swap.not_after:
            return EXPIRED
        outcome: list[int] = []
        answer = self._answer()

        def swap() -> None:
            for write in guarded.chain.writes:
                self._far.region.memory.span(write.offset, write.length)
            outcome.append(self._swap(guarded.swap))

        self._wire.out.send(lambda: self._far.carry_out(swap))
        self._post(
            guarded.chain,
            lambda: outcome[0] == guarded.swap.expected,
            lambda: self._wire.back.send(lambda: _settle(answer, outcome[0])),
        )
        return await self._outcome(answer)  # type: ignore[no-any-return]  # what ``swap`` has put there

    def export(self, buffers: Sequence[Bytes]) -> bytes:
        """Let the owner pull these bytes."""
        self._ending.check()
        self._exported += 1
        key = self._exported.to_bytes(8, "little")
        self._exports[key] = tuple(buffers)
        return key

    def withdraw(self, key: bytes) -> None:
        """End an export."""
        self._exports.pop(key, None)

    def _lent(self, key: bytes) -> bytes | None:
        buffers = self._exports.get(key)
        return None if buffers is None else self._on_the_wire(b"".join(buffers))

    async def wait_notified(self, timeout_seconds: float) -> bool:
        """Wait for a nudge from the owner."""
        self._ending.check()
        answer = self._answer()
        self._wire.out.send(
            lambda: self._far.carry_out(lambda: self._far.wait(lambda: _settle(answer, None)))
        )
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._outcome(answer)
        except TimeoutError:
            return False
        return True

    async def flush(self) -> None:
        """Return when all that was posted before has landed."""
        await self._ask(lambda: None)

    async def close(self) -> None:
        """End the session."""
        if not self._ending.over():
            self._wire.close()
            self._end(ChannelClosed(f"the session on {self._far.region.address} was closed by us"))

    def _post(self, chain: Chain, condition: Callable[[], bool], then: Callable[[], None]) -> None:
        """Send a chain piece by piece, or whole; it lands where ``condition`` holds when it arrives."""
        region = self._far.region

        def begin() -> None:
            for write in chain.writes:
                region.memory.span(write.offset, write.length)

        def finish() -> None:
            if condition() and chain.notify:
                region.notify()
            then()

        pieces = [piece for write in chain.writes for piece in self._pieces(write)]
        self._posted_bytes += sum(piece.length for piece in pieces)
        weather = self._network.weather
        if len(pieces) < 2 or self._network.rng.random() >= weather.split_chance:
            self._send(pieces, condition, [begin], [finish])
            return
        self._send(pieces[:1], condition, [begin], [])
        for piece in pieces[1:-1]:
            self._send([piece], condition, [], [])
        self._send(pieces[-1:], condition, [], [finish])

    def _send(
        self,
        pieces: list[_Piece],
        condition: Callable[[], bool],
        before: list[Callable[[], None]],
        behind: list[Callable[[], None]],
    ) -> None:
        """Send pieces that land in one step."""

        def land() -> None:
            for step in before:
                step()
            if condition():
                for offset, data in landing:
                    self._far.write(offset, data)
            for step in behind:
                step()

        landing: list[tuple[int, bytes]] = []

        def arrive() -> None:
            for piece in pieces:
                self._posted_bytes -= piece.length
                landing.append((piece.offset, self._on_the_wire(b"".join(piece.data))))
            self._far.carry_out(land)

        def freeze() -> None:
            for piece in pieces:
                piece.freeze()

        self._wire.out.send(arrive, freeze)

    def _on_the_wire(self, data: bytes) -> bytes:
        chance = self._network.weather.flip_chance
        if not data or not chance or self._network.rng.random() >= chance:
            return data
        self._network.flips += 1
        return _flipped(data, self._network.rng.randrange(8 * len(data)))

    def _pieces(self, write: Write) -> list[_Piece]:
        """The write cut up, in any order: only the order between writes is promised."""
        longest = self._network.weather.piece_bytes
        pieces = [_Piece(write.offset, [])]
        offset = write.offset
        for buffer in write.buffers:
            view = memoryview(buffer)
            while view:
                if pieces[-1].length >= longest:
                    pieces.append(_Piece(offset, []))
                part = view[: longest - pieces[-1].length]
                pieces[-1].add(part)
                offset += len(part)
                view = view[len(part) :]
        if len(pieces) > 1:
            self._network.rng.shuffle(pieces)
        return pieces

    async def _ask(self, work: Callable[[], Any]) -> Any:
        self._ending.check()
        answer = self._answer()

        def carry_out() -> None:
            found = work()
            self._wire.back.send(lambda: _settle(answer, found))

        self._wire.out.send(lambda: self._far.carry_out(carry_out))
        return await self._outcome(answer)

    def _answer(self) -> "asyncio.Future[Any]":
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[answer] = None
        return answer

    async def _outcome(self, answer: "asyncio.Future[Any]") -> Any:
        try:
            return await answer
        finally:
            self._open.pop(answer, None)

    def _end(self, reason: TransportError) -> None:
        if self._ending.reach(reason):
            self._exports.clear()
            for answer in list(self._open):
                if not answer.done():
                    answer.set_exception(self._ending.error())
                    answer.exception()  # seen: who waits may be cancelled in this very step


def _settle(answer: "asyncio.Future[Any]", found: object) -> None:
    if not answer.done():
        answer.set_result(found)


def _flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
