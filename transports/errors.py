"""What can go wrong between two hosts, named by what the caller can do about it.

::

    TransportError
      AddressError          fix the address
      UnknownScheme         install or name a transport
      ListenFailed          choose another port or host
      ConnectFailed         the peer is not there (yet): try again, or another peer
      HandshakeRefused      the peer answered and said no: the message says why
        AuthenticationFailed    give both sides the same cluster secret
        LayoutMismatch          run the same version on both sides
        UnknownRegion           the peer runs, but serves no such region
        IdentityRefused         the peer takes nothing from this identity any more: take another one
      ChannelClosed         we closed it
      PeerLost              the peer went away: open a new session
      SessionFenced         the consumer gave up on this session: open a new one, send again
      ExportGone            the owner of a region asked for bytes that a producer does not lend (any more)
      RingFull              wait, or refuse work upstream
      MessageTooLarge       make it smaller, or give the inbox a larger ring
      DeviceUnreachable     a device's memory cannot be used here: the message says what is missing
      ProtocolError         a peer sent bytes that follow no rule: the connection is closed
        HttpAnswered          an HTTP server answers there: name the address that it listens on for nodes
      OperationTimeout      the peer neither answered nor closed within the bound
"""

# ruff: noqa: N818  # named by what the caller can do, not by being an error

from typing import ClassVar


class TransportError(Exception):
    """The root of everything a transport raises."""

    retryable: ClassVar[bool] = False


class AddressError(TransportError):
    """The address cannot be read; the message shows it and the expected form."""


class UnknownScheme(TransportError):
    """No transport is registered for this scheme; the message lists those that are."""


class ListenFailed(TransportError):
    """The address could not be listened on, for example because the port is in use."""


class ConnectFailed(TransportError):
    """Nobody answered at the address."""

    retryable = True


class HandshakeRefused(TransportError):
    """The peer answered and refused; the message is the peer's reason."""


class AuthenticationFailed(HandshakeRefused):
    """The peer could not prove the cluster secret, or we could not."""


class LayoutMismatch(HandshakeRefused):
    """The two sides speak different versions or geometries; the message names both."""


class UnknownRegion(HandshakeRefused):
    """The peer serves no region of this name (any more)."""

    retryable = True


class IdentityRefused(HandshakeRefused):
    """The peer takes nothing from this identity any more, for example since it was declared dead."""


class ChannelClosed(TransportError):
    """This side has closed the object; nothing more can be done with it."""


class PeerLost(TransportError):
    """The peer's process or the path to it is gone, perhaps in the middle of a frame."""

    retryable = True


class SessionFenced(TransportError):
    """The consumer fenced this session after a stall; writes under it no longer land."""

    retryable = True


class ExportGone(TransportError):
    """What was to be pulled is not exported, or has another length."""


class RingFull(TransportError):
    """The ring has no room and the caller asked not to wait."""

    retryable = True


class MessageTooLarge(TransportError):
    """The message can never be taken; the message names the bound. Raised before anything is sent."""


class DeviceUnreachable(TransportError):
    """A device's memory is asked for, or bytes in it are to be sent, and this transport or machine cannot."""


class ProtocolError(TransportError):
    """One side broke the wire format (a hostile length or offset, an unknown frame)."""


class HttpAnswered(ProtocolError):
    """An HTTP server answers at the address, which is none of a node's: trying again is of no use."""


class OperationTimeout(TransportError):
    """An operation got no outcome within its bound."""

    retryable = True
