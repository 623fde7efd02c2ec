"""The transport inside one process: sessions act on the owner's memory directly.

``local://house/name`` joins tasks of one event loop. Each operation is carried out at once and
whole, so atomicity and order need no further care; a fence marks the session, and a marked session
refuses to act. It is what ``onepiece dev`` runs on, and the reference that other transports are
compared with.
"""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

from attrs import define, evolve, field, frozen

from transports.address import Address
from transports.device_memory import Device, DeviceError, DeviceMemory, check_same
from transports.errors import (
    AddressError,
    AuthenticationFailed,
    ChannelClosed,
    ConnectFailed,
    DeviceUnreachable,
    ExportGone,
    HandshakeRefused,
    ListenFailed,
    OperationTimeout,
    PeerLost,
    ProtocolError,
    SessionFenced,
    TransportError,
    UnknownRegion,
)
from transports.memory import (
    Accept,
    Accepted,
    Atomics,
    Capabilities,
    Claimant,
    Keeper,
    Listener,
    Options,
    Region,
    RemoteMemory,
    Transport,
)
from transports.operations import EXPIRED, Bytes, Chain, Claim, Claimed, CompareAndSwap, Expired, Guarded, Put
from transports.region_memory import RegionMemory, wanted_for
from transports.sessions import Ending

_CAPABILITIES: Final = Capabilities(
    atomics=Atomics.OWNER,
    one_sided=True,
    fences_sessions=True,
    guarded_bytes_max=1 << 32,
    zero_copy_send=True,
    pull_share=1.0,
    wire="memory",
)


class LocalTransport(Transport):
    """Serves and reaches regions of this process."""

    scheme = "local"

    def check(self, address: Address) -> None:
        """Raise ``AddressError`` for any option."""
        if address.options:
            raise AddressError(f"{address}: local has no options")

    def listen(self, address: Address, options: Options) -> AbstractAsyncContextManager[Listener]:
        """Take the host's name within this process; raises ``ListenFailed`` if it is taken."""
        self.check(address)
        return self._listening(address, options)

    @asynccontextmanager
    async def _listening(self, address: Address, options: Options) -> AsyncIterator[Listener]:
        if address.host in _LISTENERS:
            raise ListenFailed(f"{address} is in use in this process; choose another name after local://")
        listener = LocalListener(address.region(""), options)
        _LISTENERS[address.host] = listener
        try:
            yield listener
        finally:
            del _LISTENERS[address.host]
            listener.close()

    async def connect(self, address: Address, hello: bytes, options: Options) -> RemoteMemory:
        """Open a session on a region of this process."""
        self.check(address)
        listener = _LISTENERS.get(address.host)
        if listener is None:
            raise ConnectFailed(f"nobody listens on {address} in this process")
        listener.admit(options)
        region = listener.find(address.name)
        session = _Session()
        try:
            async with asyncio.timeout(options.connect_timeout_seconds):
                accepted = await region.accept(hello)
        except TimeoutError:
            raise OperationTimeout(
                f"{address} did not accept within {options.connect_timeout_seconds} s"
            ) from None
        except HandshakeRefused:
            raise
        except TransportError as error:
            raise HandshakeRefused(str(error)) from error
        region.enter(accepted.session, session)
        return LocalMemory(region, accepted, session)


class LocalListener(Listener):
    """A name taken in this process."""

    def __init__(self, address: Address, options: Options) -> None:
        self._address = address
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._regions: dict[str, LocalRegion] = {}

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
        if name in self._regions:
            raise ValueError(f"{self._address.region(name)} serves a region of this name already")
        place = self._address.region(name)
        with wanted_for(place, size_bytes):
            memory = RegionMemory(size_bytes)
        region = LocalRegion(
            place,
            memory,
            accept=accept,
            on_notify=on_notify,
            on_session_lost=on_session_lost,
            on_closed=lambda: self._regions.pop(name),
            device=device,
            claimant=claimant,
        )
        self._regions[name] = region
        return region

    def admit(self, options: Options) -> None:
        """Refuse whoever lives on another event loop or has another secret."""
        if asyncio.get_running_loop() is not self._loop:
            raise ConnectFailed(
                f"{self._address} belongs to another event loop of this process; threads with loops of"
                " their own reach each other over tcp://127.0.0.1"
            )
        ours, theirs = self._options.secret, options.secret
        if (ours is None) != (theirs is None) or not hmac.compare_digest(ours or b"", theirs or b""):
            raise AuthenticationFailed(
                f"{self._address} has another cluster secret; give both sides the same"
            )

    def find(self, name: str) -> "LocalRegion":
        """The region of this name; raises ``UnknownRegion``."""
        region = self._regions.get(name)
        if region is None:
            raise UnknownRegion(f"{self._address} serves no region {name!r}")
        return region

    def close(self) -> None:
        """Close every region."""
        for region in list(self._regions.values()):
            region.shut()


