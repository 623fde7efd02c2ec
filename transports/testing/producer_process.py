"""A producer in a process of its own, for tests that kill, stop or race it. Public, as the checks are.

``python -m transports.testing.producer_process ADDRESS IDENTITY COUNT ...``

Sends messages ``first..count`` under an identity, where ``first`` is what the receiver says it has. At
one chosen step of one chosen message it sends itself a signal; between the steps everything posted
has landed, so the ring is left in exactly that state.
"""

import argparse
import asyncio
import os
import random
import signal
from contextlib import AbstractAsyncContextManager

from transports.address import Address
from transports.channel import open_sender
from transports.errors import ConnectFailed, PeerLost
from transports.memory import Listener, Options, RemoteMemory, Transport
from transports.operations import Chain, Claim, Claimed, CompareAndSwap, Expired
from transports.registry import transport_for
from transports.ring.layout import SLOT_BYTES
from transports.testing.forwarding import ForwardingMemory

STEPS = ("before the swap", "behind the swap", "behind the payload", "behind the slot", "behind the commit")
_CONNECTS_MAX = 3


def body_of(identity: str, number: int, longer_bytes: int = 0) -> bytes:
    """A message's bytes, told from every other's."""
    return f"{identity}:{number}:".encode() + bytes([number % 256]) * (number * 37 % 500 + longer_bytes)


class SteppingMemory(ForwardingMemory):
    """A session that carries out one write at a time, and dies or dawdles where it is told to."""

    def __init__(self, inner: RemoteMemory, options: argparse.Namespace, rng: random.Random) -> None:
        super().__init__(inner)
        self._options = options
        self._rng = rng
        self._message = -1

    async def compare_and_swap(self, swap: CompareAndSwap) -> int | Expired:
        """Perhaps dawdle between the read of the tail and the swap, perhaps die on either side of it."""
        if self._options.dawdle and self._rng.random() < 0.05:
            await asyncio.sleep(self._rng.random() * self._options.dawdle)
        if self._message + 1 == self._options.number:
            if self._options.rival:
                return swap.expected ^ 1
            self._step("before the swap")
        found = await self._inner.compare_and_swap(swap)
        if found == swap.expected:
            self._message += 1
            self._step("behind the swap")
        return found

    async def claim(self, claim: Claim) -> Claimed:
        """Perhaps die on either side of it, as of a swap."""
        if self._message + 1 == self._options.number:
            self._step("before the swap")
        claimed = await self._inner.claim(claim)
        if claimed.taken:
            self._message += 1
            self._step("behind the swap")
        return claimed

    async def post(self, chain: Chain) -> None:
        """One write at a time where a step is wanted."""
        if self._message != self._options.number:
            await self._inner.post(chain)
            return
        for write in chain.writes:
            last = write is chain.writes[-1]
            await self._inner.post(Chain((write,), notify=last and chain.notify))
            await self._inner.flush()
            if write.length == 8:
                self._step("behind the commit")
            elif write.length < SLOT_BYTES and write.offset % SLOT_BYTES:
                self._step("behind the slot")
            else:
                self._step("behind the payload")

    def _step(self, name: str) -> None:
        options = self._options
        if self._message + (name == "before the swap") == options.number and name == options.step:
            options.number = -1
            os.kill(os.getpid(), getattr(signal, options.signal))


class SteppingTransport(Transport):
    """Opens sessions that die or dawdle."""

    def __init__(self, inner: Transport, options: argparse.Namespace) -> None:
        self.scheme = inner.scheme
        self._inner = inner
        self._options = options
        self._rng = random.Random(options.seed)  # noqa: S311  # a schedule, no secret

    def listen(self, address: Address, options: Options) -> AbstractAsyncContextManager[Listener]:
        """Not used by a producer."""
        return self._inner.listen(address, options)

    async def connect(self, address: Address, hello: bytes, options: Options) -> RemoteMemory:
        """Open a session; again, if another one's fence took it along while it was being opened."""
        for _ in range(_CONNECTS_MAX - 1):
            try:
                return await self._connect(address, hello, options)
            except ConnectFailed as error:
                if not isinstance(error.__cause__, PeerLost):
                    raise
        return await self._connect(address, hello, options)

    async def _connect(self, address: Address, hello: bytes, options: Options) -> RemoteMemory:
        return SteppingMemory(await self._inner.connect(address, hello, options), self._options, self._rng)


async def send_all(options: argparse.Namespace) -> None:
    """Send what the receiver does not have yet."""
    address = Address.parse(options.address)
    transport = SteppingTransport(transport_for(address), options)
    async with open_sender(address, options.identity, transport=transport) as sender:
        for number in range(sender.delivered, options.count):
            assert await sender.send(body_of(options.identity, number, options.longer)) == number
            if options.longer:
                await sender.drained()  # what is pulled from this process is safe when it was pulled
        await sender.drained()


def main() -> None:
    """Read the arguments and send."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("identity")
    parser.add_argument("count", type=int)
    parser.add_argument("--number", type=int, default=-1)
    parser.add_argument("--step", choices=STEPS)
    parser.add_argument(
        "--rival", action="store_true", help="the chosen message loses its swap, and claims its room"
    )
    parser.add_argument("--longer", type=int, default=0, help="bytes added to each message")
    parser.add_argument("--signal", default="SIGKILL")
    parser.add_argument("--dawdle", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(send_all(parser.parse_args()))


if __name__ == "__main__":
    main()
