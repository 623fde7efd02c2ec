"""Outbox: messages reach a ring or their loss is told; control messages never make anybody wait."""

import asyncio
import functools
import gc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
from attrs import define, field

from onepiece.codec import decode_control
from onepiece.errors import NodeUnreachable, PayloadTooLarge
from onepiece.log import captured
from onepiece.messages import KIND_CONTROL, KIND_STAGE_INPUT, Consumed
from onepiece.runtime.outbox import Outbox, open_outbox
from tests.runtime.rig import until
from transports import Address, Geometry, Listener, Options, Receiver, Sender, open_receiver, transport_for
from transports.fences import REFUSED

_HOUSES = count()
RING = Geometry(slot_count=16, payload_bytes=1 << 16, session_count=8)
SMALL_RING = Geometry(slot_count=8, payload_bytes=1 << 12, session_count=4)


@define(eq=False)
class Peer:
    """Another node: a listener, and the rings it serves."""

    listener: Listener
    tasks: asyncio.TaskGroup
    came: list[tuple[int, bytes]] = field(factory=list)
    """Kind and bytes of what was received."""

    @property
    def address(self) -> str:
        """Where its ring is."""
        return f"{self.listener.address}/ring"

    @property
    def messages(self) -> list[object]:
        """The control messages among it."""
        found: list[object] = []
        for kind, data in self.came:
            while kind == KIND_CONTROL and data:
                end = 4 + int.from_bytes(data[:4], "little")
                found.append(decode_control(data[4:end]))
                data = data[end:]
        return found

    @asynccontextmanager
    async def ring(self, *, reading: bool = True) -> AsyncIterator[Receiver]:
        """Serve the ring, and take what comes."""
        async with open_receiver(self.listener, "ring", RING, pulled_bytes_max=1 << 17) as receiver:
            task = self.tasks.create_task(self._read(receiver)) if reading else None
            try:
                yield receiver
            finally:
                if task is not None:
                    task.cancel()

    async def take(self, receiver: Receiver) -> None:
        """Take one message."""
        delivery = await receiver.receive()
        self.came.append((delivery.kind, bytes(delivery.payload)))
        receiver.release(delivery)

    async def _read(self, receiver: Receiver) -> None:
        while True:
            await self.take(receiver)


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Outbox, Peer]]:
    """An outbox and another node."""
    address = Address.parse(f"local://outbox-{next(_HOUSES)}")
    async with (
        transport_for(address).listen(address, Options()) as listener,
        open_outbox(lambda: "me.1", Options()) as outbox,
        asyncio.TaskGroup() as tasks,
    ):
        yield outbox, Peer(listener, tasks)


def consumed(number: int) -> Consumed:
    """A small control message."""
    return Consumed(((f"u{number}", "a", "b"),))


async def send(outbox: Outbox, peer: Peer, content: bytes, **how: Any) -> None:
    """Send a data message."""
    await outbox.send(peer.address, [content], kind=KIND_STAGE_INPUT, **how)


async def test_a_message_is_taken_and_that_is_told() -> None:
    """Once the ring's consumer has it, not when it was written."""
    async with pair() as (outbox, peer), peer.ring(reading=False) as receiver:
        taken: list[str] = []
        await send(outbox, peer, b"first", on_taken=lambda: taken.append("first"))
        await send(outbox, peer, b"second", on_taken=lambda: taken.append("second"))
        assert taken == []
        await peer.take(receiver)
        await until(lambda: taken == ["first"])
        await peer.take(receiver)
        await until(lambda: taken == ["first", "second"])
        assert peer.came == [(KIND_STAGE_INPUT, b"first"), (KIND_STAGE_INPUT, b"second")]


async def test_a_message_that_is_lost_is_told() -> None:
    """With its ring, before anybody took it; one that was taken is not (fault 29)."""
    async with pair() as (outbox, peer):
        told: list[str] = []

        def lost(name: str) -> Any:
            async def on_lost() -> None:
                told.append(f"{name} lost")

            return on_lost

        async with peer.ring(reading=False) as receiver:
            for name in ("first", "second", "third"):
                taken = functools.partial(told.append, f"{name} taken")
                await send(outbox, peer, name.encode(), on_lost=lost(name), on_taken=taken)
            await peer.take(receiver)
            await until(lambda: told)
        await until(lambda: len(told) == 3)
        assert told == ["first taken", "second lost", "third lost"]
        async with peer.ring():  # the next use opens a new link
            await send(outbox, peer, b"again")
            await until(lambda: peer.came[-1] == (KIND_STAGE_INPUT, b"again"))