@define(eq=False)
class _Session:
    """What the two sides of one session share: whether it may still act."""

    ending: Ending = field(factory=Ending)
    nudged: asyncio.Event = field(factory=asyncio.Event)
    """Set by the owner's nudge, cleared by the session's next look at the region."""
    exports: dict[bytes, tuple[Bytes, ...]] = field(factory=dict)
    exported: int = 0
    """How many there were."""

    def end(self, reason: TransportError) -> bool:
        """End the session and wake whoever waits on it."""
        first = self.ending.reach(reason)
        self.exports.clear()
        self.nudged.set()
        return first


@frozen(eq=False)
class _Hooks:
    """What the layer above wants to be told."""

    accept: Accept
    on_notify: Callable[[], None]
    on_session_lost: Callable[[int], None]
    on_closed: Callable[[], object]


class LocalRegion(Region):
    """Memory of this process and the sessions that act on it."""

    def __init__(
        self,
        address: Address,
        memory: RegionMemory,
        *,
        accept: Accept,
        on_notify: Callable[[], None],
        on_session_lost: Callable[[int], None],
        on_closed: Callable[[], object],
        device: DeviceMemory | None = None,
        claimant: Claimant | None = None,
    ) -> None:
        self.memory = memory
        self.device = device
        self.claimant = claimant
        self._address = address
        self._hooks = _Hooks(accept, on_notify, on_session_lost, on_closed)
        self._sessions: dict[int, _Session] = {}
        self._closed = False

    @property
    def view(self) -> memoryview:
        """The memory itself."""
        return self.memory.view

    @property
    def address(self) -> Address:
        """Where producers connect to."""
        return self._address

    async def accept(self, hello: bytes) -> Accepted:
        """Ask the layer above whether this producer may write."""
        return await self._hooks.accept(hello)

    def enter(self, number: int, session: _Session) -> None:
        """Let a session that was accepted act; raises ``UnknownRegion`` if the region closed meanwhile."""
        if self._closed:
            raise UnknownRegion(f"{self._address} was closed while the session was opened")
        assert number not in self._sessions, f"session {number} is open"
        self._sessions[number] = session

    def notify(self) -> None:
        """A chain with ``notify`` has landed."""
        self._hooks.on_notify()

    def leave(self, number: int, session: _Session) -> None:
        """A session ended on its producer's side."""
        if self._sessions.get(number) is session:
            del self._sessions[number]
            self._hooks.on_session_lost(number)

    async def pull(self, session: int, key: bytes, into: memoryview) -> None:
        """Copy an export, at once."""
        found = self._sessions.get(session)
        if found is None:
            raise PeerLost(f"session {session} of {self._address} is over")
        buffers = found.exports.get(key)
        if buffers is None or sum(map(len, buffers)) != len(into):
            raise ExportGone(f"session {session} of {self._address} does not export this (any more)")
        _copy(buffers, into)

    async def fence(self, sessions: Sequence[int]) -> None:
        """Revoke sessions; they act on the memory through their object only, so this is at once."""
        for number in sessions:
            session = self._sessions.pop(number, None)
            if session is not None:
                session.end(SessionFenced(f"{self._address} fenced session {number}; open a new one"))

    def nudge(self) -> None:
        """Wake producers that wait for room."""
        for session in self._sessions.values():
            session.nudged.set()

    async def close(self) -> None:
        """Revoke all sessions and stop serving the name."""
        self.shut()

    def shut(self) -> None:
        """Like ``close``, which never has to wait here."""
        if self._closed:
            return
        self._closed = True
        self._hooks.on_closed()
        for session in self._sessions.values():
            session.end(PeerLost(f"{self._address} was closed by its owner"))
        self._sessions.clear()


