"""The control ring of a node: small messages in, each to the part that asked for its kind.

Handlers run on the event loop, one after the other, and never wait: what takes time is started as a
task by its part. A handler that raises is a bug of ours; it is logged with its message and costs that
message only.
"""

import asyncio
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from onepiece.codec import CodecError, decode_control
from onepiece.log import get_logger
from onepiece.messages import CONTROL_REGION, KIND_CONTROL
from onepiece.runtime.environment import Inboxes
from transports import Delivery, Geometry, Leniency, Receiver

GEOMETRY: Final = Geometry(slot_count=4096, payload_bytes=8 << 20, session_count=4096)

_Message = TypeVar("_Message")
Handler = Callable[[Any], object]


def split_frame(payload: memoryview) -> Iterator[memoryview]:
    """The messages in one ring message; raises ``CodecError`` on a length that is none."""
    start = 0
    while start < len(payload):
        length = int.from_bytes(payload[start : start + 4], "little")
        start += 4
        if start + length > len(payload):
            raise CodecError(f"a control message claims {length} bytes where {len(payload) - start} are left")
        yield payload[start : start + length]
        start += length


class ControlService:
    """Dispatches control messages, from the ring or from this very node.

    Args:
        stall_seconds: How long a sender may stand still in the middle of a message. All heartbeats wait
            behind it, so it must be a small part of a node's lease.
    """

    def __init__(self, stall_seconds: float) -> None:
        self._stall_seconds = stall_seconds
        self._handlers: dict[type, list[Handler]] = {}
        self._is_closed = False

    def on(self, kind: type[_Message], handler: Callable[[_Message], object]) -> None:
        """Have ``handler`` called with each message of ``kind``, behind those that asked before."""
        self._handlers.setdefault(kind, []).append(handler)

    def dispatch(self, message: object) -> None:
        """Hand a message to its part; one that no part of this node asked for is logged."""
        if self._is_closed:
            return
        handlers = self._handlers.get(type(message))
        if handlers is None:
            get_logger().debug("control_message_unwanted", kind=type(message).__name__)
            return
        for handler in handlers:
            try:
                handler(message)
            except Exception:  # noqa: BLE001 - a bug in one handler costs one message
                get_logger().exception("control_handler_failed", message=repr(message)[:500])

    def close(self) -> None:
        """The parts are ending: what comes now, also from this very node, is lost with it."""
        self._is_closed = True

    async def serve(self, inboxes: Inboxes, opened: "asyncio.Future[Receiver]") -> None:
        """Receive until cancelled."""
        leniency = Leniency(lease_seconds=self._stall_seconds)
        async with inboxes.open(CONTROL_REGION, GEOMETRY, leniency, pulled_bytes_max=0) as receiver:
            opened.set_result(receiver)
            await receiver.deliver_to(functools.partial(self._take, receiver))

    def _take(self, receiver: Receiver, delivery: Delivery) -> None:
        try:
            if delivery.kind == KIND_CONTROL:
                for body in split_frame(delivery.payload):
                    self.dispatch(decode_control(body))
        except CodecError as error:
            get_logger().warning("control_message_refused", error=str(error), peer=delivery.producer)
        finally:
            receiver.release(delivery)