async def test_a_full_ring_makes_the_sender_wait() -> None:
    """That is the back-pressure a stage feels; reading lets it go on."""
    async with pair() as (outbox, peer), peer.ring(reading=False) as receiver:
        for _ in range(2):
            await send(outbox, peer, bytes(30_000))
        waiting = asyncio.ensure_future(send(outbox, peer, b"x" * 30_000))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        await peer.take(receiver)
        await waiting
        await peer.take(receiver)
        await peer.take(receiver)
        assert peer.came[-1] == (KIND_STAGE_INPUT, b"x" * 30_000)


async def test_a_message_that_can_never_fit_is_named() -> None:
    """With the option that would let it in."""
    async with pair() as (outbox, peer), peer.ring():
        with pytest.raises(PayloadTooLarge, match="--inbox-bytes"):
            await send(outbox, peer, bytes(1 << 20))
        await send(outbox, peer, b"small")


async def test_a_message_that_the_ring_cannot_hold_is_pulled() -> None:
    """It is taken like any other one."""
    async with pair() as (outbox, peer), peer.ring():
        await send(outbox, peer, bytes(100_000))
        await until(lambda: peer.came == [(KIND_STAGE_INPUT, bytes(100_000))])


async def test_nobody_there_is_an_error_of_the_sender() -> None:
    """The address is named, and the next try opens a new link."""
    async with pair() as (outbox, peer):
        with pytest.raises(NodeUnreachable, match="local://outbox-") as caught:
            await send(outbox, peer, b"x")
        assert caught.value.fields == {"address": peer.address}
        assert caught.value.__cause__ is not None
        async with peer.ring():
            await send(outbox, peer, b"x")
            await until(lambda: peer.came)


@pytest.mark.parametrize(
    "address", ["pigeon://loft:1/control", "tcp://127.0.0.1:1?shm=perhaps/control", "tcp://[::1/control", "?"]
)
async def test_an_address_that_means_nothing_here_is_one_that_nobody_answers_at(address: str) -> None:
    """Another node chose it, and may have transports that this one has not: no reason for this one to end."""
    async with pair() as (outbox, peer), peer.ring():
        outbox.post(address, consumed(1))
        with pytest.raises(NodeUnreachable):
            await outbox.send(address, [b"x"], kind=KIND_STAGE_INPUT)
        await until(lambda: not outbox._links)
        assert outbox.lost["peer_lost"] == 1
        await send(outbox, peer, b"x")
        await until(lambda: peer.came)


async def test_two_spellings_of_an_address_do_not_end_each_other() -> None:
    """As where a node joins a host by its name, whose other messages go to the number that it is known by."""
    address = Address.parse(f"local://outbox-{next(_HOUSES)}")
    spelled = f"{address}/%72ing"
    async with (
        transport_for(address).listen(address, Options()) as listener,
        open_outbox(lambda: "me.1", Options(), other_spellings=[spelled]) as outbox,
        asyncio.TaskGroup() as tasks,
    ):
        peer = Peer(listener, tasks)
        async with peer.ring() as receiver:
            for number in range(0, 10, 2):
                outbox.post(spelled, consumed(number))
                outbox.post(peer.address, consumed(number + 1))
                await outbox.flushed()
            assert sorted(map(repr, peer.messages)) == [repr(consumed(number)) for number in range(10)]
            assert not outbox.lost
            assert not receiver.fenced
            receiver.refuse("me.1")
            await until(lambda: receiver.fenced[REFUSED] == 2)


async def test_control_messages_share_a_ring_message_and_keep_their_order() -> None:
    """Whoever posts never waits; those that linger go with the next one that does not."""
    async with pair() as (outbox, peer), peer.ring():
        await send(outbox, peer, b"open")
        for number in range(10):
            outbox.post(peer.address, consumed(number), lingers=number < 9)
        await until(lambda: len(peer.messages) == 10)
        assert peer.messages == [consumed(number) for number in range(10)]
        assert len(peer.came) == 2
        outbox.post(peer.address, consumed(10), lingers=True)
        await until(lambda: len(peer.messages) == 11)  # alone, after a moment


async def test_what_was_consumed_shares_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lingers, up to a number of outputs; then those go at once."""
    monkeypatch.setattr("onepiece.runtime.outbox.CONSUMED_PER_MESSAGE_MAX", 3)
    outputs = [(f"u{number}", "a", "b") for number in range(4)]
    async with pair() as (outbox, peer), peer.ring():
        for output in outputs:
            outbox.consumed(peer.address, output)
        await until(lambda: len(peer.messages) == 2)
        assert peer.messages == [Consumed(tuple(outputs[:3])), Consumed((outputs[3],))]
        heard: list[object] = []
        outbox.deliver_locally("local://me/control", heard.append)
        outbox.consumed("local://me/control", outputs[0])
        await outbox.flushed()
        assert heard == [Consumed((outputs[0],))]


async def test_a_newer_control_message_replaces_one_that_waits() -> None:
    """Nobody wants the older one any more."""
    async with pair() as (outbox, peer), peer.ring():
        for number in range(5):
            outbox.post(peer.address, consumed(number), replaces="progress")
        await until(lambda: peer.messages)
        await outbox.flushed()
        assert peer.messages == [consumed(4)]


async def test_the_queue_to_a_peer_that_takes_nothing_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are dropped: membership will declare it dead."""
    monkeypatch.setattr("onepiece.runtime.control_queue.CONTROL_QUEUE_MAX", 3)
    async with pair() as (outbox, peer), peer.ring():
        for number in range(6):
            outbox.post(peer.address, consumed(number), lingers=True)
        await until(lambda: len(peer.messages) == 3)
        assert peer.messages == [consumed(3), consumed(4), consumed(5)]


