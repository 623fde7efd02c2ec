"""What a sender lends to its receiver: the messages that are pulled instead of written into the ring."""

import math
from collections.abc import Sequence
from typing import Final

from attrs import define, field, frozen

from transports.errors import MessageTooLarge
from transports.introductions import Welcome
from transports.memory import RemoteMemory
from transports.operations import Bytes
from transports.ring.offers import Exports, Lent, Offer

EXPORTED_BYTES_MAX: Final = 1 << 30


@frozen
class Terms:
    """What a sender lends to its receiver instead of writing it into the ring."""

    exported_bytes_max: int = EXPORTED_BYTES_MAX
    """Bytes that may be lent at a time; further messages wait. So also the longest message that is lent."""
    pull_share: float | None = None
    """Lend what is longer than this share of the payload ring; None: as the transport's capabilities say."""


@define(eq=False)
class Lender:
    """The exports of one session.

    Args:
        memory: The session.
        welcome: The receiver's bounds.
        terms: How much is lent, and from which length on.
    """

    _memory: RemoteMemory
    _welcome: Welcome
    _terms: "Terms"
    _exports: Exports = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._exports = Exports(self._terms.exported_bytes_max)

    @property
    def lent_bytes(self) -> int:
        """How many bytes are lent."""
        return self._exports.bytes

    @property
    def message_bytes_max(self) -> int:
        """The longest message that the ring holds or that may be pulled."""
        ring_bytes = self._welcome.geometry.message_bytes_max
        return max(ring_bytes, self._longest) if self._share else ring_bytes

    @property
    def _share(self) -> float:
        """From which share of the payload ring on messages are lent; 0: none."""
        share = self._memory.capabilities.pull_share
        return share if not share or self._terms.pull_share is None else self._terms.pull_share

    @property
    def _worth_pulling(self) -> float:
        """From which length on pulling costs less than writing into the ring."""
        if self._terms.pull_share is not None:
            return math.inf
        return self._memory.capabilities.pull_bytes or math.inf

    @property
    def _longest(self) -> int:
        return min(self._welcome.pulled_bytes_max, self._terms.exported_bytes_max)

    def pulls(self, length: int) -> bool:
        """Whether a message of this length is pulled, and not written into the ring.

        Raises:
            MessageTooLarge: It fits neither way.
        """
        share = self._share
        ring_bytes = self._welcome.geometry.message_bytes_max
        if not share or length <= min(share * ring_bytes, self._worth_pulling):
            return False
        if length <= self._longest:
            return True
        if length <= ring_bytes:
            return False
        raise MessageTooLarge(
            f"a message of {length} bytes is more than the inbox's payload ring of {ring_bytes} holds, more"
            f" than the {self._welcome.pulled_bytes_max} that its receiver pulls, or more than the"
            f" {self._terms.exported_bytes_max} that this sender lends: make it smaller, or raise the bounds"
        )

    def has_room(self, length: int) -> bool:
        """A message of this length may be lent now."""
        return self._exports.has_room(length)

    async def lend(self, number: int, buffers: Sequence[Bytes], length: int, message_hash: int) -> bytes:
        """Lend a message that is about to be sent; the offer that goes into the ring instead of it."""
        await self._memory.prepare_export(length)
        key = self._memory.export(buffers)
        self._exports.lend(Lent(number, length, key))
        return Offer(length, message_hash, key).to_bytes()

    def take_back(self, number: int) -> None:
        """The message lent last was not sent, or not in this session."""
        self._memory.withdraw(self._exports.take_back(number))

    def delivered(self, delivered: int) -> None:
        """The receiver has every message with a smaller number."""
        for key in self._exports.delivered(delivered):
            self._memory.withdraw(key)
