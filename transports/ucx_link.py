"""A session's own way into its region's memory: what the owner offers, what became of it, and writing.

The owner sends an *offer* once the producer has proven the cluster secret. The producer makes an
endpoint from it and looks at which wire leads to the memory. Only where writes land without the
owner's processor is the endpoint kept, as a ``Link``; everything else goes through the session's
connection as it does over tcp.
"""

import asyncio
import enum
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from attrs import frozen

from transports._libucp import UcpError
from transports.address import Address
from transports.errors import AddressError, ProtocolError
from transports.operations import Bytes, Chain
from transports.ucx_worker import DOORBELL_BYTES, Endpoint, Worker, producers_worker

OFFER_BYTES_MAX: Final = 16 << 10
WIRE_BYTES_MAX: Final = 1 << 10

_JOINED_BYTES_MAX: Final = 16 << 10
"""Buffers shorter than this are joined with their neighbours: a put costs more than the copy."""
_REQUIRE: Final = "require"
_LENGTH: Final = struct.Struct("<Q")
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
class Offer:
    """What a producer needs to write by itself."""

    memory: int
    """The address of the region's memory in the owner's process."""
    key: bytes
    """To the memory; empty if the owner has none to lend."""
    doorbell: bytes
    worker: bytes
    """The address of the owner's worker."""

    def to_bytes(self) -> bytes:
        """The body of an ATTACHED frame, whose ``a`` is ``memory`` and ``b`` the key's length."""
        return self.doorbell + self.key + self.worker

    @classmethod
    def parse(cls, memory: int, key_bytes: int, body: memoryview) -> "Offer":
        """Read an ATTACHED frame; raises ``ProtocolError``."""
        after = DOORBELL_BYTES + key_bytes
        if after > len(body):
            raise ProtocolError(f"an offer of {len(body)} bytes cannot hold a key of {key_bytes}")
        return cls(
            memory,
            key=bytes(body[DOORBELL_BYTES:after]),
            doorbell=bytes(body[:DOORBELL_BYTES]),
            worker=bytes(body[after:]),
        )


class Link:
    """Writes to the region's memory without the owner; made by ``open_link``.

    Args:
        on_failure: Called at most once, when nothing more can be written.
    """

    def __init__(self, worker: Worker, offer: Offer, on_failure: Callable[[UcpError], None]) -> None:
        self._worker = worker
        self._offer = offer
        self._on_failure = on_failure
        self._endpoint: Endpoint = worker.connect(offer.worker, self._fail)
        self._broken = False
        self._closed = False

    async def connect(self) -> Wire:
        """Finish the connection; the wire that leads to the memory."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def connected(status: int) -> None:
            if not future.done():
                future.set_result(status)

        # The endpoint must be connected before it is given a key: some versions crash otherwise.
        if not self._endpoint.flush(connected):
            self._worker.pump()
            if (status := await future) < 0:
                raise UcpError(status, "connecting")
        self._endpoint.unpack(self._offer.key)
        lanes = self._endpoint.lanes()
        if self._endpoint.is_mapped(self._offer.memory):
            return Wire(WireKind.SHM, ", ".join(lanes))
        adapters = [lane for lane in lanes if lane.startswith(_RDMA)]
        if adapters:
            return Wire(WireKind.RDMA, ", ".join(adapters))
        return Wire(WireKind.TCP, f"UCX has only {', '.join(lanes) or 'wires without names'}")

    def write(self, chain: Chain, landed: Callable[[], None]) -> None:
        """Put a chain's writes in order, then ring the owner's doorbell; calls ``landed`` when they landed.

        All offsets must lie in the region: nobody checks them on the way.
        """
        try:
            for write in chain.writes:
                self._endpoint.fence()
                address = self._offer.memory + write.offset
                for piece in _pieces(write.buffers):
                    self._endpoint.put(piece, address, self._put)
                    address += len(piece)
            if self._endpoint.flush(lambda status: self._flushed(status, chain, landed)):
                self._flushed(0, chain, landed)
        except UcpError as error:
            self._fail(error)
        self._worker.pump()

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

    def _fail(self, error: UcpError) -> None:
        if not self._broken and not self._closed:
            self._broken = True
            self._on_failure(error)

    def close(self) -> None:
        """Write nothing more, from this moment on. Idempotent."""
        if not self._closed:
            self._closed = True
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


async def open_link(offer: Offer, on_failure: Callable[[UcpError], None]) -> tuple[Wire, Link | None]:
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
