"""Whom a node takes for the leader, and how a set's nodes spread over time when a new one leads."""

import itertools
import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from onepiece.core.leader_search import (
    ASK_SECONDS,
    CANDIDATES_MAX,
    REGISTRATIONS_PER_SECOND,
    SPREAD_SECONDS_MAX,
    LeaderSearch,
    spread_seconds,
)
from onepiece.core.membership import HeartbeatReceived, MembershipConfig, MembershipMachine, NodeJoined
from tests.core.cluster import make_node


def test_a_set_with_one_manager_asks_nobody() -> None:
    """One address to join, and nobody ever said who leads: heartbeats go there, and nothing else."""
    search = LeaderSearch(("a",))
    assert search.leader == "a"
    assert search.to_ask(("a", "b"), 5.0, 0.5) == ()


def test_a_node_asks_until_it_is_told() -> None:
    """Of several addresses some may be dead: all are asked, each time, until one answers."""
    search = LeaderSearch(("a", "b"))
    assert search.to_ask((), 0.0, 0.5) == ("a", "b")
    assert search.to_ask((), 0.1, 0.5) == ("a", "b")
    assert search.told("b", 0, 0.2, 0.5)
    assert search.leader == "b"
    assert search.quiet_until == 0.2, "an empty set need not be spread"
    assert search.to_ask((), 0.3, 0.5) == ("a", "b")


def test_who_answers_spares_the_others_questions() -> None:
    """While candidates of the routes answer, an address to join that may be dead is left alone."""
    search = LeaderSearch(("a", "b"))
    search.told("b", 3, 0.0, 0.0)
    assert search.to_ask(("b", "c"), 0.1, 1.0) == ("c",)
    assert search.to_ask(("b", "c"), 2 * ASK_SECONDS + 0.1, 1.0) == ("c", "a", "b"), "nobody answered"
    search.told("b", 3, 5.0, 0.0)
    assert search.to_ask(("b", "c"), 7.0, 1.0) == ("c",)
    assert search.leader == "b"


def test_what_is_known_is_no_news() -> None:
    """The same leader again delays no heartbeat."""
    search = LeaderSearch(("a",))
    assert not search.told("a", 1000, 1.0, 0.9)
    assert search.quiet_until < 1.0


@given(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=20))
def test_rounds_are_neither_rare_nor_frequent(draws: list[float]) -> None:
    """Once told, a node asks again within ``ASK_SECONDS``, and never sooner than half of it."""
    search = LeaderSearch(("a", "b"))
    search.told("a", 10, 0.0, 0.0)
    now, asked = 0.0, []
    for draw in itertools.cycle(draws):
        if search.to_ask(("c",), now, draw):
            asked.append(now)
        now += 0.05
        if now > 20:
            break
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert min(gaps) >= ASK_SECONDS / 2 - 1e-6
    assert max(gaps) <= ASK_SECONDS + 0.05 + 1e-6


def test_as_many_are_asked_as_are_of_use() -> None:
    """However many candidates there are, the questions are bounded."""
    search = LeaderSearch(tuple(f"j{number}" for number in range(20)))
    assert len(search.to_ask([f"m{number}" for number in range(50)], 0.0, 0.5)) == CANDIDATES_MAX


def test_a_thousand_nodes_are_spread() -> None:
    """All are told at the same moment; no tenth of a second has much more than its share of them."""
    rng = random.Random(7)
    times = []
    for _ in range(1000):
        search = LeaderSearch(("old",))
        search.told("new", 1000, 0.0, rng.random())
        times.append(search.quiet_until)
    tenths = Counter(int(moment * 10) for moment in times)
    assert max(times) < SPREAD_SECONDS_MAX == spread_seconds(1000)
    assert max(tenths.values()) <= 2 * REGISTRATIONS_PER_SECOND / 10
    assert len(tenths) == 20


def test_a_manager_takes_a_thousand_nodes() -> None:
    """They are within its bound, also if the spread fails and all come at once."""
    machine = MembershipMachine(config=MembershipConfig())
    for number in range(1000):
        effects = machine.handle(HeartbeatReceived(make_node(f"n{number}")), 0.0)
        assert [type(effect) for effect in effects] == [NodeJoined]
    assert len(machine.members) == 1000
