"""Clients on a bad line: replies that get lost, streams that break, servers that are no proxies."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from attrs import define, field

import onepiece
from onepiece.client import ClientOptions
from onepiece.errors import NodeUnreachable, OnePieceError
from onepiece.node.http_testing import FakeFrontend
from onepiece.node.proxy import build_app, serve
from onepiece.requests import EventKind
from stages.echo import echo


@define
class BadLine:
    """A relay between client and proxy that drops connections as it is told.

    The system must survive: a reply that never arrives though the request did, and a stream that
    breaks anywhere.
    """

    port: int
    drop_replies: int = 0
    """So many replies are dropped, whole: the proxy acts, and its client never hears of it."""
    cut_after: list[int] = field(factory=list)
    """The next connections are cut when so many bytes of reply have passed."""
    connections: int = 0

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one connection on."""
        self.connections += 1
        cut_after = self.cut_after.pop(0) if self.cut_after else None
        there, back = await asyncio.open_connection("127.0.0.1", self.port)
        upward = asyncio.ensure_future(self._pass(reader, back))
        try:
            while data := await there.read(1 << 16):
                if self.drop_replies:
                    self.drop_replies -= 1
                    break
                if cut_after is not None:
                    data, cut_after = data[:cut_after], cut_after - len(data[:cut_after])
                writer.write(data)
                await writer.drain()
                if cut_after == 0:
                    break
        except ConnectionError:
            pass
        finally:
            upward.cancel()
            writer.close()
            back.close()
            await asyncio.gather(upward, writer.wait_closed(), back.wait_closed(), return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def bad_line() -> AsyncIterator[tuple[FakeFrontend, BadLine, onepiece.client.Client]]:
    """A proxy, a bad line to it, and a client at the other end."""
    frontend = FakeFrontend([echo])
    async with serve(build_app(frontend), shutdown_seconds=2) as port:
        line = BadLine(port)
        relay = await asyncio.start_server(line.relay, "127.0.0.1", 0)
        async with relay:
            url = f"http://127.0.0.1:{relay.sockets[0].getsockname()[1]}"
            async with onepiece.connect(url, ClientOptions(attempts=5)) as client:
                yield frontend, line, client


async def test_a_lost_reply_of_submit_makes_no_second_request() -> None:
    """The client sends again with the key that it made, and gets the accepted request (fault 131)."""
    async with bad_line() as (frontend, line, client):
        line.drop_replies = 2
        handle = await client.submit(echo(text="x"))
        assert line.connections == 3
        assert list(frontend.requests_by_uid) == [handle.uid]


async def test_events_go_on_where_the_stream_broke() -> None:
    """Cut anywhere, in an event or between two: each event comes once, in order."""
    async with bad_line() as (frontend, line, client):
        handle = await client.submit(echo(text="x"))
        for step in range(20):
            frontend.report(handle.uid, EventKind.PROGRESS, "shout", step=step)
        await client.nodes()
        line.cut_after = [700, 1234, 250, 3000]
        seen = []
        # The first connection is still open and good; a new client gets the bad ones.
        async with onepiece.connect(client.url, ClientOptions(attempts=5)) as other:
            async for event in other.attach(handle.uid).events():
                seen.append(event.sequence)
                if event.sequence == 20:
                    frontend.finish(handle.uid, "X!")
        assert seen == list(range(22))
        assert not line.cut_after


async def test_a_stream_that_asked_to_be_cancelled_is_not_taken_up_again() -> None:
    """When it breaks the request is being cancelled: the caller is told that the stream broke."""
    async with bad_line() as (_, line, client):
        handle = await client.submit(echo(text="x"))
        line.cut_after = [300]
        async with onepiece.connect(client.url) as other:
            with pytest.raises(NodeUnreachable):
                async for _ in other.attach(handle.uid).events(cancel_on_disconnect=True):
                    pass
        assert (await handle.wait()).state.value == "cancelled"


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\nnot found",
        b'HTTP/1.1 500 Oh\r\nContent-Length: 12\r\n\r\n{"detail":""}'[:-1],
    ],
)
async def test_a_server_that_is_no_proxy_is_told(reply: bytes) -> None:
    """What answers in another language is named, with its status."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with onepiece.connect(url) as client:
            with pytest.raises(OnePieceError, match="is it a proxy"):
                await client.nodes()
