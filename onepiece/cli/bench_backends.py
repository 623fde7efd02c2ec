"""What ``onepiece bench transport`` compares: each backend's two ends, over one small protocol.

A message has a kind: ``ECHO`` comes back as it is, ``TAKE`` is taken and dropped, ``LAST`` is taken
and answered with an empty message. The far end runs in a process of its own (``python -m
onepiece.cli.bench_backends NAME``), except for ``ring-local``, where it is a task beside the near one,
and ``memcpy``, which has none: what is sent is copied, into as much memory as the ring has.
The ring hashes every byte on both sides; the others check nothing.
"""

import asyncio
import mmap
import os
import socket
import struct
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import numpy as np

from onepiece.cli.bench_ends import ECHO, LENGTH_MAX, LOOPBACK, TAKE, Backend, Near, far_process, say
from onepiece.cli.bench_peers import ENGINES, engine_backend
from onepiece.cli.bench_ring import GEOMETRY, PULL_SHARE, open_ring_local, ring_backend
from transports import Bytes

_HEADER: Final = struct.Struct("<QB7x")


# Blocking sockets: what the machine can do.


class _SocketNear(Near):
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._memory = memoryview(bytearray(LENGTH_MAX))

    async def send(self, kind: int, data: Bytes) -> None:
        _socket_send(self._connection, kind, data)

    async def receive(self) -> None:
        _socket_receive(self._connection, self._memory)


def _socket_send(connection: socket.socket, kind: int, data: Bytes) -> None:
    header = _HEADER.pack(len(data), kind)
    sent = connection.sendmsg([header, data])
    if sent < len(header) + len(data):
        connection.sendall(memoryview(data)[sent - len(header) :])


def _socket_receive(connection: socket.socket, memory: memoryview) -> tuple[int, memoryview] | None:
    header = bytearray(_HEADER.size)
    if not _socket_fill(connection, memoryview(header)):
        return None
    length, kind = _HEADER.unpack(header)
    body = memory[:length]
    return (kind, body) if _socket_fill(connection, body) else None


def _socket_fill(connection: socket.socket, place: memoryview) -> bool:
    while len(place):
        count = connection.recv_into(place, 0, socket.MSG_WAITALL)
        if count == 0:
            return False
        place = place[count:]
    return True


@asynccontextmanager
async def _open_socket() -> AsyncIterator[Near]:
    async with far_process("raw-sockets") as port:
        with socket.create_connection((LOOPBACK, int(port))) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield _SocketNear(connection)


async def _serve_socket(_: list[str]) -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        say(server.getsockname()[1])
        connection, _peer = server.accept()  # blocks, as this backend does
    memory = memoryview(bytearray(LENGTH_MAX))
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while (message := _socket_receive(connection, memory)) is not None:
            kind, body = message
            if kind != TAKE:
                _socket_send(connection, kind, body if kind == ECHO else b"")


# asyncio on plain sockets: the fair baseline for anything that runs on an event loop.


class _LoopNear(Near):
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._memory = memoryview(bytearray(LENGTH_MAX))

    async def send(self, kind: int, data: Bytes) -> None:
        await _loop_send(self._connection, kind, data)

    async def receive(self) -> None:
        await _loop_receive(self._connection, self._memory)


async def _loop_send(connection: socket.socket, kind: int, data: Bytes) -> None:
    loop = asyncio.get_running_loop()
    header = _HEADER.pack(len(data), kind)
    if len(data) <= 4096:
        await loop.sock_sendall(connection, header + data)
    else:
        await loop.sock_sendall(connection, header)
        await loop.sock_sendall(connection, data)


async def _loop_receive(connection: socket.socket, memory: memoryview) -> tuple[int, memoryview] | None:
    header = bytearray(_HEADER.size)
    if not await _loop_fill(connection, memoryview(header)):
        return None
    length, kind = _HEADER.unpack(header)
    body = memory[:length]
    return (kind, body) if await _loop_fill(connection, body) else None


async def _loop_fill(connection: socket.socket, place: memoryview) -> bool:
    loop = asyncio.get_running_loop()
    while len(place):
        count = await loop.sock_recv_into(connection, place)
        if count == 0:
            return False
        place = place[count:]
    return True


@asynccontextmanager
async def _open_loop() -> AsyncIterator[Near]:
    async with far_process("asyncio-sockets") as port:
        with socket.socket() as connection:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().sock_connect(connection, (LOOPBACK, int(port)))
            yield _LoopNear(connection)


async def _serve_loop(_: list[str]) -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        server.setblocking(False)
        say(server.getsockname()[1])
        connection, _peer = await asyncio.get_running_loop().sock_accept(server)
    memory = memoryview(bytearray(LENGTH_MAX))
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while (message := await _loop_receive(connection, memory)) is not None:
            kind, body = message
            if kind != TAKE:
                await _loop_send(connection, kind, body if kind == ECHO else b"")


# asyncio streams: what most programs use.


