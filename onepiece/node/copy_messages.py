"""The messages by which store nodes copy results among themselves.

::

    store --CopyInput (record and value, into the ``store`` ring)-----------> store
          <--CopyAnswered (durable, or why not)------------------------------
    store --CopiesOffered (a page of what the other should hold)------------> store
          <--CopiesWanted (what of it is missing or worse there)-------------

When and to whom is decided by ``onepiece.core.replication``.
"""

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from onepiece.codec import register
from onepiece.core.replication_events import Version


@register
@frozen
class CopyInput:
    """Header of what stands under a UID at ``node_id``; a value follows it under ``value``, else nothing."""

    call: int
    reply_to: str
    node_id: str
    uid: str
    kind: str
    """A ``RecordKind`` value."""
    content_type: str
    meta: Mapping[str, Any]
    stored_at: float
    expires_at: float


@register
@frozen
class CopyAnswered:
    """This or better is durable there; or ``error`` says why it is not."""

    call: int
    error: Mapping[str, Any] | None = None


@register
@frozen
class CopiesOffered:
    """Some of what ``node_id`` has and the receiver should hold; answered by ``CopiesWanted``."""

    call: int
    reply_to: str
    node_id: str
    versions: tuple[Version, ...]


@register
@frozen
class CopiesWanted:
    """The UIDs of the page that are to be copied; or ``error`` says why it could not be compared."""

    call: int
    uids: tuple[str, ...]
    error: Mapping[str, Any] | None = None
