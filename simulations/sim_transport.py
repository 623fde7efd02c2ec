"""``sim://host/name``: remote memory over the simulated network.

Everything that a wire and an adapter may do to an operation happens here: a posted write lands in
pieces, long after ``post`` has returned, read from the sender's memory at the last moment; a fence
takes time, in which more of them land; a session that breaks leaves a part of a chain behind. Where the
weather is one-sided, operations land though the owner's process is paused; else its loop carries them
out, between its other steps.
"""

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

from attrs import frozen

from simulations.loop import Process
from simulations.sim_memory import SimMemory
from simulations.sim_network import Host, Network, Wire
from simulations.sim_region import Hooks, SimRegion, SimSession
from transports.address import Address
from transports.background import Background
from transports.device_memory import DeviceMemory
from transports.errors import (
    AuthenticationFailed,
    HandshakeRefused,
    ListenFailed,
    OperationTimeout,
    PeerLost,
    TransportError,
    UnknownRegion,
)
from transports.memory import (
    Accept,
    Accepted,
    Claimant,
    Keeper,
    Listener,
    Options,
    Region,
    RemoteMemory,
    Transport,
)

SCHEME: Final = "sim"


@frozen(eq=False)
class Knock:
    """A producer's first parcel."""

    address: Address
    hello: bytes
    secret: bytes | None
    admitted: Callable[["SimSession", Accepted], None]


class SimTransport(Transport):
    """The way of one process into the network."""

    scheme = SCHEME

    def __init__(self, network: Network, host: Host) -> None:
        self._network = network
        self._host = host
        assert host.process is not None, "a process has moved in"
        self._process: Process = host.process

    def listen(self, address: Address, options: Options) -> AbstractAsyncContextManager[Listener]:
        """Listen at this process's host; raises ``ListenFailed`` if it listens already, or elsewhere."""
        return self._listening(address, options)

    @asynccontextmanager
    async def _listening(self, address: Address, options: Options) -> AsyncIterator[Listener]:
        if self._host.guest is not None or address.host != self._host.name:
            raise ListenFailed(f"{address} is in use, or not at {self._host.name}")
        listener = SimListener(self._network, self._process, address.region(""), options)
        self._host.guest = listener
        try:
            yield listener
        finally:
            if self._host.guest is listener:
                self._host.guest = None
            await listener.close()

    async def connect(self, address: Address, hello: bytes, options: Options) -> RemoteMemory:
        """Open a session on a region of another host."""
        answer: asyncio.Future[tuple[SimSession, Accepted]] = asyncio.get_running_loop().create_future()

        def admitted(session: SimSession, accepted: Accepted) -> None:
            if not answer.done():
                answer.set_result((session, accepted))

        def refused(error: TransportError) -> None:
            if not answer.done():
                answer.set_exception(error)

        self._check_alive()
        knock = Knock(address, hello, options.secret, admitted)
        wire = self._network.connect(self._host, address.host, knock)
        wire.tell_near = refused
        try:
            async with asyncio.timeout(options.connect_timeout_seconds):
                session, accepted = await answer
        except TimeoutError:
            wire.close()
            raise OperationTimeout(
                f"{address} did not accept within {options.connect_timeout_seconds} s"
            ) from None
        except asyncio.CancelledError:
            wire.close()
            raise
        return SimMemory(session, accepted, wire, self._network)

    def _check_alive(self) -> None:
        if self._host.process is not self._process:
            raise PeerLost("this process is dead: nothing it does has an effect")


class SimListener(Listener):
    """What a process serves at its host."""

    def __init__(self, network: Network, process: Process, address: Address, options: Options) -> None:
        self._network = network
        self._process = process
        self._address = address
        self._options = options
        self._regions: dict[str, SimRegion] = {}
        self._background = Background(self._failed)

    @property
    def address(self) -> Address:
        """The address as given."""
        return self._address

    async def register(
        self,
        name: str,
        size_bytes: int,
        *,
        accept: Accept,
        on_notify: Callable[[], None],
        on_session_lost: Callable[[int], None],
        device: DeviceMemory | None = None,
        keeper: Keeper | None = None,
        claimant: Claimant | None = None,
    ) -> Region:
        """Serve zeroed memory under ``name``; raises ``ValueError`` if the name is taken."""
        assert device is None, "no node has an inbox in a device's memory"
        if name in self._regions:
            raise ValueError(f"{self._address.region(name)} serves a region of this name already")
        hooks = Hooks(accept, on_notify, on_session_lost, lambda: self._regions.pop(name), claimant)
        region = self._regions[name] = SimRegion(
            self._network, self._process, self._address.region(name), size_bytes, hooks
        )
        return region

    def knock(self, wire: Wire, knock: object) -> None:
        """A producer has arrived; runs in this process."""
        assert isinstance(knock, Knock), "nothing else is sent first"
        region = self._regions.get(knock.address.name)
        if not hmac.compare_digest(self._options.secret or b"", knock.secret or b""):
            wire.refuse(AuthenticationFailed(f"{self._address} has another cluster secret"))
        elif region is None:
            wire.refuse(UnknownRegion(f"{self._address} serves no region {knock.address.name!r}"))
        else:
            self._background.start(self._admit(region, wire, knock))

    async def _admit(self, region: "SimRegion", wire: Wire, knock: Knock) -> None:
        try:
            accepted = await region.hooks.accept(knock.hello)
        except HandshakeRefused as error:
            wire.refuse(error)
            return
        except TransportError as error:
            wire.refuse(HandshakeRefused(str(error)))
            return
        if region.is_closed:
            wire.refuse(UnknownRegion(f"{region.address} was closed while the session was opened"))
            return
        session = SimSession(region, accepted.session, wire, knock.hello)
        region.enter(session)
        wire.back.send(lambda: knock.admitted(session, accepted))

    async def close(self) -> None:
        """Close every region."""
        await self._background.stop()
        for region in list(self._regions.values()):
            region.shut()

    def _failed(self, error: BaseException) -> None:
        loop = asyncio.get_running_loop()
        loop.call_exception_handler({"message": "a listener failed", "exception": error})
