"""The messages by which outputs of checkpointed stages outlive the nodes that computed them.

A *checkpoint* is what a stage sent over one edge of one request, kept by store nodes until the request has
ended. It is no result: it lies in a store of its own, and only the request's owner asks for it.

::

    actor --CheckpointInput--> store --CheckpointKept--> actor
    owner --RestoreOutput--> store --OutputRestored--> owner
                               +--StageInput--> actor of the target
"""

from collections.abc import Mapping, Sequence
from struct import Struct
from typing import Any

from attrs import frozen

from onepiece.codec import decode_control, encode_control, register
from onepiece.errors import CodecError
from transports.operations import Content


@register
@frozen
class CheckpointInput:
    """Says what the ``StageInput`` before it is, on its way to a store node; answered by ``CheckpointKept``.

    ``owner`` is the control address of the request's owner as the stage's inputs name it, ``life`` that of
    the node that computed the output, ``attempt`` the owner's round it was computed in.
    """

    call: int
    reply_to: str
    uid: str
    source: str
    target: str
    owner: str
    life: str
    attempt: int
    deadline_at: float | None


@register
@frozen
class CheckpointKept:
    """The checkpoint is durable; or why it was not kept."""

    call: int
    error: Mapping[str, Any] | None = None


@register
@frozen
class RestoreOutput:
    """The owner asks a store node to send a checkpoint to its target; answered by ``OutputRestored``.

    ``stage`` is the key of the stage that the target calls.
    """

    call: int
    owner: str
    uid: str
    source: str
    target: str
    stage: str
    attempt: int


@register
@frozen
class OutputRestored:
    """Whether the node ``life`` has the checkpoint. If so it sends it, and tells the owner where to."""

    call: int
    life: str
    is_held: bool


_LENGTH = Struct("<I")


def with_header(parts: Sequence[Content], header: CheckpointInput) -> list[Content]:
    """A packed ``StageInput`` with what it is behind it: the message itself is kept as it is."""
    encoded = encode_control(header)
    return [*parts, encoded, _LENGTH.pack(len(encoded))]


def split_header(payload: memoryview) -> tuple[memoryview, CheckpointInput]:
    """The packed ``StageInput``, and what it is; raises ``CodecError`` if that cannot be told."""
    end = len(payload) - _LENGTH.size
    length = int(_LENGTH.unpack(payload[end:])[0]) if end >= 0 else 0
    if not 0 < length <= end:
        raise CodecError(f"a checkpoint of {len(payload)} bytes is none")
    header = decode_control(bytes(payload[end - length : end]))
    if not isinstance(header, CheckpointInput):
        raise CodecError(f"a {type(header).__name__} where a checkpoint's header is wanted")
    return payload[: end - length], header
