from collections import Counter

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from onepiece import limits
from onepiece.codec import decode_control, encode_control
from onepiece.core import (
    ActorRoute,
    ActorState,
    Device,
    DeviceKind,
    MembershipConfig,
    NodeRoute,
    PlacementConfig,
    Problem,
    RouteEpoch,
    RouteTable,
    WorkflowRoute,
    diff,
    rendezvous,
)
from onepiece.core.routing import first_of, next_table
from onepiece.messages import PublishedRoutes

_DEVICE = Device("cpu:0", DeviceKind.CPU, 1 << 34)


def _node(number: int, state: str = "alive", incarnation: int = 1) -> NodeRoute:
    name = f"node-{number}"
    return NodeRoute(name, incarnation, f"tcp://{name}:7070", None, ("worker",), state, (_DEVICE,), 100)


def _actor(actor_id: int, node: int = 1, state: ActorState = ActorState.READY) -> ActorRoute:
    address = f"tcp://node-{node}:7070/actor/{actor_id}"
    return ActorRoute(actor_id, "module:denoise", f"node-{node}", 1, ("cpu:0",), address, state)


def _table(*actors: ActorRoute, nodes: tuple[NodeRoute, ...] = (_node(1), _node(2))) -> RouteTable:
    workflow = WorkflowRoute("video", "module:video", "digest", ("module:denoise",))
    return RouteTable(RouteEpoch(1, 1), nodes, actors, (workflow,))


_UIDS = st.lists(st.text(min_size=1, max_size=26), min_size=1, max_size=200, unique=True)
_CANDIDATES = st.sets(st.integers(1, 200).map(str), min_size=2, max_size=12)


@given(uids=_UIDS, candidates=_CANDIDATES)
def test_rendezvous_moves_only_what_must(uids: list[str], candidates: set[str]) -> None:
    """When a candidate disappears, only what met there meets elsewhere."""
    gone = min(candidates)
    for uid in uids:
        before, after = rendezvous(uid, candidates), rendezvous(uid, candidates - {gone})
        assert before in {after, gone}


@given(uid=st.text(), candidates=_CANDIDATES)
def test_rendezvous_does_not_depend_on_order(uid: str, candidates: set[str]) -> None:
    """Nodes that list the candidates differently choose the same."""
    assert rendezvous(uid, sorted(candidates)) == rendezvous(uid, sorted(candidates, reverse=True))


def test_rendezvous_is_even() -> None:
    """Over many UIDs each candidate gets about its share."""
    counts = Counter(rendezvous(f"uid-{n}", ["1", "2", "3", "4"]) for n in range(8000))
    assert all(1800 < count < 2200 for count in counts.values())


def test_rendezvous_is_the_same_in_every_version() -> None:
    """Nodes of different versions must agree: these choices are fixed for ever."""
    chosen = [rendezvous(uid, ["1", "2", "3"]) for uid in ("a", "b", "c", "d", "e", "f")]
    assert chosen == ["2", "3", "1", "2", "2", "3"]


def test_later_manager_beats_more_tables() -> None:
    """The first table of a later manager is newer than any of an earlier one."""
    early, late = RouteTable(RouteEpoch(1, 900)), RouteTable(RouteEpoch(2, 1))
    assert late.is_newer_than(early)
    assert not early.is_newer_than(late)
    assert not early.is_newer_than(early)
    assert early.is_newer_than(None)


def test_pick_takes_the_least_busy() -> None:
    """The actor with the fewest outstanding messages is picked; one that is unknown has none."""
    table = _table(_actor(1), _actor(2, node=2))
    picked = table.pick("module:denoise", {1: 3}, {}, first=0)
    assert picked is not None
    assert picked.actor_id == 2


def test_pick_takes_of_equals_the_one_picked_longest_ago() -> None:
    """Whether nothing is under way to them or as much to each; never is longest of all."""
    table = _table(_actor(1), _actor(2, node=2), _actor(3))
    for outstanding in ({}, {1: 2, 2: 2, 3: 2}):
        picked = table.pick("module:denoise", outstanding, {1: 8, 2: 5, 3: 9}, first=0)
        assert picked is not None
        assert picked.actor_id == 2
        never = table.pick("module:denoise", outstanding, {1: 8, 2: 5}, first=0)
        assert never is not None
        assert never.actor_id == 3


def test_senders_begin_at_different_actors() -> None:
    """Who has picked nothing yet begins where its own number says, and goes on behind that."""
    table = _table(_actor(1), _actor(2, node=2), _actor(3))
    for first in range(6):
        picked: dict[int, int] = {}
        for number in range(6):
            actor = table.pick("module:denoise", {}, picked, first)
            assert actor is not None
            assert actor.actor_id == (first + number) % 3 + 1
            picked[actor.actor_id] = number + 1
    assert len({first_of(f"node-{number}") % 3 for number in range(9)}) == 3


