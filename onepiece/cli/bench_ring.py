"""The double ring between two processes, or two tasks of one: a channel each way."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

from onepiece.cli.bench_ends import ECHO, START_SECONDS, TAKE, Backend, Near, far_process, say
from transports import (
    Address,
    Bytes,
    Geometry,
    Options,
    Receiver,
    Sender,
    Terms,
    open_receiver,
    open_sender,
    transport_for,
)

PULL_SHARE: Final = 1 / 1024
"""Of the payload ring: what is longer than 128 KiB is pulled, so that both ways can be compared."""
GEOMETRY: Final = Geometry(slot_count=1024, payload_bytes=128 << 20, session_count=4)

_OPTIONS: Final = Options(connect_timeout_seconds=60.0)
"""The first session imports what its wire needs, which takes its time on an emulated processor."""


class _RingNear(Near):
    def __init__(self, sender: Sender, receiver: Receiver) -> None:
        self._sender = sender
        self._receiver = receiver

    async def send(self, kind: int, data: Bytes) -> None:
        await self._sender.send(data, kind=kind)

    async def receive(self) -> None:
        self._receiver.release(await self._receiver.receive())


@asynccontextmanager
async def _ring_inbox(address: str) -> AsyncIterator[Receiver]:
    place = Address.parse(address)
    async with (
        transport_for(place).listen(place, _OPTIONS) as listener,
        open_receiver(listener, "bench", GEOMETRY) as receiver,
    ):
        yield receiver


def ring_backend(name: str, place: str, pull_share: float | None = None) -> Backend:
    """The ring between two processes, each with an inbox at ``place``; what is longer may be pulled."""

    def open_near() -> AbstractAsyncContextManager[Near]:
        return ring_near(place, pull_share=pull_share)

    return Backend(name, open_near, _serve_ring_process)


@asynccontextmanager
async def ring_near(
    place: str,
    *,
    pull_share: float | None = None,
    far_environment: Mapping[str, str] | None = None,
    start_seconds: float = START_SECONDS,
) -> AsyncIterator[Near]:
    """The ring to a far end in a process of its own, which has its inbox at ``place`` as we have ours."""
    said = (place, "" if pull_share is None else str(pull_share))
    async with (
        _ring_inbox(place) as receiver,
        far_process(
            "ring-tcp",
            str(receiver.address),
            *said,
            environment=far_environment,
            start_seconds=start_seconds,
        ) as address,
        _ring_sender(address, "near", pull_share) as sender,
    ):
        yield _RingNear(sender, receiver)


def _ring_sender(
    address: str, identity: str, pull_share: float | None
) -> AbstractAsyncContextManager[Sender]:
    return open_sender(address, identity, terms=Terms(pull_share=pull_share), options=_OPTIONS)


async def _serve_ring_process(arguments: list[str]) -> None:
    near, place, pull_share = arguments
    async with (
        _ring_inbox(place) as receiver,
        _ring_sender(near, "far", float(pull_share) if pull_share else None) as sender,
    ):
        say(receiver.address)
        await _serve_ring(receiver, sender)


async def _serve_ring(receiver: Receiver, sender: Sender) -> None:
    while True:
        delivery = await receiver.receive()
        if delivery.kind != TAKE:
            await sender.send(bytes(delivery.payload) if delivery.kind == ECHO else b"", kind=delivery.kind)
        receiver.release(delivery)


@asynccontextmanager
async def open_ring_local() -> AsyncIterator[Near]:
    """The ring between two tasks of this process."""
    async with (
        _ring_inbox("local://bench-near") as near,
        _ring_inbox("local://bench-far") as far,
        open_sender(near.address, "far") as from_far,
        open_sender(far.address, "near") as from_near,
    ):
        serving = asyncio.ensure_future(_serve_ring(far, from_far))
        try:
            yield _RingNear(from_near, near)
        finally:
            serving.cancel()
            await asyncio.wait([serving])
