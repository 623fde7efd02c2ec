"""Bytes between hosts: one-sided memory, the double ring over it, and channels on top.

The names here are the public ones; ``transports.testing`` holds the conformance suite for transports
of third parties.
"""

from transports.address import Address
from transports.channel import (
    DEFAULT_GEOMETRY,
    Delivery,
    Leniency,
    Patience,
    Receiver,
    Sender,
    Terms,
    Undelivered,
    open_receiver,
    open_sender,
)
from transports.cuda import span_of
from transports.device_memory import Device, DeviceError, DeviceSpan
from transports.errors import (
    AddressError,
    AuthenticationFailed,
    ChannelClosed,
    ConnectFailed,
    DeviceUnreachable,
    HandshakeRefused,
    HttpAnswered,
    IdentityRefused,
    LayoutMismatch,
    ListenFailed,
    MessageTooLarge,
    OperationTimeout,
    PeerLost,
    ProtocolError,
    RingFull,
    SessionFenced,
    TransportError,
    UnknownRegion,
    UnknownScheme,
)
from transports.fences import FENCE_REASONS
from transports.memory import (
    Accepted,
    Atomics,
    Capabilities,
    Listener,
    Options,
    Region,
    RemoteMemory,
    Transport,
)
from transports.operations import Bytes
from transports.registry import known_schemes, transport_for
from transports.ring import Geometry

__all__ = [
    "DEFAULT_GEOMETRY",
    "FENCE_REASONS",
    "Accepted",
    "Address",
    "AddressError",
    "Atomics",
    "AuthenticationFailed",
    "Bytes",
    "Capabilities",
    "ChannelClosed",
    "ConnectFailed",
    "Delivery",
    "Device",
    "DeviceError",
    "DeviceSpan",
    "DeviceUnreachable",
    "Geometry",
    "HandshakeRefused",
    "HttpAnswered",
    "IdentityRefused",
    "LayoutMismatch",
    "Leniency",
    "ListenFailed",
    "Listener",
    "MessageTooLarge",
    "OperationTimeout",
    "Options",
    "Patience",
    "PeerLost",
    "ProtocolError",
    "Receiver",
    "Region",
    "RemoteMemory",
    "RingFull",
    "Sender",
    "SessionFenced",
    "Terms",
    "Transport",
    "TransportError",
    "Undelivered",
    "UnknownRegion",
    "UnknownScheme",
    "known_schemes",
    "open_receiver",
    "open_sender",
    "span_of",
    "transport_for",
]
