"""The ring by example: each promise, each rule of recovery, each way to be full."""

import pytest

from tests.ring.region import GENERATION, LEASE_SECONDS, Blocked, Inbox, Session, drain
from transports.errors import MessageTooLarge, RingFull, SessionFenced
from transports.operations import Chain, CompareAndSwap, Guarded, Pause, PauseReason, Read
from transports.ring import Geometry, Producer, SessionsExhausted

SMALL = Geometry(4, 8 * 64, 3)


@pytest.fixture(params=[False, True], ids=["plain", "guarded"])
def inbox(request: pytest.FixtureRequest) -> Inbox:
    """An inbox of 4 slots and 8 granules, in both modes of sending."""
    return Inbox(SMALL, guarded=request.param)


def _stall(inbox: Inbox, session: Session, payload: bytes = b"stalled") -> None:
    """Reserve and post, but let nothing land."""
    session.held_back = True
    inbox.send(session, payload)


def _lease_over(inbox: Inbox) -> None:
    assert inbox.poll() is None
    inbox.now += LEASE_SECONDS + 1


def test_messages_arrive_once_whole_and_in_order(inbox: Inbox) -> None:
    """What is sent comes out, with its kind, flags, number and sender, however it was cut into buffers."""
    sender = inbox.connect("A")
    assert inbox.send(sender, b"one ", memoryview(b"message"), kind=7, flags=9) == 0
    assert inbox.send(sender) == 1
    first = inbox.poll()
    assert first is not None
    assert (first.identity, first.number, first.kind, first.flags) == ("A", 0, 7, 9)
    assert inbox.bytes_of(first) == b"one message"
    second = inbox.poll()
    assert second is not None
    assert (second.number, second.length) == (1, 0)
    assert inbox.poll() is None


def test_delivered_counts_what_was_handed_over(inbox: Inbox) -> None:
    """The producer learns of a hand-over, not of a release and not before."""
    sender = inbox.connect("A")
    inbox.send(sender, b"x")
    assert inbox.refresh(sender) == 0
    assert inbox.poll() is not None
    assert inbox.refresh(sender) == 1


def test_a_held_message_stays_as_it_is_while_others_come_and_go(inbox: Inbox) -> None:
    """The bytes of a message may be read until it is released, whoever sends meanwhile."""
    sender = inbox.connect("A")
    inbox.send(sender, b"kept")
    kept = inbox.poll()
    assert kept is not None
    for number in range(3):
        inbox.send(sender, b"%d" % number * 64)
        assert inbox.take() is not None
    with pytest.raises(RingFull):
        inbox.send(sender, b"one slot too many", wait=False)
    assert inbox.bytes_of(kept) == b"kept"
    inbox.release(kept)
    assert inbox.consumer.free_bytes == 8 * 64
    inbox.send(sender, b"room again")


