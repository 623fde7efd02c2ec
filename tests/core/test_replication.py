"""Replication: which copies are made when, and that all copies become alike whatever happens between."""

import random
from collections import Counter
from collections.abc import Iterable

import pytest
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from onepiece.core.replication import TRANSITIONS, ReplicationMachine, RoundState, _Trigger, copy_holders
from onepiece.core.replication_events import (
    TOMBSTONE,
    CopyFailed,
    CopyRefused,
    CopyReplaced,
    CopyTaken,
    Pull,
    Purged,
    ReplicationConfig,
    ReplicationEffect,
    SendCopy,
    SendSummary,
    Stored,
    StoreNode,
    StoresChanged,
    SummaryAnswered,
    SummaryFailed,
    SummaryReceived,
    Tick,
    Version,
)
from onepiece.core.routing import rendezvous
from tests.core.store_set import ModelNode, StoreSet

NAMES = ["a", "b", "c", "d"]
CONFIG = ReplicationConfig(
    in_flight_per_peer=2,
    pending_max=8,
    page_records_max=4,
    page_seconds=0.5,
    settle_seconds=2.0,
    retry_seconds=1.0,
    retry_seconds_max=4.0,
    attempts_max=3,
    round_seconds=100.0,
)


def nodes(names: Iterable[str], *, draining: str = "", life: int = 1) -> StoresChanged:
    """A route table with these store nodes."""
    return StoresChanged(tuple(StoreNode(name, f"{name}.{life}", name not in draining) for name in names))


def uid_held_by(*names: str) -> str:
    """A UID whose holders among all are these, in this order."""
    return next(u for u in map(str, range(10_000)) if copy_holders(u, NAMES, len(names)) == names)


def settled(config: ReplicationConfig = CONFIG, names: Iterable[str] = NAMES) -> ReplicationMachine:
    """The machine of node ``a`` at 10 s, after its first rounds, which found nothing to do."""
    machine = ReplicationMachine(node_id="a", config=config)
    effects = machine.handle(nodes(names), 0.0)
    now = 0.0
    while effects or not machine.is_settled:
        for effect in effects:
            if isinstance(effect, SendSummary):
                machine.handle(SummaryAnswered(effect.number, (), None), now)
        now += 0.5
        effects = machine.handle(Tick(), now)
    assert now < 10.0
    machine.handle(Tick(), 10.0)
    return machine


def sent_to(effects: list[ReplicationEffect]) -> list[tuple[str, str]]:
    """The copies that are to be sent, as (peer, UID)."""
    return [(effect.peer, effect.uid) for effect in effects if isinstance(effect, SendCopy)]


def number_of(effects: list[ReplicationEffect]) -> int:
    """The number of the only call among the effects."""
    (number,) = [effect.number for effect in effects if isinstance(effect, SendCopy | SendSummary)]
    return number


# --- who holds what ----------------------------------------------------------------------------


def test_the_first_holder_is_the_one_that_rendezvous_picks() -> None:
    """Writers and readers find the first copy by ``rendezvous``, so the holders begin with it."""
    for uid in map(str, range(200)):
        assert copy_holders(uid, NAMES, 1) == (rendezvous(uid, NAMES),)
        holders = copy_holders(uid, NAMES, 3)
        assert holders[0] == rendezvous(uid, NAMES)
        assert len(set(holders)) == 3
        assert set(copy_holders(uid, NAMES, 9)) == set(NAMES)
    assert copy_holders("u", [], 2) == ()


def test_holders_are_spread_and_move_little() -> None:
    """Each node holds its share, and when one leaves only its copies find a new place."""
    uids = [str(number) for number in range(2000)]
    before = {uid: copy_holders(uid, NAMES, 2) for uid in uids}
    share = Counter(name for holders in before.values() for name in holders)
    assert all(800 < share[name] < 1200 for name in NAMES), share
    for uid in uids:
        after = copy_holders(uid, ["a", "b", "c"], 2)
        stayed = [name for name in before[uid] if name != "d"]
        assert list(after[: len(stayed)]) == stayed


