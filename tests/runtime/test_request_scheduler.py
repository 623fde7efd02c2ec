"""RequestScheduler: tasks are complete or wait, run in turn, and give back what they hold just once."""

import itertools
from collections.abc import Iterable

import pytest
from attrs import define, field

from onepiece.codec import CodecError, pack, unpack
from onepiece.errors import JoinBudgetExceeded
from onepiece.graph import Constant, FromStage, GraphNode
from onepiece.messages import StageInput
from onepiece.runtime.request_scheduler import Held, RequestScheduler, StageTask

JOIN = GraphNode("merge", "m:merge", {"left": FromStage("a"), "right": FromStage("b"), "times": Constant(3)})
SOLE = GraphNode("sole", "m:sole", {"x": FromStage("a")})


@define
class Desk:
    """A scheduler, and what was released."""

    scheduler: RequestScheduler = field(factory=lambda: RequestScheduler(10_000))
    released: list[str] = field(factory=list)

    def message(
        self,
        uid: str,
        node: GraphNode = SOLE,
        source: str = "a",
        *,
        workflow: str = "w",
        size: int = 10,
        at: float = 0.0,
        deadline_at: float | None = None,
        trail: Iterable[str] = (),
    ) -> Held:
        """A message that has arrived."""
        reports = dict.fromkeys(trail, b"")
        header = StageInput(uid, workflow, node.id, source, "owner", 0.0, deadline_at, 0.0, {}, reports)
        payload = memoryview(b"".join(pack(header, {source: bytes(size)}).parts))
        unpacked = unpack(payload, StageInput)
        name = f"{uid}/{source}"
        return Held(header, unpacked.values, payload, at, 1, lambda: self.released.append(name))

    def add(self, held: Held, node: GraphNode = SOLE) -> StageTask | None:
        """Take it in as an actor does."""
        sources = {each.node for each in node.inputs.values() if isinstance(each, FromStage)}
        return self.scheduler.add(node, frozenset(sources), held)

    def pull(self) -> str:
        """The UID of the stage task that runs next."""
        stage_task = self.scheduler.pull()
        assert stage_task is not None
        return stage_task.uid


def test_a_job_of_one_source_is_ready_at_once() -> None:
    """It keeps its message where it arrived until it is pulled; first come, first served."""
    desk = Desk()
    for uid in "abc":
        stage_task = desk.add(desk.message(uid))
        assert stage_task is not None
        assert stage_task.is_ready
    assert desk.scheduler.queued == 3
    assert desk.scheduler.is_queued("b", "sole")
    assert [desk.pull() for _ in range(3)] == ["a", "b", "c"]
    assert desk.scheduler.pull() is None
    assert not desk.scheduler.is_queued("b", "sole")
    assert desk.released == []


def test_a_job_gives_back_its_memory_once() -> None:
    """Whoever releases it, and however often."""
    desk = Desk()
    stage_task = desk.add(desk.message("a"))
    assert stage_task is not None
    stage_task.release()
    stage_task.release()
    assert desk.released == ["a/a"]


def test_workflows_take_turns() -> None:
    """One with many requests does not starve one with few."""
    desk = Desk()
    for number in range(4):
        desk.add(desk.message(f"busy{number}", workflow="busy"))
    desk.add(desk.message("rare", workflow="rare"))
    assert [desk.pull() for _ in range(5)] == ["busy0", "rare", "busy1", "busy2", "busy3"]


def test_inputs_wait_for_their_siblings() -> None:
    """In memory of their own, so that the ring is free; complete, they make one task with the constants."""
    desk = Desk()
    assert desk.add(desk.message("u", JOIN, "a", size=100, at=1.0), JOIN) is None
    assert desk.released == ["u/a"]
    assert desk.scheduler.joining == 1
    assert desk.scheduler.join_bytes > 100
    assert desk.scheduler.pull() is None
    stage_task = desk.add(desk.message("u", JOIN, "b", at=2.0), JOIN)
    assert stage_task is not None
    assert (stage_task.is_ready, stage_task.arrived_at, stage_task.constants) == (True, 2.0, {"times": 3})
    assert set(stage_task.held) == {"a", "b"}
    assert bytes(stage_task.held["a"].values["a"]) == bytes(100)
    assert (desk.scheduler.joining, desk.scheduler.join_bytes, desk.scheduler.queued) == (0, 0, 1)
    assert desk.released == ["u/a"]
    stage_task.release()
    assert desk.released == ["u/a", "u/b"]