def test_pick_avoids_suspects_while_it_can() -> None:
    """An actor on a suspect node is picked only if all others are, too; it still is a meeting point."""
    table = _table(_actor(1), _actor(2, node=2), nodes=(_node(1, "suspect"), _node(2)))
    picked = table.pick("module:denoise", {2: 50}, {}, first=0)
    assert picked is not None
    assert picked.actor_id == 2
    all_suspect = _table(_actor(1), nodes=(_node(1, "suspect"),))
    assert all_suspect.pick("module:denoise", {}, {}, first=0) is not None
    assert {a.actor_id for a in table.actors_for("module:denoise")} == {1, 2}


def test_draining_actors_serve_only_alone() -> None:
    """While an actor is ready, those that drain get nothing; if none is, they go on."""
    draining = _actor(1, state=ActorState.DRAINING)
    assert _table(draining, _actor(2)).actors_for("module:denoise") == (_actor(2),)
    assert _table(draining).actors_for("module:denoise") == (draining,)
    assert _table(evolve(draining, address="")).actors_for("module:denoise") == ()


@pytest.mark.parametrize("state", [ActorState.LOADING, ActorState.FAILED])
def test_others_get_nothing(state: ActorState) -> None:
    """An actor that loads or failed takes no work, and nobody meets there."""
    table = _table(_actor(1, state=state))
    assert table.actors_for("module:denoise") == ()
    assert table.pick("module:denoise", {}, {}, first=0) is None
    assert table.meeting_point("module:denoise", "uid") is None


def test_meeting_point_is_the_same_on_every_node() -> None:
    """Two nodes with the same routes, listed differently, send a join's inputs to the same actor."""
    actors = [_actor(n) for n in range(1, 9)]
    here, there = _table(*actors), _table(*reversed(actors))
    for n in range(100):
        assert here.meeting_point("module:denoise", f"{n}") == there.meeting_point("module:denoise", f"{n}")


def test_waiting_says_what_for() -> None:
    """A workflow that cannot be served says why: a problem, a load, or that it is not placed."""
    loading = _table(_actor(1, state=ActorState.LOADING))
    assert loading.waiting_for("video") == ("video/denoise is loading on node-1",)
    assert _table().waiting_for() == ("video/denoise is not placed yet",)
    told = evolve(_table(), problems=(Problem("module:denoise", "no room"),))
    assert told.waiting_for() == ("video/denoise: no room",)
    assert _table(_actor(1)).waiting_for() == ()
    assert loading.waiting_for("another") == ()


def test_lookups() -> None:
    """Nodes, actors and workflows are found by their names; unknown names find nothing."""
    table = _table(_actor(7))
    assert table.actor(7) == _actor(7)
    assert table.actor(8) is None
    assert table.node("node-2") == _node(2)
    assert table.node("node-3") is None
    found = table.workflow("video")
    assert found is not None
    assert found.digest == "digest"
    assert table.workflow("stills") is None


def test_diff_names_what_changed() -> None:
    """A new incarnation is a node gone and a node joined; an actor's new state is a change of it."""
    old = _table(_actor(1), _actor(2))
    new = _table(_actor(2, state=ActorState.DRAINING), _actor(3), nodes=(_node(1, incarnation=2), _node(2)))
    changes = diff(old, new)
    assert changes.nodes_gone == (_node(1),)
    assert changes.nodes_joined == (_node(1, incarnation=2),)
    assert changes.actors_gone == (_actor(1),)
    assert changes.actors_added == (_actor(3),)
    assert changes.actors_changed == ((_actor(2), _actor(2, state=ActorState.DRAINING)),)
    assert changes.workflows_added == changes.workflows_gone == ()
    assert diff(None, old).workflows_added == old.workflows


def test_next_table_shares_what_did_not_change() -> None:
    """An unchanged table is the same object; a changed one shares its unchanged routes and counts up."""
    old = _table(_actor(1), _actor(2))
    assert next_table(old, _table(_actor(1), _actor(2))) is old
    new = next_table(old, _table(_actor(1), _actor(3)))
    assert new.epoch == RouteEpoch(1, 2)
    assert new.actors[0] is old.actors[0]
    assert new.nodes[0] is old.nodes[0]


def test_tables_survive_the_wire() -> None:
    """A table that was sent is the table that arrives, lookups included."""
    table = _table(_actor(1), _actor(2, state=ActorState.FAILED))
    arrived = decode_control(encode_control(PublishedRoutes(table)))
    assert arrived == PublishedRoutes(table)
    assert isinstance(arrived, PublishedRoutes)
    assert arrived.table.actors_for("module:denoise") == (_actor(1),)


def test_the_largest_set_fits_in_a_control_message() -> None:
    """The bounds of nodes and actors are such that a table of all of them can be sent."""
    stage = "package.subpackage.module_of_stages:a_stage_with_a_long_name"
    nodes = tuple(
        evolve(_node(n), node_id=f"a-rather-long-host-name-{n}", http=f"http://10.0.0.{n}:7080")
        for n in range(MembershipConfig().nodes_max)
    )
    actors = tuple(
        evolve(_actor(n), stage=stage, node_id=f"a-rather-long-host-name-{n}", incarnation=1 << 41)
        for n in range(PlacementConfig().actors_max)
    )
    encoded = encode_control(PublishedRoutes(_table(*actors, nodes=nodes)))
    assert len(encoded) < limits.CONTROL_BYTES_MAX