def test_versions_are_ordered_alike_everywhere() -> None:
    """A tombstone beats an error, that a value, that an intent; of two of a kind the earlier stands."""
    kinds = (TOMBSTONE, "error", "result", "intent")
    best_first = [Version("u", kind, at - rank) for rank, kind in enumerate(kinds) for at in (8.0, 9.0)]
    for place, version in enumerate(best_first):
        assert version.beats(None)
        for other in best_first[: place + 1]:
            assert not version.beats(other)
        for other in best_first[place + 1 :]:
            assert version.beats(other) != (version.kind == other.kind == TOMBSTONE), "tombstones are alike"


# --- copies at once ----------------------------------------------------------------------------


def test_a_stored_value_goes_to_the_other_holders() -> None:
    """The node that stored it, the first holder or not, sends it to each holder but itself."""
    assert sent_to(settled().handle(Stored(uid_held_by("a", "c")), 10.0)) == [("c", uid_held_by("a", "c"))]
    assert sent_to(settled().handle(Stored(uid_held_by("b", "a")), 10.0)) == [("b", uid_held_by("b", "a"))]
    uid = uid_held_by("d", "b")
    assert sent_to(settled().handle(Stored(uid), 10.0)) == [("d", uid), ("b", uid)]
    assert sent_to(settled(names=["a"]).handle(Stored(uid), 10.0)) == []


def test_a_purge_goes_to_every_store_node() -> None:
    """Any of them may have a copy that is no longer where it should be."""
    assert sent_to(settled().handle(Purged("u1"), 10.0)) == [("b", "u1"), ("c", "u1"), ("d", "u1")]


def test_copies_in_flight_are_bounded_for_each_peer() -> None:
    """A peer that takes long holds up its own copies only; each one taken lets the next go."""
    machine = settled(evolve(CONFIG, pending_max=64))
    effects = [effect for number in range(4) for effect in machine.handle(Purged(f"u{number}"), 10.0)]
    assert Counter(peer for peer, _ in sent_to(effects)) == {"b": 2, "c": 2, "d": 2}
    to_b = next(effect for effect in effects if isinstance(effect, SendCopy) and effect.peer == "b")
    assert sent_to(machine.handle(CopyTaken(to_b.number), 10.1)) == [("b", "u2")]


def test_what_changed_while_it_was_sent_is_sent_again() -> None:
    """A purge that overtakes a copy under way follows it: the peer does not keep the value."""
    machine = settled()
    uid = uid_held_by("a", "b")
    first = number_of(machine.handle(Stored(uid), 10.0))
    assert ("b", uid) not in sent_to(machine.handle(Purged(uid), 10.1)), "one at a time"
    again = machine.handle(CopyTaken(first), 10.2)
    assert sent_to(again) == [("b", uid)]
    assert machine.handle(CopyTaken(number_of(again)), 10.3) == []


def test_failed_copies_are_tried_again_and_then_left_to_a_round() -> None:
    """Attempts pause longer each time; after the last the peer is offered all it should hold."""
    machine = settled()
    uid = uid_held_by("a", "b")
    effects = machine.handle(Stored(uid), 10.0)
    for now, pause in [(10.0, 1.0), (11.0, 2.0)]:
        assert machine.handle(CopyFailed(number_of(effects)), now) == []
        assert machine.next_deadline(now) == now + pause
        assert machine.handle(Tick(), now + pause - 0.1) == []
        effects = machine.handle(Tick(), now + pause)
        assert sent_to(effects) == [("b", uid)]
    assert machine.handle(CopyFailed(number_of(effects)), 13.0) == []
    assert machine.pending == 0
    assert not machine.is_settled
    assert machine.next_deadline(13.0) == 17.0
    assert machine.handle(Tick(), 17.0) == [SendSummary(number_of(effects) + 1, "b", "")]


def test_what_finds_no_place_is_left_to_a_round() -> None:
    """The list of copies is bounded; a copy that it does not take is made by a round, not forgotten."""
    machine = settled(names=["a", "b"])
    for number in range(20):
        machine.handle(Purged(f"u{number}"), 10.0)
    assert machine.pending == 8
    assert not machine.is_settled
    effects = [effect for effect in machine.handle(Tick(), 11.0) if isinstance(effect, SendSummary)]
    assert effects == [], "a page waits until there is room for what it brings"
    numbers = list(machine._under_way)
    while numbers:
        effects_of = machine.handle(CopyTaken(numbers.pop()), 11.0)
        numbers += [effect.number for effect in effects_of if isinstance(effect, SendCopy)]
        effects += [effect for effect in effects_of if isinstance(effect, SendSummary)]
    assert [effect.peer for effect in effects] == ["b"]


