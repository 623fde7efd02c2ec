"""What a node makes of addresses to join at which no node is."""

import asyncio
from pathlib import Path

import pytest
from attrs import evolve

from onepiece.errors import OnePieceError
from onepiece.node.node import open_node, run_node
from onepiece.node.options import NodeOptions
from onepiece.node.stopping import StopSignal
from tests.node.in_process import DEVICES, SEED_ROLES, proxy_of, run, until_ready
from transports import Address

WORKER = frozenset({"worker"})


async def as_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer as an HTTP server does that cannot make sense of what it is sent."""
    await reader.read(1)
    writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n\r\nInvalid")
    await writer.drain()
    writer.close()


async def serve_http() -> tuple[asyncio.Server, Address]:
    """A server of HTTP, and its address as if it were a node's."""
    server = await asyncio.start_server(as_http, "127.0.0.1", 0)
    return server, Address.parse(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")


async def test_a_node_that_is_to_join_an_http_port_ends() -> None:
    """Trying again is of no use there: it says what is wrong and which address is wanted, once."""
    server, address = await serve_http()
    async with server:
        stop = StopSignal()
        with pytest.raises(ExceptionGroup) as caught:
            await run_node(NodeOptions(roles=WORKER, join=(address,), devices=DEVICES), stop)
        assert caught.group_contains(OnePieceError, match="this is where it serves HTTP; name the address")
        assert stop.reason is not None
        assert f"--join {address}" in stop.reason


async def test_one_address_that_is_none_is_not_the_end(tmp_path: Path) -> None:
    """Of several that a node is to join another one is a node's."""
    server, address = await serve_http()
    seed = NodeOptions(roles=SEED_ROLES, workflows=("stages.echo:echo",), workers=1, state_dir=tmp_path)
    async with server, open_node(seed, StopSignal()) as first:
        stop = StopSignal()
        joining = (address, Address.parse(first.address))
        async with open_node(NodeOptions(roles=WORKER, join=joining, devices=DEVICES), stop):
            await until_ready(proxy_of(first))
            assert stop.reason is None


async def test_a_host_may_be_joined_by_any_of_its_names(tmp_path: Path) -> None:
    """A name, or an option in the address: links to the manager do not end each other, none loses a word."""
    seed = NodeOptions(roles=SEED_ROLES, workflows=("stages.echo:echo",), workers=1, state_dir=tmp_path)
    async with open_node(seed, StopSignal()) as first:
        address = evolve(Address.parse(first.address), host="localhost", options={"shm": "off"})
        joining = NodeOptions(roles=WORKER, join=(address,), devices=DEVICES)
        async with open_node(joining, StopSignal()) as worker:
            await until_ready(proxy_of(first))
            for text in ("a", "b", "c"):
                assert await run(proxy_of(first), "echo", {"text": text}, 60) == f"{text.upper()}!"
            await worker.env.outbox.flushed()
            assert len(worker.env.outbox.links()) > 1
            assert not first.env.inboxes.fenced["control"]
            assert not worker.env.outbox.lost