@pytest.mark.parametrize("order", list(itertools.permutations("abcd")), ids="".join)
def test_the_order_in_which_siblings_finish_changes_nothing(order: tuple[str, ...]) -> None:
    """Each parameter gets what its own source put out, whichever of them was first (fault 75)."""
    node = GraphNode("merge", "m:merge", {source: FromStage(source) for source in "abcd"})
    desk = Desk()
    tasks = [
        desk.add(desk.message("u", node, source, size=10 + ord(source), at=float(turn)), node)
        for turn, source in enumerate(order)
    ]
    assert tasks[:3] == [None] * 3
    assert tasks[3] is not None
    values = {name: value for held in tasks[3].held.values() for name, value in held.values.items()}
    assert {name: len(value) for name, value in values.items()} == {name: 10 + ord(name) for name in "abcd"}


def test_a_second_message_of_a_source_changes_nothing() -> None:
    """It is released; the first one counts."""
    desk = Desk()
    desk.add(desk.message("u", JOIN, "a"), JOIN)
    before = desk.scheduler.join_bytes
    assert desk.add(desk.message("u", JOIN, "a"), JOIN) is None
    assert desk.released == ["u/a", "u/a"]
    assert desk.scheduler.join_bytes == before


def test_a_message_of_a_foreign_source_is_refused() -> None:
    """And released."""
    desk = Desk()
    with pytest.raises(CodecError, match="takes nothing from 'elsewhere'"):
        desk.add(desk.message("u", SOLE, "elsewhere"))
    assert desk.released == ["u/elsewhere"]


def test_inputs_that_wait_have_a_budget() -> None:
    """Beyond it the request ends with an error that says what to do; what waits already stays (fault 133)."""
    desk = Desk()
    desk.add(desk.message("u", JOIN, "a", size=6000), JOIN)
    with pytest.raises(JoinBudgetExceeded, match="--join-bytes") as caught:
        desk.add(desk.message("v", JOIN, "a", size=6000), JOIN)
    assert caught.value.fields == {"uid": "v", "stage": "merge"}
    assert desk.released == ["u/a", "v/a"]
    assert desk.add(desk.message("u", JOIN, "b", size=6000), JOIN) is not None  # completes, so needs no room


def test_everything_of_a_request_can_be_dropped() -> None:
    """Queued or waiting; the room that it used is free, and others are untouched."""
    desk = Desk()
    for uid in "ab":
        desk.add(desk.message(uid))
        desk.add(desk.message(uid, JOIN, "a"), JOIN)
    assert desk.scheduler.uids() == {"a", "b"}
    half = desk.scheduler.join_bytes // 2
    dropped = desk.scheduler.drop("a")
    assert sorted(stage_task.node for stage_task in dropped) == ["merge", "sole"]
    assert desk.scheduler.join_bytes == half
    assert desk.scheduler.uids() == {"b"}
    assert not desk.scheduler.is_queued("a", "sole")
    assert desk.pull() == "b"
    assert desk.scheduler.drop("b")
    assert desk.scheduler.drop("nobody") == []
    assert list(desk.scheduler.all_tasks()) == []


def test_a_join_can_be_taken_elsewhere() -> None:
    """When inputs meet at another actor now."""
    desk = Desk()
    desk.add(desk.message("u", JOIN, "a"), JOIN)
    (stage_task,) = desk.scheduler.joins()
    desk.scheduler.take_join(stage_task)
    assert (desk.scheduler.joining, desk.scheduler.join_bytes) == (0, 0)


def test_jobs_past_their_deadline_are_found() -> None:
    """Whether they wait for inputs or for a worker."""
    desk = Desk()
    desk.add(desk.message("late", deadline_at=5.0))
    desk.add(desk.message("later", JOIN, "a", deadline_at=6.0), JOIN)
    desk.add(desk.message("never"))
    assert [stage_task.uid for stage_task in desk.scheduler.overdue(5.0)] == ["late"]
    assert {stage_task.uid for stage_task in desk.scheduler.overdue(7.0)} == {"late", "later"}


def test_a_jobs_trail_names_each_stage_once() -> None:
    """Though its inputs came on several paths that share a beginning."""
    desk = Desk()
    desk.add(desk.message("u", JOIN, "a", trail=("root", "left")), JOIN)
    stage_task = desk.add(desk.message("u", JOIN, "b", trail=("root", "right")), JOIN)
    assert stage_task is not None
    assert list(stage_task.trail) == ["root", "left", "right"]
    assert stage_task.attempt == 1
    assert stage_task.received_bytes > 20
