import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepiece.core.admission import BudgetLimits, RequestBudget
from onepiece.errors import Overloaded


def test_the_total_bound_is_named() -> None:
    """The request beyond the proxy's bound is refused with the bound, retryable, and changes nothing."""
    budget = RequestBudget(BudgetLimits(total=2, each=2))
    budget.take("a", "video")
    budget.take("b", "stills")
    with pytest.raises(Overloaded, match="bound is 2") as caught:
        budget.take("c", "video")
    assert caught.value.retryable
    assert caught.value.fields["in_flight_max"] == 2
    assert budget.in_flight == 2


def test_one_workflow_leaves_room_for_others() -> None:
    """A workflow at its own bound is refused by name, while another is still let in."""
    budget = RequestBudget(BudgetLimits(total=10, each=2, by_workflow={"stills": 1}))
    budget.take("a", "video")
    budget.take("b", "video")
    with pytest.raises(Overloaded, match="'video' has 2"):
        budget.check("video")
    budget.take("c", "stills")
    with pytest.raises(Overloaded, match="'stills' has 1"):
        budget.check("stills")


def test_places_are_taken_and_given_back_once() -> None:
    """The same UID again takes no second place, and giving back twice frees no other's."""
    budget = RequestBudget(BudgetLimits(total=2, each=2))
    budget.take("a", "video")
    budget.take("a", "video")
    assert budget.in_flight == 1
    budget.take("b", "video")
    budget.give_back("a")
    budget.give_back("a")
    assert budget.in_flight_of("video") == 1
    budget.give_back("never seen")
    assert budget.in_flight == 1


def test_a_lower_bound_spares_what_is_in_flight() -> None:
    """Bounds that a capacity model lowers refuse the next request, and stop none that is under way."""
    budget = RequestBudget(BudgetLimits(total=10, each=5))
    for uid in "abc":
        budget.take(uid, "video")
    budget.set_workflow_limits({"video": 1})
    assert budget.in_flight == 3
    with pytest.raises(Overloaded, match="bound is 1"):
        budget.check("video")


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 8), st.sampled_from(["video", "stills"]))))
def test_the_count_comes_back_to_nothing(steps: list[tuple[bool, int, str]]) -> None:
    """Whatever was taken and given back in whatever order: when all have ended no place is taken."""
    budget = RequestBudget(BudgetLimits(total=5, each=3))
    for takes, number, workflow in steps:
        uid = f"{workflow}-{number}"
        if takes:
            try:
                budget.take(uid, workflow)
            except Overloaded:
                assert budget.in_flight == 5 or budget.in_flight_of(workflow) == 3
        else:
            budget.give_back(uid)
        assert budget.in_flight <= 5
    for number in range(9):
        for workflow in ("video", "stills"):
            budget.give_back(f"{workflow}-{number}")
    assert budget.in_flight == budget.in_flight_of("video") == budget.in_flight_of("stills") == 0
