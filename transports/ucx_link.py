"""A session's own way into its region's memory: what the owner offers, what became of it, and writing.

The owner sends an *offer* once the producer has proven the cluster secret. The producer makes an
endpoint from it and looks at which wire leads to the memory. Only where writes land without the
owner's processor is the endpoint kept, as a ``Link``; everything else goes through the session's
connection as it does over tcp.

Where an offer has memory of a device beside the region, there is no other way to that, so the way is tried
out: the producer puts a *proof* there, drawn by the owner, who looks whether it has come.
"""

import asyncio
import enum
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_void_p
from typing import Final, TypeAlias

from attrs import frozen

from transports._libucp import UcpError
from transports.address import Address
from transports.device_memory import DeviceError, DeviceSpan
from transports.errors import AddressError, ProtocolError
from transports.operations import Bytes, Chain, Put
from transports.ucx_devices import type_of
from transports.ucx_worker import DOORBELL_BYTES, Endpoint, Role, Worker, producers_worker

OFFER_BYTES_MAX: Final = 16 << 10
WIRE_BYTES_MAX: Final = 1 << 10

_JOINED_BYTES_MAX: Final = 16 << 10
"""Buffers shorter than this are joined with their neighbours: a put costs more than the copy."""
_REQUIRE: Final = "require"
PROOF_BYTES: Final = 16
_BESIDE: Final = struct.Struct(f"<QQQ{PROOF_BYTES}s")
OnFailure: TypeAlias = Callable[[UcpError | DeviceError], None]
_RDMA: Final = ("rc_", "dc_")
"""How the names of wires begin whose adapters carry out writes."""


class WireKind(enum.Enum):
    """What carries a session's writes."""

    SHM = "shm"
    """The producer's processor, into memory that both processes have mapped."""
    RDMA = "rdma"
    """The network adapters."""
    TCP = "tcp"
    """The session's connection: the owner's processor carries them out."""


@frozen
class Wire:
    """The wire in use, and what else is to be said of it."""

    kind: WireKind
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind.value} ({self.detail})" if self.detail else self.kind.value

    @classmethod
    def parse(cls, text: str) -> "Wire":
        """Read what ``str`` wrote; raises ``ProtocolError``."""
        kind, _, detail = text.partition(" ")
        if not text.isprintable():
            raise ProtocolError("a wire's name that cannot be printed")
        try:
            return cls(WireKind(kind), detail.removeprefix("(").removesuffix(")"))
        except ValueError as error:
            raise ProtocolError(f"a wire of an unknown kind: {text[:100]!r}") from error


class Requirement(enum.Enum):
    """What an address asks of the wire: ``ucx://host:port?require=rdma``."""

    NOTHING = ""
    SHM = "shm"
    RDMA = "rdma"
    TCP = "tcp"
    ONE_SIDED = "one-sided"

    @classmethod
    def of(cls, address: Address) -> "Requirement":
        """Read an address's options; raises ``AddressError`` for those that mean nothing."""
        unknown = address.options.keys() - {_REQUIRE}
        text = address.options.get(_REQUIRE, "")
        known = [requirement.value for requirement in cls if requirement.value]
        if unknown or (text and text not in known):
            raise AddressError(f"{address}: the only option of ucx is {_REQUIRE}={'|'.join(known)}")
        return cls(text)

    def unmet(self, wire: Wire) -> str | None:
        """What is wrong with this wire; None if it will do."""
        if self is Requirement.NOTHING or self.value == wire.kind.value:
            return None
        if self is Requirement.ONE_SIDED and wire.kind is not WireKind.TCP:
            return None
        return (
            f"{_REQUIRE}={self.value} is asked for and the wire in use is {wire}; look at UCX_TLS, at the"
            " library (that of the extra 'ucx' has neither InfiniBand nor RoCE) and at the devices"
        )


@frozen
class OfferBeside:
    """What a producer needs to put into memory of a device beside the region."""

    memory: int
    """Where it begins, as the owner's process addresses it."""
    size_bytes: int
    proof_at: int
    """The address to which the proof goes, in the margin behind the memory."""
    proof: bytes
    key: bytes

    def to_bytes(self) -> bytes:
        """As it stands in an offer."""
        return _BESIDE.pack(self.memory, self.size_bytes, self.proof_at, self.proof) + self.key

    @classmethod
    def parse(cls, body: bytes) -> "OfferBeside":
        """Read ``to_bytes``; raises ``ProtocolError``."""
        if len(body) <= _BESIDE.size:
            raise ProtocolError(f"an offer of a device's memory in {len(body)} bytes")
        memory, size_bytes, proof_at, proof = _BESIDE.unpack_from(body)
        return cls(memory, size_bytes, proof_at, proof, body[_BESIDE.size :])