def test_what_is_refused_is_answered_by_the_better() -> None:
    """A peer that sent what was purged here gets the tombstone."""
    assert sent_to(settled().handle(CopyRefused("u1", "c"), 10.0)) == [("c", "u1")]
    assert settled().handle(CopyRefused("u1", "stranger"), 10.0) == []


def test_what_replaces_the_worse_is_handed_on() -> None:
    """A better value goes to the other holders, a tombstone to every peer, and neither back to its sender."""
    uid = uid_held_by("a", "b")
    assert sent_to(settled().handle(CopyReplaced(uid, "c", False), 10.0)) == [("b", uid)]
    assert settled().handle(CopyReplaced(uid, "b", False), 10.0) == []
    everybody = sent_to(settled().handle(CopyReplaced(uid, "b", True), 10.0))
    assert sorted(everybody) == [(name, uid) for name in sorted(set(NAMES) - {"a", "b"})]


# --- rounds ------------------------------------------------------------------------------------


def test_every_state_knows_what_may_happen() -> None:
    """A need may come up in any state; pages are sent when due, end once, and only then."""
    needed = {(state, _Trigger.NEEDED) for state in RoundState}
    assert needed <= TRANSITIONS.keys()
    assert TRANSITIONS.keys() - needed == {
        (RoundState.DUE, _Trigger.PAGE_SENT),
        (RoundState.OFFERED, _Trigger.PAGE_FAILED),
        (RoundState.OFFERED, _Trigger.PAGE_ANSWERED),
        (RoundState.COPYING, _Trigger.PAGE_COPIED),
        (RoundState.COPYING, _Trigger.ROUND_ENDED),
    }


def test_a_round_goes_page_by_page() -> None:
    """The next page is offered when all that was wanted of the last is copied, and not too soon."""
    machine = settled(names=["a", "b"])
    offer = machine.handle(nodes("ab", life=2), 10.0)
    assert [(effect.peer, effect.after_uid) for effect in offer if isinstance(effect, SendSummary)] == [
        ("b", "")
    ]
    copies = machine.handle(SummaryAnswered(number_of(offer), ("u1", "u2", "u3"), "u4"), 10.1)
    assert sent_to(copies) == [("b", "u1"), ("b", "u2")]
    numbers = [effect.number for effect in copies if isinstance(effect, SendCopy)]
    assert sent_to(machine.handle(CopyTaken(numbers[0]), 10.2)) == [("b", "u3")]
    machine.handle(CopyTaken(numbers[1]), 10.3)
    assert machine.handle(CopyTaken(numbers[1] + 1), 10.3) == [], "the page's pause is not over"
    assert machine.next_deadline(10.3) == 10.5
    (page,) = machine.handle(Tick(), 10.5)
    assert page == SendSummary(numbers[1] + 2, "b", "u4")
    machine.handle(SummaryAnswered(numbers[1] + 2, (), None), 10.6)
    assert machine.is_settled
    assert machine.next_deadline(10.6) == 110.6
    (again,) = machine.handle(Tick(), 110.6)
    assert isinstance(again, SendSummary), "whatever went wrong unseen is found by the next round"


def test_a_need_amid_a_round_begins_another_behind_it() -> None:
    """Records that the round has passed may be those that are needed now."""
    machine = settled(names=["a", "b", "c"])
    offer = machine.handle(nodes("abc", life=2), 10.0)
    machine.handle(SummaryAnswered(number_of(offer), (), "u4"), 10.1)
    other = machine.handle(Tick(), 10.5)
    machine.handle(SummaryAnswered(number_of(other), (), None), 10.5)
    machine.handle(StoresChanged(nodes("ab", life=2).stores), 10.6)
    last = machine.handle(Tick(), 11.0)
    assert isinstance(last[0], SendSummary)
    assert (last[0].peer, last[0].after_uid) == ("b", "u4")
    machine.handle(SummaryAnswered(number_of(last), (), None), 11.1)
    assert machine.next_deadline(11.1) == 12.6
    (again,) = machine.handle(Tick(), 12.6)
    assert isinstance(again, SendSummary)
    assert (again.peer, again.after_uid) == ("b", "")


