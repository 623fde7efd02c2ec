"""What stands first and cannot go on holds up nothing behind it, and no worker waits for another one."""

from typing import Any

from attrs import evolve

from onepiece import StageContext, stage, workflow
from onepiece.core.routing import RouteEpoch
from onepiece.graph import INPUTS
from onepiece.messages import KIND_STAGE_INPUT, StageInput, with_attempt
from onepiece.requests import EventKind
from onepiece.runtime.result_targets import InputTarget, input_targets
from tests.runtime.actor_rig import ActorRig, actor_rig


@stage(isolation="loop")
async def polish(ctx: StageContext[None], text: str) -> str:
    """Called by another stage."""
    return f"{text}, polished"


@stage(isolation="loop", concurrency=1)
async def render(ctx: StageContext[None], text: str) -> str:
    """Calls another stage, and waits for what it returns."""
    call: Any = polish  # its type is that of a graph's node
    return str(await call(ctx, f"{text} rendered"))


@workflow
def film(text: str) -> str:
    """One stage, by its graph."""
    return render(text)


async def send_for_a_workflow_that_is_not_known(rigged: ActorRig, uid: str) -> None:
    """A message that overtook the route table that names its workflow, or that nobody knows."""
    graph = rigged.workflow.graph
    header = StageInput(
        uid, graph.name, graph.nodes[0].id, INPUTS, rigged.env.control_address, 0.0, None, 0.0
    )
    [(_, target)] = input_targets(graph, header)
    assert isinstance(target, InputTarget)
    strange = evolve(target, header=evolve(header, workflow="not_known"))
    parts = with_attempt(strange.pack({"text": "first"}).parts, 1)
    await rigged.outbox.send(rigged.actor.address, parts, kind=KIND_STAGE_INPUT)


async def test_a_message_that_has_to_wait_holds_up_none_behind_it() -> None:
    """At the head, of a workflow that is not there yet: later ones pass, and then it runs (fault 133)."""
    async with actor_rig(film) as rigged:
        await send_for_a_workflow_that_is_not_known(rigged, "first")
        for number in range(5):
            await rigged.submit(f"later-{number}", text="x")
        later = [await rigged.outcome(f"later-{number}") for number in range(5)]
        assert later == ["x rendered, polished"] * 5
        assert rigged.kinds("first") == []
        graph, routes = rigged.workflow.graph, rigged.env.routes
        routes.update(
            evolve(routes.table, epoch=RouteEpoch(1, 2)), {graph.name: graph, "not_known": graph}, {}
        )
        assert await rigged.outcome("first") == "first rendered, polished"


async def test_stages_that_call_stages_wait_for_no_worker() -> None:
    """One worker, and each call makes another: it runs in place, on the worker that has it (fault 93)."""
    async with actor_rig(film) as rigged:
        for number in range(4):
            await rigged.submit(f"{number}", text=f"{number}")
        assert [await rigged.outcome(f"{number}") for number in range(4)] == [
            f"{number} rendered, polished" for number in range(4)
        ]
        assert rigged.kinds("0").count(EventKind.STAGE_STARTED.value) == 1
