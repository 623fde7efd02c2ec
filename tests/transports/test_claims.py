"""Claims over tcp: who offers them to whom, also across releases, and many senders of one inbox."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from attrs import evolve

from transports import Address, Geometry, Options, Receiver, open_receiver, open_sender
from transports.memory import Capabilities, RemoteMemory
from transports.operations import Claim, Claimed
from transports.ring import Claims
from transports.tcp import TcpTransport
from transports.tcp_owner import OwnerSession
from transports.testing import Setting
from transports.testing.forwarding import ForwardingMemory
from transports.testing.setting import raised, staged
from transports.verbs_owner import VerbsOwnerSession

HERE = Address.parse("tcp://127.0.0.1:0?shm=off")
RING = Geometry(slot_count=64, payload_bytes=1 << 16, session_count=64)


class _Counting(ForwardingMemory):
    """Counts what is asked of the owner for reservations."""

    asked: Counter[str]

    @property
    def capabilities(self) -> Capabilities:
        """As inside."""
        return self._inner.capabilities

    async def claim(self, claim: Claim) -> Claimed:
        """Count it."""
        self.asked["claims"] += 1
        return await super().claim(claim)


class CountingTransport(TcpTransport):
    """Opens such sessions; as a producer of a release that knows no claims, if ``is_old``."""

    def __init__(self, *, is_old: bool = False) -> None:
        self.asked: Counter[str] = Counter()
        self.is_old = is_old

    async def connect(self, address: Address, hello: bytes, options: Options) -> RemoteMemory:
        """Open one."""
        memory = _Counting(await super().connect(address, hello, options))
        memory.asked = self.asked
        self.asked["offered"] += memory.capabilities.claims
        if self.is_old:
            memory._inner._capabilities = evolve(memory.capabilities, claims=False)  # type: ignore[attr-defined]  # of tcp
        return memory


@asynccontextmanager
async def serving() -> AsyncIterator[Receiver]:
    """An inbox on a free port."""
    async with (
        TcpTransport().listen(HERE, Options()) as listener,
        open_receiver(listener, "actor/7", RING) as receiver,
    ):
        yield receiver


async def cross(transport: CountingTransport, *, senders: int, messages: int) -> None:
    """Many senders send to one inbox whose loop is slow; each message once, in order."""
    seen: Counter[str] = Counter()

    async def receive(receiver: Receiver) -> None:
        while seen.total() < senders * messages:
            delivery = await receiver.receive()
            assert delivery.number == seen[delivery.producer]
            seen[delivery.producer] += 1
            receiver.release(delivery)
            time.sleep(0.0005)  # noqa: ASYNC251  # a busy processor: others ask meanwhile

    async with serving() as receiver, AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(open_sender(receiver.address, f"{at}", transport=transport))
            for at in range(senders)
        ]

        async def send(at: int) -> None:
            for number in range(messages):
                await opened[at].send(b"%d" % number)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(receive(receiver))
            for at in range(senders):
                tasks.create_task(send(at))
    assert all(count == messages for count in seen.values())


async def test_many_senders_claim() -> None:
    """Where many send, they claim; one claim is enough for a message."""
    transport = CountingTransport()
    await cross(transport, senders=20, messages=5)
    assert transport.asked["offered"] == 20
    assert 0 < transport.asked["claims"] <= 100


async def test_a_sender_alone_claims_nothing() -> None:
    """Its swaps are never lost."""
    transport = CountingTransport()
    await cross(transport, senders=1, messages=40)
    assert transport.asked["claims"] == 0


async def test_an_owner_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not say that it executes claims is asked for none, and all arrive by swaps."""
    monkeypatch.setattr(OwnerSession, "executes", False)
    transport = CountingTransport()
    await cross(transport, senders=5, messages=5)
    assert (transport.asked["offered"], transport.asked["claims"]) == (0, 0)


async def test_a_producer_of_before() -> None:
    """One that knows no claims sends by swaps to an owner that offers them."""
    transport = CountingTransport(is_old=True)
    await cross(transport, senders=5, messages=5)
    assert (transport.asked["offered"], transport.asked["claims"]) == (5, 0)


async def test_adapters_tails_are_left_to_adapters() -> None:
    """Where adapters swap, the owner's processor executes no claim: the two need not be atomic together."""
    assert not VerbsOwnerSession.executes
    assert OwnerSession.executes


async def test_who_offers_no_claims_says_so() -> None:
    """A claim on a session that declares none is a mistake of its caller."""
    async with staged(Setting(TcpTransport(), HERE), RING.region_bytes, Claims(RING)) as stage:
        memory = await stage.connect()
        await raised(AssertionError, RemoteMemory.claim(memory, Claim(1)))
        await memory.close()
