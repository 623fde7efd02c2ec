"""Transfer engines of other projects, for ``onepiece bench transport``: NIXL and Mooncake's.

Both write from memory of one process into memory of another one, and say when it has landed. They know no
messages: nobody at the far end is told, nothing waits for room, and nothing is checked. What is sent goes
into as much memory as the ring has, round and round. Neither is installed by an extra of this project.
"""

import asyncio
import base64
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
from attrs import frozen

from onepiece.cli.bench_ends import Backend, Near, far_process
from transports import Bytes

FAR_BYTES: Final = 128 << 20
"""Memory that is written to, as long as the ring of the others."""

_NIXL: Final = ("nixl_cu12", "nixl_cu13")
_LOOPBACK: Final = "127.0.0.1"
_UNDER_WAY: Final = "PROC"
_DONE: Final = "DONE"

Put = Callable[[Bytes, int], None]
"""Write these bytes at that place in the far end's memory, and return when they are there."""


@frozen
class Engine:
    """A transfer engine."""

    missing: Callable[[], str | None]
    """What to install; None if it is there."""
    far: Callable[[], Awaitable[None]]
    """Lend memory until the process ends; prints what ``near`` needs."""
    near: Callable[[str], Put]
    """Reach the memory of which this was printed."""


def _place(text: str) -> tuple[str, int]:
    peer, _, address = text.partition(" ")
    return peer, int(address)


def _address(data: Bytes) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


async def _lend(peer: str, memory: "np.ndarray[Any, Any]") -> None:
    print(f"{peer} {memory.ctypes.data}", flush=True)
    await asyncio.Event().wait()


class _Known:
    """Memory that an engine was told of, by its address: the longest piece counts."""

    def __init__(self, register: Callable[[int, int], None]) -> None:
        self._register = register
        self._lengths: dict[int, int] = {}

    def tell(self, address: int, length: int) -> None:
        """Register what is not known yet."""
        if self._lengths.get(address, 0) < length:
            self._register(address, length)
            self._lengths[address] = length


# NIXL, over UCX: `UCX_TLS` says which wire.


def _nixl_package() -> str | None:
    return next((name for name in _NIXL if find_spec(name) is not None), None)


def _nixl_missing() -> str | None:
    return None if _nixl_package() else "nixl is not installed (pip install --no-deps nixl-cu12)"


def _nixl_agent(name: str, *, progresses: bool) -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    api = import_module(f"{_nixl_package()}._api")
    return api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=progresses, backends=["UCX"]))


async def _nixl_far() -> None:
    agent, memory = _nixl_agent("far", progresses=True), np.zeros(FAR_BYTES, np.uint8)
    agent.register_memory([(memory.ctypes.data, FAR_BYTES, 0, "")], "DRAM")
    await _lend(base64.b64encode(agent.get_agent_metadata()).decode(), memory)


def _nixl_near(said: str) -> Put:
    card, far_address = _place(said)
    agent = _nixl_agent("near", progresses=False)
    agent.add_remote_agent(base64.b64decode(card))
    known = _Known(lambda address, length: agent.register_memory([(address, length, 0, "")], "DRAM"))

    def put(data: Bytes, offset: int) -> None:
        address, length = _address(data), len(data)
        known.tell(address, length)
        here = agent.get_xfer_descs([(address, length, 0)], "DRAM")
        there = agent.get_xfer_descs([(far_address + offset, length, 0)], "DRAM")
        transfer = agent.initialize_xfer("WRITE", here, there, "far")
        state = agent.transfer(transfer)
        while state == _UNDER_WAY:
            state = agent.check_xfer_state(transfer)
        agent.release_xfer_handle(transfer)
        if state != _DONE:
            raise RuntimeError(f"nixl ended a transfer with {state}")

    return put


# Mooncake's transfer engine, over its own tcp.


def _mooncake_missing() -> str | None:
    if find_spec("mooncake") is not None:
        return None
    return "mooncake is not installed (pip install --no-deps mooncake-transfer-engine-non-cuda)"


def _mooncake_engine() -> Any:
    os.environ.setdefault("GLOG_minloglevel", "2")
    engine = import_module("mooncake.engine").TransferEngine()
    if engine.initialize(f"{_LOOPBACK}:0", "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("mooncake's transfer engine cannot be initialised")
    return engine


async def _mooncake_far() -> None:
    engine, memory = _mooncake_engine(), np.zeros(FAR_BYTES, np.uint8)
    engine.register_memory(memory.ctypes.data, FAR_BYTES)
    await _lend(f"{_LOOPBACK}:{engine.get_rpc_port()}", memory)


def _mooncake_near(said: str) -> Put:
    peer, far_address = _place(said)
    engine = _mooncake_engine()
    known = _Known(engine.register_memory)

    def put(data: Bytes, offset: int) -> None:
        address, length = _address(data), len(data)
        known.tell(address, length)
        if engine.transfer_sync_write(peer, address, far_address + offset, length) != 0:
            raise RuntimeError("mooncake ended a transfer with an error")

    return put


ENGINES: Final[dict[str, Engine]] = {
    "nixl": Engine(_nixl_missing, _nixl_far, _nixl_near),
    "mooncake": Engine(_mooncake_missing, _mooncake_far, _mooncake_near),
}


def _round_and_round(put: Put) -> Callable[[Bytes], None]:
    """Write each piece behind the one before, and at the start again where the memory ends."""
    start = 0

    def write(data: Bytes) -> None:
        nonlocal start
        if start + len(data) > FAR_BYTES:
            start = 0
        put(data, start)
        start += len(data)

    return write


class _EngineNear(Near):
    def __init__(self, write: Callable[[Bytes], None]) -> None:
        self._write = write

    async def send(self, kind: int, data: Bytes) -> None:
        self._write(data)

    async def receive(self) -> None:
        pass


def engine_backend(name: str) -> Backend:
    """What is measured of an engine: its bandwidth, and nothing more."""
    engine = ENGINES[name]

    @asynccontextmanager
    async def open_near() -> AsyncIterator[Near]:
        async with far_process(name) as said:
            yield _EngineNear(_round_and_round(engine.near(said)))

    async def serve(_: list[str]) -> None:
        await engine.far()

    return Backend(name, open_near, serve, is_answered=False, missing=engine.missing)
