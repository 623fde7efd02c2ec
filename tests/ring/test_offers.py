"""Messages that are offered in the ring and pulled: what the consumer takes, refuses and drops."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ring.region import GENERATION, LEASE_SECONDS, Inbox, Session
from transports.ring import Consumer, Geometry
from transports.ring.layout import hash_payload
from transports.ring.offers import KEY_BYTES_MAX, OFFER_BYTES_MAX, Exports, Lent, Offer

GEOMETRY = Geometry(slot_count=4, payload_bytes=256, session_count=4)
LARGE = bytes(range(256)) * 4


class PullingInbox(Inbox):
    """An inbox whose consumer pulls 1500 bytes at a time from what tests put into ``exported``."""

    def __init__(self) -> None:
        super().__init__(GEOMETRY)
        self.consumer = Consumer(
            GEOMETRY,
            generation=GENERATION,
            lease_seconds=LEASE_SECONDS,
            slowest_bytes_per_second=1e9,
            pulled_bytes_max=1500,
        )

    def offer(self, session: Session, body: bytes, *, promised: bytes | None = None) -> None:
        """Export ``body``, and send an offer of it, or of what was promised instead."""
        key = b"key of %d" % len(self.exported)
        self.exported[session.number, key] = body
        promised = body if promised is None else promised
        offer = Offer(len(promised), hash_payload((promised,)), key).to_bytes()
        self.send_offer(session, offer)

    def send_offer(self, session: Session, offer: bytes) -> None:
        """Send bytes as an offer."""
        program = session.producer.send((offer,), kind=7, now=self.now, pull=True)
        self.run(session, program)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.binary(min_size=1, max_size=KEY_BYTES_MAX))
def test_offers_come_back(length: int, message_hash: int, key: bytes) -> None:
    """What is offered is what is read."""
    offer = Offer(length, message_hash, key)
    assert Offer.from_bytes(offer.to_bytes()) == offer


@pytest.mark.parametrize("length", [0, 15, 16, OFFER_BYTES_MAX + 1])
def test_other_lengths_are_no_offers(length: int) -> None:
    """An offer has a key, and a bound."""
    assert Offer.from_bytes(bytes(length)) is None


def test_exports_are_bounded_and_end_in_order() -> None:
    """One message is always lent, more only within the bound; delivered ones are given back, no others."""
    exports = Exports(100)
    assert exports.has_room(1000)
    exports.lend(Lent(3, 60, b"three"))
    assert exports.has_room(40)
    assert not exports.has_room(41)
    exports.lend(Lent(5, 40, b"five"))
    assert exports.delivered(3) == ()
    assert exports.delivered(5) == (b"three",)
    assert exports.bytes == 40
    assert exports.take_back(5) == b"five"
    assert exports.bytes == 0
    assert exports.delivered(100) == ()


def test_an_offer_is_pulled_handed_over_and_counted() -> None:
    """It is held outside the ring, and counts as delivered."""
    inbox = PullingInbox()
    session = inbox.connect("a")
    inbox.send(session, b"small")
    inbox.offer(session, LARGE)
    assert inbox.take() == b"small"
    delivery = inbox.poll()
    assert delivery is not None
    assert (delivery.content, delivery.length, delivery.number, delivery.kind) == (LARGE, len(LARGE), 1, 7)
    assert inbox.refresh(session) == 2
    inbox.release(delivery)
    assert inbox.poll() is None


@pytest.mark.parametrize("promised", [LARGE[:-1], LARGE[:-1] + b"x", LARGE * 2, b""])
def test_what_is_not_as_offered_ends_its_session(promised: bytes) -> None:
    """Another length, other bytes, too much: never handed over; the producer has to come again."""
    inbox = PullingInbox()
    session = inbox.connect("a")
    inbox.offer(session, LARGE, promised=promised)
    inbox.send(session, b"behind it")
    assert inbox.poll() is None
    assert inbox.fenced == [(session.number,)]
    again = inbox.connect("a")
    assert again.producer.next_number == 0
    inbox.offer(again, LARGE)
    delivery = inbox.poll()
    assert delivery is not None
    assert (delivery.number, delivery.content) == (0, LARGE)


def test_bytes_that_are_no_offer_end_their_session() -> None:
    """A producer that says so and does not mean it."""
    inbox = PullingInbox()
    session = inbox.connect("a")
    inbox.send_offer(session, b"no offer")
    assert inbox.poll() is None
    assert inbox.fenced == [(session.number,)]


def test_an_offer_waits_until_there_is_memory_for_it() -> None:
    """However long: its producer is not suspected meanwhile."""
    inbox = PullingInbox()
    session = inbox.connect("a")
    inbox.offer(session, LARGE)
    inbox.offer(session, LARGE)
    first = inbox.poll()
    assert first is not None
    assert inbox.poll() is None
    assert inbox.consumer.waits_for_release
    inbox.now += 100 * LEASE_SECONDS
    assert inbox.poll() is None
    assert inbox.fenced == []
    inbox.release(first)
    second = inbox.poll()
    assert second is not None
    assert second.number == 1


def test_an_offer_of_a_session_that_has_ended_is_dropped() -> None:
    """It is not pulled, and comes again in the next session; what was sent behind it too."""
    inbox = PullingInbox()
    session = inbox.connect("a")
    inbox.offer(session, LARGE)
    inbox.send(session, b"behind it")
    inbox.revoke(session.number)
    inbox.consumer.close_session(session.number)
    again = inbox.connect("a")
    assert again.producer.next_number == 0
    assert inbox.poll() is None
    assert inbox.pulled == []
    inbox.offer(again, LARGE)
    delivery = inbox.poll()
    assert delivery is not None
    assert delivery.content == LARGE


def test_a_session_that_ends_while_it_is_pulled_from() -> None:
    """What had come whole counts, and its repeat in the next session is dropped."""
    inbox = PullingInbox()
    session = inbox.connect("a")
    inbox.offer(session, LARGE)

    def reconnect() -> None:
        inbox.at_pull = lambda: None
        inbox.revoke(session.number)
        inbox.consumer.close_session(session.number)
        again.append(inbox.connect("a"))

    again: list[Session] = []
    inbox.at_pull = reconnect
    delivery = inbox.poll()
    assert delivery is not None
    assert delivery.content == LARGE
    assert again[0].producer.next_number == 0
    inbox.offer(again[0], LARGE)
    inbox.send(again[0], b"new")
    inbox.release(delivery)
    assert inbox.take() == b"new"
    assert inbox.pulled == [session.number], "a repeat is not pulled"