def test_what_was_just_stored_goes_before_what_a_round_brings() -> None:
    """A peer that comes back with an empty disk does not delay the copies of new results."""
    machine = settled(names=["a", "b"])
    offer = machine.handle(nodes("ab", life=2), 10.0)
    copies = machine.handle(SummaryAnswered(number_of(offer), ("u1", "u2", "u3", "u4"), None), 10.1)
    machine.handle(Purged("fresh"), 10.2)
    assert isinstance(copies[0], SendCopy)
    assert sent_to(machine.handle(CopyTaken(copies[0].number), 10.3)) == [("b", "fresh")]


def test_a_lost_page_is_offered_again() -> None:
    """It begins where the last good one ended, after a pause that grows."""
    machine = settled(names=["a", "b"])
    offer = machine.handle(nodes("ab", life=2), 10.0)
    machine.handle(SummaryAnswered(number_of(offer), (), "u4"), 10.0)
    now, page = 10.5, machine.handle(Tick(), 10.5)
    for pause in (1.0, 2.0, 4.0, 4.0):
        assert machine.handle(SummaryFailed(number_of(page)), now) == []
        assert machine.next_deadline(now) == now + pause
        now += pause
        page = machine.handle(Tick(), now)
        assert isinstance(page[0], SendSummary)
        assert page[0].after_uid == "u4"


def test_answers_to_an_earlier_life_are_not_heard() -> None:
    """What was under way to a peer that died ends unheard, and counts for nothing."""
    machine = settled(names=["a", "b"])
    copy = number_of(machine.handle(Purged("u1"), 10.0))
    offer = number_of(machine.handle(nodes("ab", life=2), 10.0))
    assert machine.pending == 0
    machine.handle(nodes("ab", life=3), 11.0)
    assert machine.handle(CopyTaken(copy), 11.1) == []
    assert machine.handle(CopyFailed(copy), 11.1) == []
    assert machine.handle(SummaryFailed(offer), 11.1) == []
    assert machine.handle(SummaryAnswered(offer, ("u9",), None), 11.2) == []
    assert machine.pending == 0


def test_who_joins_is_offered_what_it_should_hold() -> None:
    """A new peer gets a round at once; the others hold no more than before, and get none."""
    machine = settled(names=["a", "b"])
    offered = machine.handle(nodes("abc"), 10.0)
    assert [effect.peer for effect in offered if isinstance(effect, SendSummary)] == ["c"]
    machine.handle(SummaryAnswered(number_of(offered), (), None), 10.1)
    assert machine.is_settled


def test_when_one_leaves_the_others_are_offered_its_share() -> None:
    """After a while in which it may come back, every peer gets a round."""
    machine = settled()
    machine.handle(nodes("abc"), 10.0)
    assert machine.next_deadline(10.0) == 12.0
    assert machine.handle(Tick(), 11.9) == []
    assert [effect.peer for effect in machine.handle(Tick(), 12.0) if isinstance(effect, SendSummary)] == [
        "b"
    ]


def test_who_drains_is_no_holder_any_more() -> None:
    """Its copies find a new place while it is still there, and it hands over what it alone has."""
    machine = settled()
    uid = uid_held_by("d", "a")
    third = copy_holders(uid, ["a", "b", "c"], 2)[1]
    machine.handle(nodes(NAMES, draining="d"), 10.0)
    assert not machine.is_settled
    assert not machine.should_hold("d", uid)
    assert machine.should_hold(third, uid)
    alone = settled(names=["a", "b"])
    alone.handle(nodes("ab", draining="ab"), 10.0)
    assert alone.should_hold("b", uid), "where all drain, they go on holding"


def test_a_page_is_answered_by_what_is_wanted() -> None:
    """Wanted is what is missing or worse here; what is better here goes back; what is alike, nowhere."""
    machine = settled()
    page = (
        Version("u1", "result", 5.0),
        Version("u2", TOMBSTONE, 5.0),
        Version("u3", "result", 5.0),
        Version("u4", "result", 5.0),
        Version("u5", "intent", 3.0),
    )
    mine = (
        Version("u2", "result", 1.0),
        Version("u3", TOMBSTONE, 9.0),
        Version("u4", "result", 5.0),
        Version("u5", "result", 4.0),
    )
    effects = machine.handle(SummaryReceived("b", page, mine), 10.0)
    assert effects[0] == Pull("b", ("u1", "u2"))
    assert sent_to(effects) == [("b", "u3"), ("b", "u5")]


