"""Stage inputs on their way into an inbox in a device's memory, and out of it.

There a message has two places. Its buffers lie in the payload ring, which only the device can look at; what
the host has to read goes beside it, as the ring's *head*::

    0  u64  attempt          as ``messages.with_attempt`` writes it
    8  u32  head in payload  0: the message's head follows; else its length
    16      the message's head, if it fits

    payload: [the message's head, zeros to 64, if it did not fit] buffer 0, zeros to 64, buffer 1 ...

So no message is refused for its head alone; a long one is copied back by its receiver. What is sent may lie
on a device or not, piece by piece. Copies in the host's memory are sent instead where the receiver's inbox is
there, and where bytes of the sender's device cannot be sent into the receiver's.
"""

from collections.abc import Sequence
from struct import Struct
from typing import Final, TypeGuard

from attrs import define

from onepiece.codec import Apart, head_bytes, padding_behind
from onepiece.errors import CodecError, StageFailed
from onepiece.limits import HEADER_BYTES_MAX
from onepiece.log import get_logger
from onepiece.messages import KIND_STAGE_INPUT, split_attempt
from transports import Bytes, DeviceError, DeviceSpan, DeviceUnreachable, Sender
from transports.device_calls import in_thread
from transports.operations import Content

_ATTEMPT_BYTES: Final = 8
_PREFIX_BYTES: Final = 8
_LENGTH: Final = Struct("<I4x")
_FIXED_BYTES: Final = _ATTEMPT_BYTES + _LENGTH.size


def lies_in_host(parts: Sequence[Content]) -> TypeGuard[Sequence[Bytes]]:
    """Whether no part of a message lies on a device."""
    return not any(isinstance(part, DeviceSpan) for part in parts)


def copied_to_host(parts: Sequence[Content]) -> list[Bytes]:
    """The parts, with copies of those on devices; blocks.

    Raises ``StageFailed`` if a device has failed.
    """
    copies: list[Bytes] = []
    for part in parts:
        if isinstance(part, DeviceSpan):
            copies.append(_copy_of(part))
        else:
            assert isinstance(part, bytes | bytearray | memoryview)
            copies.append(part)
    return copies


def _copy_of(span: DeviceSpan) -> bytes:
    try:
        return span.to_host()
    except DeviceError as error:
        raise StageFailed(
            f"what a stage put out on {span.device.name} is lost with that device: {error}"
        ) from error


async def in_host(parts: Sequence[Content]) -> Sequence[Bytes]:
    """As ``copied_to_host``, in a thread where there is anything to copy."""
    if lies_in_host(parts):
        return parts
    return await in_thread(copied_to_host, parts)


def for_device(parts: Sequence[Content], head_bytes_max: int) -> tuple[bytes, list[Content]]:
    """Head and payload of a stage input for an inbox on a device.

    Args:
        parts: The message, cut anywhere behind its first eight bytes, and its attempt as the last one.
        head_bytes_max: How long the ring's head may be.
    """
    *message, attempt = parts
    begin, _ = _cut(message, _PREFIX_BYTES)
    length = head_bytes(begin)
    head, body = _cut(message, length)
    zeros, body = _cut(body, padding_behind(length) if body else 0)
    assert isinstance(attempt, bytes)
    if _FIXED_BYTES + length <= head_bytes_max:
        return attempt + _LENGTH.pack(0) + head, body
    return attempt + _LENGTH.pack(length), [head, zeros, *body]


def _cut(parts: Sequence[Content], length: int) -> tuple[bytes, list[Content]]:
    """The first bytes of a message, which lie in the host's memory, and what is behind them."""
    begin, rest = bytearray(), list(parts)
    while len(begin) < length:
        part = rest.pop(0)
        assert isinstance(part, bytes | bytearray | memoryview), "heads are in the host's memory"
        piece = memoryview(part)[: length - len(begin)]
        begin += piece
        if len(piece) < len(part):
            rest.insert(0, memoryview(part)[len(piece) :])
    return bytes(begin), [part for part in rest if len(part)]


def from_device(head: bytes, payload: DeviceSpan) -> tuple[Apart, int, bool]:
    """A stage input that came into an inbox on a device, its attempt, and whether a node was lost with it.

    Raises:
        CodecError: The head is no such message's.
        DeviceError: (of transports) The device refuses a copy of a long head.
    """
    if len(head) < _FIXED_BYTES:
        raise CodecError(f"a stage's input with a head of {len(head)} bytes is none")
    _, attempt, was_lost = split_attempt(memoryview(head)[:_ATTEMPT_BYTES])
    (length,) = _LENGTH.unpack_from(head, _ATTEMPT_BYTES)
    inner = memoryview(head)[_FIXED_BYTES:]
    if not length:
        return Apart(inner, payload), attempt, was_lost
    if len(inner) or not length <= min(len(payload), _PREFIX_BYTES + HEADER_BYTES_MAX):
        raise CodecError(f"a head of {length} bytes in a payload of {len(payload)}")
    body = payload[length + padding_behind(length) :]
    return Apart(memoryview(payload[:length].to_host()), body), attempt, was_lost


@define(eq=False)
class DeviceWay:
    """The way of one link's messages into whatever inbox it leads to."""

    address: str
    _has_complained: bool = False

    async def send(self, sender: Sender, parts: Sequence[Content], kind: int) -> int:
        """Send a message, laid out for the receiver's memory; as ``Sender.send``.

        Raises ``StageFailed`` too, if it must be copied from a device that has failed.
        """
        if not sender.head_bytes_max or kind != KIND_STAGE_INPUT:
            return await sender.send(await in_host(parts), kind=kind)
        head, payload = for_device(parts, sender.head_bytes_max)
        try:
            return await sender.send(payload, kind=kind, head=head)
        except DeviceUnreachable as error:
            if lies_in_host(payload):
                raise
            self._complain(error)
        return await sender.send(await in_host(payload), kind=kind, head=head)

    def _complain(self, error: DeviceUnreachable) -> None:
        """Once for a link: it is slower than was asked for, and nobody loses anything."""
        if not self._has_complained:
            self._has_complained = True
            get_logger().warning("device_bytes_through_host", address=self.address, error=str(error))