class LocalMemory(RemoteMemory):
    """A session that acts on the owner's memory at once."""

    def __init__(self, region: LocalRegion, accepted: Accepted, session: _Session) -> None:
        self._region = region
        self._memory = region.memory
        self._accepted = accepted
        self._session = session

    @property
    def capabilities(self) -> Capabilities:
        """Everything that memory of one process allows."""
        device, claims = self._region.device, self._region.claimant is not None
        return evolve(_CAPABILITIES, claims=claims, device_bytes=0 if device is None else device.size_bytes)

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
        self._session.ending.check()
        self._session.nudged.clear()
        try:
            return self._memory.read(offset, length)
        except ProtocolError as error:
            raise self._break(error) from None

    async def compare_and_swap(self, swap: CompareAndSwap) -> int | Expired:
        """Swap a word; the word found is the outcome."""
        self._session.ending.check()
        self._session.nudged.clear()
        return self._swap(swap)

    async def claim(self, claim: Claim) -> Claimed:
        """Reserve, at once."""
        self._session.ending.check()
        self._session.nudged.clear()
        assert self._region.claimant is not None, "capabilities say that there are claims"
        try:
            return self._region.claimant(self._memory.view, self.session, claim.length)
        except ProtocolError as error:
            raise self._break(error) from None

    async def fetch_and_add(self, offset: int, addend: int) -> int:
        """Add to a word, modulo 2**64; the word found."""
        self._session.ending.check()
        try:
            return self._memory.fetch_and_add(offset, addend)
        except ProtocolError as error:
            raise self._break(error) from None

    async def post(self, chain: Chain) -> None:
        """Carry out the writes in order."""
        self._session.ending.check()
        self._write(chain, self._spans(chain))

    async def put(self, put: Put) -> None:
        """Copy into the device's memory, at once."""
        self._session.ending.check()
        device = self._region.device
        assert device is not None, "capabilities say that there is none"
        try:
            device.put(put.offset, put.buffers)
        except ProtocolError as error:
            raise self._break(error) from None
        except DeviceError as error:
            # No session would do better, so it ends the sender and not only this session.
            failed = f"{device.device.name} failed as bytes were put into {self._region.address}: {error}"
            raise self._break(DeviceUnreachable(failed)) from error

    def reach(self, device: Device) -> None:
        """Copies are made within one device."""
        if self._region.device is None:
            super().reach(device)
        else:
            check_same(self._region.device.device, device)

    async def guarded(self, guarded: Guarded) -> int | Expired:
        """Swap and, if it took place, the chain."""
        self._session.ending.check()
        self._session.nudged.clear()
        spans = self._spans(guarded.chain)
        found = self._swap(guarded.swap)
        if found == guarded.swap.expected:
            self._write(guarded.chain, spans)
        return found

    async def wait_notified(self, timeout_seconds: float) -> bool:
        """Wait for a nudge from the owner."""
        self._session.ending.check()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._session.nudged.wait()
        except TimeoutError:
            return False
        self._session.ending.check()
        return True

    async def flush(self) -> None:
        """Everything posted has landed already."""
        self._session.ending.check()

    async def close(self) -> None:
        """End the session."""
        if self._session.end(ChannelClosed(f"the session on {self._region.address} was closed by us")):
            self._region.leave(self.session, self._session)

    def export(self, buffers: Sequence[Bytes]) -> bytes:
        """Let the owner copy these bytes."""
        self._session.ending.check()
        self._session.exported += 1
        key = self._session.exported.to_bytes(8, "little")
        self._session.exports[key] = tuple(buffers)
        return key

    def withdraw(self, key: bytes) -> None:
        """End an export."""
        self._session.exports.pop(key, None)

    def _swap(self, swap: CompareAndSwap) -> int | Expired:
        if time.monotonic() > swap.not_after:
            return EXPIRED
        try:
            return self._memory.compare_and_swap(swap.offset, swap.expected, swap.desired)
        except ProtocolError as error:
            raise self._break(error) from None

    def _spans(self, chain: Chain) -> list[memoryview]:
        """Where the writes go; all are checked before any byte moves."""
        try:
            return [self._memory.span(write.offset, write.length) for write in chain.writes]
        except ProtocolError as error:
            raise self._break(error) from None

    def _write(self, chain: Chain, spans: list[memoryview]) -> None:
        for span, write in zip(spans, chain.writes, strict=True):
            _copy(write.buffers, span)
        if chain.notify:
            self._region.notify()

    def _break(self, error: TransportError) -> TransportError:
        self._session.end(error)
        self._region.leave(self.session, self._session)
        return self._session.ending.error()


def _copy(buffers: Sequence[Bytes], into: memoryview) -> None:
    start = 0
    for buffer in buffers:
        into[start : start + len(buffer)] = buffer
        start += len(buffer)


_LISTENERS: Final[dict[str, LocalListener]] = {}
"""The names taken in this process; an entry lives as long as its listener's context."""
