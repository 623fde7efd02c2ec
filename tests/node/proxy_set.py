"""A proxy on the loopback with a frontend that the test drives, and connections below HTTP to it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import anyio
import httpx
from attrs import define

from onepiece.node.http_testing import FakeFrontend
from onepiece.node.proxy import ProxyOptions, build_app, serve
from stages.echo import echo


@define
class Proxy:
    """A served proxy and its frontend."""

    frontend: FakeFrontend
    http: httpx.AsyncClient
    port: int

    async def submit(self) -> str:
        """Submit a request; its UID."""
        answer = await self.http.post("/v1/requests", json={"workflow": "echo", "inputs": {"text": "ahoy"}})
        uid: str = answer.json()["uid"]
        return uid

    async def raw(self, text: str, body: bytes = b"") -> "Raw":
        """Open a connection and send these lines of a request, with a Host."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = "\r\n".join([*text.splitlines(), "Host: proxy", "", ""])
        writer.write(head.encode() + body)
        await writer.drain()
        return Raw(reader, writer)


@define
class Raw:
    """A connection below HTTP."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def answer(self) -> tuple[int, str]:
        """The status and the rest of what comes until the end or the next pause in an answer."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        status = int(head.split()[1])
        length = next(
            (
                int(line.split(":")[1])
                for line in head.splitlines()
                if line.lower().startswith("content-length")
            ),
            0,
        )
        return status, head + (await self.reader.readexactly(length)).decode()

    async def close(self) -> None:
        """Drop the connection."""
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


@asynccontextmanager
async def proxy(options: ProxyOptions | None = None) -> AsyncIterator[Proxy]:
    """A proxy on a free port of the loopback."""
    frontend = FakeFrontend([echo])
    async with (
        serve(build_app(frontend, options), shutdown_seconds=2) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, verify=False) as http,
    ):
        yield Proxy(frontend, http, port)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, for ten seconds at most."""
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - any condition, also one without an event
            await asyncio.sleep(0.005)