@frozen
class Step:
    """Something that happens to a set, and how long nothing else does."""

    kind: str
    node: str
    other: str
    uid: str
    seconds: float


STEPS = st.builds(
    Step,
    kind=st.sampled_from(["put", "put", "put", "purge", "purge", "crash", "wipe", "start", "cut", "mend"]),
    node=st.sampled_from(NAMES),
    other=st.sampled_from(NAMES),
    uid=st.sampled_from([f"u{number:02}" for number in range(8)]),
    seconds=st.sampled_from([0.0, 0.0, 0.05, 1.0, 5.0]),
)


@given(
    steps=st.lists(STEPS, max_size=60),
    seed=st.integers(0, 1 << 16),
    has_periodic_rounds=st.booleans(),
    stays_dead=st.sampled_from(["", *NAMES]),
)
@settings(max_examples=80, deadline=None)
def test_copies_become_alike_when_faults_stop(
    steps: list[Step], seed: int, has_periodic_rounds: bool, stays_dead: str
) -> None:
    """All holders end with the best version that is on any disk; nothing that was purged is anywhere.

    That is the best that was on any disk when the faults stopped, or a better one that a node had sent
    before it died for good and that came after that.

    Survives: crashes with and without the disk, partitions in one direction or both, loss, repetition and
    reordering of what is sent, and route tables that come late. The holders come to be alike without
    the rounds that are due by time alone; only what lies on a node that is no holder waits for these.
    """
    config = CONFIG if has_periodic_rounds else evolve(CONFIG, round_seconds=1e9)
    stores = StoreSet(NAMES, config, random.Random(seed))
    for step in steps:
        happen(stores, step)
        stores.run(step.seconds)
    if stays_dead:
        stores.crash(stays_dead, wipe=True)
    stores.heal(stays_dead)
    at_first = best_versions(stores.nodes.values())
    stores.run(3 * CONFIG.round_seconds)
    living = [name for name in NAMES if name != stays_dead]
    for name in living:
        node = stores.nodes[name]
        assert node.machine is not None
        assert node.machine.pending == 0
        assert has_periodic_rounds or node.machine.is_settled
    for uid, version in at_first.items():
        holders = [stores.nodes[name] for name in copy_holders(uid, living, CONFIG.copies)]
        best = best_versions(stores.nodes.values() if has_periodic_rounds else holders).get(uid)
        assert best is not None, f"{uid} is gone"
        assert not version.beats(best), f"{uid} was {version} and is {best}"
        for holder in holders:
            found = holder.disk.get(uid)
            assert found is not None, f"{holder.name} lacks {uid}"
            assert found.order == best.order, f"{holder.name} has {found}"
        if best.kind == TOMBSTONE and has_periodic_rounds:
            kinds = {node.disk[uid].kind for node in stores.nodes.values() if uid in node.disk}
            assert kinds == {TOMBSTONE}, f"{uid} was purged and is back"


def happen(stores: StoreSet, step: Step) -> None:
    """Carry out a step."""
    match step.kind:
        case "put":
            stores.put(step.node, step.uid)
        case "purge":
            stores.purge(step.node, step.uid)
        case "crash" | "wipe":
            stores.crash(step.node, wipe=step.kind == "wipe")
        case "start":
            stores.start(step.node)
        case "cut":
            stores.cut.add((step.node, step.other))
        case "mend":
            stores.cut.discard((step.node, step.other))


def best_versions(nodes: Iterable[ModelNode]) -> dict[str, Version]:
    """The best version under each UID on the disks of these nodes."""
    best: dict[str, Version] = {}
    for node in nodes:
        for uid, version in node.disk.items():
            if version.beats(best.get(uid)):
                best[uid] = version
    return best


def test_a_story_can_be_replayed() -> None:
    """The same events at the same moments give the same effects."""
    machine = settled()
    machine.handle(Stored(uid_held_by("a", "b")), 10.0)
    machine.handle(nodes("ab"), 11.0)
    machine.handle(Tick(), 40.0)
    machine.story.replay()


def test_config_relations_are_asserted() -> None:
    """A list that cannot hold one page is refused where it is written."""
    with pytest.raises(AssertionError):
        evolve(CONFIG, pending_max=3)
