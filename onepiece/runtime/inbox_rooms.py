"""Room of an inbox in a device's memory: given back when nobody refers to its message any more.

A stage is handed tensors that lie in the inbox itself. Each keeps its message's room, also when the stage
has ended: as its output, which may be the same memory, or in a state of the stage's own. When the last one is
gone the device may still compute with what was there, since work is only *given* to it. So the room is given
back once the device has done all that it had been given by then.

    occupied --last tensor gone, in any thread--> left --the device is done--> given back

A stage that keeps what it should have cloned holds up whoever sends to it, once the ring has come round to
it. That is told in the log when nothing else can be the reason. So may an error that refers to the frames it
came through and they to it, with a stage's inputs among what they had: the garbage collector finds those, but
hardly ever where nothing is done. Then it is called here.
"""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Callable

from attrs import define, field

from onepiece.limits import OCCUPIED_COLLECT_SECONDS, OCCUPIED_IDLE_SECONDS
from onepiece.log import get_logger
from transports import Delivery, DeviceSpan, Receiver
from transports.device_calls import in_thread


class _Room:
    """Is kept by whatever lies in it."""


@define(eq=False)
class InboxRooms:
    """The messages of one inbox on a device whose memory is in use.

    Args:
        inbox: The inbox.
        stage: Whose it is.
        is_idle: Whether the stage has nothing in hand: what is in use then, it keeps.
        on_change: Called when room was given back.
    """

    inbox: Receiver
    stage: str
    is_idle: Callable[[], bool]
    on_change: Callable[[], None]
    occupied: int = 0
    """How many there are."""
    _came: int = 0
    """Messages so far."""
    _collected: int = 0
    """How many of them had come when nothing was left of them for the garbage collector."""
    _has_told: bool = False
    _left: list[Delivery] = field(factory=list)
    _wake: asyncio.Event = field(factory=asyncio.Event)
    _loop: asyncio.AbstractEventLoop = field(factory=asyncio.get_running_loop)

    def occupy(self, delivery: Delivery) -> DeviceSpan:
        """The message's payload; its room is given back behind the last that refers to any of it."""
        assert delivery.on_device is not None
        room = _Room()
        if self._came == self._collected:
            self._wake.set()  # to look again
        self._came += 1
        self.occupied += 1
        # By a weak reference: what an actor's end leaves behind may refer to the room, and must not be kept
        # by what waits for the room's end.
        weakref.finalize(room, _leave, weakref.ref(self), delivery).atexit = False
        return delivery.on_device.kept_by(room)

    def leave(self, delivery: Delivery) -> None:
        """Nobody refers to it; called in whatever thread found that out."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the inbox with it
            self._loop.call_soon_threadsafe(self._note, delivery)

    def _note(self, delivery: Delivery) -> None:
        self._left.append(delivery)
        self._wake.set()

    async def serve(self) -> None:
        """Give room back until cancelled.

        Raises ``DeviceError`` (of transports) if the device fails: nobody knows then when it is done.
        """
        device = self.inbox.device
        assert device is not None, "an inbox in the host's memory gives its room back at once"
        while True:
            await self._woken()
            left, self._left = self._left, []
            if not left:
                continue
            await in_thread(device.wait, None)
            for delivery in left:
                self.inbox.release(delivery)
            self.occupied -= len(left)
            self.on_change()

    async def _woken(self) -> None:
        """Wait until there may be room to be given back; look now and then who keeps the rest."""
        while True:
            try:
                async with asyncio.timeout(self._patience):
                    await self._wake.wait()
            except TimeoutError:
                self._look()
            else:
                self._wake.clear()
                return

    @property
    def _patience(self) -> float | None:
        if self._came != self._collected:
            return OCCUPIED_COLLECT_SECONDS
        return None if self._has_told else OCCUPIED_IDLE_SECONDS

    def _look(self) -> None:
        """Where the stage has nothing in hand, see whether it keeps anything, or only seems to."""
        if not self.is_idle():
            return
        if self._came != self._collected:
            self._collected = self._came
            if self.occupied:
                gc.collect()
        elif self.occupied and not self._has_told:
            self._has_told = True
            get_logger().warning(
                "stage_keeps_inputs",
                stage=self.stage,
                messages=self.occupied,
                hint="they hold up the inbox on its GPU; let it keep clones of what it needs beyond a call",
            )


def _leave(rooms: "weakref.ref[InboxRooms]", delivery: Delivery) -> None:
    found = rooms()
    if found is not None:
        found.leave(delivery)
