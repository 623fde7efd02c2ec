"""The events of one request as its owner keeps them for whoever follows: in order, numbered, bounded.

Events that change nothing (progress, previews) are *lossy*: when there are too many events, or they hold
too many bytes, all lossy ones but the newest are dropped. A follower that is behind misses those and no
others. The rest is bounded by what a request can go through: its stages, and how often each may run again.

Sizes are estimates of what an event takes in memory: exact for what can be large (texts, bytes), a guess
for the objects around it.
"""

from collections.abc import Mapping
from typing import Any, Final

from attrs import define, field

from onepiece.requests import EventKind, RequestEvent

LOSSY: Final = frozenset({EventKind.PROGRESS, EventKind.PREVIEW})
_EVENT_BYTES: Final = 200
_OBJECT_BYTES: Final = 56


@define
class EventLog:
    """One request's events.

    Args:
        uid: The request.
        count_max: Beyond it lossy events are dropped.
        bytes_max: Beyond it, too.
    """

    uid: str
    count_max: int
    bytes_max: int
    next_sequence: int = 0
    held_bytes: int = 0
    """What the kept events take, as estimated."""
    _events: list[RequestEvent] = field(factory=list)

    def add(
        self,
        kind: EventKind,
        at: float,
        *,
        stage: str | None = None,
        node: str | None = None,
        detail: Mapping[str, Any] | None = None,
    ) -> RequestEvent:
        """Keep an event as the newest."""
        event = RequestEvent(
            uid=self.uid,
            sequence=self.next_sequence,
            kind=kind,
            at=at,
            stage=stage,
            node=node,
            detail=detail or {},
        )
        self.next_sequence += 1
        size = _size_of(event)
        if len(self._events) >= self.count_max or self.held_bytes + size > self.bytes_max:
            self._events = [kept for kept in self._events if kept.kind not in LOSSY]
            self.held_bytes = sum(map(_size_of, self._events))
        self._events.append(event)
        self.held_bytes += size
        return event

    def after(self, sequence: int) -> list[RequestEvent]:
        """The kept events behind this number."""
        return [event for event in self._events if event.sequence > sequence]


def _size_of(event: RequestEvent) -> int:
    return _EVENT_BYTES + size_of(event.detail)


def size_of(value: Any) -> int:
    """What a plain value takes in memory, as estimated."""
    match value:
        case str() | bytes():
            return _OBJECT_BYTES + len(value)
        case Mapping():
            return _OBJECT_BYTES + sum(size_of(key) + size_of(each) for key, each in value.items())
        case list() | tuple():
            return _OBJECT_BYTES + sum(map(size_of, value))
        case _:
            return _OBJECT_BYTES
