"""What a node asks of requests that it has had something of for long; time is given."""

from typing import cast

from attrs import define, field

from onepiece.messages import AskEnded
from onepiece.node.leftovers import AGAIN_SECONDS, ASK_MAX, FIRST_SECONDS, Leftovers
from onepiece.runtime.environment import Environment

OWN = "local://me/control"


@define
class Asked:
    """A node of which nothing else is there; it notes what it sends."""

    control_address: str = OWN
    posted: list[tuple[str, AskEnded]] = field(factory=list)

    @property
    def outbox(self) -> "Asked":
        """What posts."""
        return self

    def post(self, address: str, message: AskEnded) -> None:
        """Note it."""
        self.posted.append((address, message))

    def owner_of(self, uid: str, named: str) -> str:
        """The one that is named."""
        return named

    def take(self) -> dict[str, tuple[str, ...]]:
        """What each address was asked since the last time."""
        posted, self.posted = self.posted, []
        return {address: message.uids for address, message in posted}


def leftovers_of(held: dict[str, str]) -> tuple[Leftovers, Asked]:
    """The part, and what it sends."""
    asked = Asked()
    return Leftovers(cast(Environment, asked), lambda: held), asked


def test_what_is_held_for_some_time_is_asked_about_and_then_seldom() -> None:
    """Each owner once, of all that is its own; what was let go of meanwhile is forgotten."""
    held = {"a": "one", "b": "other", "c": "one"}
    leftovers, asked = leftovers_of(held)
    for now in (0.0, FIRST_SECONDS - 0.1):
        leftovers._look(now)
        assert asked.take() == {}
    leftovers._look(FIRST_SECONDS)
    assert asked.take() == {"one": ("a", "c"), "other": ("b",)}
    del held["a"]
    leftovers._look(AGAIN_SECONDS)
    assert asked.take() == {}
    leftovers._look(FIRST_SECONDS + AGAIN_SECONDS)
    assert asked.take() == {"one": ("c",), "other": ("b",)}
    held["a"] = "one"
    leftovers._look(FIRST_SECONDS + AGAIN_SECONDS)
    leftovers._look(FIRST_SECONDS + AGAIN_SECONDS + FIRST_SECONDS)
    assert asked.take() == {"one": ("a",)}, "it is asked about as something new"


def test_a_node_that_drains_asks_more_often() -> None:
    """It waits to be rid of what it holds: its operator, or the machine that stops, waits for it."""
    leftovers, asked = leftovers_of({"a": "one"})
    leftovers._look(0.0)
    leftovers._look(FIRST_SECONDS)
    asked.take()
    leftovers.in_haste = True
    for number in (2, 3):
        leftovers._look(number * FIRST_SECONDS)
        assert asked.take() == {"one": ("a",)}
    leftovers.in_haste = False
    leftovers._look(4 * FIRST_SECONDS)
    assert asked.take() == {}


def test_of_more_than_a_question_holds_each_has_its_turn() -> None:
    """Also where the first ones are due again before the last ones were asked about."""
    held = {f"u{number}": "one" for number in range(3 * ASK_MAX)}
    leftovers, asked = leftovers_of(held)
    leftovers.in_haste = True
    leftovers._look(0.0)
    seen: set[str] = set()
    for turn in range(1, 4):
        leftovers._look(turn * FIRST_SECONDS)
        [uids] = asked.take().values()
        assert len(uids) == ASK_MAX
        seen.update(uids)
    assert seen == set(held)