def test_head_moves_over_the_released_prefix_only(inbox: Inbox) -> None:
    """Messages may be released in any order; room returns from the oldest on."""
    sender = inbox.connect("A")
    for _ in range(3):
        inbox.send(sender, bytes(64))
    first, second, third = (inbox.poll() for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    inbox.release(third)
    inbox.release(second)
    assert inbox.consumer.free_bytes == 5 * 64
    assert inbox.consumer.held == 1
    inbox.release(first)
    assert inbox.consumer.free_bytes == 8 * 64
    with pytest.raises(AssertionError, match="released before"):
        inbox.own(inbox.consumer.release(first))


def test_a_ring_full_of_held_messages_does_not_begin_again(inbox: Inbox) -> None:
    """With every slot handed over and none released, the cursor stands before its own start."""
    sender = inbox.connect("A")
    for _ in range(4):
        inbox.send(sender, b"x")
        assert inbox.poll() is not None
    assert inbox.poll() is None
    assert inbox.consumer.held == 4


def test_full_is_seen_by_the_sender(inbox: Inbox) -> None:
    """Bytes or slots: without room a sender waits, or is told if it does not want to."""
    sender = inbox.connect("A")
    inbox.send(sender, bytes(8 * 64))
    program = sender.producer.send((b"x",), kind=1, now=0.0)
    operation = next(program)
    assert isinstance(operation, Read)
    assert program.send(inbox.carry_out(sender, operation)) == Pause(PauseReason.FULL, 1)
    program.close()
    assert not sender.producer.in_doubt
    with pytest.raises(RingFull, match="no room for 1 bytes"):
        inbox.send(sender, b"x", wait=False)
    assert inbox.take() == bytes(8 * 64)
    assert inbox.send(sender, b"x") == 1


def test_a_message_as_long_as_the_ring_goes_through_wherever_it_starts(inbox: Inbox) -> None:
    """An empty ring holds any message, also one that skips more than it uses."""
    sender = inbox.connect("A")
    for granules in (1, 8, 3, 7, 5, 5, 8, 2, 8):
        payload = bytes([granules]) * (granules * 64 - 3)
        inbox.send(sender, payload)
        assert inbox.take() == payload


def test_what_can_never_fit_is_refused_before_anything_is_sent(inbox: Inbox) -> None:
    """A message longer than the payload ring is an error of its own, with both lengths."""
    sender = inbox.connect("A")
    with pytest.raises(MessageTooLarge, match=r"513 bytes.*512"):
        next(sender.producer.send((bytes(513),), kind=1, now=0.0))


def test_the_loser_of_a_swap_takes_the_word_it_found(inbox: Inbox) -> None:
    """After a lost swap the sender pauses shortly and goes on without reading again."""
    one, other = inbox.connect("A"), inbox.connect("B")
    program = one.producer.send((b"late",), kind=1, now=0.0)
    swap = program.send(inbox.carry_out(one, next(program)))
    inbox.send(other, b"early")
    assert program.send(inbox.carry_out(one, swap)) == Pause(PauseReason.CONTENDED, 1)
    again = program.send(0.0)
    assert isinstance(again, CompareAndSwap | Guarded)
    inbox.run(one, program, again)
    assert drain(inbox) == [b"early", b"late"]


def test_an_old_snapshot_is_read_again(inbox: Inbox) -> None:
    """Half a lease after its read, head and tail are not used for a reservation any more."""
    sender = inbox.connect("A")
    inbox.send(sender, b"x")
    assert not isinstance(next(sender.producer.send((b"x",), kind=1, now=LEASE_SECONDS / 2 - 1)), Read)
    fresh = inbox.connect("B")
    inbox.send(fresh, b"x")
    assert isinstance(next(fresh.producer.send((b"x",), kind=1, now=LEASE_SECONDS / 2)), Read)


def test_a_swap_that_comes_too_late_starts_over(inbox: Inbox) -> None:
    """A program that slept behind its read does not swap: it learns the time and reads again."""
    sender = inbox.connect("A")
    program = sender.producer.send((b"x",), kind=1, now=0.0)
    swap = program.send(inbox.carry_out(sender, next(program)))
    inbox.now = LEASE_SECONDS
    assert isinstance(program.send(inbox.carry_out(sender, swap)), Pause)
    assert isinstance(program.send(inbox.now), Read)
    program.close()
    assert not sender.producer.in_doubt


def test_a_send_abandoned_behind_its_swap_ends_the_session(inbox: Inbox) -> None:
    """Whoever closes a program at its swap does not know what happened, and must not go on."""
    sender = inbox.connect("A")
    program = sender.producer.send((b"x",), kind=1, now=0.0)
    program.send(inbox.carry_out(sender, next(program)))
    program.close()
    assert sender.producer.in_doubt
    with pytest.raises(AssertionError, match="open a new session"):
        inbox.send(sender, b"y")


def test_a_large_payload_is_posted_before_it_is_hashed() -> None:
    """Beyond a length the payload travels while it is hashed; slot and commit word follow."""
    inbox = Inbox(Geometry(2, 1 << 20, 1))
    sender = inbox.connect("A")
    payload = bytes(range(256)) * 512
    program = sender.producer.send((payload[:1000], payload[1000:]), kind=1, now=0.0)
    operations = []
    try:
        operation = next(program)
        while True:
            operations.append(operation)
            operation = program.send(inbox.carry_out(sender, operation))
    except StopIteration:
        pass
    _, _, first, second = operations
    assert isinstance(first, Chain)
    assert isinstance(second, Chain)
    assert not first.notify
    assert [write.length for write in first.writes] == [len(payload)]
    assert second.notify
    assert [write.length for write in second.writes] == [48, 8]
    assert inbox.take() == payload


def test_a_very_large_payload_is_posted_and_hashed_by_pieces() -> None:
    """No piece is longer than the bound, and the pieces of several buffers make up the message."""
    inbox = Inbox(Geometry(2, 1 << 20, 1))
    sender = inbox.connect("A")
    sender.producer.hash_after_post_bytes = 1
    sender.producer.piece_bytes = 1000
    payload = bytes(range(251)) * 100
    program = sender.producer.send((payload[:3333], payload[3333:]), kind=1, now=0.0)
    sender.held_back = True
    inbox.run(sender, program)
    *pieces, body, commit = [sum(map(len, write.buffers)) for write in sender.posted]
    assert max(pieces) == 1000
    assert [body, commit] == [48, 8]
    inbox.land(sender)
    assert inbox.take() == payload


# Recovery.


def test_nothing_is_suspected_before_its_lease_is_over(inbox: Inbox) -> None:
    """A reserved slot is waited for, and delivered when it comes in time."""
    sender = inbox.connect("A")
    _stall(inbox, sender)
    assert inbox.poll() is None
    deadline = inbox.consumer.next_deadline()
    assert deadline is not None
    assert deadline >= LEASE_SECONDS
    inbox.now = deadline - 0.01
    assert inbox.poll() is None
    inbox.land(sender)
    assert inbox.take() == b"stalled"
    assert inbox.poll() is None
    assert inbox.consumer.next_deadline() is None


def test_a_large_reservation_is_given_time_for_its_bytes() -> None:
    """The lease grows with the bytes that are reserved, so a slow wire is not suspected."""
    geometry = Geometry(2, 1 << 20, 1)
    inbox = Inbox(geometry)
    inbox.consumer = type(inbox.consumer)(
        geometry, generation=GENERATION, lease_seconds=LEASE_SECONDS, slowest_bytes_per_second=1 << 10
    )
    _stall(inbox, inbox.connect("A"), bytes(1 << 20))
    inbox.poll()
    assert inbox.consumer.next_deadline() == LEASE_SECONDS + 1024


def test_the_only_open_slot_costs_only_its_own_producer(inbox: Inbox) -> None:
    """A committed slot behind it says who reserved it: nobody else is fenced."""
    stalled, other, idle = inbox.connect("A"), inbox.connect("B"), inbox.connect("C")
    _stall(inbox, stalled)
    inbox.send(other, b"behind")
    _lease_over(inbox)
    assert inbox.take() == b"behind"
    assert inbox.fenced == [(stalled.number,)]
    with pytest.raises(SessionFenced):
        inbox.send(stalled, b"more")
    inbox.send(idle, b"goes on")
    assert inbox.take() == b"goes on"


def test_several_open_slots_make_everybody_a_suspect(inbox: Inbox) -> None:
    """Nobody testifies for a slot in the middle, so whoever may own it is fenced."""
    one, two, third = inbox.connect("A"), inbox.connect("B"), inbox.connect("C")
    _stall(inbox, one)
    _stall(inbox, two)
    inbox.send(third, b"behind")
    _lease_over(inbox)
    assert inbox.take() == b"behind"
    assert [sorted(sessions) for sessions in inbox.fenced] == [[1, 2, 3]]


def test_the_tail_itself_testifies_for_the_last_slot(inbox: Inbox) -> None:
    """Without anything behind it, the tail word names who reserved the open slot."""
    stalled = inbox.connect("A")
    inbox.connect("B")
    _stall(inbox, stalled)
    _lease_over(inbox)
    assert inbox.poll() is None
    assert inbox.fenced == [(stalled.number,)]
    assert inbox.consumer.free_bytes == 8 * 64


def test_what_lands_before_the_fence_is_delivered(inbox: Inbox) -> None:
    """A message that arrives in the last moment is looked at once more, and counts."""
    stalled = inbox.connect("A")
    _stall(inbox, stalled)
    _lease_over(inbox)
    inbox.at_fence = lambda: inbox.land(stalled)
    assert inbox.take() == b"stalled"
    assert inbox.connect("A").producer.next_number == 1


def test_a_fenced_producer_sends_again_and_nothing_comes_twice(inbox: Inbox) -> None:
    """The new session is told how much was handed over; what follows a gap is not delivered early."""
    sender = inbox.connect("A")
    inbox.send(sender, b"0")
    assert inbox.take() == b"0"
    sender.held_back = True
    inbox.send(sender, b"1")
    lost = len(sender.posted)
    inbox.send(sender, b"2")
    for _ in range(lost):
        sender.posted.popleft()
    inbox.land(sender)
    _lease_over(inbox)
    assert inbox.poll() is None
    again = inbox.connect("A")
    assert again.producer.next_number == 1
    assert again.producer.delivered == 1
    inbox.send(again, b"1")
    inbox.send(again, b"2")
    assert drain(inbox) == [b"1", b"2"]
    assert inbox.refresh(again) == 3


def test_a_repeat_is_dropped_and_acknowledged_in_the_new_session(inbox: Inbox) -> None:
    """What the old session had committed is handed over once, and the new session is told."""
    sender = inbox.connect("A")
    inbox.send(sender, b"0")
    inbox.send(sender, b"1")
    inbox.revoke(sender.number)
    inbox.consumer.close_session(sender.number)
    again = inbox.connect("A")
    assert again.producer.next_number == 0
    inbox.send(again, b"0")
    inbox.send(again, b"1")
    assert inbox.take() == b"0"
    assert inbox.refresh(again) == 1
    assert inbox.take() == b"1"
    assert inbox.take() is None
    assert inbox.refresh(again) == 2
    assert inbox.consumer.free_bytes == 8 * 64


def test_a_slot_whose_producer_is_gone_needs_no_lease(inbox: Inbox) -> None:
    """When the connection is lost nothing can land any more: the slot is given back at once."""
    stalled, other = inbox.connect("A"), inbox.connect("B")
    _stall(inbox, stalled)
    inbox.send(other, b"behind")
    assert inbox.poll() is None
    inbox.revoke(stalled.number)
    inbox.consumer.close_session(stalled.number)
    assert inbox.take() == b"behind"
    assert inbox.fenced == []


@pytest.mark.parametrize("damaged", ["payload", "slot"])
def test_damage_is_never_delivered(inbox: Inbox, damaged: str) -> None:
    """A flipped bit is waited out, then its session is fenced and sends again (fault 9)."""
    sender, other = inbox.connect("A"), inbox.connect("B")
    inbox.send(sender, b"damaged")
    inbox.send(other, b"behind")
    offset = SMALL.payload_start if damaged == "payload" else SMALL.slots_start + 24
    inbox.memory[offset] ^= 4
    _lease_over(inbox)
    assert inbox.take() == b"behind"
    assert inbox.fenced == [(sender.number,)]
    again = inbox.connect("A")
    inbox.send(again, b"whole")
    assert inbox.take() == b"whole"


def test_late_visible_bytes_are_waited_for(inbox: Inbox) -> None:
    """A commit word that is seen before its payload does not deliver anything yet (fault 43)."""
    sender = inbox.connect("A")
    sender.held_back = True
    inbox.send(sender, b"payload")
    payload = sender.posted.popleft()
    inbox.land(sender)
    assert inbox.poll() is None
    sender.posted.append(payload)
    inbox.land(sender)
    assert inbox.take() == b"payload"


def test_a_commit_word_of_another_generation_is_nothing(inbox: Inbox) -> None:
    """A producer of an earlier region's generation is not heard (fault 55)."""
    number, first_number = inbox.consumer.open_session("old")
    producer = Producer(
        SMALL, session=number, generation=GENERATION - 1, first_number=first_number, lease_seconds=1
    )
    inbox.sessions[number] = old = Session(producer, number)
    inbox.send(old, b"from another time")
    assert inbox.poll() is None


# Sessions.


def test_a_session_number_is_reused_only_behind_everything_it_reserved(inbox: Inbox) -> None:
    """Slots of a session that has ended go on meaning its identity until the cursor is past them."""
    sessions = [inbox.connect(name) for name in "ABC"]
    inbox.send(sessions[0], b"from A")
    inbox.revoke(sessions[0].number)
    inbox.consumer.close_session(sessions[0].number)
    with pytest.raises(SessionsExhausted, match="all 3 sessions"):
        inbox.consumer.open_session("D")
    delivery = inbox.poll()
    assert delivery is not None
    assert delivery.identity == "A"
    assert inbox.poll() is None
    newcomer = inbox.connect("D")
    assert newcomer.number == sessions[0].number
    assert inbox.refresh(newcomer) == 0
    inbox.send(newcomer, b"from D")
    other = inbox.poll()
    assert other is not None
    assert other.identity == "D"


def test_an_identity_has_one_session_at_a_time(inbox: Inbox) -> None:
    """Before a producer connects again its earlier session must have been fenced."""
    session = inbox.connect("A")
    assert inbox.consumer.session_of("A") == session.number
    with pytest.raises(AssertionError, match="fence it first"):
        inbox.consumer.open_session("A")
    inbox.consumer.close_session(session.number)
    inbox.consumer.close_session(session.number)
    assert inbox.consumer.session_of("A") is None


def test_identities_are_forgotten_from_the_oldest_on() -> None:
    """The number of remembered producers is bounded; those with a session are never forgotten."""
    inbox = Inbox(Geometry(4, 512, 2))
    inbox.consumer = type(inbox.consumer)(
        inbox.geometry,
        generation=GENERATION,
        lease_seconds=1.0,
        slowest_bytes_per_second=1.0,
        identities_max=2,
    )
    stays = inbox.connect("stays")
    for name in ("first", "second"):
        session = inbox.connect(name)
        inbox.send(session, b"x")
        assert inbox.take() == b"x"
        inbox.consumer.close_session(session.number)
        assert inbox.take() is None
    assert inbox.connect("first").producer.next_number == 0
    assert inbox.consumer.session_of("stays") == stays.number


def test_blocked_senders_do_not_reserve(inbox: Inbox) -> None:
    """Waiting leaves no trace: after a wait was given up, others find the ring as it was."""
    one, other = inbox.connect("A"), inbox.connect("B")
    inbox.send(one, bytes(5 * 64))
    with pytest.raises(Blocked):
        inbox.send(other, bytes(4 * 64))
    inbox.send(one, bytes(3 * 64))
    assert len(drain(inbox)) == 2
