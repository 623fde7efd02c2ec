"""What the tests of memory that is shared within a host have in common."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from attrs import evolve

from transports.address import Address
from transports.memory import Options, RemoteMemory
from transports.operations import Chain, Write
from transports.shm_link import MemoryLink
from transports.shm_producer import SharingMemory
from transports.tcp import TcpTransport
from transports.testing import Setting
from transports.testing.setting import Stage, staged

HERE = Address.parse("tcp://127.0.0.1:0?shm=required")
"""Sessions have the memory from the beginning on."""
UNASKED = Address.parse("tcp://127.0.0.1:0")
COPIED = Address.parse("tcp://127.0.0.1:0?shm=copy")
"""Nobody reads the other process's memory."""
READ_WIRE = "shm (beside tcp, read in place)"
SECRET = Options(secret=b"of this cluster")
LARGE = 3 << 20
"""More than one turn of the event loop copies."""


@asynccontextmanager
async def region(
    size_bytes: int = 1 << 16, options: Options = SECRET, address: Address = HERE
) -> AsyncIterator[Stage]:
    """A region whose memory may be mapped."""
    async with staged(Setting(TcpTransport(), address, options), size_bytes) as stage:
        yield stage


def linked(memory: RemoteMemory) -> MemoryLink:
    """The session's own way into the memory, which it must have."""
    assert isinstance(memory, SharingMemory)
    assert memory._link is not None
    return memory._link


async def connect_over_tcp(stage: Stage) -> RemoteMemory:
    """A session as another host would open it."""
    address = evolve(stage.region.address, options={"shm": "off"})
    memory = await TcpTransport().connect(address, b"far", stage.setting.options)
    assert memory.capabilities.wire == "tcp"
    return memory


def write(offset: int, data: bytes, *, notify: bool = False) -> Chain:
    """A chain of one write."""
    return Chain((Write(offset, (data,)),), notify=notify)


def hold_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on producers keep what they have mapped, as one that is stopped does."""
    monkeypatch.setattr(MemoryLink, "close", lambda _: None)
