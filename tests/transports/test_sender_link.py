"""How a sender gets back to a receiver that answers and then ends each session."""

import asyncio
import random
import time

import pytest

from transports import Address, Geometry, Options, Patience, PeerLost, open_receiver, open_sender
from transports.errors import ProtocolError
from transports.local import LocalTransport
from transports.memory import RemoteMemory, Transport
from transports.sender_lender import Terms
from transports.sender_link import Link
from transports.testing.forwarding import ForwardingMemory

SMALL = Geometry(slot_count=8, payload_bytes=1 << 16, session_count=4)
AGAIN = PeerLost("the session was ended")


def link_to(address: Address, transport: Transport) -> Link:
    """A sender's way to this receiver."""
    return Link(
        transport=transport,
        address=address,
        identity="a",
        options=Options(),
        patience=Patience(),
        terms=Terms(),
        clock=time.monotonic,
        rng=random.Random(7),
    )


async def test_sessions_in_vain_come_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is taken session after session there are bounded pauses; what is taken ends them."""
    pauses: list[float] = []

    async def sleep(seconds: float, result: object = None) -> object:
        pauses.append(seconds)
        return result

    here = Address.parse("local://link")
    async with (
        LocalTransport().listen(here, Options()) as listener,
        open_receiver(listener, "actor/7", SMALL) as receiver,
    ):
        link = link_to(receiver.address, LocalTransport())

        async def again(sent: int) -> None:
            session = await link.open_again(AGAIN, sent)
            await session.memory.close()
            receiver.poll_nowait()  # which makes room for another session

        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "sleep", sleep)
            await link.open()
            await again(0)
            assert not pauses, "a session that ends once is opened again at once"
            for _ in range(1100):
                await again(0)
        assert len(pauses) == 1100
        assert pauses[0] < pauses[-1]
        assert max(pauses) <= 0.5
        async with open_sender(receiver.address, "a") as sender:
            await sender.send(b"taken")
            await receiver.receive()
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "sleep", sleep)
            await again(1)
            pauses.clear()
            await again(1)
            await again(1)
        assert len(pauses) == 0


@pytest.mark.parametrize("number", [0, SMALL.session_count + 1, 1 << 63])
async def test_a_session_that_no_ring_has_is_refused(number: int) -> None:
    """An owner whose sessions have numbers that its geometry cannot have is refused at once."""

    class Misnumbering(LocalTransport):
        async def connect(self, address: Address, hello: bytes, options: Options) -> RemoteMemory:
            memory = await super().connect(address, hello, options)
            return Misnumbered(memory)

    class Misnumbered(ForwardingMemory):
        @property
        def session(self) -> int:
            return number

    async with (
        LocalTransport().listen(Address.parse("local://misnumbered"), Options()) as listener,
        open_receiver(listener, "actor/7", SMALL) as receiver,
    ):
        with pytest.raises(ProtocolError, match=f"opened session {number} of 4"):
            await link_to(receiver.address, Misnumbering()).open()


async def test_a_receiver_that_has_forgotten_what_it_took_is_gone() -> None:
    """Numbers cannot go on where the receiver counts fewer messages than it was seen to take."""
    async with (
        LocalTransport().listen(Address.parse("local://forgetful"), Options()) as listener,
        open_receiver(listener, "actor/7", SMALL) as receiver,
    ):
        link = link_to(receiver.address, LocalTransport())
        await link.open()
        with pytest.raises(PeerLost, match=r"has 0 messages of 'a'.*has forgotten"):
            await link.open_again(AGAIN, 3, 2)
