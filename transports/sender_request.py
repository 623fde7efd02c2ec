"""What a sender has in hand: a message, the call that waits for it, and sending that has begun."""

import asyncio
import types
from collections.abc import Coroutine, Generator, Sequence
from functools import partial
from typing import Any, cast

from attrs import define, field, frozen

from transports.device_memory import Device, DeviceSpan
from transports.errors import RingFull
from transports.operations import Bytes, Content, as_bytes
from transports.ring.layout import BYTE_MAX


class Abandoned(Exception):  # noqa: N818  # no error: it ends a program that has reserved nothing
    """The caller of ``send`` has gone, or its time is over, before anything was reserved."""


@frozen(eq=False)
class Undelivered:
    """A message that the receiver was not seen to take; it may be sent elsewhere."""

    number: int
    kind: int
    flags: int
    buffers: tuple[Content, ...] = field(repr=False)
    """The payload; some of it may be ``DeviceSpan``s, if the inbox is in a device's memory."""
    head: Bytes = field(default=b"", repr=False)


@define(eq=False)
class Begun:
    """The sending of a message that has begun, and rests until ``waits_for`` is there."""

    message: Undelivered
    work: Coroutine[Any, Any, None]
    waits_for: object = None
    error: BaseException | None = None
    """What ended the work at once."""

    @types.coroutine
    def finish(self) -> Generator[Any, Any, None]:
        """Go on with the work in the task that awaits this."""
        if self.error is not None:
            raise self.error
        while True:
            try:
                sent = yield self.waits_for
            except BaseException as error:  # noqa: BLE001 - the work decides, as if it had waited itself
                step = partial(self.work.throw, error)
            else:
                step = partial(self.work.send, sent)
            try:
                self.waits_for = step()
            except StopIteration:
                return


@define(eq=False)
class Request:
    """A call of ``send`` that waits for its number."""

    kind: int
    flags: int
    buffers: tuple[Content, ...]
    head: Bytes
    answer: asyncio.Future[int]
    may_wait: bool
    devices: frozenset[Device] = frozenset()
    """On which some of the payload lies."""
    idle: bool = True
    """Nothing of it is on its way: it waits for its turn, or for room."""
    expired: bool = False
    begun: Begun | None = None
    """Set from the moment ``send`` has begun the work until it is done or the courier has taken it over."""

    def fail(self, error: BaseException) -> None:
        """Tell the caller, unless it has gone."""
        if not self.answer.done():
            self.answer.set_exception(error)

    def expire(self, seconds: float) -> None:
        """The caller's time is over: give up now, or at the next wait for room."""
        self.expired = True
        if self.idle:
            self.fail(RingFull(f"no room within {seconds} s; wait longer, or refuse work upstream"))


def new_request(
    kind: int,
    flags: int,
    buffers: Bytes | DeviceSpan | Sequence[Content],
    head: Bytes,
    timeout_seconds: float | None,
) -> Request:
    """What a call of ``send`` asks for.

    Raises:
        TypeError: What is no buffer.
        ValueError: A buffer that is not in one piece, or a kind or flags that are no byte.
    """
    if not (0 <= kind <= BYTE_MAX and 0 <= flags <= BYTE_MAX):
        raise ValueError(f"kind and flags are 0 to {BYTE_MAX}, not {kind} and {flags}")
    devices: frozenset[Device] = frozenset()
    parts: tuple[Content, ...]
    if isinstance(buffers, bytes | bytearray | memoryview):
        parts = (as_bytes(buffers),)
    else:
        parts = (buffers,) if isinstance(buffers, DeviceSpan) else tuple(map(_plain, buffers))
        devices = frozenset(buffer.device for buffer in parts if isinstance(buffer, DeviceSpan))
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    may_wait = timeout_seconds is None or timeout_seconds > 0
    return Request(kind, flags, parts, as_bytes(head), answer, may_wait, devices)


def _plain(buffer: Content) -> Content:
    return buffer if isinstance(buffer, DeviceSpan) else as_bytes(cast("Bytes", buffer))