async def test_control_messages_to_nobody_are_dropped() -> None:
    """They do not wait for ever, and ``flushed`` does not either."""
    async with pair() as (outbox, peer):
        outbox.post(peer.address, consumed(1))
        async with asyncio.timeout(20):
            await outbox.flushed()
        assert peer.came == []


async def test_heartbeats_to_nobody_are_complained_of_once() -> None:
    """Not twice a second for as long as nobody is there; and again when somebody was."""
    said: list[str] = []
    async with pair() as (outbox, peer):

        async def lose() -> None:
            outbox.post(peer.address, consumed(1), replaces="heartbeat")
            await until(lambda: not outbox._links)

        with captured(lambda event: said.append(event["event"])):
            for _ in range(3):
                await lose()
            assert said == ["control_messages_lost"]
            async with peer.ring():
                outbox.post(peer.address, consumed(2))
                await until(lambda: peer.messages)
            await until(lambda: not outbox._links)
            said.clear()
            await lose()
            assert said == ["control_messages_lost"]


async def test_heartbeats_to_nobody_are_not_waited_for() -> None:
    """They go on being sent while a node leaves, also to a manager that has left before it."""
    async with pair() as (outbox, peer):

        async def beat() -> None:
            while True:
                outbox.post(peer.address, consumed(1), replaces="heartbeat")
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            beating = tasks.create_task(beat())
            await asyncio.sleep(0)
            async with asyncio.timeout(20):
                await outbox.flushed()
            beating.cancel()


async def test_what_is_queued_for_a_peer_that_is_dropped_is_not_waited_for() -> None:
    """A node leaves although a message waits for room at a manager that is declared dead meanwhile."""
    async with pair() as (outbox, peer), peer.ring(reading=False):
        for number in range(2 * RING.slot_count):
            outbox.post(peer.address, consumed(number))
            for _ in range(5):
                await asyncio.sleep(0)
        flushing = asyncio.ensure_future(outbox.flushed())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not flushing.done()
        outbox.drop(peer.address)
        async with asyncio.timeout(20):
            await flushing


async def test_messages_to_oneself_need_no_ring() -> None:
    """They are handed over on the loop, later: a handler never runs inside of ``post``."""
    async with pair() as (outbox, _):
        heard: list[object] = []
        outbox.deliver_locally("local://me/control", heard.append)
        outbox.post("local://me/control", consumed(1))
        assert heard == []
        await asyncio.sleep(0)
        assert heard == [consumed(1)]


async def test_peers_that_die_leave_nothing() -> None:
    """A thousand die with messages they had not taken: each is told as lost, and no link stays (fault 51)."""
    lost: list[int] = []

    def on_lost(number: int) -> Callable[[], Coroutine[Any, Any, None]]:
        async def note() -> None:
            lost.append(number)

        return note

    async with pair() as (outbox, peer):
        tasks, held = len(asyncio.all_tasks()), senders()
        for number in range(1000):
            async with open_receiver(peer.listener, f"actor/{number}", SMALL_RING) as receiver:
                address = str(receiver.address)
                await outbox.send(address, [b"never taken"], kind=KIND_STAGE_INPUT, on_lost=on_lost(number))
                outbox.post(address, consumed(number))
                outbox.post(address, consumed(number), lingers=True)
        await until(lambda: len(lost) == 1000)
        await until(lambda: len(asyncio.all_tasks()) == tasks)
        assert sorted(lost) == list(range(1000))
        assert outbox._links == {}
        assert senders() == held


def senders() -> int:
    """Those that are still referred to."""
    gc.collect()
    return sum(issubclass(type(each), Sender) for each in gc.get_objects())


async def test_flushed_means_taken() -> None:
    """All that was sent is in the consumer's hands: a node may leave then."""
    async with pair() as (outbox, peer), peer.ring(reading=False) as receiver:
        await send(outbox, peer, b"data")
        outbox.post(peer.address, consumed(1))
        flushing = asyncio.ensure_future(outbox.flushed())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not flushing.done()
        await peer.take(receiver)
        await peer.take(receiver)
        await flushing
        assert peer.messages == [consumed(1)]