@frozen
class Offer:
    """What a producer needs to write by itself."""

    memory: int
    """The address of the region's memory in the owner's process."""
    key: bytes
    """To the memory; empty if the owner has none to lend."""
    doorbell: bytes
    worker: bytes
    """The address of the owner's worker."""
    beside: OfferBeside | None = None

    def to_bytes(self) -> bytes:
        """The body of an ATTACHED frame, whose ``a`` is ``memory``, and ``b`` the key's length."""
        return self.doorbell + self.key + self._beside_bytes + self.worker

    @property
    def beside_bytes(self) -> int:
        """The frame's ``c``: how many bytes of the body are about memory of a device; 0: there is none."""
        return len(self._beside_bytes)

    @property
    def _beside_bytes(self) -> bytes:
        return b"" if self.beside is None else self.beside.to_bytes()

    @classmethod
    def parse(cls, memory: int, key_bytes: int, body: memoryview, beside_bytes: int = 0) -> "Offer":
        """Read an ATTACHED frame; raises ``ProtocolError``."""
        after_key = DOORBELL_BYTES + key_bytes
        after = after_key + beside_bytes
        if after > len(body):
            raise ProtocolError(
                f"an offer of {len(body)} bytes cannot hold a key of {key_bytes} and {beside_bytes} more"
            )
        return cls(
            memory,
            key=bytes(body[DOORBELL_BYTES:after_key]),
            doorbell=bytes(body[:DOORBELL_BYTES]),
            worker=bytes(body[after:]),
            beside=OfferBeside.parse(bytes(body[after_key:after])) if beside_bytes else None,
        )


