"""What a sender and a receiver tell each other when a session opens (pure).

::

    hello     u16 layout version, u16 bytes of identity, identity (UTF-8)
    welcome   u16 layout version, u16 bytes of geometry, u64 generation, u64 first number,
              f64 lease seconds, u64 pulled bytes, geometry

``identity`` names the producer across sessions: numbers go on where its last session stopped, which
is how a message sent again after a reconnection is known to be a repeat.
"""

import struct
from typing import Final, Self

from attrs import frozen

from transports.errors import HandshakeRefused, LayoutMismatch, ProtocolError
from transports.ring import LAYOUT_VERSION, Geometry
from transports.ring.layout import GENERATION_MAX

IDENTITY_BYTES_MAX: Final = 512
_NUMBERS_END: Final = 1 << 63
_LEASE_SECONDS_END: Final = 1e9

_HELLO: Final = struct.Struct("<HH")
_WELCOME: Final = struct.Struct("<HHQQdQ")


@frozen
class Hello:
    """The sender's word: who it is."""

    identity: str

    def __attrs_post_init__(self) -> None:
        if not 0 < len(self.identity.encode()) <= IDENTITY_BYTES_MAX:
            raise ValueError(f"an identity has 1 to {IDENTITY_BYTES_MAX} bytes, not {self.identity!r}")

    def to_bytes(self) -> bytes:
        """The wire form."""
        name = self.identity.encode()
        return _HELLO.pack(LAYOUT_VERSION, len(name)) + name

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a hello; raises ``LayoutMismatch`` or ``HandshakeRefused``."""
        if len(data) < _HELLO.size:
            raise HandshakeRefused(f"a hello of {len(data)} bytes is none of a channel's")
        version, length = _HELLO.unpack_from(data)
        _check_version(version, "the sender")
        name = data[_HELLO.size :]
        if not 0 < length <= IDENTITY_BYTES_MAX or len(name) != length:
            raise HandshakeRefused(f"an identity has 1 to {IDENTITY_BYTES_MAX} bytes, not {len(name)}")
        try:
            return cls(identity=name.decode())
        except UnicodeDecodeError as error:
            raise HandshakeRefused(f"the identity is no UTF-8: {error}") from error


@frozen
class Welcome:
    """The receiver's word: what its ring is like, and how far this sender's messages have come."""

    generation: int
    first_number: int
    lease_seconds: float
    geometry: Geometry
    pulled_bytes_max: int = 0
    """The longest message that the receiver pulls; 0: it pulls none."""

    def to_bytes(self) -> bytes:
        """The wire form."""
        geometry = self.geometry.to_bytes()
        header = _WELCOME.pack(
            LAYOUT_VERSION,
            len(geometry),
            self.generation,
            self.first_number,
            self.lease_seconds,
            self.pulled_bytes_max,
        )
        return header + geometry

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a welcome; raises ``LayoutMismatch`` or ``ProtocolError``."""
        if len(data) < _WELCOME.size:
            raise ProtocolError(f"a welcome of {len(data)} bytes is none of a channel's")
        version, length, generation, first_number, lease_seconds, pulled_max = _WELCOME.unpack_from(data)
        _check_version(version, "the receiver")
        geometry = data[_WELCOME.size :]
        if len(geometry) != length:
            raise ProtocolError(f"a welcome promises {length} bytes of geometry and holds {len(geometry)}")
        if not (
            0 < generation <= GENERATION_MAX
            and first_number < _NUMBERS_END
            and 0 < lease_seconds < _LEASE_SECONDS_END
        ):
            raise ProtocolError(
                f"a welcome with generation {generation}, number {first_number}, a lease of {lease_seconds} s"
            )
        return cls(generation, first_number, lease_seconds, Geometry.from_bytes(geometry), pulled_max)


def _check_version(version: int, side: str) -> None:
    if version != LAYOUT_VERSION:
        raise LayoutMismatch(
            f"{side} speaks ring layout {version}, we speak {LAYOUT_VERSION}; run the same release on both"
        )
