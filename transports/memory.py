"""One-sided access to another host's memory: what every transport implements.

Two sides::

    producer's host                                 owner's host
    Transport.connect(address, hello)  ---------->  Listener, Region.accept(hello) -> welcome
    RemoteMemory (one *session*)       read/cas/..  Region.view (plain memory, never copied)
                                       post -------> Region.on_notify()
                                                    Region.fence(session)
    export(buffers) -> key  <----- bytes -------    Region.pull(session, key, into)

A transport carries bytes and words; it knows nothing of rings, messages or requests. ``hello`` and
``welcome`` are short opaque byte strings by which the layer above agrees on identity, generation
and geometry; the number of the session is chosen by the owner's ``accept``.

An operation outside the region, or on a word that is not aligned, changes nothing and ends the
session with ``ProtocolError``: the owner never trusts an offset.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeAlias

from attrs import field, frozen

from transports.address import Address
from transports.device_memory import Device, DeviceError, DeviceMemory
from transports.errors import DeviceUnreachable, ExportGone
from transports.operations import Bytes, Chain, Claim, Claimed, CompareAndSwap, Expired, Guarded, Put


class Atomics(enum.Enum):
    """Who executes compare-and-swap and fetch-and-add."""

    ADAPTER = "adapter"
    """The network adapter: atomic among remote peers, perhaps not with the owner's processor."""
    OWNER = "owner"
    """The owner's runtime, on receipt of a message."""


@frozen
class Capabilities:
    """What a transport can do; programs and channels choose by it, never by a scheme's name."""

    atomics: Atomics
    one_sided: bool
    """Posted writes land without the owner's processor."""
    fences_sessions: bool
    """One session can be revoked alone; otherwise the whole region is retired."""
    guarded_bytes_max: int = 0
    """Largest chain that may ride behind a swap in one ``Guarded``; 0: not supported."""
    claims: bool = False
    """The owner executes a whole reservation (``RemoteMemory.claim``)."""
    zero_copy_send: bool = True
    """Buffers are handed to the wire without being joined or copied in user space."""
    pull_share: float = 0.0
    """0: nothing can be exported. Otherwise what is longer than this share of the payload ring is pulled by
    the owner; 1: only what the ring cannot hold at all, because writing it costs less than pulling it."""
    pull_bytes: int = 0
    """0, or: what is longer is pulled although the ring could hold it, because pulling it costs less."""
    device_bytes: int = 0
    """Memory of a device beside the region, that ``put`` reaches; 0: none."""
    wire: str = ""
    """What carries the bytes, for people: ``tcp``, ``shm (sysv/memory)``."""


@frozen
class Accepted:
    """The owner's answer to a producer that may write: the session's number and the welcome."""

    session: int
    welcome: bytes


@frozen
class Options:
    """Settings of one listener or connection; bounds and secrets, no behaviour of the ring."""

    secret: bytes | None = field(default=None, repr=False)
    """Cluster secret, proven by challenge and response in the handshake; never sent."""
    connect_timeout_seconds: float = 5.0
    operation_timeout_seconds: float = 30.0
    silence_seconds: float = 10.0
    """A peer of which nothing is heard or taken for this long is lost, though its connection stands."""
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_authority: str | None = None


Accept: TypeAlias = Callable[[bytes], Awaitable[Accepted]]
"""Called with a producer's hello; raises ``HandshakeRefused`` with the reason to say no.

It may wait, because an earlier session of the same producer has to be fenced first. If the producer
is gone when the answer comes, ``on_session_lost`` follows for the session it names. Between the answer
and the moment from which ``fence`` knows the session the transport must not suspend.
"""


Claimant: TypeAlias = Callable[[memoryview, int, int], Claimed]
"""Executes a ``Claim`` in a region's memory: the region's view, the session's number, the length asked for.

Called on the event loop, for a session that is open. The length comes from outside. Raises ``ProtocolError``,
and nothing has changed, if there can be no such reservation.
"""


