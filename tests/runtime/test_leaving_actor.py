"""An actor that leaves while messages come to it: nothing is lost, nor run twice unseen."""

from collections.abc import Callable, Sequence

import pytest
from attrs import evolve, frozen

from onepiece import StageContext, stage, workflow
from onepiece.core.inventory import ActorState
from onepiece.core.routing import ActorRoute
from onepiece.graph import INPUTS
from onepiece.messages import KIND_STAGE_INPUT, OutputHeaded, StageInput, with_attempt
from onepiece.runtime.intake import Intake
from onepiece.runtime.result_deliver import Letter, ResultDeliver
from onepiece.runtime.result_targets import Target, input_targets
from tests.runtime.actor_rig import ActorRig, actor_rig
from tests.runtime.rig import until
from transports import Bytes, Geometry


@stage(isolation="loop")
async def shout(ctx: StageContext[None], text: str) -> str:
    """Say it louder."""
    return f"{text.upper()}!"


@workflow
def echo(text: str) -> str:
    """Answer with the same text, louder."""
    return shout(text)


@frozen
class Inputs:
    """A message with a request's inputs."""

    target: Target
    parts: Sequence[Bytes]


def inputs_of(rigged: ActorRig, uid: str) -> Inputs:
    """What the owner sends to the stage."""
    graph = rigged.workflow.graph
    header = StageInput(
        uid, graph.name, graph.nodes[0].id, INPUTS, rigged.env.control_address, 0.0, None, 0.0
    )
    [(_, target)] = input_targets(graph, header)
    return Inputs(target, target.pack({"text": "ahoy"}).parts)


async def test_what_an_actor_has_taken_is_seen_before_it_leaves() -> None:
    """Else its senders would send elsewhere what has run here, and it would run twice (fault 118)."""
    told: list[str] = []

    async def on_lost() -> None:
        told.append("lost")

    async with actor_rig(echo) as rigged:
        parts = with_attempt(inputs_of(rigged, "a").parts, 1)
        send = rigged.outbox.send(
            rigged.actor.address,
            parts,
            kind=KIND_STAGE_INPUT,
            on_lost=on_lost,
            on_taken=lambda: told.append("taken"),
        )
        await send
        assert await rigged.outcome("a") == "AHOY!"
        rigged.actor.drain()
        await rigged.running
        await until(lambda: told)
        assert told == ["taken"]


async def test_an_owner_hears_where_a_message_went_whose_ring_was_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have been taken all the same: whoever has the second one is to hear of the end as well."""
    repeats: list[bool] = []
    take: Callable[..., None] = Intake._take

    def noted_take(self: Intake, held: object, graph: object) -> None:
        repeats.append(getattr(held, "is_repeat"))  # noqa: B009 - of any kind here
        take(self, held, graph)

    monkeypatch.setattr(Intake, "_take", noted_take)
    async with actor_rig(echo) as rigged:
        table, env = rigged.env.routes.table, rigged.env
        here = ActorRoute(
            1, rigged.actor.stage.key, "node-1", 1, ("cpu:0",), rigged.actor.address, ActorState.READY
        )
        sent = inputs_of(rigged, "a")
        async with env.inboxes.open("actor/2", Geometry(64, 1 << 16, 64)):
            gone = evolve(here, actor_id=2, address=str(env.address.region("actor/2")))
            env.routes.update(evolve(table, actors=(gone,)), env.routes.graphs, {})
            assert await ResultDeliver(env).send(Letter(sent.target, sent.parts)) == "node-1.1"
            assert not any(isinstance(each, OutputHeaded) for each in rigged.heard)
            env.routes.update(evolve(table, actors=(here,)), env.routes.graphs, {})
        assert await rigged.outcome("a") == "AHOY!"
        node = rigged.workflow.graph.nodes[0].id
        await until(lambda: OutputHeaded("a", {node: "node-1.1"}) in rigged.heard)
        assert repeats == [True]
