"""Two ends of something that carries messages, of which the far one runs in a process of its own."""

import asyncio
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

from attrs import frozen

from transports import Bytes

ECHO: Final = 0
TAKE: Final = 1
LAST: Final = 2

LENGTH_MAX: Final = 64 << 20
LOOPBACK: Final = "127.0.0.1"
START_SECONDS: Final = 30.0


class Near(ABC):
    """The near end: what is measured."""

    @abstractmethod
    async def send(self, kind: int, data: Bytes) -> None:
        """Send one message."""

    @abstractmethod
    async def receive(self) -> None:
        """Receive one message, whole, into memory."""


@frozen
class Backend:
    """Something that carries messages between two processes."""

    name: str
    open: Callable[[], AbstractAsyncContextManager[Near]]
    serve: Callable[[list[str]], Awaitable[None]]
    """The far end; runs until it is cancelled or its process ends."""
    is_answered: bool = True
    """It can echo; otherwise only its bandwidth means anything."""
    missing: Callable[[], str | None] = lambda: None
    """What is not installed that it needs."""


def far_command(name: str, *arguments: str) -> list[str]:
    """The command line of a backend's far end."""
    return [sys.executable, "-m", "onepiece.cli.bench_backends", name, *arguments]


@asynccontextmanager
async def far_process(
    name: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    start_seconds: float = START_SECONDS,
) -> AsyncIterator[str]:
    """Run a backend's far end; yields the address it prints. It ends with its standard input."""
    process = await asyncio.create_subprocess_exec(
        *far_command(name, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **(environment or {})},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        async with asyncio.timeout(start_seconds):
            line = (await process.stdout.readline()).decode().strip()
        if not line:
            raise RuntimeError(f"the far end of {name} did not start; its error stands above")
        yield line
    finally:
        process.stdin.close()
        await process.wait()


def say(address: object) -> None:
    """Tell the near end where we are."""
    print(address, flush=True)
