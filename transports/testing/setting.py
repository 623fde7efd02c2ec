"""What checks run in: a transport, a place to listen, and a region that keeps a diary."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from attrs import define, field, frozen

from transports.address import Address
from transports.device_memory import Device
from transports.memory import Accepted, Claimant, Listener, Options, Region, RemoteMemory, Transport

LIMIT_SECONDS: Final = 20.0
"""How long a check waits for what must come; far above what it takes, so that a slow machine passes."""


_Error = TypeVar("_Error", bound=Exception)


@frozen
class Setting:
    """A transport and where it may listen; a fresh one for each check."""

    transport: Transport
    address: Address
    options: Options = field(factory=Options)
    device: Device | None = None
    """In whose memory inboxes are to lie, for the checks of that."""


Maker = Callable[[], Setting]
Check = Callable[[Setting], Awaitable[None]]


async def until(condition: Callable[[], bool], what: str) -> None:
    """Let the event loop run until ``condition`` holds; raises ``AssertionError`` naming ``what``."""
    deadline = asyncio.get_running_loop().time() + LIMIT_SECONDS
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"waited {LIMIT_SECONDS} s for: {what}"
        await asyncio.sleep(0.001)


async def raised(kind: type[_Error], work: Awaitable[object]) -> _Error:
    """The error of this kind in which ``work`` must end, and soon."""
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            result = await work
    except kind as error:
        return error
    except TimeoutError:
        raise AssertionError(f"{work!r} did not end within {LIMIT_SECONDS} s") from None
    raise AssertionError(f"{kind.__name__} was expected, and {result!r} returned")


@define(eq=False)
class Diary:
    """An owner's answers, and a record of what it was told."""

    refusal: Exception | None = None
    hellos: list[bytes] = field(factory=list)
    answered: list[int] = field(factory=list)
    notified: int = 0
    lost: list[int] = field(factory=list)
    accepting: asyncio.Event = field(factory=asyncio.Event)
    """Cleared by a check that wants producers to wait for their answer."""

    def __attrs_post_init__(self) -> None:
        self.accepting.set()

    async def accept(self, hello: bytes) -> Accepted:
        """Take every producer; sessions are numbered from 1."""
        if self.refusal is not None:
            raise self.refusal
        self.hellos.append(hello)
        number = len(self.hellos)
        await self.accepting.wait()
        self.answered.append(number)
        return Accepted(number, b"welcome " + hello)

    def on_notify(self) -> None:
        """Count."""
        self.notified += 1

    def on_session_lost(self, session: int) -> None:
        """Note the session."""
        self.lost.append(session)


@define(eq=False)
class Stage:
    """A listener with one region, and a way to open sessions on it."""

    setting: Setting
    listener: Listener
    region: Region
    diary: Diary

    async def connect(self, hello: bytes = b"check") -> RemoteMemory:
        """Open a session."""
        return await self.setting.transport.connect(self.region.address, hello, self.setting.options)


@asynccontextmanager
async def staged(
    setting: Setting, size_bytes: int = 1 << 16, claimant: Claimant | None = None
) -> AsyncIterator[Stage]:
    """A listener with a region of this size, in which claims are executed if there is somebody who does."""
    diary = Diary()
    async with setting.transport.listen(setting.address, setting.options) as listener:
        region = await listener.register(
            "check/1",
            size_bytes,
            accept=diary.accept,
            on_notify=diary.on_notify,
            on_session_lost=diary.on_session_lost,
            claimant=claimant,
        )
        yield Stage(setting, listener, region, diary)
