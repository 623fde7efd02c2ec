"""How a sender gets to its receiver, and back to it: connecting, and telling it from its successor."""

import asyncio
import random
from collections.abc import Callable
from typing import Final

from attrs import define, field, frozen

from transports.address import Address
from transports.errors import (
    ChannelClosed,
    ConnectFailed,
    HandshakeRefused,
    IdentityRefused,
    LayoutMismatch,
    OperationTimeout,
    PeerLost,
    ProtocolError,
    TransportError,
)
from transports.introductions import Hello, Welcome
from transports.memory import Options, RemoteMemory, Transport
from transports.ring import Producer
from transports.sender_lender import Lender, Terms

_RECONNECT_PAUSE_SECONDS: Final = (0.02, 0.5)
"""First and longest pause between two attempts to reach a receiver again."""
_DOUBLINGS_MAX: Final = 10


@frozen
class Patience:
    """How long a sender tries before it calls its receiver gone."""

    reconnect_seconds: float = 2.0
    """Nobody answers at the address for this long."""
    pull_seconds: float = 5.0
    """On a regular exit, the receiver pulls what it was offered within this time."""


@frozen(eq=False)
class Session:
    """One session and the producer that runs on it."""

    memory: RemoteMemory
    producer: Producer
    welcome: Welcome
    lender: Lender


@define(eq=False)
class Link:
    """The way to one receiver under one identity.

    Args:
        transport: Opens the sessions.
        address: The receiver's, with the region's name.
        identity: Under which the receiver counts our messages across sessions.
        options: Secret, bounds and certificates.
        patience: How long to try again.
        terms: What is lent to the receiver.
        clock: Monotonic seconds.
        rng: Draws the jitter between attempts.
    """

    transport: Transport
    address: Address
    identity: str
    options: Options
    patience: Patience
    terms: Terms
    clock: Callable[[], float]
    rng: random.Random
    _generation: int | None = field(default=None, init=False)
    _taken: int = field(default=0, init=False)
    """How many messages the receiver had when the last session began."""
    _in_vain: int = field(default=0, init=False)
    """Sessions in a row in which it has taken none."""

    async def open(self) -> Session:
        """Open the first session; raises what ``Transport.connect`` raises, and ``LayoutMismatch``."""
        memory = await self.transport.connect(self.address, self._hello(), self.options)
        return await self._begin(memory)

    async def open_again(self, cause: TransportError, sent: int, delivered: int = 0) -> Session:
        """Open a new session after ``cause`` ended the last one.

        Args:
            cause: Why the last session ended.
            sent: How many messages this identity has sent.
            delivered: How many of them were seen to be taken.

        Raises:
            IdentityRefused: The receiver takes nothing from this identity any more.
            PeerLost: The receiver is gone: nobody answers within our patience, the region is no longer
                served, or a new receiver has its name.
        """
        await self._pause_after_vain_ones()
        give_up_at = self.clock() + self.patience.reconnect_seconds
        pause, longest = _RECONNECT_PAUSE_SECONDS
        while True:
            try:
                memory = await self.transport.connect(self.address, self._hello(), self.options)
            except IdentityRefused:
                raise
            except HandshakeRefused as error:
                raise PeerLost(f"{self.address} does not take {self.identity!r} back: {error}") from error
            except (ConnectFailed, OperationTimeout, PeerLost) as error:
                if self.clock() >= give_up_at:
                    raise PeerLost(
                        f"{self.address} is gone: {cause}; then, for {self.patience.reconnect_seconds} s:"
                        f" {error}"
                    ) from error
            else:
                session = await self._begin(memory)
                taken = session.welcome.first_number
                if delivered <= taken <= sent:
                    return session
                await memory.close()
                why = (
                    "another sender uses this identity" if taken > sent else "it has forgotten this identity"
                )
                raise PeerLost(
                    f"{self.address} has {taken} messages of {self.identity!r}, of which we sent {sent} and"
                    f" knew {delivered} to be taken: {why}"
                )
            await asyncio.sleep(pause * self.rng.uniform(0.5, 1.0))
            pause = min(2 * pause, longest)

    async def _pause_after_vain_ones(self) -> None:
        """Wait where the receiver answers and then ends each session, before all is sent once more.

        So does one that cannot get memory for what it should pull, or whose sender changes what it lends. It
        may be over soon; without a pause both sides would be busy with nothing else.
        """
        if self._in_vain > 1:
            pause, longest = _RECONNECT_PAUSE_SECONDS
            pause *= 2.0 ** min(self._in_vain, _DOUBLINGS_MAX)
            await asyncio.sleep(min(pause, longest) * self.rng.uniform(0.5, 1.0))

    def reason_of(self, failure: BaseException) -> TransportError:
        """What ends the channel, as its callers are told it."""
        if isinstance(failure, TransportError):
            return failure
        reason = ChannelClosed(f"the sender {self.identity!r} to {self.address} failed: {failure!r}")
        reason.__cause__ = failure
        return reason

    def _hello(self) -> bytes:
        return Hello(self.identity).to_bytes()

    async def _begin(self, memory: RemoteMemory) -> Session:
        """Start a producer on a new session, if it is still the same receiver that gave it."""
        try:
            welcome = Welcome.from_bytes(memory.welcome)
            if self._generation not in {None, welcome.generation}:
                raise PeerLost(
                    f"{self.address} was replaced by a new receiver, which knows nothing of before"
                )
            geometry, beside = welcome.geometry, memory.capabilities.device_bytes
            if beside != (geometry.payload_bytes if geometry.is_apart else 0):
                raise LayoutMismatch(
                    f"{self.address} has {beside} bytes of a device's memory beside its region, which does"
                    f" not fit {geometry}: run the same release on both sides"
                )
            if not 1 <= memory.session <= welcome.geometry.session_count:
                raise ProtocolError(
                    f"{self.address} opened session {memory.session} of {welcome.geometry.session_count}"
                )
            producer = Producer(
                welcome.geometry,
                session=memory.session,
                generation=welcome.generation,
                first_number=welcome.first_number,
                lease_seconds=welcome.lease_seconds,
                guarded_bytes_max=memory.capabilities.guarded_bytes_max,
                claims=memory.capabilities.claims,
            )
        except BaseException:
            await memory.close()
            raise
        self._in_vain = self._in_vain + 1 if welcome.first_number == self._taken else 0
        self._generation, self._taken = welcome.generation, welcome.first_number
        return Session(memory, producer, welcome, Lender(memory, welcome, self.terms))
