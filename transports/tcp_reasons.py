"""Why a session was refused or has ended, as the frames REFUSED and ENDED tell it."""

from collections.abc import Mapping
from typing import Final

from transports.errors import (
    AuthenticationFailed,
    HandshakeRefused,
    IdentityRefused,
    LayoutMismatch,
    PeerLost,
    ProtocolError,
    SessionFenced,
    TransportError,
    UnknownRegion,
)
from transports.tcp_frames import REASON_BYTES_MAX, Header, Kind, frame

_REASONS: Final[Mapping[int, type[TransportError]]] = {
    1: HandshakeRefused,
    2: AuthenticationFailed,
    3: LayoutMismatch,
    4: UnknownRegion,
    5: IdentityRefused,
    16: PeerLost,
    17: SessionFenced,
    18: ProtocolError,
}
_CODES: Final = {kind: code for code, kind in _REASONS.items()}


def reason_frame(kind: Kind, error: TransportError) -> bytes:
    """A REFUSED or ENDED frame, whole."""
    default = HandshakeRefused if kind is Kind.REFUSED else PeerLost
    code = _CODES.get(type(error), _CODES[default])
    text = str(error).encode()[:REASON_BYTES_MAX]
    return frame(kind, body=len(text), a=code) + text


def parse_reason(header: Header, body: memoryview) -> TransportError:
    """The error that a REFUSED or ENDED frame tells."""
    default = HandshakeRefused if header.kind == Kind.REFUSED else PeerLost
    error = _REASONS.get(header.a, default)
    if issubclass(error, HandshakeRefused) is not (header.kind == Kind.REFUSED):
        error = default
    return error(str(body, "utf-8", "replace"))