class _StreamNear(Near):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, kind: int, data: Bytes) -> None:
        await _stream_send(self._writer, kind, data)

    async def receive(self) -> None:
        await _stream_receive(self._reader)


async def _stream_send(writer: asyncio.StreamWriter, kind: int, data: Bytes) -> None:
    writer.write(_HEADER.pack(len(data), kind))
    writer.write(data)
    await writer.drain()


async def _stream_receive(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    length, kind = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    return kind, await reader.readexactly(length)


@asynccontextmanager
async def _open_streams() -> AsyncIterator[Near]:
    async with far_process("asyncio-streams") as port:
        reader, writer = await asyncio.open_connection(LOOPBACK, int(port), limit=1 << 20)
        try:
            yield _StreamNear(reader, writer)
        finally:
            writer.close()
            await writer.wait_closed()


async def _serve_streams(_: list[str]) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                kind, body = await _stream_receive(reader)
                if kind != TAKE:
                    await _stream_send(writer, kind, body if kind == ECHO else b"")
        except asyncio.IncompleteReadError:
            writer.close()

    server = await asyncio.start_server(talk, LOOPBACK, 0, limit=1 << 20)
    async with server:
        say(server.sockets[0].getsockname()[1])
        await server.serve_forever()


# pyzmq: a message library of long standing.


class _ZmqNear(Near):
    def __init__(self, channel: Any) -> None:
        self._channel = channel

    async def send(self, kind: int, data: Bytes) -> None:
        await self._channel.send_multipart([bytes([kind]), data], copy=len(data) < 65536)

    async def receive(self) -> None:
        await self._channel.recv_multipart(copy=False)


@asynccontextmanager
async def _open_zmq() -> AsyncIterator[Near]:
    import zmq.asyncio

    async with far_process("pyzmq") as port:
        with zmq.asyncio.Context() as context, context.socket(zmq.PAIR) as channel:
            channel.linger = 0
            channel.connect(f"tcp://{LOOPBACK}:{port}")
            yield _ZmqNear(channel)


async def _serve_zmq(_: list[str]) -> None:
    import zmq.asyncio

    with zmq.asyncio.Context() as context, context.socket(zmq.PAIR) as channel:
        channel.linger = 0
        say(channel.bind_to_random_port(f"tcp://{LOOPBACK}"))
        while True:
            kind, body = await channel.recv_multipart(copy=False)
            if kind.bytes[0] != TAKE:
                answer = body if kind.bytes[0] == ECHO else b""
                await channel.send_multipart([kind, answer], copy=len(answer) < 65536)


# Copies within this process: what shared memory can do.


class _CopyNear(Near):
    def __init__(self) -> None:
        # Of the kind that the ring lies in, and no larger or smaller: a copy that stays in a cache is faster.
        self._memory = np.frombuffer(mmap.mmap(-1, GEOMETRY.payload_bytes), np.uint8)
        self._start = 0

    async def send(self, kind: int, data: Bytes) -> None:
        if self._start + len(data) > len(self._memory):
            self._start = 0
        end = self._start + len(data)
        np.copyto(self._memory[self._start : end], np.frombuffer(data, np.uint8))
        self._start = end

    async def receive(self) -> None:
        pass


@asynccontextmanager
async def _open_copy() -> AsyncIterator[Near]:
    yield _CopyNear()


async def _serve_nowhere(_: list[str]) -> None:
    raise RuntimeError("this backend lives in one process")


BACKENDS: Final[dict[str, Backend]] = {
    backend.name: backend
    for backend in (
        Backend("raw-sockets", _open_socket, _serve_socket),
        Backend("asyncio-sockets", _open_loop, _serve_loop),
        Backend("asyncio-streams", _open_streams, _serve_streams),
        Backend("pyzmq", _open_zmq, _serve_zmq),
        Backend("memcpy", _open_copy, _serve_nowhere, is_answered=False),
        ring_backend("ring-tcp", f"tcp://{LOOPBACK}:0?shm=off"),
        ring_backend("ring-tcp-pulled", f"tcp://{LOOPBACK}:0?shm=off", pull_share=PULL_SHARE),
        ring_backend("ring-shm", f"tcp://{LOOPBACK}:0?shm=required"),
        ring_backend("ring-shm-copied", f"tcp://{LOOPBACK}:0?shm=copy"),
        ring_backend("ring-ucx", f"ucx://{LOOPBACK}:0?require=shm"),
        ring_backend("ring-verbs", f"verbs://{LOOPBACK}:0"),
        *map(engine_backend, ENGINES),
        Backend("ring-local", open_ring_local, _serve_nowhere),
    )
}


def _end_with_input() -> None:
    # Not through sys.stdin: its lock, held by this thread, would trouble the interpreter's own end.
    while os.read(0, 4096):
        pass
    os._exit(0)


def main(argv: list[str]) -> None:
    """Run the far end of the backend named first, until standard input ends."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    asyncio.run(BACKENDS[argv[0]].serve(argv[1:]))  # type: ignore[arg-type]  # a coroutine in every case


if __name__ == "__main__":
    main(sys.argv[1:])