class Keeper(Protocol):
    """The layer above, where device memory lies beside a region: it alone knows what of that is whole."""

    def renew(self, view: memoryview) -> DeviceMemory:
        """Other memory of the device, into which what is whole was taken over.

        Called when the region is retired, while writes may go on landing in the device memory of before.

        Args:
            view: The region's new memory, a copy of the old one.

        Raises:
            DeviceError: There is no memory left, or the device fails.
        """
        ...

    def failed(self, error: DeviceError) -> None:
        """There is no other memory to be had: the region is closed."""
        ...


class RemoteMemory(ABC):
    """A session: one producer's access to one region.

    Every method may raise ``PeerLost`` (connection gone), ``SessionFenced`` (the owner revoked us),
    ``ChannelClosed`` (we closed it), ``ProtocolError`` (one side broke a rule) or
    ``OperationTimeout``. After any of the first four every later call raises the same. Cancelling a
    call leaves the operation posted: it may still take place. An operation may be begun by one task
    and finished by another, so it must not depend on which one is current (no ``asyncio.timeout``);
    ``wait_notified``, ``flush`` and ``close`` are called from one task to their end.
    """

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this session's wire can do."""

    @property
    @abstractmethod
    def session(self) -> int:
        """The number the owner gave this session."""

    @property
    @abstractmethod
    def welcome(self) -> bytes:
        """What the owner answered to our hello."""

    @abstractmethod
    async def read(self, offset: int, length: int) -> Bytes:
        """Fetch bytes of the region."""

    @abstractmethod
    async def compare_and_swap(self, swap: CompareAndSwap) -> int | Expired:
        """Swap a word; the word found is the outcome."""

    @abstractmethod
    async def fetch_and_add(self, offset: int, addend: int) -> int:
        """Add to a word, modulo 2**64; the word found is the outcome."""

    @abstractmethod
    async def post(self, chain: Chain) -> None:
        """Post writes in order; returns when they are accepted for sending, not when they landed.

        Applies back-pressure: while the send queue is full the call waits.
        """

    @abstractmethod
    async def guarded(self, guarded: Guarded) -> int | Expired:
        """Swap and, if it took place, the chain; only where ``guarded_bytes_max`` allows it."""

    @abstractmethod
    async def wait_notified(self, timeout_seconds: float) -> bool:
        """Wait for a nudge from the owner that its ring moved; False when the time is over.

        A nudge given after the owner carried out this session's latest read or swap counts, so none is
        missed between looking and waiting. Where the wire has no nudges this is a plain wait.
        """

    @abstractmethod
    async def flush(self) -> None:
        """Return when all that was posted before has landed."""

    @abstractmethod
    async def close(self) -> None:
        """End the session; idempotent. What was posted may or may not land."""

    # Only where ``Capabilities.claims``.

    async def claim(self, claim: Claim) -> Claimed:
        """Have the owner reserve; the outcome counts as a look at the region (``wait_notified``)."""
        raise AssertionError(f"{type(self).__name__} declares no claims")

    # Only where ``Capabilities.device_bytes`` is not 0.

    async def put(self, put: Put) -> None:
        """Post bytes into the device memory beside the region; as ``post``, and in order with other puts."""
        raise AssertionError(f"{type(self).__name__} declares no device_bytes, so it puts nothing")

    def reach(self, device: Device) -> None:
        """Make ready to put bytes that lie on this device; raises ``DeviceUnreachable``.

        May be repeated, and left out: then ``put`` does it, and raises the same. A session that has ended
        raises nothing.
        """
        raise DeviceUnreachable(
            f"the inbox is not in a device's memory, so bytes on {device.name} cannot be sent to it; copy"
            " them to the host first, or open the receiver with memory="
        )

    # Only where ``Capabilities.pull_share`` is not 0.

    async def prepare_export(self, length: int) -> None:  # noqa: B027 - most have nothing to prepare
        """Called before an ``export`` of so many bytes: what lets the owner fetch them by a better way."""

    def export(self, buffers: Sequence[Bytes]) -> bytes:
        """Let the owner pull the concatenation of ``buffers``, which must not change meanwhile.

        Returns:
            A key of at most ``KEY_BYTES_MAX`` bytes, by which the owner names this export. No other one
            of this session ever has it, so that bytes of another one are never taken for these.
        """
        raise AssertionError(f"{type(self).__name__} declares no pull_share, so it exports nothing")

    def withdraw(self, key: bytes) -> None:
        """End an export: its buffers may change now. The session's end ends it too."""
        raise AssertionError(f"{type(self).__name__} exports nothing")


