"""Giving back on the manager's machine: from what nodes report to orders, and what is left."""

from onepiece.core import ActorLife
from onepiece.core.move_board import StageLimits
from tests.core.cluster import make_need, make_workflow
from tests.core.loaded_set import BLUE, RED, STEP, LoadedSet


def _devices_of(the: LoadedSet, stage: str) -> set[str]:
    return {actor.node_id for actor in the.cluster.manager.actors.values() if actor.stage == stage}


def _until_giving_back(the: LoadedSet) -> None:
    the.rates = {"red": 4.2, "blue": 0.1}
    the.cluster.drains_slowly = True
    for _ in range(360):
        the.step()
        if any(move.outcome == "giving back" for move in the.view().moves):
            return
    raise AssertionError("nothing was given back")


def _finish_draining(the: LoadedSet) -> None:
    the.cluster.drains_slowly = False
    for node in the.cluster.nodes.values():
        node.finish_draining()
    the.run(2 * STEP)


def test_what_a_lower_load_does_not_need_is_given_back_and_taken_again() -> None:
    """The last one stays; what is given back is drained, and taken from the idle ones, not from a donor."""
    the = LoadedSet()
    the.rates = {"red": 4.2, "blue": 4.2}
    the.run(400)
    _until_giving_back(the)
    (move,) = [each for each in the.view().moves if each.outcome == "giving back"]
    assert (move.stage, move.donor, move.reason) == (BLUE, BLUE, "the load needs 1 less of 3")
    ending = [actor for actor in the.cluster.manager.actors.values() if actor.life is ActorLife.STOPPING]
    assert {actor.stop_reason for actor in ending} == {"the load does not need it"}
    assert {actor.actor_id for actor in ending} == set(move.replaces)
    _finish_draining(the)
    assert the.ready() == (3, 2)
    the.run(900)
    view = the.view()
    assert (the.ready(), view.given_back, view.done, view.abandoned) == ((3, 1), 2, 0, 0)
    assert {each.outcome for each in view.moves} == {"given back"}
    assert {stage.wanted for stage in view.stages} == {1, 3}
    assert {stage.leaving for stage in view.stages} == {0}
    red = _devices_of(the, RED)
    the.rates = {"red": 4.2, "blue": 4.2}
    the.run(300)
    view = the.view()
    assert the.ready() == (3, 3)
    assert {each.donor for each in view.moves if each.outcome == "done"} == {None}
    assert _devices_of(the, RED) == red


def test_a_pinned_minimum_is_not_given_back() -> None:
    """Nor is anything of a stage whose load is not known, as a workflow with it was never measured."""
    the = LoadedSet(limits={BLUE: StageLimits(instances_min=2)})
    the.rates = {"red": 0.1, "blue": 0.1}
    the.run(1200)
    assert the.ready() == (1, 2)
    the = LoadedSet()
    unmeasured = make_workflow("other", make_need("blue", 30, instances=3), make_need("slow", 30))
    the.cluster.offer(unmeasured)
    the.rates = {"red": 0.1, "blue": 0.1, "other": 0.01}
    the.run(1200)
    assert the.ready() == (1, 3)


def test_a_manager_that_restarts_goes_on_giving_back() -> None:
    """The instance ends, nothing takes its place, and that it was given back is known."""
    the = LoadedSet()
    _until_giving_back(the)
    the.cluster.restart_manager()
    the.run(60)
    _finish_draining(the)
    assert the.ready() == (3, 1)
    assert the.view().given_back == 2
