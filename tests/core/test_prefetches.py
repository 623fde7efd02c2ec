"""Moves behind an old instance: what the new one will load is read first, while the old one serves."""

from attrs import evolve

from onepiece.limits import PREFETCH_SECONDS_MAX
from tests.core.cluster import make_need, make_workflow
from tests.core.loaded_set import BLUE, RED, STEP, LoadedSet


def _until_prefetching(the: LoadedSet) -> str:
    """The node whose old instance serves while it reads what the new one is to load."""
    the.rates = {"red": 0.2, "blue": 11.0}
    the.loads_by_itself = False
    for node in the.cluster.nodes.values():
        node.fetches_slowly = True
    for _ in range(75):
        the.step()
        if (moves := the.view().moves) and moves[0].outcome == "prefetching":
            return moves[0].node
    raise AssertionError("nothing was read in advance")


def _all_fetched(the: LoadedSet) -> None:
    for node in the.cluster.nodes.values():
        node.fetches_slowly = False
        reports = node.prefetches.items()
        node.prefetches = {stage: evolve(report, is_over=True) for stage, report in reports}


def test_the_old_instance_serves_while_the_new_one_s_weights_are_read() -> None:
    """Then it drains, the other is loaded, and what was read is asked for no more."""
    the = LoadedSet(memory_gib=60)
    name = _until_prefetching(the)
    the.run(60)
    assert the.ready() == (3, 3)
    assert set(the.cluster.nodes[name].prefetches) == {BLUE}
    _all_fetched(the)
    the.run(2 * STEP)
    assert the.ready()[0] < 3
    assert not the.cluster.nodes[name].prefetches
    the.loads_by_itself = True
    the.run(300)
    red, blue = the.ready()
    assert (red + blue, the.view().abandoned) == (6, 0)
    assert blue > 3


def test_a_prefetch_that_is_never_over_holds_nothing_up_for_ever() -> None:
    """A node of another version, for instance, says nothing of it."""
    the = LoadedSet(memory_gib=60)
    name = _until_prefetching(the)
    the.cluster.nodes[name].prefetches.clear()
    the.loads_by_itself = True
    the.run(PREFETCH_SECONDS_MAX / 2)
    assert the.ready() == (3, 3)
    the.run(PREFETCH_SECONDS_MAX)
    assert the.ready()[1] > 3


def test_a_lost_order_to_prefetch_is_sent_again() -> None:
    """As any other."""
    the = LoadedSet(memory_gib=60)
    name = _until_prefetching(the)
    the.cluster.nodes[name].prefetches.clear()
    the.run(2 * STEP)
    assert set(the.cluster.nodes[name].prefetches) == {BLUE}


def test_a_prefetch_is_taken_back_with_its_move() -> None:
    """The workflows change: the old instance never stopped, and both stages have what they had."""
    the = LoadedSet(memory_gib=60)
    name = _until_prefetching(the)
    the.cluster.offer(make_workflow("green", make_need("green", 60)))
    assert not the.cluster.nodes[name].prefetches
    assert {move.outcome for move in the.view().moves if move.outcome != "advised"} == {"abandoned"}
    assert the.ready() == (3, 3)
    wanted = {stage.stage: stage.wanted for stage in the.view().stages}
    assert (wanted[RED], wanted[BLUE]) == (3, 3)


def test_a_manager_that_restarts_goes_on_with_a_prefetch() -> None:
    """It gives the order anew."""
    the = LoadedSet(memory_gib=60)
    name = _until_prefetching(the)
    before = the.cluster.nodes[name].prefetches[BLUE].number
    the.cluster.restart_manager()
    the.run(4 * STEP)
    assert the.cluster.nodes[name].prefetches[BLUE].number != before
    assert the.ready() == (3, 3)
    _all_fetched(the)
    the.loads_by_itself = True
    the.run(120)
    assert the.ready()[1] > 3
