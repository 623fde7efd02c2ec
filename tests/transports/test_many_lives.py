"""Transports, sessions and peers that come and go by the hundred: nothing of them stays."""

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Final

import pytest

from tests.runtime.rig import descriptors
from transports import Address, Geometry, open_receiver, open_sender
from transports.local import LocalTransport
from transports.operations import Chain, Write
from transports.tcp import TcpTransport
from transports.testing import Setting, until
from transports.testing.setting import staged

LIVES: Final = 1000
SMALL: Final = Geometry(slot_count=8, payload_bytes=1 << 12, session_count=4)
_NAMES = count()


@pytest.fixture(params=["local", "tcp"])
def setting(request: pytest.FixtureRequest) -> Setting:
    """Each transport in turn."""
    if request.param == "tcp":
        return Setting(TcpTransport(), Address.parse("tcp://127.0.0.1:0"))
    return Setting(LocalTransport(), Address.parse(f"local://lives-{next(_NAMES)}"))


def objects() -> Counter[str]:
    """What transports have made that is still referred to: both ends of sessions, regions, listeners."""
    gc.collect()
    kinds = (type(each) for each in gc.get_objects())
    return Counter(kind.__qualname__ for kind in kinds if f"{kind.__module__}".startswith("transports."))


@asynccontextmanager
async def nothing_stays() -> AsyncIterator[None]:
    """Behind the block there are no more sessions, tasks and descriptors than before."""

    def there() -> tuple[int, Counter[str], set[str]]:
        return len(asyncio.all_tasks()), objects(), descriptors()

    before = there()
    yield
    await until(lambda: there() == before, "the end of all that was opened")


async def test_sessions_come_and_go(setting: Setting) -> None:
    """Closed with writes under way, or orderly: each ends on both sides, its memory is free (fault 65)."""
    async with nothing_stays():
        async with staged(setting) as stage:
            async with nothing_stays():
                for life in range(LIVES):
                    memory = await stage.connect(b"%d" % life)
                    await memory.post(Chain((Write(0, (bytes(1000),)),)))
                    if life % 2:
                        await memory.flush()
                    await memory.close()
                    await memory.close()
                del memory
            lost = stage.diary.lost
            await until(lambda: len(lost) == LIVES, "the ends of all sessions")
            assert lost == list(range(1, LIVES + 1))
        del stage  # the region's memory is there for as long as the region


async def test_transports_come_and_go(setting: Setting) -> None:
    """Opened, used and closed again and again, in the order in which they depend on each other (fault 65)."""
    async with nothing_stays():
        for _ in range(LIVES):
            async with (
                setting.transport.listen(setting.address, setting.options) as listener,
                open_receiver(listener, "actor/7", SMALL) as receiver,
                open_sender(receiver.address, "a", transport=setting.transport) as sender,
            ):
                await sender.send(b"x")
                receiver.release(await receiver.receive())
        del listener, receiver, sender
