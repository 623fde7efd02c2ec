"""Claims: what the owner executes, and when a producer asks for it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ring.region import LEASE_SECONDS, Inbox, Session, drain
from transports.errors import ProtocolError, RingFull
from transports.operations import (
    Claim,
    Claimed,
    CompareAndSwap,
    Guarded,
    Operation,
    Pause,
    PauseReason,
    Read,
)
from transports.ring import Claims, Geometry
from transports.ring.layout import HEAD_OFFSET, TAIL_OFFSET, WORD, pack_position, unpack_position

SMALL = Geometry(4, 8 * 64, 3)


@pytest.fixture
def inbox() -> Inbox:
    """An inbox whose owner executes claims."""
    return Inbox(SMALL, guarded=True, claims=True)


def _sending(
    inbox: Inbox, session: Session, payload: bytes = b"x", *, rival: Session | None = None
) -> list[Operation]:
    """What a send yields, if ``rival`` sends before its swap; pauses end at once."""
    program = session.producer.send((payload,), kind=1, now=inbox.now)
    operations: list[Operation] = []
    outcome: Any = None
    try:
        while True:
            operation = program.send(outcome)
            operations.append(operation)
            if rival is not None and isinstance(operation, CompareAndSwap | Guarded):
                inbox.send(rival, b"rival")
                rival = None
            outcome = inbox.now if isinstance(operation, Pause) else inbox.carry_out(session, operation)
    except StopIteration:
        return operations


def _kinds(operations: list[Operation]) -> list[str]:
    return [type(operation).__name__ for operation in operations]


def test_who_has_lost_a_swap_claims(inbox: Inbox) -> None:
    """The second try cannot be lost: it is the owner's, and its payload follows."""
    one, other = inbox.connect("A"), inbox.connect("B")
    operations = _sending(inbox, one, b"late", rival=other)
    assert _kinds(operations) == ["Read", "Guarded", "Pause", "Claim", "Chain"]
    assert operations[2] == Pause(PauseReason.CONTENDED, 1)
    assert operations[3] == Claim(4)
    assert drain(inbox) == [b"rival", b"late"]


def test_while_others_send_messages_are_claimed_at_once(inbox: Inbox) -> None:
    """No payload is sent in vain where the tail has moved each time; what is quiet ends that."""
    one, other = inbox.connect("A"), inbox.connect("B")
    _sending(inbox, one, rival=other)
    drain(inbox)
    for _ in range(3 * one.producer.quiet_claims):
        _sending(inbox, other)
        assert _kinds(_sending(inbox, one)) == ["Claim", "Chain"]
        drain(inbox)
    for _ in range(one.producer.quiet_claims):
        assert _kinds(_sending(inbox, one)) == ["Claim", "Chain"]
        drain(inbox)
    assert _kinds(_sending(inbox, one)) == ["Guarded"]


def test_who_has_waited_for_room_claims(inbox: Inbox) -> None:
    """All are woken together: a claim needs no second look, and a refusal waits again."""
    one, other = inbox.connect("A"), inbox.connect("B")
    inbox.send(other, bytes(8 * 64))
    program = one.producer.send((b"x",), kind=1, now=0.0)
    assert program.send(inbox.carry_out(one, next(program))) == Pause(PauseReason.FULL, 1)
    claim = program.send(inbox.now)
    assert claim == Claim(1)
    assert program.send(inbox.carry_out(one, claim)) == Pause(PauseReason.FULL, 1)
    assert not one.producer.in_doubt
    assert inbox.take() == bytes(8 * 64)
    inbox.run(one, program, program.send(inbox.now))
    assert inbox.take() == b"x"


def test_a_claim_tells_that_the_ring_is_full(inbox: Inbox) -> None:
    """Who does not want to wait is told, and may go on in the same session."""
    one, other = inbox.connect("A"), inbox.connect("B")
    _sending(inbox, one, rival=other)
    _sending(inbox, other, bytes(6 * 64))
    with pytest.raises(RingFull, match="no room for 1 bytes"):
        inbox.send(one, b"x", wait=False)
    assert not one.producer.in_doubt
    drain(inbox)
    assert inbox.send(one, b"y") == 1


def test_a_claim_brings_the_count_of_what_was_delivered(inbox: Inbox) -> None:
    """As a read does."""
    one, other = inbox.connect("A"), inbox.connect("B")
    _sending(inbox, one, rival=other)
    drain(inbox)
    assert one.producer.delivered == 0
    assert _kinds(_sending(inbox, one)) == ["Claim", "Chain"]
    assert one.producer.delivered == 1


def test_a_send_abandoned_at_its_claim_ends_the_session(inbox: Inbox) -> None:
    """Whoever closes a program at its claim does not know what happened, and must not go on."""
    one, other = inbox.connect("A"), inbox.connect("B")
    _sending(inbox, one, rival=other)
    program = one.producer.send((b"x",), kind=1, now=0.0)
    assert next(program) == Claim(1)
    program.close()
    assert one.producer.in_doubt


