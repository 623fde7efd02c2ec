"""What a sender has in hand: a message, the call that waits for it, and sending that has begun."""

import asyncio
import types
from collections.abc import Coroutine, Generator
from functools import partial
from typing import Any

from attrs import define, field, frozen

from transports.errors import RingFull
from transports.operations import Bytes


class Abandoned(Exception):  # noqa: N818  # no error: it ends a program that has reserved nothing
    """The caller of ``send`` has gone, or its time is over, before anything was reserved."""


@frozen(eq=False)
class Undelivered:
    """A message that the receiver was not seen to take; it may be sent elsewhere."""

    number: int
    kind: int
    flags: int
    buffers: tuple[Bytes, ...] = field(repr=False)


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
    buffers: tuple[Bytes, ...]
    answer: asyncio.Future[int]
    may_wait: bool
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