class Region(ABC):
    """A registered block of the owner's memory, served under a name."""

    @property
    @abstractmethod
    def view(self) -> memoryview:
        """The memory itself: writable, format ``B``, 64-byte aligned.

        When a session ends, by a fence or otherwise, other memory with the same bytes may take its place.
        Views taken before stay readable; what is written belongs into the view that is there now.
        """

    @property
    @abstractmethod
    def address(self) -> Address:
        """Where producers connect to, name included."""

    @abstractmethod
    async def fence(self, sessions: Sequence[int]) -> None:
        """Revoke these sessions; when it returns no write of theirs can land any more.

        Unknown or already closed sessions are no error. Where a session cannot be revoked alone, others
        end too and are reported as lost. Raises ``ChannelClosed`` if none can be revoked, since there is no
        other memory of a device to be had; the region is closed then.
        """

    async def pull(self, session: int, key: bytes, into: memoryview) -> int | None:
        """Fetch all of what a session exports under ``key``; only where its ``pull_share`` is not 0.

        Returns the xxh3-64 of what is in ``into`` then, if it was computed on the way.

        Raises ``PeerLost`` or ``SessionFenced`` if the session ended before the last byte was read,
        ``ExportGone`` if the export ended or has another length, ``OperationTimeout`` if nothing comes.
        Then, and after a cancellation, ``into`` may still be written to: use other memory the next time.
        """
        raise ExportGone(
            f"session {session} offers {len(into)} bytes under a key of {len(key)}, and"
            f" {type(self).__name__} pulls nothing"
        )

    @abstractmethod
    def nudge(self) -> None:
        """Wake producers that wait for room (``RemoteMemory.wait_notified``)."""

    @abstractmethod
    async def close(self) -> None:
        """Revoke all sessions and stop serving the name; idempotent."""


class Listener(ABC):
    """A bound address under which regions are served."""

    @property
    @abstractmethod
    def address(self) -> Address:
        """The address really bound (a port 0 is replaced by the port given)."""

    @abstractmethod
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
        """Serve ``size_bytes`` of zeroed memory under ``name``.

        ``claimant`` executes claims. A transport whose atomics are the adapter's asks it for none: there the
        owner's processor must not change the tail.

        ``device`` is memory of a device beside it, into which producers may put. A transport takes it only if
        adapters or the device itself write there. Where it cannot revoke one session alone it asks
        ``keeper`` for other memory when the region is retired: what lies on a device has no hash, so a plain
        copy of it would tell nothing. Raises ``DeviceUnreachable`` if it does not take it.

        ``on_notify`` runs on the event loop after a chain with ``notify`` landed; ``on_session_lost``
        when a session ended without a fence (its process died or closed it). Raises ``ValueError``
        if the name is taken, ``ListenFailed`` if there is no memory for it.
        """


class Transport(ABC):
    """A scheme's implementation; stateless but for what its listeners hold."""

    scheme: str

    @abstractmethod
    def listen(self, address: Address, options: Options) -> AbstractAsyncContextManager[Listener]:
        """Bind; raises ``ListenFailed``. Leaving the context closes every region and session."""

    @abstractmethod
    async def connect(self, address: Address, hello: bytes, options: Options) -> RemoteMemory:
        """Open a session on the region that ``address`` names.

        Raises ``ConnectFailed``, ``HandshakeRefused`` and its kinds, ``OperationTimeout``.
        """

    def check(self, address: Address) -> None:  # noqa: B027  # whoever knows no options may leave it out
        """Raise ``AddressError`` for options that mean nothing, before anybody listens or connects."""