def test_a_claimed_slot_without_a_message_is_recovered(inbox: Inbox) -> None:
    """A producer that dies behind its claim holds the others up for a lease, as behind a swap."""
    one, other = inbox.connect("A"), inbox.connect("B")
    _sending(inbox, one, rival=other)
    drain(inbox)
    program = one.producer.send((b"never written",), kind=1, now=0.0)
    assert inbox.carry_out(one, next(program)).taken
    _sending(inbox, other, b"behind it")
    assert inbox.poll() is None
    inbox.now += LEASE_SECONDS + 1
    assert drain(inbox) == [b"behind it"]
    assert inbox.fenced == [(one.number,)]


def test_without_claims_swaps_are_tried_again() -> None:
    """An owner that executes none is asked for none: who loses takes the word found."""
    inbox = Inbox(SMALL, guarded=True)
    one, other = inbox.connect("A"), inbox.connect("B")
    assert _kinds(_sending(inbox, one, rival=other)) == ["Read", "Guarded", "Pause", "Guarded"]


@pytest.mark.parametrize("head", [0, pack_position(0, 1, 9)], ids=["full", "impossible"])
def test_an_owner_that_contradicts_itself_is_found_out(inbox: Inbox, head: int) -> None:
    """An answer that says there was room, with words that say there was none, is an error."""
    one, other = inbox.connect("A"), inbox.connect("B")
    _sending(inbox, one, rival=other)
    program = one.producer.send((b"x",), kind=1, now=0.0)
    assert next(program) == Claim(1)
    tail = pack_position(2, 4, 4) if not head else pack_position(2, 0, 0)
    with pytest.raises(ProtocolError, match="no room for them"):
        program.send(Claimed(tail, head, 0, taken=True))


@pytest.mark.parametrize("length", [-1, 8 * 64 + 1, 1 << 63])
def test_an_impossible_claim_changes_nothing(inbox: Inbox, length: int) -> None:
    """What the ring can never hold is refused, whatever its words say."""
    before = bytes(inbox.memory)
    with pytest.raises(ProtocolError, match=f"claims {length} bytes.*512 at most"):
        Claims(SMALL)(inbox.view, 1, length)
    assert bytes(inbox.memory) == before


def test_spoilt_words_are_no_room(inbox: Inbox) -> None:
    """A head ahead of the tail, which no owner has ever published, is answered as it is."""
    WORD.pack_into(inbox.view, HEAD_OFFSET, pack_position(0, 3, 3))
    assert Claims(SMALL)(inbox.view, 1, 64) == Claimed(0, pack_position(0, 3, 3), 0, taken=False)
    assert not any(inbox.view[TAIL_OFFSET : TAIL_OFFSET + 8])


@given(
    slots=st.integers(1, 5),
    granules=st.integers(2, 9),
    apart=st.booleans(),
    near_wrap=st.booleans(),
    lengths=st.lists(st.tuples(st.integers(0, 9 * 64), st.booleans()), max_size=12),
)
def test_a_claim_is_a_read_and_a_swap_at_once(
    slots: int, granules: int, apart: bool, near_wrap: bool, lengths: list[tuple[int, bool]]
) -> None:
    """Whatever is sent and released, both ways leave the same tail, and find the same room."""
    geometry = Geometry(slots, granules * 64, 3, 64 if apart else 0)
    inboxes = [Inbox(geometry, claims=claims) for claims in (False, True)]
    start = geometry.sequence_modulus - 1 << 28 | geometry.granule_modulus - 1 if near_wrap else 0
    for inbox in inboxes:
        for offset in (TAIL_OFFSET, HEAD_OFFSET):
            WORD.pack_into(inbox.view, offset, start)
        inbox.consumer._head = inbox.consumer._cursor = start
    sessions = [inbox.connect("A") for inbox in inboxes]
    for length, takes in lengths:
        payload = bytes(min(length, geometry.message_bytes_max))
        sent = []
        for inbox, session in zip(inboxes, sessions, strict=True):
            session.producer._claims_due = int(session is sessions[1])
            session.producer._usable_until = float("-inf")
            try:
                sent.append(inbox.send(session, payload, wait=False, head=b"h" if apart else b""))
            except RingFull:
                sent.append(-1)
            if takes:
                inbox.take()
        assert sent[0] == sent[1]
        assert bytes(inboxes[0].memory) == bytes(inboxes[1].memory)
        tail = int.from_bytes(inboxes[1].view[TAIL_OFFSET : TAIL_OFFSET + 8], "little")
        assert unpack_position(tail)[0] in {0, 1}


def test_the_first_try_is_a_swap(inbox: Inbox) -> None:
    """Alone, a message costs one round trip and its payload goes along."""
    sender = inbox.connect("A")
    assert _kinds(_sending(inbox, sender)) == ["Read", "Guarded"]
    assert _kinds(_sending(inbox, sender)) == ["Guarded"]
    assert isinstance(next(sender.producer.send((bytes(64),), kind=1, now=LEASE_SECONDS)), Read)
