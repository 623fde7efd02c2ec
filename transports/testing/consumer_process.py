"""A receiver in a process of its own, for tests that kill it. Public, as the checks are.

``python -m transports.testing.consumer_process ADDRESS ...``

Listens, prints the address of its inbox and then the sender and number of each message that it was handed, a
line each. At one chosen step of one chosen pull it sends itself a signal.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence

from transports.address import Address
from transports.channel import open_receiver
from transports.device_memory import DeviceMemory
from transports.memory import Accept, Claimant, Keeper, Listener, Options, Region
from transports.registry import transport_for
from transports.ring import Geometry

PULL_STEPS = (
    "before the pull",
    "in the pull",
    "behind the pull",
    "behind the hand-over",
    "behind the release",
)


class _Trap:
    """The chosen step of the chosen pull."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.pulls = 0

    def reach(self, step: str) -> None:
        """Die here, if it is the one."""
        if self.pulls == self._options.number and step == self._options.step:
            os.kill(os.getpid(), getattr(signal, self._options.signal))


class SteppingRegion(Region):
    """A region whose pulls have steps."""

    def __init__(self, inner: Region, trap: _Trap) -> None:
        self._inner = inner
        self._trap = trap

    @property
    def view(self) -> memoryview:
        """The memory itself."""
        return self._inner.view

    @property
    def address(self) -> Address:
        """Where producers connect to."""
        return self._inner.address

    async def fence(self, sessions: Sequence[int]) -> None:
        """Revoke sessions."""
        await self._inner.fence(sessions)

    async def pull(self, session: int, key: bytes, into: memoryview) -> None:
        """Fetch an export, step by step."""
        self._trap.pulls += 1
        self._trap.reach("before the pull")
        pulling = asyncio.ensure_future(self._inner.pull(session, key, into))
        await asyncio.sleep(0)
        self._trap.reach("in the pull")
        await pulling
        self._trap.reach("behind the pull")

    def nudge(self) -> None:
        """Wake producers."""
        self._inner.nudge()

    async def close(self) -> None:
        """Stop serving."""
        await self._inner.close()


class SteppingListener(Listener):
    """Serves regions whose pulls have steps."""

    def __init__(self, inner: Listener, trap: _Trap) -> None:
        self._inner = inner
        self._trap = trap

    @property
    def address(self) -> Address:
        """The address really bound."""
        return self._inner.address

    async def register(
        self,
        name: str,
        size_bytes: int,
        *,
        accept: Accept,
        on_notify: Callable[[], None],
        on_session_lost: Callable[[int], None],
        device: DeviceMemory | None = None,
        keeper: Keeper | None = None,
        claimant: Claimant | None = None,
    ) -> Region:
        """Serve memory under ``name``."""
        region = await self._inner.register(
            name,
            size_bytes,
            accept=accept,
            on_notify=on_notify,
            on_session_lost=on_session_lost,
            device=device,
            keeper=keeper,
            claimant=claimant,
        )
        return SteppingRegion(region, self._trap)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def receive_all(options: argparse.Namespace) -> None:
    """Receive until somebody ends this process."""
    place = Address.parse(options.address)
    geometry = Geometry(slot_count=16, payload_bytes=1 << 13, session_count=8)
    trap = _Trap(options)
    async with (
        transport_for(place).listen(place, Options()) as listener,
        open_receiver(SteppingListener(listener, trap), "actor/7", geometry) as receiver,
    ):
        _say(str(receiver.address))
        while True:
            delivery = await receiver.receive()
            _say(f"{delivery.producer} {delivery.number}")
            trap.reach("behind the hand-over")
            receiver.release(delivery)
            trap.reach("behind the release")


def main() -> None:
    """Read the arguments and receive."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--number", type=int, default=-1, help="which pull, from 1")
    parser.add_argument("--step", choices=PULL_STEPS)
    parser.add_argument("--signal", default="SIGKILL")
    asyncio.run(receive_all(parser.parse_args()))


if __name__ == "__main__":
    main()