async def test_a_dropped_link_is_not_waited_for() -> None:
    """A peer that takes nothing, with a queue before it, is declared dead while this node leaves."""
    async with pair() as (outbox, peer), peer.ring(reading=False):
        await send(outbox, peer, b"data")
        for number in range(RING.slot_count + 2):
            outbox.post(peer.address, consumed(number))
            await asyncio.sleep(0.01)  # a ring message for each, until the ring is full
        outbox.post(peer.address, consumed(99))
        flushing = asyncio.ensure_future(outbox.flushed())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not flushing.done()
        outbox.drop(peer.address)
        async with asyncio.timeout(20):
            await flushing


async def test_flushed_means_that_what_follows_was_taken_too() -> None:
    """A message that is taken lets its sender tell who retained what it was made from: that is not lost."""
    async with pair() as (outbox, peer), peer.ring():
        other = f"{peer.listener.address}/other"
        heard: list[bytes] = []
        async with open_receiver(peer.listener, "other", RING) as retaining:
            outbox.post(other, consumed(0))  # so that its link is looked at first
            tell = functools.partial(outbox.post, other, consumed(1), lingers=True)
            await send(outbox, peer, b"data", on_taken=tell)

            async def read() -> None:
                while True:
                    delivery = await retaining.receive()
                    heard.append(bytes(delivery.payload))
                    retaining.release(delivery)

            reading = asyncio.ensure_future(read())
            await outbox.flushed()
            reading.cancel()
        assert len(heard) == 2


async def test_a_new_life_sends_nothing_of_the_old_one() -> None:
    """Messages that nobody took are not told as lost: they are not to be sent elsewhere either."""
    async with pair() as (outbox, peer), peer.ring(reading=False):
        told: list[str] = []

        async def on_lost() -> None:
            told.append("lost")

        await send(outbox, peer, b"old", on_lost=on_lost)
        outbox.forget_all()
        await send(outbox, peer, b"new", on_lost=on_lost)
        assert told == []


async def test_a_closing_outbox_opens_no_link() -> None:
    """Whoever hears in the last moment that a message was taken may want to tell others: too late."""
    async with pair() as (outbox, peer), peer.ring():
        await outbox.send(peer.address, [b"one"], kind=KIND_STAGE_INPUT)
        outbox.drop_all()
        outbox.post("local://nobody/control", Consumed((("u", "a", "b"),)))
        assert not outbox._links


async def test_words_that_lie_in_a_ring_that_ends_are_told_as_lost() -> None:
    """Sent and not taken, queued behind a full ring, or lingering: one line counts them all."""
    said: list[dict[str, Any]] = []
    async with pair() as (outbox, peer):
        with captured(lambda event: said.append(dict(event))):
            async with peer.ring(reading=False) as receiver:
                outbox.post(peer.address, consumed(0))
                await peer.take(receiver)
                for number in range(1, 2 * RING.slot_count):
                    outbox.post(peer.address, consumed(number))
                    await asyncio.sleep(0.005)  # a ring message for each, until the ring is full
                outbox.consumed(peer.address, ("u", "a", "b"))
            await until(lambda: not outbox._links)
        assert [(each["event"], each["count"]) for each in said] == [
            ("control_messages_lost", 2 * RING.slot_count)
        ]
        assert outbox.lost == {"peer_lost": 2 * RING.slot_count}


async def test_words_for_a_peer_that_is_dropped_are_told_as_lost() -> None:
    """Its node was declared dead: what it had not taken is counted, and logged with the reason."""
    said: list[dict[str, Any]] = []
    async with pair() as (outbox, peer), peer.ring(reading=False):
        outbox.post(peer.address, consumed(0))
        await until(lambda: any(link.not_taken for link in outbox.links()))
        outbox.post(peer.address, consumed(1), lingers=True)
        with captured(lambda event: said.append(dict(event))):
            outbox.drop(peer.address)
            await until(lambda: outbox.lost["peer_lost"] == 2)
    assert [each["event"] for each in said] == ["control_messages_lost"]
    assert "was closed" in said[0]["error"]


async def test_words_of_an_old_life_are_not_lost() -> None:
    """They are not to arrive: nobody needs to be told."""
    said: list[str] = []
    async with pair() as (outbox, peer), peer.ring(reading=False):
        with captured(lambda event: said.append(event["event"])):
            outbox.post(peer.address, consumed(0))
            await until(lambda: any(link.not_taken for link in outbox.links()))
            outbox.forget_all()
            await until(lambda: not outbox.links())
            await send(outbox, peer, b"new")
    assert "control_messages_lost" not in said