class Link:
    """Writes to the region's memory without the owner; made by ``open_link``.

    UCX promises no order between puts without a fence, and no way into a device's memory was seen running. So
    whatever is asked for behind a put into such memory waits until that has arrived.

    Args:
        on_failure: Called at most once, when nothing more can be written.
    """

    def __init__(self, worker: Worker, offer: Offer, on_failure: OnFailure) -> None:
        self._worker = worker
        self._offer = offer
        self._on_failure = on_failure
        self._endpoint: Endpoint = worker.connect(offer.worker, self._fail)
        self._key = self._key_beside = c_void_p()
        self._arriving = False
        """What was put into a device's memory is not yet there."""
        self._waiting: deque[Callable[[], None]] = deque()
        self._broken = False
        self._closed = False

    async def connect(self) -> Wire:
        """Finish the connection; the wire that leads to the memory."""
        # The endpoint must be connected before it is given a key: some versions crash otherwise.
        await self._flushed_all("connecting")
        self._key = self._endpoint.unpack(self._offer.key)
        if self._offer.beside is not None:
            self._key_beside = self._endpoint.unpack(self._offer.beside.key)
        lanes = self._endpoint.lanes()
        if self._endpoint.is_mapped(self._offer.memory, self._key):
            return Wire(WireKind.SHM, ", ".join(lanes))
        adapters = [lane for lane in lanes if lane.startswith(_RDMA)]
        if adapters:
            return Wire(WireKind.RDMA, ", ".join(adapters))
        return Wire(WireKind.TCP, f"UCX has only {', '.join(lanes) or 'wires without names'}")

    async def prove(self) -> None:
        """Put the owner's proof into the device's memory; raises ``UcpError`` if no way leads there."""
        beside = self._offer.beside
        if beside is not None:
            self._endpoint.put(beside.proof, beside.proof_at, self._key_beside, self._put)
            await self._flushed_all("putting into the device's memory")

    async def _flushed_all(self, what: str) -> None:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def done(status: int) -> None:
            if not future.done():
                future.set_result(status)

        if not self._endpoint.flush(done):
            self._worker.pump()
            if (status := await future) < 0:
                raise UcpError(status, what)

    def write(self, chain: Chain, landed: Callable[[], None]) -> None:
        """Put a chain's writes in order, then ring the owner's doorbell; calls ``landed`` when they landed.

        All offsets must lie in the region: nobody checks them on the way.
        """
        self._in_turn(lambda: self._write(chain, landed))

    def put(self, put: Put, landed: Callable[[], None]) -> None:
        """Put into the device's memory beside the region; calls ``landed`` when all of it is there.

        All of it must lie there, and devices must be known to libucp (``type_of``).
        """
        self._in_turn(lambda: self._put_beside(put, landed))

    def _in_turn(self, work: Callable[[], None]) -> None:
        if self._arriving:
            self._waiting.append(work)
        else:
            work()
        self._worker.pump()

    def _put_beside(self, put: Put, landed: Callable[[], None]) -> None:
        assert self._offer.beside is not None
        address = self._offer.beside.memory + put.offset
        self._arriving = True
        try:
            for buffer in filter(len, put.buffers):
                if isinstance(buffer, DeviceSpan):
                    kind = type_of(buffer.device, Role.PRODUCER)
                    self._endpoint.put_span(buffer, kind, address, self._key_beside, self._put)
                else:
                    assert isinstance(buffer, bytes | bytearray | memoryview)
                    self._endpoint.put(buffer, address, self._key_beside, self._put)
                address += len(buffer)
            if self._endpoint.flush(lambda status: self._arrived(status, landed)):
                self._arriving = False
                landed()
        except (UcpError, DeviceError) as error:
            self._fail(error)

    def _arrived(self, status: int, landed: Callable[[], None]) -> None:
        if status < 0:
            self._fail(UcpError(status, "ucp_ep_flush_nbx"))
        if self._broken or self._closed:
            self._waiting.clear()
            return
        self._arriving = False
        landed()
        while self._waiting and not self._arriving:
            self._waiting.popleft()()
        self._worker.pump()

    def _write(self, chain: Chain, landed: Callable[[], None]) -> None:
        try:
            for write in chain.writes:
                self._endpoint.fence()
                address = self._offer.memory + write.offset
                for piece in _pieces(write.buffers):
                    self._endpoint.put(piece, address, self._key, self._put)
                    address += len(piece)
            if self._endpoint.flush(lambda status: self._flushed(status, chain, landed)):
                self._flushed(0, chain, landed)
        except UcpError as error:
            self._fail(error)

    def _put(self, status: int) -> None:
        if status < 0:
            self._fail(UcpError(status, "ucp_put_nbx"))

    def _flushed(self, status: int, chain: Chain, landed: Callable[[], None]) -> None:
        if status < 0:
            self._fail(UcpError(status, "ucp_ep_flush_nbx"))
        if self._broken or self._closed:
            return
        try:
            if chain.notify:
                self._endpoint.ring(self._offer.doorbell)
        except UcpError as error:
            self._fail(error)
        else:
            landed()

    def _fail(self, error: UcpError | DeviceError) -> None:
        if not self._broken and not self._closed:
            self._broken = True
            self._on_failure(error)

    def close(self) -> None:
        """Write nothing more, from this moment on. Idempotent."""
        if not self._closed:
            self._closed = True
            self._waiting.clear()
            self._endpoint.close()
            self._worker.release()


def _pieces(buffers: Sequence[Bytes]) -> Iterator[Bytes]:
    small: list[Bytes] = []
    for buffer in buffers:
        if len(buffer) < _JOINED_BYTES_MAX:
            small.append(buffer)
            continue
        if joined := b"".join(small):
            yield joined
        small.clear()
        yield buffer
    if joined := b"".join(small):
        yield joined


async def open_link(offer: Offer, on_failure: OnFailure) -> tuple[Wire, Link | None]:
    """Try what the owner offers.

    Returns:
        The wire in use; and the link, if writes land without the owner's processor.
    """
    if not offer.key:
        return Wire(WireKind.TCP, "the owner has no memory to lend"), None
    try:
        worker = producers_worker()
    except UcpError as error:
        return Wire(WireKind.TCP, f"UCX cannot be used: {error}"), None
    try:
        link = Link(worker, offer, on_failure)
    except UcpError as error:
        worker.release()
        return Wire(WireKind.TCP, f"UCX finds no other: {error}"), None
    try:
        wire = await link.connect()
        if wire.kind is not WireKind.TCP:
            await link.prove()
    except UcpError as error:
        link.close()
        return Wire(WireKind.TCP, f"UCX finds no other: {error}"), None
    except BaseException:
        link.close()
        raise
    if wire.kind is WireKind.TCP:
        link.close()
        return wire, None
    return wire, link
