"""Moves on the manager's machine: from what nodes report to orders, on virtual time and simulated nodes."""

import pytest

from onepiece.core import (
    ManagerConfig,
    NodeState,
)
from onepiece.core.balance import (
    RebalanceMode,
)
from onepiece.core.move_board import StageLimits
from onepiece.core.pending_move import MovePhase
from tests.core.cluster import make_need, make_workflow
from tests.core.loaded_set import BLUE, RED, LoadedSet


@pytest.mark.parametrize("memory_gib", [30, 60])
def test_a_shift_of_the_load_is_followed_within_three_moves(memory_gib: int) -> None:
    """Beside the old ones where memory allows (30 of 80 GiB), else behind them (60) (fault 91)."""
    the = LoadedSet(memory_gib=memory_gib)
    the.rates = {"red": 4.2, "blue": 4.2}
    the.run(180)
    assert the.ready() == (3, 3)
    the.rates = {"red": 0.8, "blue": 7.6}
    the.run(600)
    assert the.ready() == (1, 5)
    assert len(the.moved) == 2
    view = the.view()
    assert {(move.outcome, move.stage, move.donor) for move in view.moves} == {("done", BLUE, RED)}
    assert view.abandoned == 0
    assert all(stage.problem is None for stage in view.stages)


def test_a_set_that_keeps_up_moves_nothing() -> None:
    """However uneven it is, as long as none could do without an instance."""
    the = LoadedSet()
    the.rates = {"red": 2.8, "blue": 4.5}
    the.run(1200)
    assert the.ready() == (3, 3)
    assert the.view().moves == ()
    assert the.view().reason == "no stage is busier than 85%"


def test_a_steady_overload_does_not_flap_for_an_hour() -> None:
    """Where two choices are about as good, at most one move is made, and not taken back."""
    the = LoadedSet(red=4, blue=4)
    the.rates = {"red": 6.0, "blue": 8.0}
    the.run(3600)
    assert len(the.moved) <= 1
    assert the.ready() in {(4, 4), (3, 5)}


def test_advice_is_shown_and_nothing_is_moved() -> None:
    """The default."""
    the = LoadedSet(mode=RebalanceMode.ADVISE)
    the.rates = {"red": 0.8, "blue": 7.6}
    the.run(300)
    assert the.ready() == (3, 3)
    moves = the.view().moves
    assert {(move.outcome, move.stage, move.donor) for move in moves} == {("advised", BLUE, RED)}
    assert ManagerConfig().balance.mode is RebalanceMode.ADVISE


def test_pinned_minimum_and_maximum_hold() -> None:
    """Both, whatever the load says; and definitions are raised or lowered to them."""
    the = LoadedSet(limits={RED: StageLimits(instances_min=2)})
    the.rates = {"red": 0.2, "blue": 11.0}
    the.run(900)
    assert the.ready() == (2, 4)
    the = LoadedSet(limits={RED: StageLimits(instances_min=3), BLUE: StageLimits(instances_max=2)})
    the.rates = {"red": 0.2, "blue": 11.0}
    the.run(900)
    assert the.ready() == (3, 2)
    assert the.view().given_back == 0


def _until_moving(the: LoadedSet) -> None:
    the.rates = {"red": 0.2, "blue": 11.0}
    the.loads_by_itself = False
    for _ in range(75):
        the.step()
        if any(move.outcome in set(MovePhase) for move in the.view().moves):
            return
    raise AssertionError("no move began")


@pytest.mark.parametrize("memory_gib", [30, 60])
def test_a_node_that_dies_in_the_middle_ends_its_move_alone(memory_gib: int) -> None:
    """What was wanted before is wanted again, and the other moves go on."""
    the = LoadedSet(memory_gib=memory_gib)
    _until_moving(the)
    victim = the.view().moves[0].node
    the.cluster.nodes.pop(victim)
    for _ in range(10):
        the.step()
    assert the.cluster.manager.members[victim].state is NodeState.DEAD
    ended = [move for move in the.view().moves if move.outcome == "abandoned"]
    assert [move.node for move in ended] == [victim]
    assert ended[0].reason == f"{victim} is gone"
    the.loads_by_itself = True
    the.run(300)
    red, blue = the.ready()
    assert red >= 1
    assert red + blue == (5 if memory_gib > 40 else 6), "two of the small ones fit on one device"


def test_a_new_actor_that_fails_leaves_the_old_one() -> None:
    """Beside the old one: that has served all the time, and goes on."""
    the = LoadedSet(red=2, blue=1)
    _until_moving(the)
    (move,) = the.view().moves
    assert move.outcome == "warming"
    assert move.actor is not None
    assert the.ready()[0] == 2
    the.cluster.nodes[move.node].fail(move.actor, "out of memory")
    the.beat()
    after = the.view()
    assert [each.outcome for each in after.moves if each.actor == move.actor] == ["abandoned"]
    assert "out of memory" in after.moves[-1].reason
    assert the.ready() == (2, 1)


@pytest.mark.parametrize("memory_gib", [30, 60])
def test_a_manager_that_restarts_goes_on_with_the_move(memory_gib: int) -> None:
    """The moves under way and what is wanted by them are stored; what was measured is measured anew."""
    the = LoadedSet(memory_gib=memory_gib)
    _until_moving(the)
    the.cluster.restart_manager()
    the.loads_by_itself = True
    the.run(70)
    red, blue = the.ready()
    assert red + blue == 6
    assert blue > 3
    assert the.view().done >= 1
    assert not [move for move in the.view().moves if move.outcome == "abandoned"]
    the.cluster.restart_manager()
    the.rates = {}
    the.run(70)
    assert the.ready() == (red, blue)


def test_no_moment_has_fewer_ready_actors_than_a_move_beside_needs() -> None:
    """Warmed up beside the old one: the sum of ready instances never falls."""
    the = LoadedSet()
    the.rates = {"red": 0.8, "blue": 7.6}
    for _ in range(75):
        the.step()
        assert sum(the.ready()) >= 6
    assert the.view().done >= 1


def test_workflows_that_change_end_the_moves() -> None:
    """A stage that is other than it was begins anew with what its definition says."""
    the = LoadedSet()
    _until_moving(the)
    the.cluster.offer(
        make_workflow("blue", make_need("blue", 20, instances=2), digest="other"), replaces=True
    )
    the.loads_by_itself = True
    the.run(20)
    assert all(move.outcome == "abandoned" for move in the.view().moves if move.outcome != "advised")
    wanted = {stage.stage: stage.wanted for stage in the.view().stages}
    assert wanted[BLUE] == 2
